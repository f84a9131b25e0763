"""Checks of params of every shape that shards have: none, empty, of strides of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from torch import Tensor

from truestep.optimizers.conformance.bench import PARAM, Bench, Slots
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.given import Gradients, gradients, start
from truestep.optimizers.conformance.kernels import refusal
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem
from truestep.optimizers.conformance.reference import SMALL, Textbook, demand_agreement, walked
from truestep.optimizers.conformance.subject import Case, Subject
from truestep.optimizers.probe.build import arguments

STEPS: Final = 3
Lay: TypeAlias = Callable[[Tensor], Tensor]


def zero_size(case: Case) -> str:
    """Params without elements are held beside others, which do not notice."""
    subject = case.subject.without_draws()
    values = start(subject.shapes)
    empty = _empties(subject)

    def told(bench: Bench) -> Slots:
        slots = bench.run(0, subject.short(STEPS)).state()
        return {slot: v for slot, v in slots.items() if slot[0] in values and (slot[1] == PARAM or not subject.coupled)}

    def without() -> Slots:
        return told(subject.bench(values))

    again = without if subject.coupled else None
    return demand_same(
        told(subject.bench({**values, **empty})), without(), "the same as without a param of no elements", again=again
    )


def empty_shard(case: Case) -> str:
    """A rank whose shards are all empty steps like the others."""
    subject = case.subject
    bench = subject.bench(_empties(subject)).run(0, STEPS)
    bench.slots()
    bench.load(subject.bench(_empties(subject)).run(0, 1).state_dicts()).run(0, 1)
    return f"{len(bench.params)} empty params step, and load"


def _empties(subject: Subject) -> dict[str, Tensor]:
    """Return empty params: of each number of dims that it takes, none along the first."""
    shapes = {len(shape): shape for shape in subject.shapes.values() if shape}
    if not shapes:
        raise NotApplicable("it takes 0-d params only")
    return start({f"empty.{ndim}d": (0, *shape[1:]) for ndim, shape in shapes.items()})


def zero_dim(case: Case) -> str:
    """Params of no dims train."""
    subject = case.subject
    if 0 in subject.refused:
        raise NotApplicable(f"it refuses them{subject.why_not(0)}")
    value = start({"gain": ()})
    bench = subject.bench(value).run(0, STEPS)
    after = bench.params["gain"].detach()
    if after.shape != () or not bool(after.isfinite()) or bool(after == value["gain"]):
        found = f"{float(after):g} of shape {tuple(after.shape)}" if after.numel() == 1 else f"shape {tuple(after.shape)}"
        raise Failed(Problem("a 0-d param that trains", f"{found} after {STEPS} steps", "gain", PARAM))
    return f"trains over {STEPS} steps"


def _strided(tensor: Tensor) -> Tensor:
    """Return the same values, the last two dims exchanged in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


# Of a param and of its gradient.
_LAYS: Final[Mapping[str, tuple[Lay, Lay]]] = {
    "a param of other strides": (_strided, _as_is),
    "a gradient of other strides": (_as_is, _strided),
    "both of other strides": (_strided, _strided),
}


def non_contiguous(case: Case) -> str:
    """Strides of params and gradients do not matter."""
    subject = case.subject.without_draws()
    values = start(_matrices(subject))
    told = ""
    for what, lays in _LAYS.items():
        mine = _laid(subject, values, lays).state()
        told = demand_same(
            mine,
            _laid(subject, values, (_as_is, _as_is)).state(),
            f"the same as contiguous, with {what}",
            again=lambda: _laid(subject, values, (_as_is, _as_is)).state(),
            fix="Update element by element, not by flat memory.",
        )
    return told


def _laid(subject: Subject, values: Mapping[str, Tensor], lays: tuple[Lay, Lay]) -> Bench:
    bench = subject.bench({name: lays[0](value) for name, value in values.items()})
    for step in range(subject.short(STEPS)):
        bench.step(_given(values, lays[1], step))
    return bench


def fused_strides(case: Case) -> str:
    """The fused kernel heeds strides: FSDP and channels_last hand it params and gradients that differ in theirs."""
    subject, reference = case.subject, case.reference
    accepted = arguments(subject.target)
    if accepted is None or "fused" not in accepted:
        raise NotApplicable("it has no fused kernel")
    values = start(_matrices(subject), size=SMALL)
    told = ""
    for what, lays in _LAYS.items():
        laid = {name: lays[0](value) for name, value in values.items()}
        given = functools.partial(_given, values, lays[1])
        try:
            bench = subject.bench(laid, fused=True)
            bench.step(given(0))
        except Exception as error:  # whatever a class says to a kernel
            raise NotApplicable(f"its fused kernel is refused: {refusal(error)}") from error
        fix = "Hand it gradients of the param's strides, or use foreach=True."
        if isinstance(reference, Textbook):
            walk = walked(subject, subject.bench(laid, fused=True), STEPS, given=given)
            told = demand_agreement(reference, walk, f"the update, with {what},", fix)
        else:
            told = _demand_plain(subject, values, bench, what, fix)
    return told


def _given(values: Mapping[str, Tensor], lay: Lay, step: int) -> Gradients:
    return {name: lay(gradient) for name, gradient in gradients(values, step).items()}


def _demand_plain(subject: Subject, values: Mapping[str, Tensor], bench: Bench, what: str, fix: str) -> str:
    def plain() -> Slots:
        return subject.bench(values, fused=False).run(0, 1).state()

    return demand_same(bench.state(), plain(), f"the update of the plain kernel, with {what}", again=plain, fix=fix)


def _matrices(subject: Subject) -> dict[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in subject.shapes.items() if len(shape) > 1 and min(shape[-2:]) > 1}
    if not shapes:
        raise NotApplicable("it takes no params of two dims")
    return shapes
