"""The optimizer under check: how it is made, over which params, and stepped by which gradients.

A *subject* is a class or function with its settings, and the params that it was seen to take. It makes benches, and remembers
what was measured once for many checks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from truestep.optimizers.conformance.bench import PARAM, Bench, numbered
from truestep.optimizers.conformance.given import Shapes, gradients, start
from truestep.optimizers.conformance.problem import NotApplicable, first_line
from truestep.optimizers.probe import plan as probed
from truestep.optimizers.probe.build import Target, Way, name_of, target_of, ways_of
from truestep.optimizers.probe.ground import find_ground
from truestep.optimizers.probe.plan import subjects_of, with_companions
from truestep.optimizers.probe.quiet import drew, randomness, seed
from truestep.state.view import SlotId
from truestep.words.errors import UnsupportedError
from truestep.words.names import OPTIMIZER_SLOT, group_slot

FEW_EVALUATIONS: Final = 2
COUPLING_STEPS: Final = 12


@dataclass(frozen=True)
class Subject:
    """A class or function with its settings, and what it was seen to take.

    Attributes:
        way: How it is made and stepped.
        shapes: Of the params that it takes, by name; at least two.
        sparse: It takes sparse gradients only.
        refused: ``dims -> why`` of the params that it does not take.
    """

    way: Way
    shapes: Shapes
    sparse: bool = False
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the class or function."""
        return name_of(self.way.target)

    @property
    def target(self) -> Target:
        """The class or function."""
        return self.way.target

    def bench(
        self,
        named: Mapping[str, Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        size: float = 1.0,
        groups: int = 1,
        **settings: Any,
    ) -> Bench:
        """Return a new optimizer over params with these values, or over the usual ones.

        Args:
            named: Values by name; they are copied.
            dtype: Of the usual ones.
            size: Of their elements.
            groups: Into how many param groups they are put.
            settings: Over those of the subject.
        """
        values = start(self.shapes, dtype=dtype, size=size) if named is None else named
        params = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
        return Bench(self.way, params, sparse=self.sparse, groups=groups, settings=settings)

    def short(self, steps: int) -> int:
        """Return how many steps to take where others take so many: fewer, where each is many evaluations of a closure."""
        return steps if self.evaluations <= FEW_EVALUATIONS else max(1, steps // 4)

    @functools.cached_property
    def evaluations(self) -> int:
        """How often a step evaluates its closure."""
        return self.bench().run(0, 1).evaluations

    def one(self, ndim: int | None = None) -> str:
        """Return the name of its first param of that many dims.

        Raises:
            NotApplicable: If it takes none.
        """
        for name, shape in self.shapes.items():
            if ndim in (None, len(shape)):
                return name
        raise NotApplicable(f"it takes no params of {ndim} dims{self.why_not(ndim or 0)}")

    def why_not(self, ndim: int) -> str:
        """Return in brackets why it does not take params of that many dims."""
        return f" ({self.refused[ndim]})" if ndim in self.refused else ""

    def has(self, entry: str) -> bool:
        """Tell whether its groups have an entry."""
        return any(entry in group for group in self.usual.groups)

    @functools.cached_property
    def usual(self) -> Bench:
        """A bench to look at, not to step."""
        return self.bench()

    @functools.cached_property
    def counters(self) -> dict[SlotId, float]:
        """The slots that count steps, as ``slot -> by how much each step raises them``, measured over four steps."""
        bench, seen = self.bench(), []
        for step in range(4):
            bench.run(step, step + 1)
            seen.append(bench.slots())
        counters = {}
        for slot_id in seen[-1]:
            path = [numbered(slots.get(slot_id)) for slots in seen]
            rises = {
                after - before for before, after in zip(path, path[1:], strict=False) if before is not None and after is not None
            }
            whole = all(number is not None and number.is_integer() for number in path)
            if slot_id[1] != PARAM and whole and len(rises) == 1 and (rise := rises.pop()) > 0:
                counters[slot_id] = rise
        return counters

    @functools.cached_property
    def draws(self) -> bool:
        """Whether building it or one of its first steps draws random numbers: what it draws depends on what it has drawn."""
        seed()
        before = randomness()
        bench = self.bench()
        drawn = drew(before, randomness())
        for step in range(self.short(COUPLING_STEPS)):
            bench.run(step, step + 1)
            drawn = drawn or drew(before, randomness())
        return drawn

    def without_draws(self) -> Subject:
        """Return itself.

        Raises:
            NotApplicable: If it draws random numbers, so that one param's depend on which others there are.
        """
        if self.draws:
            raise NotApplicable("it draws random numbers: a param's depend on which others there are, and how they lie")
        return self

    @functools.cached_property
    def coupled(self) -> bool:
        """Whether the gradient of one param changes the update of another: it shares something over a group, or over all."""
        calm, stirred = self.bench(), self.bench()
        first, *others = calm.params
        for step in range(self.short(COUPLING_STEPS)):
            handed = gradients(calm.params, step)
            calm.step(handed)
            stirred.step({**handed, first: -3 * handed[first].flip(0) if handed[first].ndim else -3 * handed[first]})
        return any(not torch.equal(calm.params[name], stirred.params[name]) for name in others)

    def counter_of(self, bench: Bench, name: str) -> SlotId | None:
        """Return the slot that counts the steps of a param: its own, or else that of its group or of the optimizer."""
        group = next(number for number, group in enumerate(bench.groups) if group is bench.group_of(name))
        for owner in (name, group_slot(str(group)), OPTIMIZER_SLOT):
            keys = [key for its, key in self.counters if its == owner]
            if keys:
                return owner, "step" if "step" in keys else keys[0]
        return None


@dataclass(frozen=True)
class Case:
    """What a check is given.

    Attributes:
        subject: The class or function.
        reference: What its updates are held against; None: nothing was given, and torch has no rule for it.
    """

    subject: Subject
    reference: Any = None  # of `reference.Reference`, which is written in the words of this module


# -- Finding out what a class takes


def subject_of(optimizer: Any, params: Mapping[str, Sequence[int]] | str | None, settings: Mapping[str, Any]) -> Subject:
    """Return the subject, once a way was found to make and step it.

    Raises:
        UnsupportedError: If it cannot be built or stepped, with its own error.
    """
    target, settings = target_of(optimizer, settings)
    asked = subjects_of(params)
    ground, why = find_ground(target, settings, asked)
    if ground is not None:
        subject = Subject(ground.way, {one.name: one.shape for one in ground.subjects})
        return replace(subject, refused=_refusals(subject, asked))
    shapes = {one.name: one.shape for one in with_companions(asked)}
    for way in ways_of(target, settings)[0]:
        subject = Subject(way, shapes, sparse=True)
        if _complaint(subject) is None:
            return subject
    raise UnsupportedError(
        f"{name_of(target)} cannot be built and stepped: {why.removesuffix('.')}. "
        "Expected a class that takes params, or a function named_params -> optimizer; give its settings."
    )


def _refusals(subject: Subject, asked: Sequence[probed.Subject]) -> dict[int, str]:
    """Return what the class says to those params that it does not take, by their number of dims."""
    taken = {len(shape) for shape in subject.shapes.values()}
    refused = {}
    for one in asked:
        if one.ndim not in taken:
            complaint = _complaint(replace(subject, shapes={one.name: one.shape}))
            refused[one.ndim] = f"{type(complaint).__name__}: {first_line(complaint)}" if complaint else "not beside the others"
    return refused


def _complaint(subject: Subject) -> Exception | None:
    """Return what the class says to being made and stepped twice."""
    try:
        subject.bench().run(0, 2)
    except Exception as error:  # whatever a class says to a shape
        return error
    return None
