"""When the ranks reduce the gradients of a window: once, or in every micro-batch.

``last``: in the window's last backward. Least traffic; under sharded backends whole gradients are kept until then.
``every``: in every backward. What is kept stays sharded.
``auto``: the one that needs no more memory than one micro-batch does: ``last`` where gradients are whole anyway, else ``every``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from truestep.backends.base import Session
from truestep.words.errors import UnsupportedError

MODES: Final = ("auto", "last", "every", "shard")


@dataclass(frozen=True)
class Sync:
    """The choice.

    Attributes:
        mode: ``last`` or ``every``.
        sharded: Every forward and backward communicates, whatever the mode.
        why: In words.
    """

    mode: str
    sharded: bool
    why: str

    def reduces(self, last: bool) -> bool:
        """Tell whether a micro-batch is reduced."""
        return last or self.mode == "every"

    def communicates(self, last: bool) -> bool:
        """Tell whether its backward waits for other ranks."""
        return self.sharded or self.reduces(last)


def chosen(asked: str, session: Session, folds: bool) -> Sync:
    """Return what `asked` comes to on a backend.

    Args:
        asked: One of `MODES`.
        session: Of the backend.
        folds: Gradients are added up in another dtype, which takes them reduced after every backward.

    Raises:
        UnsupportedError: If the backend has no such mode, or it goes not with `folds`.
    """
    offered = session.sync_modes()
    if asked not in MODES or (asked != "auto" and asked not in offered):
        raise UnsupportedError(
            f"sync={asked!r}: expected one of auto {' '.join(offered)} on {session.backend}, {_reason(asked, session)}. "
            "Choose one of these."
        )
    if folds and asked == "last":
        raise UnsupportedError(
            "sync='last' with a grad_dtype: gradients are added up in that dtype after they are reduced, which takes every "
            "micro-batch. Pass sync='every' or 'auto'."
        )
    sharded = offered[0] == "every"
    mode = asked if asked != "auto" else "every" if folds else offered[0]
    return Sync(mode, sharded, _told(mode, session, sharded))


def _reason(asked: str, session: Session) -> str:
    if asked == "shard":
        return "found one of a hybrid mesh: reduce-scatter in every micro-batch, all-reduce in the last"
    if session.is_engine:
        return "found one that its stage does not have: ZeRO 0 and 1 reduce at the window's end, 2 and 3 in every backward"
    return "found another"


def _told(mode: str, session: Session, sharded: bool) -> str:
    if session.backend == "single":
        return "one process: nothing to reduce"
    if len(session.sync_modes()) == 1:
        return f"{mode}: {session.backend} has no other"
    if not sharded:
        return f"{mode}: gradients are whole on every rank either way"
    cost = f"{whole_gradient_bytes(session):,} bytes of whole gradients on each rank"
    return f"every: gradients stay sharded; 'last' would keep {cost}" if mode == "every" else f"last: keeps {cost}"


def whole_gradient_bytes(session: Session) -> int:
    """Return what the whole gradients of all params that train take, in the dtype in which a rank accumulates them."""
    view, itemsize = session.view(), session.contract().accumulate_dtype.itemsize
    return sum(math.prod(view[name, "param"].shape) for name in set(session.identity().live.values())) * itemsize
