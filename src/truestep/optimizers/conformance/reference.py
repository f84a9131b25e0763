"""The judges of an update against a reference: a rule of the textbook, or another class run in lock-step.

A *walk* is what the class under check did: of each step the params before, the gradients, the number of the step, the params
after. A judge follows it, put back at each step to where the class was, and says where its own update ends elsewhere. State is
the judge's own, so that the names of the class's keys do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from truestep.optimizers.conformance.bench import PARAM, Bench, Slots
from truestep.optimizers.conformance.given import Gradients, gradients
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem
from truestep.optimizers.conformance.subject import Subject, subject_of
from truestep.optimizers.probe.build import arguments, name_of, target_of
from truestep.optimizers.textbook import RULES, Arithmetic, Operand, Rule, hyper_of, rule, rule_of, with_rate
from truestep.proof.bounds import Expected, unit_roundoff, worst
from truestep.proof.update import Judgement, judge, sensitivity
from truestep.words.errors import UnsupportedError
from truestep.words.scope import Scope

AGED_STEPS: Final = 1_000_000  # by then bias corrections are 1 in any precision; below 2^24, exact in float32
_COUNTS: Final = Arithmetic.of(torch.float64, scalar=True)  # the number of a step, and what is made of it in Python
_SCALARS: Final = Arithmetic.of(torch.float32, scalar=True)  # what torch keeps in 0-d tensors
SMALL: Final = 2.0**-10  # size of params where an update must not drown in their rounding


@dataclass(frozen=True)
class Taken:
    """One step of a walk: tensors by name, and the number of the step by name."""

    before: Mapping[str, Tensor]
    gradients: Gradients
    count: Mapping[str, float]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Walk:
    """What the class under check did."""

    bench: Bench
    steps: list[Taken] = field(default_factory=list)
    aged: bool = False

    @property
    def judged_from(self) -> int:
        """The first step that is judged, from 1: what is aged was young in its first one."""
        return 2 if self.aged else 1


class Reference(Protocol):
    """What updates are held against."""

    @property
    def name(self) -> str:
        """What it is called in findings."""

    def judge(self, walk: Walk) -> tuple[list[Problem], float]:
        """Return what differs, and the worst ratio of a difference to what is allowed."""

    def hyper(self, bench: Bench) -> Mapping[str, Any]:
        """Return its hyper-parameters for the first group of a bench."""


def walked(
    subject: Subject,
    bench: Bench,
    steps: int,
    *,
    aged: bool = False,
    given: Callable[[int], Gradients] | None = None,
) -> Walk:
    """Step a new bench and note what it does.

    Args:
        subject: Whose.
        bench: Its params need not be the usual ones.
        steps: How many.
        aged: After the first step, set its counters to a million.
        given: The gradients of a step, from 0; else the usual ones.

    Raises:
        NotApplicable: If it is to be aged and keeps no counter that can be set.
    """
    walk = Walk(bench, aged=aged)
    counter_by_name = {name: subject.counter_of(bench, name) for name in bench.params}
    for step in range(steps):
        if aged and step == 1:
            for slot_id in {slot_id for slot_id in counter_by_name.values() if slot_id is not None}:
                if not bench.count(slot_id, AGED_STEPS):
                    raise NotApplicable(f"its counter {slot_id[1]} cannot be set from outside")
        handed = gradients(bench.params, step) if given is None else given(step)
        before = bench.values()
        bench.step(handed)
        slots = bench.slots()
        # Which step it is we know: a class that took one more than it was asked to is not to be believed.
        count = {
            name: float(slots.get(slot_id, step + 1) if aged and slot_id is not None else step + 1)
            for name, slot_id in counter_by_name.items()
        }
        walk.steps.append(Taken(before, handed, count, bench.values()))
    return walk


def demand_agreement(reference: Reference, walk: Walk, what: str, fix: str = "") -> str:
    """Demand that a walk is the reference's; return in words how close it is.

    Raises:
        Failed: With a problem for each param, at the first step that differs.
    """
    problems, ratio = reference.judge(walk)
    if problems:
        raise Failed(*(Problem(f"{what} of {reference.name}", one.found, one.param, one.key, one.step, fix) for one in problems))
    return f"{len(walk.steps)} steps within {ratio:.2g} of the bound" if ratio else f"{len(walk.steps)} steps bitwise"


# -- The textbook


@dataclass(frozen=True)
class Textbook:
    """A rule in float64, with the operand bound of the dtype that the class computes in."""

    rule: Rule

    @property
    def name(self) -> str:
        """As the textbook has it."""
        return f"the textbook's {self.rule.name}"

    def hyper(self, bench: Bench) -> Mapping[str, Any]:
        """Return the hyper-parameters that a group says, the rule's defaults for what it does not name."""
        return hyper_of(self.rule, bench.groups[0])

    def judge(self, walk: Walk) -> tuple[list[Problem], float]:
        """Follow a walk param by param."""
        problems, ratios = [], [0.0]
        for name, param in walk.bench.params.items():
            # What is kept in fewer bits than the param has can be no closer: whether that is close enough another check tells.
            arithmetic = Arithmetic.of(max([param.dtype, *_kept_in(walk.bench, name)], key=unit_roundoff))
            hyper = hyper_of(self.rule, walk.bench.group_of(name), param.dtype)
            state, hyper = self._new(param, hyper, arithmetic), with_rate(hyper, walk.bench.group_of(name))
            for number, taken in enumerate(walk.steps, start=1):
                gradient = taken.gradients[name]
                if gradient is None:
                    continue
                expected, state = self._step(taken, name, gradient, state, hyper, arithmetic)
                far = worst(taken.after[name], expected)
                if number < walk.judged_from:
                    continue
                ratios.append(far.ratio)
                if far.ratio > 1:
                    problems.append(_far(name, number, far, taken.before[name]))
                    break
        return problems, max(ratios)

    def _new(self, param: Tensor, hyper: Mapping[str, Any], arithmetic: Arithmetic) -> dict[str, Operand]:
        """Return the state before the first step."""
        made = {}
        for key, value in self.rule.init(param.detach().double(), hyper).items():
            if isinstance(value, Tensor):
                made[key] = Operand(value, value.abs(), int(bool(value.any())), arithmetic)
            elif key != "step":
                made[key] = _SCALARS.constant(value)
        return made

    def _step(
        self,
        taken: Taken,
        name: str,
        gradient: Tensor,
        state: Mapping[str, Any],
        hyper: Mapping[str, Any],
        arithmetic: Arithmetic,
    ) -> tuple[Expected, dict[str, Any]]:
        before = taken.before[name]
        dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
        theta, new = self.rule.step(
            arithmetic.exact(before.double()), arithmetic.exact(dense.double()), state, hyper, _COUNTS.exact(taken.count[name])
        )
        return Expected(theta.value.broadcast_to(before.shape), theta.bound.broadcast_to(before.shape)), new


def _kept_in(bench: Bench, name: str) -> list[torch.dtype]:
    """Return the dtypes of a param's state, but for what is a mere number."""
    entries = [entry for owner, entry in bench.entries() if owner == name]
    kept = [leaf for entry in entries for key, value in entry.items() if key != "step" for leaf in tree_leaves(value)]
    ndim = min(bench.params[name].ndim, 1)
    return [leaf.dtype for leaf in kept if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= ndim]


def _far(name: str, step: int, far: Any, before: Tensor) -> Problem:
    at = float(before[far.index] if far.index else before)
    moved, should = far.found - at, far.expected - at
    return Problem(
        "the update",
        f"{moved:.6g} at {list(far.index or ())}, where {should:.6g} should be: {far.ratio:.3g} times its bound off",
        name,
        PARAM,
        step,
    )


# -- Another class


@dataclass(frozen=True)
class OtherClass:
    """A class or function run in lock-step, with its own sensitivity as the bound.

    Attributes:
        subject: The reference.
        given: The entries of groups that it takes over from the class under check.
    """

    subject: Subject
    given: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Of the class."""
        return self.subject.name

    def hyper(self, bench: Bench) -> Mapping[str, Any]:
        """Return what the groups of both have."""
        theirs = self.subject.usual.groups[0]
        return {key: value for key, value in bench.groups[0].items() if key in theirs and key != "params"}

    def judge(self, walk: Walk) -> tuple[list[Problem], float]:
        """Follow a walk with all params at once."""
        found = {
            (name, str(number)): _update(taken.before[name], after)
            for number, taken in enumerate(walk.steps, start=1)
            for name, after in taken.after.items()
            if number >= walk.judged_from
        }
        expected = self._path(walk)
        judged = judge(found, expected)
        if any(one.verdict == "differs" for one in judged):
            judged = judge(found, expected, moves=sensitivity(lambda: self._path(walk), unmoved=expected))
        apart: dict[str, Judgement] = {}
        for one in judged:
            if one.verdict == "differs":
                apart.setdefault(one.slot[0], one)
        problems = [
            Problem(
                "the update",
                f"one {one.distance:.3g} away (2-norm), {one.ratio:.3g} times what rounding does",
                name,
                PARAM,
                int(one.slot[1]),
            )
            for name, one in apart.items()
        ]
        return problems, max((one.ratio for one in judged), default=0.0)

    def _path(self, walk: Walk) -> Slots:
        mine = self.subject.bench(walk.steps[0].before)
        for theirs, ours in zip(walk.bench.groups, mine.groups, strict=False):  # groups of unlike set-ups: as far as they go
            ours.update({k: v for k, v in theirs.items() if k in ours and k in self.given and not isinstance(v, Tensor)})
        path: Slots = {}
        for number, taken in enumerate(walk.steps):
            if walk.aged and number:
                for name in mine.params:
                    if (slot_id := self.subject.counter_of(mine, name)) is not None and (number == 1):
                        mine.count(slot_id, AGED_STEPS)
            mine.put(taken.before)
            mine.step(taken.gradients)
            for name, param in mine.params.items():
                if number + 1 >= walk.judged_from:
                    path[name, str(number + 1)] = _update(taken.before[name], param.detach())
        return path


def _update(before: Tensor, after: Tensor) -> Tensor:
    """Return the difference of two params, exactly."""
    wide = torch.complex128 if after.is_complex() else torch.float64
    return after.to(wide) - before.to(wide)


# -- Which one


def reference_of(asked: Any, subject: Subject) -> Reference | None:
    """Return the reference that was asked for: a name of the textbook, a class, a function; None: torch's own rule, if any.

    Raises:
        UnsupportedError: If there is none of that name, or it cannot be built.
    """
    if asked is None:
        found = rule_of(subject.target) if isinstance(subject.target, type) else None
        return None if found is None else _by_rule(found, subject)
    if isinstance(asked, str):
        if asked.lower() not in RULES:
            known = ", ".join(sorted(RULES))
            raise UnsupportedError(
                f"expected a reference of the textbook, a class or a function, found {asked!r}. Choose one of {known}."
            )
        return _by_rule(rule(asked), subject)
    if isinstance(asked, type) and (found := rule_of(asked)) is not None:
        return _by_rule(found, subject)
    return _by_class(asked, subject)


def _by_rule(found: Rule, subject: Subject) -> Reference:
    """Return the judge by a rule; by torch's class of it, where no sum of magnitudes bounds it."""
    if _bounds_nothing(found):
        return _by_class(next(one for one in _torch_classes() if rule_of(one) is found), subject)
    return Textbook(found)


def _bounds_nothing(found: Rule) -> bool:
    """Tell whether a rule's params come without a bound, as Muon's do, from one step on a matrix."""
    if found.scope is not Scope.TENSOR:
        return False
    matrix = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], dtype=torch.float64)
    hyper = hyper_of(found, {}, torch.float32)
    at = {"weight": matrix.float()}
    taken = Taken(at, at, {"weight": 1.0}, at)
    textbook = Textbook(found)
    arithmetic = Arithmetic.of(torch.float32)
    far, _ = textbook._step(taken, "weight", matrix, textbook._new(matrix, hyper, arithmetic), hyper, arithmetic)
    return not math.isfinite(float(far.bound.max()))


def _torch_classes() -> list[type]:
    return [value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)]


def _by_class(asked: Any, subject: Subject) -> OtherClass:
    target, own = target_of(asked, {})
    accepted = arguments(target)
    shared = {key: value for key, value in subject.way.settings.items() if accepted is None or key in accepted}
    settings = {**own, **(shared if isinstance(target, type) else {})}
    try:
        made = subject_of(target, subject.shapes, settings)
    except UnsupportedError as error:
        raise UnsupportedError(f"the reference {name_of(target)}: {error}") from error
    if missing := sorted(set(subject.shapes) - set(made.shapes)):
        raise UnsupportedError(
            f"the reference {made.name} does not take all params that {subject.name} takes: it refuses {', '.join(missing)}"
            f"{made.why_not(len(subject.shapes[missing[0]]))}. Give params that both take, params='2d'."
        )
    return OtherClass(made, frozenset(_agreed(subject, made)))


def _agreed(subject: Subject, other: Subject) -> set[str]:
    """Return the names of hyper-parameters that both keep in their groups: plain numbers, no state."""
    counting = {key for _, key in (*subject.counters, *other.counters)}
    mine, theirs = subject.usual.groups[0], other.usual.groups[0]
    return {
        key
        for key, value in mine.items()
        if key in theirs
        and key not in counting
        and key != "params"
        and type(value) is type(theirs[key])
        and isinstance(value, (int, float, tuple, list))
    }
