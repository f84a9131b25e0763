"""`Accumulator`: many micro-batches, one step, on every backend.

    acc = ts.Accumulator(model, optimizer, micro_batches=4, max_norm=1.0)
    for window in acc.windows(loader, num_items=count_tokens):
        for batch in window:
            window.backward(loss_of(model, batch))
        window.step()

The gradient that enters the step is that of the mean over all items of the window, on all ranks, whatever its length and however
its items are spread.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from truestep.accumulate import drawing
from truestep.accumulate.agreement import adds_up_apart, agree_on, check, not_finite, wrong_length
from truestep.accumulate.exchange import exchanged, row
from truestep.accumulate.later import Later
from truestep.accumulate.phases import Event
from truestep.accumulate.sync import chosen
from truestep.accumulate.weights import known_ahead
from truestep.accumulate.window import Rules, Window
from truestep.backends import base, slots
from truestep.backends.base import Session
from truestep.state import ranks
from truestep.words.errors import WindowError
from truestep.words.finding import Finding, listed

SCHEMA_VERSION: Final = 1
_COUNTS: Final = ("windows", "stepped", "batches")
_UNKNOWN_REDUCTION: Final = (
    "truestep: how gradients are reduced is up to a hook of yours. Losses are weighted as for a mean over the ranks; a hook that "
    "sums makes gradients too large by their number."
)
_window_by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Window]] = weakref.WeakKeyDictionary()


class Accumulator:
    """Owns the accumulation windows of a training loop that is yours. Collective, as are all its calls: every rank.

    Args:
        model: What the loop calls: a module, under DDP, FSDP2 or FSDP1; a DeepSpeed engine; what accelerate's `prepare` returned;
            or several of these. Wrapped and prepared before.
        optimizer: Over its params; likewise one or several. An engine has its own: leave it out.
        micro_batches: K, the length of a window; the last of a loader may be shorter.
        max_norm: Global gradient norm to clip at, over all shards, once a window; ``math.inf`` only measures it. A DeepSpeed
            engine is set to it, and without one to no clipping, unless its config names a limit.
        scheduler: One or several, advanced once a window in which the params were updated.
        scaler: A ``torch.amp.GradScaler``: unscaled once a window, and a step is skipped on all ranks or on none.
        reduction: What your loss is over its own items: ``mean`` or ``sum``.
        grad_dtype: Add gradients up in this dtype: ``torch.float32`` for bf16 params, each micro-batch reduced. Without it they
            are added in the params' own dtype: of a bf16 sum each addition may lose 1/256.
        sync: ``last``, ``every`` or ``auto``: see `describe`.

    Raises:
        UnsupportedError: If the backend cannot do what is asked for.
        WindowError: ``window/settings``, if the ranks were given different ones.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        micro_batches: int,
        max_norm: float | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        reduction: str = "mean",
        grad_dtype: torch.dtype | None = None,
        sync: str = "auto",
    ) -> None:
        self._begin(
            base.attach(model, optimizer),
            micro_batches,
            max_norm=max_norm,
            scheduler=scheduler,
            scaler=scaler,
            reduction=reduction,
            grad_dtype=grad_dtype,
            sync=sync,
        )

    @classmethod
    def over(cls, session: Session, micro_batches: int, *, ends_on_nan: bool = True, **settings: Any) -> Accumulator:
        """Return an accumulator over a session that is already there.

        Args:
            session: Of any backend.
            micro_batches: As of the class.
            ends_on_nan: Whether a loss that is not finite is an error.
            **settings: The others of the class, by name.
        """
        made = cls.__new__(cls)
        made._begin(session, micro_batches, **settings)
        made._ends_on_nan = ends_on_nan
        return made

    def _begin(
        self,
        session: Session,
        micro_batches: int,
        *,
        max_norm: float | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        reduction: str = "mean",
        grad_dtype: torch.dtype | None = None,
        sync: str = "auto",
    ) -> None:
        self._session = session
        self._micro_batches = micro_batches
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._passed = 0  # batches that the next `windows` does not use
        self._window: Window | None = None
        self._ends_on_nan = True
        self._unread: Later | None = None  # the loss of the last step
        alone = session.backend == "single" or ranks.count() == 1
        scaler = scaler if scaler is not None else session.extras.get("scaler")
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        agree_on(session, alone, micro_batches, max_norm, reduction, scaler)
        contract = session.contract()
        if contract.reduction is None and not alone:
            warnings.warn(_UNKNOWN_REDUCTION, stacklevel=3)
        folds = adds_up_apart(grad_dtype, contract.accumulate_dtype, session)
        self._rules = Rules(
            session=session,
            sync=chosen(sync, session, folds),
            alone=alone,
            ranks=1 if alone or contract.reduction == "sum" else ranks.count(),
            reduction=reduction,
            max_norm=session.declare_clip(max_norm),
            schedulers=tuple(item for _, item in slots.labelled_items(scheduler)) if scheduler is not None else (),
            scaler=scaler,
            grad_dtype=grad_dtype if folds else None,
            before_step=self._settle,
            after_step=self._after_step,
        )

    def describe(self) -> str:
        """Return, in one line, what was chosen and why."""
        rules = self._rules
        return f"{self._session.backend}, {self._micro_batches} micro-batches a window; sync {rules.sync.why}"

    # -- windows

    def windows(self, loader: Iterable[Any], num_items: Callable[[Any], float] | None = None) -> Iterator[Window]:
        """Yield windows until the loader ends on every rank.

        The batches of a window are drawn when it opens, so that its total is known before the first backward.

        Args:
            loader: Any iterable of this rank's batches.
            num_items: ``batch -> how many items its loss is over``; a count that lies on a device is read when the window opens.

        Raises:
            WindowError: On all ranks at once: the window before was neither stepped nor skipped, a rank that never had a batch,
                wrong counts. Where the loader of one rank raises, the others raise an error that names it.
        """
        draws = drawing.Draws(loader, self._passed)
        self._counts["batches"], self._passed = self._passed, 0
        while (window := self._next(draws, num_items)) is not None:
            yield window
        draws.end()
        self._counts["batches"] = 0
        self._settle()

    def open(self, micro_batches: int) -> Window:
        """Return a window whose batches you draw yourself: call ``window.backward`` once for each.

        Args:
            micro_batches: Its length, the same on every rank.

        Raises:
            WindowError: On all ranks at once: the window before was neither stepped nor skipped, no length, or another one on
                other ranks.
        """
        findings = self._left() or wrong_length(micro_batches)
        length = 0 if findings else micro_batches
        rows = exchanged(self._rules.alone, row(Event.OPEN, micro_batches=length, drawn=length, ever=1), findings)
        check(rows, length, self._session.modules())
        weights = known_ahead(None, sum(each.drawn for each in rows), length, length, self._rules.ranks, self._rules.reduction)
        return self._opened(Window(self._rules, length, weights), length)

    def _next(self, draws: drawing.Draws, num_items: Callable[[Any], float] | None) -> Window | None:
        """Open the next window; None where every rank is out of batches."""
        findings, reason, counts = self._left(), None, None
        drawn: list[drawing.Drawn] = []
        if not findings:
            drawn, reason = draws.take(self._micro_batches)
            if num_items is not None and reason is None:
                counts, findings, reason = drawing.counted(drawn, num_items)
        mine = row(
            Event.OPEN,
            micro_batches=self._micro_batches,
            drawn=len(drawn),
            counted=num_items is not None,
            items=sum(counts or ()),
            ever=draws.ever,
        )
        rows = exchanged(self._rules.alone, mine, findings, reason)
        length = int(max(each.drawn for each in rows))
        if not length:
            return None
        check(rows, length, self._session.modules())
        total = sum(each.drawn if counts is None else each.items for each in rows)
        weights = known_ahead(counts, total, len(drawn), length, self._rules.ranks, self._rules.reduction)
        return self._opened(Window(self._rules, length, weights, drawn, draws.last), length)

    def _opened(self, window: Window, length: int) -> Window:
        self._window = window
        self._counts["batches"] += length
        for module in self._session.modules():
            _window_by_module[module] = weakref.ref(window)
        return window

    def _left(self) -> list[Finding]:
        """Return what is wrong with opening a window now: one is open, of this accumulator or of another over the same model."""
        if self._window is not None and not self._window.is_over:
            return [self._window.refused(Event.LEAVE)]
        others = (_window_by_module.get(module, lambda: None)() for module in self._session.modules())
        return [each.refused(Event.OPEN) for each in others if each is not None and not each.is_over][:1]

    # -- after a step

    def _after_step(self, window: Window) -> None:
        self._counts["windows"] += 1
        self._counts["stepped"] += window.stepped
        may_end = self._ends_on_nan and self._rules.scaler is None
        self._unread = Later(window.loss) if may_end and window.loss is not None else None

    def _settle(self) -> None:
        """Raise if the loss of the last step was not finite: it is the same on every rank, and read only now.

        Raises:
            WindowError: ``window/not-finite``.
        """
        loss, self._unread = self._unread, None
        if loss is not None and not math.isfinite(value := loss.read()):
            raise WindowError("", [not_finite(value, self._counts["windows"])])

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return, between two windows, how far it is: plain data, the same on every rank.

        Raises:
            WindowError: Inside a window: what it has accumulated cannot be kept.
        """
        if self._window is not None and not self._window.is_over:
            raise WindowError("", [self._window.refused(Event.LEAVE)])
        return {"schema_version": SCHEMA_VERSION, "micro_batches": self._micro_batches, **self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state: the next `windows` passes by the batches that were used, unless its loader has a state itself.

        Raises:
            WindowError: If this is no such state, or inside a window.
        """
        counts: dict[str, Any] = {name: state.get(name) for name in _COUNTS}
        if state.get("schema_version") != SCHEMA_VERSION or not all(isinstance(value, int) for value in counts.values()):
            raise WindowError(
                f"expected the state of an Accumulator with {', '.join(_COUNTS)}, found {listed(state, 5)}. "
                "Pass what acc.state_dict() returned."
            )
        if self._window is not None and not self._window.is_over:
            raise WindowError("", [self._window.refused(Event.LEAVE)])
        self._counts = dict(counts)
        self._passed = self._counts["batches"]
