"""What one rank's training loop did in one optimizer step, recorded from the outside.

A *micro-batch* opens at the first forward after a backward (or at the recipe's `loss`, where the loop calls it) and holds every
backward up to the next one. Each is kept with what one process needs to run it again: the RNG states and buffers as they were
before its forward, the loss, the factor that reached the loss, and the local gradients that hooks saw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from truestep.backends.base import Contract, Identity, Piece, Session, Undo
from truestep.state.generators import rng_states
from truestep.state.view import Slot, SlotId, StateView
from truestep.verification.own_shards import OnShards, ShardWatch
from truestep.words.finding import Finding
from truestep.words.names import group_slot


@dataclass
class MicroBatch:
    """One forward and its backward passes.

    Attributes:
        rng: RNG states before the forward.
        buffers: Buffers of the unwrapped models as the forward found them.
        loss: What the recipe's `loss` returned, or None where the loop does not call it.
        factor: The gradient that reached that loss.
        root: The tensor that backward was called on.
        gradients: This rank's local gradient of each param that got one.
        joint: One backward ran over this loss and others together, so that its own gradients were not seen.
    """

    rng: dict[str, Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    factor: Tensor | None = None
    root: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    backwards: int = 0
    factors_seen: int = 0
    joint: bool = False


@dataclass
class Clip:
    """One recorded clipping.

    Attributes:
        max_norm: Its limit.
        norm: What it returned.
        unclipped: The gradients that it was given, as they were before; None where an engine clips inside its step.
        micro_batches: How many were over.
    """

    max_norm: float
    norm: Tensor
    unclipped: dict[str, Piece] | None
    micro_batches: int = 0


@dataclass
class StepRecord:
    """What one rank did in one optimizer step.

    Attributes:
        batches: The micro-batches that were handed to the loop, as drawn.
        micro_batches: What the loop did with them.
        start: The view at the start of the step, where it is not the end of the step before; None otherwise.
        between: What changed between the last step's end and this one's start, and between its start and the step's entry.
        entering: The gradient of each param as it entered the innermost step; None where it was absent.
        steps: How often each optimizer stepped.
        micro_batches_at_step: How many micro-batches were over when the first step came.
        groups: What the param groups held as the first step came: a loop sets learning rates until then.
        after: The view right after the first step.
        identity: Who is who when the first step came.
        orphans: State keyed by no live param then.
        on_shards: How element-wise steps agree with a replica on this rank's own shards.
        loss: What `train_step` returned.
    """

    step: int
    rank: int
    batches: list[Any]
    micro_batches: list[MicroBatch] = field(default_factory=list)
    start: StateView | None = None
    between: list[Finding] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    entering: dict[str, Piece | None] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    micro_batches_at_step: int = 0
    after: StateView | None = None
    groups: dict[SlotId, Any] = field(default_factory=dict)
    identity: Identity | None = None
    orphans: tuple[tuple[str, tuple[str, ...]], ...] = ()
    contract: Contract = field(default_factory=Contract)
    on_shards: OnShards = field(default_factory=OnShards)
    loss: float | None = None


class Recorder:
    """Watches one session, step by step; changes nothing.

    Args:
        session: What is watched.
        hyper_parameters: Keys of param groups that schedules may change between steps.
    """

    def __init__(self, session: Session, hyper_parameters: frozenset[str]) -> None:
        self._session = session
        self._hyper_parameters = hyper_parameters
        self._last: StateView | None = None
        self._record = StepRecord(0, 0, [])
        self._start: StateView | None = None
        self._forward_open = False
        self._in_backward = False
        self._reached: list[MicroBatch] = []
        self._shards = ShardWatch(session.optimizers, session.identity().live)
        self._undo: list[Undo] = [
            session.hook_gradients(self._see_gradient),
            session.on_step(self._before_step, self._after_step),
            self._shards.close,
            *(self._hook_forward(index, module) for index, module in enumerate(session.modules())),
        ]

    def close(self) -> None:
        """Remove every hook."""
        for undo in self._undo:
            undo()

    @contextmanager
    def step(self, number: int, rank: int, batches: Sequence[Any]) -> Iterator[StepRecord]:
        """Record one optimizer step: give the record, filled when the context ends."""
        record = self._record = StepRecord(number, rank, list(batches), contract=self._session.contract())
        record.steps = [0] * len(self._session.optimizers)
        self._forward_open = False
        self._start = plain_copy(self._session.view())
        if self._last is None:
            record.start = self._start
        elif changes := self._changes(self._last, self._start):
            record.between, record.start = changes, self._start
        with self._watching_backward(), self._watching_clips():
            yield record
        by_engine = [Clip(limit, norm.detach().cpu().clone(), None) for limit, norm in self._session.clips()]
        record.clips += by_engine[:1]  # of the first step, as `entering` is
        record.on_shards = self._shards.take()
        if record.after is None:
            record.after = plain_copy(self._session.view())
        if record.identity is None:
            record.identity, record.orphans = self._session.identity(), record.after.orphans
            record.groups = group_values(record.after)
        self._last = record.after

    def loss(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """Return the recipe's `loss`, watched."""

        def watched(model: Any, batch: Any) -> Tensor:
            if self._in_backward or not torch.is_grad_enabled():
                return loss(model, batch)
            micro_batch = self._opened(fresh=True)
            value = loss(model, batch)
            micro_batch.loss = value.detach().cpu().clone()

            def reached(factor: Tensor) -> None:
                micro_batch.factors_seen += 1
                self._reached.append(micro_batch)
                micro_batch.factor = factor.detach().cpu().clone()

            if value.requires_grad:
                value.register_hook(reached)
            return value

        return watched

    # -- micro-batches

    def _opened(self, fresh: bool = False) -> MicroBatch:
        """Return the micro-batch that is open; after a backward, or for a `fresh` loss where one is there already, a new one."""
        if self._forward_open and not (fresh and self._record.micro_batches[-1].loss is not None):
            return self._record.micro_batches[-1]
        self._record.micro_batches.append(MicroBatch(rng_states()))
        self._forward_open = True
        return self._record.micro_batches[-1]

    def _hook_forward(self, index: int, module: nn.Module) -> Undo:
        prefix = f"{index}:" if len(self._session.modules()) > 1 else ""

        def entered(*_: Any) -> None:
            if self._in_backward or not torch.is_grad_enabled():
                return
            micro_batch = self._opened()
            for name, buffer in module.named_buffers():
                micro_batch.buffers.setdefault(prefix + name, buffer.detach().cpu().clone())

        handle = module.register_forward_pre_hook(entered)
        return handle.remove

    @contextmanager
    def _watching_backward(self) -> Iterator[None]:
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            outermost = not self._in_backward
            micro_batch = self._opened()
            if outermost:
                root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
                micro_batch.root = root.detach().cpu().clone() if isinstance(root, Tensor) else None
                self._reached = []
            self._in_backward = True
            try:
                backward(tensors, *args, **kwargs)
            finally:
                if outermost:
                    self._in_backward = False
                    self._forward_open = False
                    together = list({id(each): each for each in [*self._reached, micro_batch]}.values())
                    for each in together:
                        each.backwards += 1
                        each.joint = each.joint or len(together) > 1

        # Tensor.backward and every vendor's backward look this function up when they run.
        with mock.patch.object(torch.autograd, "backward", watched):
            yield

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        if not self._in_backward:  # torch.autograd.grad fires tensor hooks too, and accumulates nothing
            return
        known = self._record.micro_batches[-1].gradients
        seen = gradient.detach().cpu()
        known[name] = known[name] + seen if name in known else seen.clone()

    # -- the step

    def _before_step(self, index: int) -> None:
        record = self._record
        if not any(record.steps):
            record.micro_batches_at_step = self._micro_batches_over()
            self._note_entry(record)
        record.steps[index] += 1

    def _note_entry(self, record: StepRecord) -> None:
        """Note what changed since the window's start, and who is who, as the first step comes."""
        entry = plain_copy(self._session.view())
        record.identity, record.orphans = self._session.identity(), entry.orphans
        record.groups = group_values(entry)
        start = self._start or entry
        changes = self._changes(start, entry)
        if start.orphans and not entry.orphans:
            # State that was keyed by dead params was moved to the live ones: a repair, and what the step starts from.
            changes = [change for change in changes if change.expected != "absent"]
            record.start = entry
        record.between += changes

    def _micro_batches_over(self) -> int:
        return sum(1 for micro_batch in self._record.micro_batches if micro_batch.backwards or self._in_backward)

    def _after_step(self, index: int, entering: dict[str, Piece | None]) -> None:
        record = self._record
        if record.steps[index] == 1:
            record.entering.update(entering)
        if all(record.steps) and record.after is None:
            record.after = plain_copy(self._session.view())

    def _changes(self, old: StateView, new: StateView) -> list[Finding]:
        return [
            finding
            for finding in old.diff(new)
            if not (finding.param is None and _last_part(finding.key) in self._hyper_parameters)
        ]

    @contextmanager
    def _watching_clips(self) -> Iterator[None]:
        # What every clipping by norm comes to. The loop may have imported the function: so not its name is replaced, but what
        # torch's wrapper around it calls, which all its names share.
        wrapper = torch.nn.utils.clip_grad._clip_grads_with_norm_
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        clip_with = cells["func"].cell_contents

        def watched(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not all(self._record.steps):  # what is clipped after the step is no longer of this window
                norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
                unclipped = self._session.pieces(held) or {}
                clip = Clip(float(max_norm), norm.detach().cpu().clone(), unclipped, self._micro_batches_over())
                self._record.clips.append(clip)
            clip_with(held, max_norm, total_norm, *args, **kwargs)

        cells["func"].cell_contents = watched
        try:
            yield
        finally:
            cells["func"].cell_contents = clip_with


def _last_part(key: str | None) -> str:
    return (key or "").rsplit("/", 1)[-1]


def plain_copy(view: StateView) -> StateView:
    """Return a frozen copy of which everything pickles: an opaque object is kept as the name of its class."""
    frozen = view.copy()
    return StateView((_without_object(slot) for slot in frozen.values()), frozen.orphans)


def group_values(view: StateView) -> dict[SlotId, Any]:
    """Return what the param groups of a view hold: numbers, and tensors as they are; objects stay the reference's own."""
    owned = [slot for slot in view.values() if slot.name.startswith(group_slot("")) and slot.kind != "opaque"]
    return {(slot.name, slot.key): slot.local[0] if slot.kind == "tensor" else slot.value for slot in owned}


def _without_object(slot: Slot) -> Slot:
    return dataclasses.replace(slot, value=type(slot.value).__qualname__) if slot.kind == "opaque" else slot
