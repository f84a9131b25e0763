"""Running optimizers of a probe: steps in, the path of the params out.

A *field* gives the gradients: of the open kinds a row a step, of the bowl from the params as they are. A *trace* is where the
params were before the first step and after each. Updates are their differences: what a rule that moves a param by a millionth
of itself does is all there, and would be lost in a comparison of params.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from truestep.optimizers.probe.build import Way, groups_of, refusing
from truestep.optimizers.probe.plan import KINDS, Member, Plan, Subject, absent_in, scale_of, zero_in
from truestep.optimizers.probe.quiet import seed


@dataclass(frozen=True)
class Field:
    """The gradients of all subjects, by step.

    Attributes:
        rows: Float32 of shape (steps, numel): gradients; of the bowl where its minimum is.
        curvature: Float32 of shape (numel,), of the bowl; 0 elsewhere.
        alive: Float32 of shape (steps, 1): 0 where all gradients are zero.
        absents: Whether subjects miss their gradients in the steps that the plan says.
        zeros_for_absent: They have zero gradients then instead.
    """

    rows: Tensor
    curvature: Tensor
    alive: Tensor
    absents: bool = True
    zeros_for_absent: bool = False

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.rows)

    def until(self, steps: int) -> Field:
        """Return its first steps."""
        return replace(self, rows=self.rows[:steps], alive=self.alive[:steps])

    def at(self, places: Tensor) -> Field:
        """Return the field of some elements."""
        return replace(self, rows=self.rows.index_select(1, places), curvature=self.curvature[places])

    def disturbed(self, places: Collection[int]) -> Field:
        """Return one that is far off at these places, in every step."""
        rows = self.rows.clone()
        at = torch.tensor(sorted(places))
        rows[:, at] = 5 * rows.abs().amax(1, keepdim=True) - 1.7 * rows[:, at]
        return replace(self, rows=rows)

    @functools.cached_property
    def _closed(self) -> Tensor:
        return self.curvature > 0

    @functools.cached_property
    def _is_open(self) -> bool:
        return not bool(self._closed.any())

    def gradient(self, step: int, params: Tensor) -> Tensor:
        """Return the gradient of a step, freshly made."""
        if self._is_open:
            return self.rows[step] * self.alive[step]
        return torch.where(self._closed, self.curvature * (params - self.rows[step]), self.rows[step]).mul_(self.alive[step])

    def loss(self, step: int, params: Tensor) -> Tensor:
        """Return the loss that has this gradient, 0-d."""
        along = torch.where(self._closed, 0.5 * (params - self.rows[step]), params)
        return (self.gradient(step, params) * along).sum()


def field(plan: Plan, steps: int, *, zeros: bool = True, absents: bool = True) -> Field:
    """Return the gradients of all subjects; of one kind and shape the same each time."""
    parts = [_part(subject, steps) for subject in plan.subjects]
    alive = torch.tensor([[0.0 if zeros and zero_in(step) else 1.0] for step in range(steps)])
    return Field(torch.cat([rows for rows, _ in parts], 1), torch.cat([curvature for _, curvature in parts]), alive, absents)


def _part(subject: Subject, steps: int) -> tuple[Tensor, Tensor]:
    """Return the rows and curvature of one subject."""
    generator = torch.Generator().manual_seed(1 + 3 * subject.original + KINDS.index(subject.kind))
    numel = subject.numel
    direction = torch.randn(numel, generator=generator)
    noise = torch.randn(steps, numel, generator=generator)
    if subject.kind == "bowl":
        return (2 * direction).expand(steps, -1), 0.2 + torch.rand(numel, generator=generator)
    sizes = torch.tensor([[scale_of(step)] for step in range(steps)])
    return sizes * (direction + 0.5 * noise if subject.kind == "drift" else noise), torch.zeros(numel)


def start(plan: Plan) -> Tensor:
    """Return where the params start: float32 of shape (numel,), none near zero, as ratios to a param's size would then rule."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (plan.numel,), generator=generator) * 2 - 1
    return sign * (0.1 + torch.rand(plan.numel, generator=generator))


@dataclass
class Trace:
    """What came of a run.

    Attributes:
        path: Of shape (steps + 1, numel of the members): where the params were.
        optimizers: The optimizers, after the last step.
        params: ``(member, param)`` for each member.
    """

    path: Tensor
    optimizers: list[Any]
    params: list[tuple[Member, nn.Parameter]]

    @property
    def updates(self) -> Tensor:
        """What each step added: float64 of shape (steps, numel)."""
        return updates(self.path)


def updates(path: Tensor) -> Tensor:
    """Return the differences of a path, in float64."""
    wide = path.double()
    return wide[1:] - wide[:-1]


def places_of(members: Sequence[Member]) -> Tensor:
    """Return the places of several members, end to end."""
    return torch.tensor([place for member in members for place in member.places], dtype=torch.int64)


def params_of(members: Sequence[Member], at: Tensor) -> list[tuple[Member, nn.Parameter]]:
    """Return a new param for each member, with its part of the flat start."""
    return [(member, nn.Parameter(at[list(member.places)].view(member.shape))) for member in members]


def run(
    way: Way, members: Sequence[Member], at: Tensor, gradients: Field, *, before: Callable[[Stepper], None] | None = None
) -> Trace:
    """Make an optimizer of these members and step it through all gradients.

    Args:
        way: How it is made and stepped.
        members: What it holds.
        at: The flat start of all subjects.
        gradients: Of all subjects.
        before: Is called with the stepper before the first step.
    """
    stepper = Stepper(way, members, at, gradients)
    if before is not None:
        before(stepper)
    path = [stepper.read()]
    for step in range(gradients.steps):
        stepper.step(step, path[-1])
        path.append(stepper.read())
    return Trace(torch.stack(path), stepper.optimizers, stepper.params)


class Stepper:
    """An optimizer with its params, and how to step it."""

    def __init__(self, way: Way, members: Sequence[Member], at: Tensor, gradients: Field) -> None:
        seed()
        self.params = params_of(members, at)
        with refusing():
            self.optimizers = way.make(self.params)
        self._way = way
        self._gradients = gradients.at(places_of(members))
        self._sizes = [len(member.places) for member in members]

    def read(self) -> Tensor:
        """Return the params, flat: a copy."""
        return torch.cat([param.detach().reshape(-1) for _, param in self.params])

    def step(self, step: int, params: Tensor) -> None:
        """Set the gradients of a step, counted from 0, and take it; `params` are the params as they are, flat."""
        self.set(self._gradients.gradient(step, params), step)
        with refusing():
            self._way.step(self.optimizers, self._closed(step))

    def rest(self) -> None:
        """Take a step with zero gradients and learning rates of 0, as torch's state-dict functions do to create state."""
        groups = groups_of(self.optimizers)
        rates = [group.get("lr") for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = 0 * rate if rate is not None else rate
        for _, param in self.params:
            param.grad = torch.zeros_like(param)
        with refusing():
            self._way.step(self.optimizers, lambda: torch.zeros(()))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def set(self, gradient: Tensor, step: int) -> None:
        """Give each param its part of a flat gradient, or none."""
        source = self._gradients
        for (member, param), part in zip(self.params, gradient.split_with_sizes(self._sizes), strict=True):
            missing = source.absents and absent_in(member.subject, step)
            if missing and not source.zeros_for_absent:
                param.grad = None
            else:
                made = part.view(member.shape)
                param.grad = made.zero_() if missing else made

    def _closed(self, step: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            with torch.no_grad():
                params = self.read()
                self.set(self._gradients.gradient(step, params), step)
                return self._gradients.loss(step, params)

        return closure


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Tell where two tensors of one shape differ; a NaN is like another."""
    return (one != other) & ~(one.isnan() & other.isnan())
