"""Finding out how an optimizer is made and stepped, and which params it takes: by trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.optimizers.probe import run
from truestep.optimizers.probe.build import Refusal, Way, flag_in, refusing, ways_of
from truestep.optimizers.probe.plan import DEFAULT_SHAPES, FIRST_STEPS, KINDS, Member, Plan, Subject, plan_of, with_companions
from truestep.optimizers.probe.quiet import seed
from truestep.optimizers.probe.run import Field, Trace

TRIED_STEPS: Final = 3
MOST_OPERATIONS: Final = 1000  # a param and step; Adam takes 12, Newton-Schulz 40
_CLOSURE: Final = "argument: 'closure'"  # what Python says of a step that was not given one
# Zero gradients, then absent ones, are left out where a class cannot bear them.
_MERCIES: Final = ((True, True), (False, True), (True, False), (False, False))


@dataclass(frozen=True)
class Ground:
    """What is measured, and on what.

    Attributes:
        way: How the optimizer is made and stepped.
        subjects: The whole params that it takes.
        zeros: Whether some steps may have zero gradients.
        absents: Whether some params may miss theirs.
        operations: How many of torch's a step takes for each param.
    """

    way: Way
    subjects: tuple[Subject, ...]
    zeros: bool = True
    absents: bool = True
    operations: int = 0

    def field(self, plan: Plan, steps: int) -> Field:
        """Return the gradients of a plan."""
        return run.field(plan, steps, zeros=self.zeros, absents=self.absents)

    def trace(self, kind: str, steps: int) -> Trace:
        """Run the whole subjects with one kind of gradients."""
        plan = plan_of(self.subjects, (kind,))
        return run.run(self.way, plan.wholes, run.start(plan), self.field(plan, steps))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of gradients to measure with: all, or of a class whose steps take long the first one."""
        return KINDS if self.operations <= MOST_OPERATIONS else KINDS[:1]

    @property
    def notes(self) -> list[str]:
        """What it cannot bear, and what was left out, in words."""
        found = (
            (self.zeros, "fails where all gradients are zero"),
            (self.absents, "fails where a gradient is absent"),
            (self.kinds == KINDS, f"a step takes {self.operations} operations a param: measured with one kind of gradients only"),
        )
        return [what for is_well, what in found if not is_well]


class _Counting(TorchDispatchMode):
    """Counts the operations that torch runs in this thread while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def find_ground(
    target: Callable[..., Any], settings: Mapping[str, Any], subjects: Sequence[Subject]
) -> tuple[Ground | None, str]:
    """Return what can be measured, and why nothing can."""
    ways, why = ways_of(target, settings)
    tried, asked = list(ways), ""
    while tried:
        way = tried.pop(0)
        ground, error = _tried(way, subjects)
        if ground is not None:
            return ground, ""
        if way.flag or not why or _CLOSURE in why:  # of the most usual way, and of the one that it asked for
            why = error
        if not asked and (asked := flag_in(error)):
            tried = [replace(one, form="groups", flag=asked) for one in ways[:2]] + tried
    return None, why


def _tried(way: Way, subjects: Sequence[Subject]) -> tuple[Ground | None, str]:
    """Return the ground of a way in which it steps some of the subjects, and what it says if there is none."""
    taken, error = _taken(way, subjects)
    if not taken:
        return None, error
    return _bearable(way, with_companions(taken))


def _taken(way: Way, subjects: Sequence[Subject]) -> tuple[list[Subject], str]:
    """Return the subjects that it steps, each alone, and what it says to the most usual one that it does not."""
    taken, error = [], ""
    for subject in sorted(subjects, key=lambda one: abs(one.ndim - 2)):
        try:
            _try(way, torch.full(subject.shape, 0.5), torch.ones(subject.shape))
        except Refusal as refusal:
            error = error or str(refusal)
        else:
            taken.append(subject)
    return [subject for subject in subjects if subject in taken], error


def _bearable(way: Way, subjects: tuple[Subject, ...]) -> tuple[Ground | None, str]:
    """Return the ground with the hardest gradients that it bears: finite, else at least without an exception."""
    runs, error = [], ""
    for zeros, absents in _MERCIES:
        ground = Ground(way, subjects, zeros, absents)
        try:
            with _Counting() as counting:
                path = ground.trace(KINDS[0], FIRST_STEPS).path
        except Refusal as refusal:
            error = f"it steps each param alone, and of several says: {refusal}"
            continue
        ground = replace(ground, operations=counting.operations // (FIRST_STEPS * len(subjects)))
        if bool(path.isfinite().all()):
            return ground, ""
        runs.append(ground)
    return (runs[0] if runs else None), error


# -- Which params


def accepted(way: Way, subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Return which kinds of params it steps to finite ones, found by trying each alone."""
    ndims = sorted({*(len(shape) for shape in DEFAULT_SHAPES.values()), 3, *(subject.ndim for subject in subjects)})
    usual = min(subjects, key=lambda subject: abs(subject.ndim - 2)).shape
    found = []
    for name, (param, gradient) in {**{f"{ndim}d": _plain(ndim) for ndim in ndims}, **_variants(usual)}.items():
        try:
            left = _try(way, param, gradient)
        except Refusal:
            continue
        if bool(left.isfinite().all()):
            found.append(name)
    return tuple(found)


def _plain(ndim: int) -> tuple[Tensor, Tensor]:
    shape = tuple(range(ndim + 1, 1, -1))
    return torch.full(shape, 0.5), torch.ones(shape)


def _variants(shape: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return params that are unusual in one way each, with a gradient."""
    one, gradient = torch.full(shape, 0.5), torch.linspace(0.5, 1.5, math.prod(shape)).view(shape)
    made = {
        "empty": (torch.zeros((0, *shape[1:])), torch.zeros((0, *shape[1:]))),
        "float64": (one.double(), gradient.double()),
        "bfloat16": (one.bfloat16(), gradient.bfloat16()),
        "float16": (one.half(), gradient.half()),
        "complex64": (torch.complex(one, one), torch.complex(gradient, -gradient)),
    }
    if len(shape) > 1:
        made["strided"] = (one.mT.contiguous().mT, gradient)
    if shape:
        made["sparse"] = (one.clone(), gradient.to_sparse(1))
    return made


def _try(way: Way, tensor: Tensor, gradient: Tensor) -> Tensor:
    """Step one param a few times and return it."""
    seed()
    param = nn.Parameter(tensor.clone(memory_format=torch.preserve_format))
    with refusing():
        optimizers = way.make([(Member("layers.0.weight", tuple(tensor.shape), (), 0, tensor.ndim), param)])

    def closure() -> Tensor:
        param.grad = gradient.clone()
        return param.detach().abs().sum().float()

    for _ in range(TRIED_STEPS):
        closure()
        with refusing():
            way.step(optimizers, closure)
    return param.detach()
