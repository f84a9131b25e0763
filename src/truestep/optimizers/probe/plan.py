"""What a probe tries, as plain data: whole params, the ways to cut them, the gradients, and which steps have none.

A *subject* is a whole param of the probe's own; all subjects laid end to end make one flat vector, and whatever an optimizer
object of the probe holds (a *member*: a whole subject or a piece of one) is a shape and a list of places in it. A *cut* is one
way to hold one subject, or a range of two in one tensor, on ranks; the members of one layout on one rank share an optimizer
object, as there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from truestep.words.errors import UnsupportedError
from truestep.words.shards import Box

Shape: TypeAlias = tuple[int, ...]

STEPS: Final = 64
FIRST_STEPS: Final = 8  # of the short look that comes first: one zero step and two with absent gradients are among them
# Gradients: a fixed direction with noise; noise alone; those of an element-wise quadratic, in a closed loop.
KINDS: Final = ("drift", "noise", "bowl")
GROUPS: Final = 2  # two of two params each tell what a group shares from what all share
LOWERED: Final = 3  # what a setting above STEPS is set to, to see what it holds back

FLAT: Final = "flat"
RESHAPED: Final = "reshaped"
FUSED: Final = "fused"
BOX: Final = "box"
PLAIN_LAYOUTS: Final = ("dim 0", "dim 1", FLAT, FUSED)
# Sizes differ within a shape and between shapes, so that a dim of a state says which one it follows.
DEFAULT_SHAPES: Final[Mapping[str, Shape]] = {
    "layers.0.gain": (),
    "layers.0.bias": (13,),
    "layers.0.weight": (7, 4),
    "layers.1.weight": (4, 9),
    "layers.2.weight": (5, 3, 2, 4),
}


@dataclass(frozen=True)
class Subject:
    """A whole param.

    Attributes:
        name: Its name.
        shape: Its shape.
        kind: Of its gradients, one of `KINDS`.
        original: The number of the first subject of this name and shape, of which this one is a copy with other gradients.
    """

    name: str
    shape: Shape
    kind: str = KINDS[0]
    original: int = 0

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Member:
    """What one optimizer object holds as one param.

    Attributes:
        name: Of the subject; of the first, where it holds ranges of two.
        shape: Of this tensor.
        places: Where its elements are in the flat vector of all subjects, in row-major order.
        subject: The number of its (first) subject, which says its group, and when its gradient is absent.
        whole_ndim: Number of dims of that subject.
    """

    name: str
    shape: Shape
    places: tuple[int, ...]
    subject: int
    whole_ndim: int


@dataclass(frozen=True)
class Part:
    """The elements of one subject in one member of a cut: ``start <= index < stop`` of the member."""

    rank: int
    subject: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """One way to hold a subject on ranks, a member a rank; of a fused one, a range of each of two subjects in one tensor.

    Attributes:
        layout: ``dim N``, ``box``, ``flat``, ``reshaped`` or ``fused``.
        members: One a rank.
        parts: Whose elements they are.
    """

    layout: str
    members: tuple[Member, ...]
    parts: tuple[Part, ...]

    @property
    def subjects(self) -> tuple[int, ...]:
        """Numbers of the subjects in it."""
        return tuple(dict.fromkeys(part.subject for part in self.parts))


@dataclass(frozen=True)
class Plan:
    """Whole subjects and their cuts."""

    subjects: tuple[Subject, ...]
    cuts: tuple[Cut, ...] = field(repr=False)

    @property
    def wholes(self) -> tuple[Member, ...]:
        """The subjects as the params of one process."""
        starts = _starts(self.subjects)
        return tuple(
            Member(subject.name, subject.shape, tuple(range(start, start + subject.numel)), number, subject.ndim)
            for number, (subject, start) in enumerate(zip(self.subjects, starts, strict=True))
        )

    @property
    def numel(self) -> int:
        """Number of elements of all subjects."""
        return sum(subject.numel for subject in self.subjects)


def group_of(subject: int) -> int:
    """Return the param group of a subject."""
    return subject % GROUPS


def absent_in(subject: int, step: int) -> bool:
    """Tell whether a subject has no gradient in this step, counted from 0; half of them miss it together."""
    return step % 9 == (3, 7)[subject // 2 % 2]


def zero_in(step: int) -> bool:
    """Tell whether all gradients of this step are zero."""
    return step % 9 == 5


def scale_of(step: int) -> float:
    """Return the size of a step's gradients: the first step of many rules is blind to it, the later ones are not."""
    return (1.0, 0.3, 3.0, 0.1, 1.0, 1.0, 0.5, 2.0)[step % 8]


# -- Which subjects


def subjects_of(params: Mapping[str, Sequence[int]] | str | None) -> tuple[Subject, ...]:
    """Return the whole params that a probe steps.

    Args:
        params: Shapes by name; ``"2d"`` (0d to 9d): of that ndim only; None: 0, 1, 2 (tall and wide) and 4 dims.

    Raises:
        UnsupportedError: If it is none of these.
    """
    if params is None:
        return tuple(Subject(name, shape) for name, shape in DEFAULT_SHAPES.items())
    if isinstance(params, str):
        if not (found := re.fullmatch(r"([0-9])d", params)):
            raise UnsupportedError(f'expected params to be "2d", or shapes by name, found {params!r}. Pass {{"w": (8, 6)}}.')
        ndim = int(found[1])
        usual = [Subject(name, shape) for name, shape in DEFAULT_SHAPES.items() if len(shape) == ndim]
        return tuple(usual) or (Subject("layers.0.weight", tuple(range(ndim + 1, 1, -1))),)
    if not isinstance(params, Mapping) or not params or not all(map(_is_shape, params.values())):
        raise UnsupportedError(f'expected params to be "2d", or shapes by name, found {params!r}. Pass {{"w": (8, 6)}}.')
    return tuple(Subject(str(name), tuple(shape)) for name, shape in params.items())


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (tuple, list)) and all(isinstance(size, int) and size > 0 for size in shape)


def with_companions(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Return the subjects, and others of unlike sizes where they are too few for two params in each of two groups."""
    made = list(subjects)
    for turn in itertools.count(1):
        if len(made) >= 2 * GROUPS:
            return tuple(made)
        made += [Subject(f"{one.name}.{turn}", other_size(one.shape, turn)) for one in subjects]
    raise AssertionError  # unreachable: count() does not end


def other_size(shape: Shape, turn: int = 1) -> Shape:
    """Return a shape of the same ndim and other sizes."""
    return tuple(size + 2 * turn + dim for dim, size in enumerate(shape))


# -- How they are cut


def plan_of(subjects: Sequence[Subject], kinds: Sequence[str] = KINDS) -> Plan:
    """Return the plan of these subjects, each once for every kind of gradients, and of their cuts."""
    copies = [
        replace(one, name=one.name if kind == kinds[0] else f"{kind}.{one.name}", kind=kind, original=number)
        for kind in kinds
        for number, one in enumerate(subjects)
    ]
    chosen = [range(len(subjects) * turn, len(subjects) * (turn + 1)) for turn in range(len(kinds))]
    cuts = [cut for numbers in chosen for cut in _cuts(copies, numbers)]
    # A rule that depends on shapes does so whatever the gradients: all layouts once, the plain ones for every kind.
    return Plan(tuple(copies), tuple(cut for cut in cuts if cut.subjects[0] < len(subjects) or cut.layout in PLAIN_LAYOUTS))


def _cuts(subjects: Sequence[Subject], chosen: Sequence[int]) -> Iterator[Cut]:
    starts = _starts(subjects)

    def member(number: int, shape: Shape, places: Sequence[int]) -> Member:
        return Member(
            subjects[number].name, shape, tuple(starts[number] + place for place in places), number, subjects[number].ndim
        )

    for number in chosen:
        for layout, pieces in _pieces(subjects[number].shape):
            parts = [Part(rank, number, 0, len(places)) for rank, (_, places) in enumerate(pieces)]
            yield Cut(layout, tuple(member(number, shape, places) for shape, places in pieces), tuple(parts))
    for first, second in _partners(chosen):
        tail = range(_middle(subjects[first].shape) % subjects[first].numel, subjects[first].numel)
        head = range(min(_middle(subjects[second].shape), subjects[second].numel))
        places = (*(starts[first] + place for place in tail), *(starts[second] + place for place in head))
        fused = Member(subjects[first].name, (len(places),), places, first, subjects[first].ndim)
        parts = [Part(0, first, 0, len(tail)), Part(0, second, len(tail), len(places))]
        yield Cut(FUSED, (fused,), tuple(parts))


def _pieces(shape: Shape) -> Iterator[tuple[str, list[tuple[Shape, list[int]]]]]:
    """Yield each layout of one param with ``(shape, places)`` a rank."""
    middles = tuple(size - size // 2 for size in shape)
    start, stop = (0,) * len(shape), shape
    for dim, middle in enumerate(middles):
        if shape[dim] > 1:
            cut = (middle,)
            parts = [Box(start, (*stop[:dim], *cut, *stop[dim + 1 :])), Box((*start[:dim], *cut, *start[dim + 1 :]), stop)]
            yield dim_layout(dim), [(part.shape, _places(shape, part)) for part in parts]
    if len(shape) > 1 and min(shape) > 1:
        corners = [Box(start, middles), Box(middles, stop)]
        yield BOX, [(corner.shape, _places(shape, corner)) for corner in corners]
    numel = math.prod(shape)
    if len(shape) > 1 and numel > 1:
        middle = _middle(shape)
        yield FLAT, [((middle,), list(range(middle))), ((numel - middle,), list(range(middle, numel)))]
    if len(shape) != 1:
        yield RESHAPED, [((numel,), list(range(numel)))]


def dim_layout(dim: int) -> str:
    """Return the name of a dim, and of a cut along it."""
    return f"dim {dim}"


def _middle(shape: Shape) -> int:
    """Return where a flat range ends: near the middle, and inside a row where there are rows."""
    numel = math.prod(shape)
    middle = min(numel // 2 + 1, max(numel - 1, 1))
    inside_row = len(shape) < 2 or shape[-1] == 1 or middle % shape[-1]
    return middle if inside_row else middle - 1


def _partners(chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs to be held in one tensor: of those that miss their gradients together, as a fused one has it or not."""
    for parity in (0, 1):
        alike = [number for number in chosen if number // 2 % 2 == parity]
        yield from itertools.pairwise(alike)


def _starts(subjects: Sequence[Subject]) -> list[int]:
    return [0, *itertools.accumulate(subject.numel for subject in subjects)][:-1]


def _places(shape: Shape, box: Box) -> list[int]:
    """Return the row-major places of a box."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    points = itertools.product(*(range(start, stop) for start, stop in zip(box.start, box.stop, strict=True)))
    return [sum(index * stride for index, stride in zip(point, strides, strict=True)) for point in points]
