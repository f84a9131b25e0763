"""Micro-batches that must leave no trace: those that a rank replays because others have more, and those without items.

A rank that is out of batches runs its last one again, so that no other rank waits for it. RNG states and buffers are put back
afterwards, and what reaches the params is *replaced* by zeros, at hooks on them: NaN times a weight of zero is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from truestep.backends.base import Session, Undo
from truestep.state.generators import restore_rng, rng_states
from truestep.words.finding import Finding


class Mute:
    """Hooks that replace gradients by zeros while they are told to.

    Args:
        session: Whose params are hooked, from the first time on that this is needed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._undo: Undo | None = None
        self._keeps: Tensor | bool = True

    def arm(self) -> None:
        """Place the hooks: before the forward, where that can be known."""
        if self._undo is None:
            self._undo = self._session.hook_gradients(self._see)

    def keep(self, keeps: Tensor | bool) -> None:
        """Say whether gradients pass from now on: also by a 0-d bool tensor, which the host does not read."""
        self._keeps = keeps
        if keeps is not True:
            self.arm()

    def _see(self, name: str, gradient: Tensor) -> Tensor | None:
        if self._keeps is True:
            return None
        if self._keeps is False:
            return torch.zeros_like(gradient)
        return torch.where(self._keeps.to(gradient.device), gradient, 0)

    def close(self) -> None:
        """Take the hooks away."""
        self._keeps = True
        if self._undo is not None:
            self._undo()
            self._undo = None


class Trace:
    """RNG states and buffers as they are now, to be put back."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._rng = rng_states()
        self._buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]

    def restore(self) -> None:
        """Put them back."""
        restore_rng(self._rng)
        with torch.no_grad():
            for buffer, old in self._buffers:
                buffer.copy_(old)


def not_replayable(modules: Sequence[nn.Module]) -> list[Finding]:
    """Return what a replay would leave behind on the other ranks: statistics that are taken over all of them."""
    return [
        Finding(
            "window/not-replayable",
            None,
            "error",
            expected="as many micro-batches on every rank",
            found=f"fewer on some, and {name or 'the model'!r} is a SyncBatchNorm: what is replayed would enter its statistics",
            fix="Drop the loader's tail (drop_last=True), or call eval() on the module.",
        )
        for module in modules
        for name, part in module.named_modules()
        if isinstance(part, nn.SyncBatchNorm) and part.training
    ][:1]


def never_had_a_batch(without: Sequence[int]) -> Finding:
    """Return what is said where a rank has nothing to replay."""
    return Finding(
        "window/no-batch",
        None,
        "error",
        expected="at least one batch on every rank",
        found="a loader that gave none, so that there is nothing to replay",
        fix="Give every rank at least one batch.",
        ranks=tuple(without),
    )
