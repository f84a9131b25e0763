"""The optimizer under check: how it is made, over which params, and stepped by which gradients.

A *subject* is a class or function with its settings, and the params that it was seen to take. A *bench* is one optimizer of the
subject over params of its own. Params, gradients and random numbers of a bench depend on names and steps alone, so that two benches
that do the same end bit for bit alike.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from truestep.backends import slots as reading
from truestep.optimizers.probe import plan as probed
from truestep.optimizers.probe.build import Target, Way, groups_of, name_of, target_of, ways_of
from truestep.optimizers.probe.ground import find_ground
from truestep.optimizers.probe.plan import Member, Shape, scale_of, subjects_of, with_companions
from truestep.optimizers.probe.quiet import seed
from truestep.state.view import SlotId
from truestep.words.errors import UnsupportedError
from truestep.words.names import OPTIMIZER_SLOT, group_slot

Shapes: TypeAlias = Mapping[str, Shape]
Gradients: TypeAlias = Mapping[str, "Tensor | None"]
Slots: TypeAlias = dict[SlotId, Any]

PARAM: Final = "param"
BOWL: Final = 0.25  # how steep the quadratic is whose gradient a closure adds: its minimum lies at zero
FEW_EVALUATIONS: Final = 2
COUPLING_STEPS: Final = 12


@dataclass(frozen=True)
class Problem:
    """One thing that a check found wrong.

    Attributes:
        expected, found: In a few words.
        param, key: The slot that it concerns.
        step: From 1.
        fix: An imperative sentence.
    """

    expected: str
    found: str
    param: str | None = None
    key: str | None = None
    step: int | None = None
    fix: str = ""


class Failed(Exception):
    """A check does not hold."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"expected {one.expected}, found {one.found}" for one in problems))
        self.problems = problems


class NotApplicable(Exception):
    """A check that has nothing to say about this class; the text says why."""


class Bench:
    """One optimizer over params of its own.

    Args:
        subject: Whose.
        named: ``name -> param``; the bench keeps them.
        groups: Into how many param groups they are put, in turn.
        settings: Over those of the subject.
    """

    def __init__(
        self, subject: Subject, named: Mapping[str, nn.Parameter], groups: int = 1, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.subject = subject
        self.params = dict(named)
        seed()
        way = replace(subject.way, settings={**subject.way.settings, **(settings or {})})
        if groups > 1 and way.form != "groups":
            way = replace(way, form="groups")
        members = [
            (Member(name, tuple(param.shape), (), number % groups, param.ndim), param)
            for number, (name, param) in enumerate(self.params.items())
        ]
        self.optimizers: list[Any] = way.make(members)
        self.evaluations = 0  # of closures
        self.handed: dict[str, Tensor] = {}  # the gradients as they were handed over last: copies

    def step(self, gradients: Gradients) -> Any:
        """Give the params these gradients (copies) and take one step; return what it returns."""
        seed()
        if not self.subject.way.closure:
            self.give(gradients)
            return [optimizer.step() for optimizer in self.optimizers][0]
        return [optimizer.step(self.closure(gradients)) for optimizer in self.optimizers][0]

    def give(self, gradients: Gradients) -> None:
        """Set the gradients: copies, absent ones None."""
        self.handed = {}
        for name, param in self.params.items():
            gradient = gradients.get(name)
            if gradient is None:
                param.grad = None
            else:
                self._hand(name, param, gradient)

    def closure(self, gradients: Gradients) -> Callable[[], Tensor]:
        """Return a closure with the gradients of a line plus a bowl, so that they depend on where the params are."""

        def closure() -> Tensor:
            self.evaluations += 1
            loss = torch.zeros(())
            with torch.no_grad():
                for name, param in self.params.items():
                    gradient = gradients.get(name)
                    if gradient is None:
                        param.grad = None
                    else:
                        self._hand(name, param, gradient + BOWL * param)
                        loss = loss + (gradient * param).sum().real.float() + 0.5 * BOWL * (param.abs() ** 2).sum().float()
            return loss

        return closure

    def _hand(self, name: str, param: nn.Parameter, gradient: Tensor) -> None:
        self.handed[name] = gradient.detach().clone()
        fresh = gradient.detach().clone()  # of the same strides
        param.grad = fresh.to_sparse() if self.subject.sparse and fresh.layout == torch.strided else fresh

    def run(self, first: int, last: int, **of: Any) -> Bench:
        """Take the steps from `first` to `last`, counted from 0, the last one not; `of` go to `gradients`."""
        for step in range(first, last):
            self.step(gradients(self.params, step, **of))
        return self

    # -- What it keeps

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All param groups, live."""
        return groups_of(self.optimizers)

    def group_of(self, name: str) -> dict[str, Any]:
        """Return the live group that holds a param."""
        param = self.params[name]
        return next(group for group in self.groups if any(param is one for one in group["params"]))

    def set(self, **entries: Any) -> Bench:
        """Set entries of all groups that have them."""
        for group in self.groups:
            group.update({key: value for key, value in entries.items() if key in group})
        return self

    def values(self) -> dict[str, Tensor]:
        """Return copies of the params."""
        return {name: param.detach().clone() for name, param in self.params.items()}

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        """Return ``(param name, live state)`` of every param that has state, with the optimizer's own dicts."""
        found = []
        for optimizer in self.optimizers:
            state = optimizer.state
            found += [(name, state[param]) for name, param in self.params.items() if param in state]
        return found

    def slots(self) -> Slots:
        """Return copies of all slots; None, and objects that cannot be read, are left out."""
        labelled = reading.labelled_items(self.optimizers)
        live = [
            slot for name, param in self.params.items() for slot in reading.param_slots(name, param, labelled, reading.replica)
        ]
        for label, optimizer in labelled:
            live += [*reading.group_slots(optimizer, label), *reading.optimizer_slots(optimizer, label)]
        return {
            (slot.name, slot.key): _dense(slot.local[0]) if slot.kind == "tensor" else copy.deepcopy(slot.value)
            for slot in live
            if slot.kind == "tensor" or (slot.kind == "value" and slot.value is not None)
        }

    def state(self) -> Slots:
        """Return copies of the slots of params alone: themselves, and their state."""
        return {slot_id: value for slot_id, value in self.slots().items() if slot_id[0] in self.params}

    def count(self, slot_id: SlotId, steps: float) -> bool:
        """Set a step counter; return whether it could be found."""
        name, key = slot_id
        holders: list[dict[Any, Any]] = [entry for owner, entry in self.entries() if owner == name]
        if name.startswith(group_slot("")):
            holders = self.groups
        elif name.startswith(OPTIMIZER_SLOT):
            holders = [*(vars(optimizer) for optimizer in self.optimizers), *(optimizer.state for optimizer in self.optimizers)]
        holders = [holder for holder in holders if key in holder]
        for holder in holders:
            value = holder[key]
            holder[key] = torch.full_like(value, steps) if isinstance(value, Tensor) else type(value)(steps)
        return bool(holders)

    # -- Saving and loading

    def state_dicts(self) -> list[Any]:
        """Return the `state_dict` of each optimizer."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load(self, states: Sequence[Any]) -> Bench:
        """Load one `state_dict` into each optimizer."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        return self

    def put(self, values: Mapping[str, Tensor]) -> Bench:
        """Write values into the params."""
        with torch.no_grad():
            for name, value in values.items():
                self.params[name].copy_(value)
        return self


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
        return Bench(self, {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}, groups, settings)

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


def numbered(value: Any) -> float | None:
    """Return a single number as a float; None for what is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _dense(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().clone()


def dtypes(slots: Slots) -> dict[SlotId, torch.dtype]:
    """Return the dtypes of those slots that are tensors."""
    return {slot_id: value.dtype for slot_id, value in slots.items() if isinstance(value, Tensor)}


# -- Params and gradients


def start(shapes: Shapes, *, dtype: torch.dtype = torch.float32, size: float = 1.0) -> dict[str, Tensor]:
    """Return values for params, each between half and one and a half of `size`, of either sign."""
    return {name: (size * _numbers(name, shape, -1)).to(dtype) for name, shape in shapes.items()}


def gradients(params: Mapping[str, Tensor], step: int, *, decades: bool = False, size: float | None = None) -> dict[str, Tensor]:
    """Return the gradients of a step, from 0, of the params' shapes and dtypes.

    Args:
        params: By name.
        step: Their size changes from step to step: the first step of Adam, Adagrad and Lion is blind to it.
        decades: Spread magnitudes over twelve decades, from 1e-12 up: down to where eps stands.
        size: Instead of the step's own.
    """
    size = scale_of(step) if size is None else size
    made = {}
    for name, param in params.items():
        numbers = _numbers(name, tuple(param.shape), step)
        if decades:
            numbers = numbers.sign() * 10.0 ** (-12 * (numbers.abs() - 0.5))
        made[name] = (size * numbers).to(param.dtype)
    return made


def _numbers(name: str, shape: Shape, step: int) -> Tensor:
    """Return float64 numbers of either sign, none nearer to zero than a half: their squares do not cancel, nor sink into eps."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    numbers = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1
    return numbers * signs


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


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line without a full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].removesuffix(".")
