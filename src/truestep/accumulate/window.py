"""One accumulation window: its micro-batches, one step.

The context of each micro-batch is open from the end of the backward before it to the end of its own: a loop needs no `with`. What
may come when is in `phases`; what a loss weighs in `weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from truestep.accumulate import scaling
from truestep.accumulate.drawing import Drawn
from truestep.accumulate.exchange import Row, exchanged, row
from truestep.accumulate.folding import Fold
from truestep.accumulate.phases import TABLE, Event, Phase, following, refusal
from truestep.accumulate.replay import Mute, Trace
from truestep.accumulate.sync import Sync
from truestep.accumulate.weights import Weights, no_items, wrong_counts
from truestep.backends.base import Session
from truestep.state import ranks
from truestep.words.errors import WindowError
from truestep.words.finding import Finding


@dataclass(frozen=True)
class Rules:
    """What holds for every window of an accumulator.

    Attributes:
        session: Of the backend.
        sync: When it reduces.
        alone: No other rank takes part.
        ranks: What a loss is to be multiplied by to undo the backend's mean over the ranks.
        reduction: What a loss is over its own items.
        max_norm: Global gradient norm to clip at, or None.
        schedulers: Advanced once a window.
        scaler: A GradScaler that is on, or None.
        grad_dtype: Gradients are added up in it, where it is not None.
        before_step: Raises what the window before left to be said.
        after_step: Is told of a window that was stepped.
    """

    session: Session
    sync: Sync
    alone: bool
    ranks: int
    reduction: str
    max_norm: float | None
    schedulers: tuple[Any, ...]
    scaler: Any
    grad_dtype: torch.dtype | None
    before_step: Callable[[], None]
    after_step: Callable[[Window], None]


class Window:
    """The micro-batches of one optimizer step; made by `Accumulator.windows` and `Accumulator.open`.

    Attributes:
        micro_batches: How many it has, on every rank.
        num_items: Items of all of them, on all ranks: a number, or a 0-d tensor where they are counted late; None uncounted.
        loss: The mean of the losses over all items of the window (their sum, where losses are sums that nobody counts): a 0-d
            float32 tensor, the same on every rank; None before the step.
        grad_norm: The global gradient norm before clipping, a 0-d tensor; None before the step, and without `max_norm`.
        stepped: Whether the params were updated; a GradScaler or an engine may have skipped the step.
    """

    def __init__(self, rules: Rules, length: int, weights: Weights, drawn: list[Drawn] | None = None, last: Any = None) -> None:
        self.micro_batches = length
        self.num_items: float | Tensor | None = weights.items
        self.loss: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.stepped = False
        self.phase = Phase.ACCUMULATING
        self._rules = rules
        self._weights = weights
        self._drawn = drawn
        self._last = last  # batch of this rank, to be replayed
        self._own = length if drawn is None else len(drawn)
        self._counted = None if weights.items is None else "ahead"  # or "late", from the first backward with num_items on
        self._index = 0  # of the micro-batch under way
        self._sums: Tensor | None = None  # of weighted losses, and of items counted late
        self._late_items = 0.0  # of these, what the host knows
        self._trace: Trace | None = None
        self._mute = Mute(rules.session)
        params = [
            param for optimizer in rules.session.optimizers for group in optimizer.param_groups for param in group["params"]
        ]
        self._fold = Fold(params, rules.grad_dtype) if rules.grad_dtype is not None else None
        self._context = ExitStack()
        if 0.0 in weights.shares:
            self._mute.arm()  # before the first forward
        self._enter()

    @property
    def is_over(self) -> bool:
        """Whether it was stepped or skipped."""
        return self.phase in (Phase.STEPPED, Phase.SKIPPED)

    # -- the loop

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches; `backward` is called once for each.

        A rank that has fewer than others is given its last one again: it adds nothing, and leaves RNG states and buffers alone.
        """
        if self._drawn is None:
            raise WindowError("a window made by open(micro_batches) has no batches of its own. Draw them yourself.")
        for index in range(self.micro_batches):
            if self._index != index or self.phase is not Phase.ACCUMULATING:
                self._exchange(
                    Event.BACKWARD, [refusal(self.phase, Event.LEAVE, f"{self._index} backwards in {index} micro-batches")]
                )
            if index and self._rules.sync.sharded:  # the forward to come communicates
                self._exchange(Event.NEXT, [])
            if index < self._own:
                drawn = self._drawn.pop(0)  # not kept longer than needed
                drawn.restore()
                batch = drawn.batch
            else:
                batch = self._last
                self._trace = Trace(self._rules.session.modules())
            with self._breaking():
                yield batch

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._fail()
        elif not self.is_over:
            self._exchange(Event.LEAVE, [self.refused(Event.LEAVE)])

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Break the window if the loop over it is left, by an exception or by `break`, before its last backward."""
        try:
            yield
        except GeneratorExit:
            if self.phase is Phase.ACCUMULATING:
                self._fail()
            raise

    # -- events

    def backward(self, loss: Tensor, *, num_items: float | Tensor | None = None) -> None:
        """Run the backward of one micro-batch, its loss weighted. Collective where it reduces, or params are sharded.

        A 16-bit loss cannot carry its weight exactly (1/3 arrives as 0.33398 in bf16): return losses in float32, or set the
        accumulator's `grad_dtype`, which has gradients weighted instead.

        Args:
            loss: 0-d, attached to the graph: of one micro-batch, unweighted.
            num_items: How many items it is over, where that is known only after the forward; then in every micro-batch of the
                window. A tensor on a device is not read by the host.

        Raises:
            WindowError: ``window/..``, on all ranks at once: not this window's turn, a loss without a gradient, wrong counts.
        """
        last = self._index == self.micro_batches - 1
        event = Event.LAST_BACKWARD if last else Event.BACKWARD
        count = None if num_items is None or self._is_replay else _on_host(num_items)
        findings = self._misuse(event, loss, num_items, count)
        if findings or self._rules.sync.communicates(last):
            self._exchange(event, findings)
        with self._failing():
            self._run(loss, num_items, count)
            self._context.close()
        self._pass(event)
        self._index += 1
        if self._trace is not None:
            self._trace.restore()
            self._trace = None
        if not last:
            self._enter()

    def step(self) -> None:
        """Weight what was counted late, clip, step, advance the scheduler and clear the gradients, once. Collective: every rank.

        Raises:
            WindowError: On all ranks at once: before the window's last backward, or a second time; no items at all; or the loss
                of the window before was not finite.
        """
        findings = [] if self.phase is Phase.REDUCED else [self.refused(Event.STEP)]
        rows = self._exchange(Event.STEP, findings)
        if len({each.counted for each in rows}) > 1:
            raise WindowError("", [_mixed(None)])
        if rows[0].counted and not sum(each.items for each in rows):
            raise WindowError("", [no_items()])
        self._rules.before_step()
        with self._failing():
            self._finish()
        self._rules.after_step(self)

    def skip(self) -> None:
        """Drop the window: its gradients are gone and nothing steps. Collective: every rank."""
        findings = [] if following(self.phase, Event.SKIP) else [self.refused(Event.SKIP)]
        self._exchange(Event.SKIP, findings)
        self._close()
        self._rules.session.discard()
        self._pass(Event.SKIP)

    def refused(self, event: Event) -> Finding:
        """Return what is said of an event that may not come now."""
        over = f"after {self._index} of {self.micro_batches} micro-batches" if self.phase is Phase.ACCUMULATING else ""
        return refusal(self.phase, event, over)

    # -- how

    @property
    def _is_replay(self) -> bool:
        return self._index >= self._own

    def _exchange(self, event: Event, findings: list[Finding]) -> list[Row]:
        mine = row(event, micro_batches=self.micro_batches, counted=self._counted == "late", items=self._late_items)
        return exchanged(self._rules.alone, mine, findings)

    def _enter(self) -> None:
        last = self._index == self.micro_batches - 1
        self._context.enter_context(self._rules.session.micro_batch(last, self._rules.sync.reduces(last)))

    def _misuse(self, event: Event, loss: Any, num_items: Any, count: float | None) -> list[Finding]:
        if following(self.phase, event) is None:
            return [self.refused(event)]
        late = num_items is not None
        if late and self._counted == "ahead" or self._index and late != (self._counted == "late"):
            return [_mixed(self._counted)]
        if not isinstance(loss, Tensor) or loss.ndim:
            return [_wrong_loss(f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}")]
        if not loss.requires_grad:
            return [_wrong_loss("one without a gradient: detached, or made under no_grad")]
        return wrong_counts([count]) if count is not None else []

    def _run(self, loss: Tensor, num_items: float | Tensor | None, count: float | None) -> None:
        session = self._rules.session
        keeps, weight = self._weight(num_items, count)
        if num_items is not None:
            self._counted = "late"
            self._late_items += 0.0 if self._is_replay else math.nan if count is None else count
        self._note(loss, keeps, weight, num_items)
        self._mute.keep(keeps)
        scale = weight / session.loss_scale()
        as_it_is = self._fold is not None or (isinstance(scale, float) and scale == 1.0)
        weighted = loss if as_it_is else loss * scale
        session.backward(weighted if self._rules.scaler is None else self._rules.scaler.scale(weighted))
        self._mute.keep(True)
        if self._fold is not None:
            self._fold.add(scale)

    def _weight(self, num_items: float | Tensor | None, count: float | None) -> tuple[bool | Tensor, float | Tensor]:
        """Return whether the micro-batch counts at all, and what its loss is multiplied by."""
        if self._is_replay:
            return False, 1.0
        if num_items is None:
            factor = self._weights.factor(self._index)
            return factor != 0.0, factor or 1.0
        if count is None:  # on a device
            there = torch.as_tensor(num_items).detach()
            return there > 0, there if self._rules.reduction == "mean" else 1.0
        return count != 0.0, count if self._rules.reduction == "mean" and count else 1.0

    def _note(self, loss: Tensor, keeps: bool | Tensor, weight: float | Tensor, num_items: float | Tensor | None) -> None:
        """Add to the sums that become `loss` and `num_items`; nothing is read from the device."""
        if self._sums is None:
            self._sums = torch.zeros(2, dtype=torch.float64, device=loss.device)
        value = loss.detach().double() * weight
        if keeps is not False:
            self._sums[0] += value if keeps is True else torch.where(keeps, value, 0.0)
            if num_items is not None:
                self._sums[1] += num_items

    def _finish(self) -> None:
        rules, session = self._rules, self._rules.session
        sums = self._sums if self._sums is not None else torch.zeros(2, dtype=torch.float64)
        if not rules.alone:
            ranks.total(sums)
        if self._fold:
            self._fold.show()
        value = sums[0] / rules.ranks
        if self._counted == "late":
            self.num_items = sums[1]
            value = sums[0] / sums[1]
            session.scale_gradients(rules.ranks / sums[1])
        self.loss = value.float()
        finite = rules.scaler is None or scaling.unscale(rules.scaler, session.optimizers, rules.alone)
        self.grad_norm = session.clip(rules.max_norm) if rules.max_norm is not None else None
        self._pass(Event.CLIP)
        if self._fold:
            self._fold.cast()
        if rules.scaler is not None:
            scaling.step(rules.scaler, session.optimizers, finite)
        else:
            finite = session.step()
        if self.grad_norm is None and rules.max_norm is not None:
            self.grad_norm = session.grad_norm()
        self.stepped = finite
        for scheduler in rules.schedulers if finite else ():
            session.advance(scheduler)
        session.zero_grad()
        self._close()
        self._pass(Event.STEP)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._fail()
            raise

    def _pass(self, event: Event) -> None:
        self.phase = TABLE[self.phase, event]

    def _fail(self) -> None:
        self.phase = following(self.phase, Event.FAIL) or self.phase
        self._close()

    def _close(self) -> None:
        self._context.close()
        self._mute.close()
        if self._fold:
            self._fold.drop()
        if self._drawn is not None:
            self._drawn.clear()
        if self._trace is not None:
            self._trace.restore()
            self._trace = None


def _on_host(num_items: float | Tensor) -> float | None:
    """Return a count that the host has; None where a device has it."""
    if isinstance(num_items, Tensor) and num_items.device.type != "cpu":
        return None
    try:
        return float(num_items)
    except (TypeError, ValueError):
        return math.nan


def _wrong_loss(found: str) -> Finding:
    return Finding(
        "window/loss",
        None,
        "error",
        expected="a 0-d loss that requires a gradient",
        found=found,
        fix="Pass the loss tensor of one micro-batch as the model made it: a mean or a sum, not detached, no .item().",
    )


def _mixed(counted: str | None) -> Finding:
    return Finding(
        "window/counts-mixed",
        None,
        "error",
        expected="item counts from one place, for every micro-batch of a window",
        found="backward(num_items=) in a window that counts ahead" if counted == "ahead" else "num_items in some backwards only",
        fix="Give num_items to windows(), or to every backward of the window.",
    )
