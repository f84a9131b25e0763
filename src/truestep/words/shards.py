"""Boxes and flat ranges: the algebra of which part of a tensor lies where. Torch-free and pure.

A *box* is an axis-aligned, half-open block of a tensor's own coordinates. A *flat range* is a half-open range of its row-major
order; it decomposes into at most 2·ndim−1 boxes. A 0-d tensor has one box, with no axes and one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned block: ``start[d] <= index[d] < stop[d]``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the whole tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Rows:
    """The maximal runs of a box in the row-major order of the tensor it lies in: all of one length, at regular distances.

    Attributes:
        first: Where the first one starts.
        length: Elements in each.
        counts: How many there are along each remaining axis, outermost first.
        strides: The distance between starts along the same axes.
    """

    first: int
    length: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cover:
    """How well boxes cover a tensor.

    Attributes:
        missing: Number of elements that no box holds.
        doubled: Number of elements that more than one box holds.
    """

    missing: int
    doubled: int

    @property
    def exact(self) -> bool:
        """Whether every element lies in exactly one box."""
        return not self.missing and not self.doubled


def split(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the `parts` ranges ``(start, stop)`` into which `torch.chunk` cuts an axis; it leaves trailing empty ones out.

    >>> split(5, 4)
    [(0, 2), (2, 4), (4, 5), (5, 5)]

    Raises:
        ValueError: If `length` is negative or `parts` is not positive.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"expected a length >= 0 cut into at least 1 part, found length {length} and {parts} parts")
    step = -(-length // parts)
    return [(min(part * step, length), min((part + 1) * step, length)) for part in range(parts)]


def split_box(shape: tuple[int, ...], dim: int, parts: int) -> list[Box]:
    """Return the `parts` boxes of a tensor of this shape cut along `dim` as `split` does; an empty one has no elements.

    Raises:
        ValueError: If there is no axis `dim` (a negative one counts from the end), or as `split`.
    """
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"expected an axis of a {len(shape)}-d tensor, found dim {dim}")
    everything, dim = whole(shape), dim % len(shape)
    return [_along(everything, dim, start, stop) for start, stop in split(shape[dim], parts)]


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that lie in both, or None if there are none."""
    if len(a.start) != len(b.start):
        raise ValueError(f"expected boxes of one tensor, found {len(a.start)} and {len(b.start)} axes")
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None


def subtract(a: Box, b: Box) -> tuple[Box, ...]:
    """Return disjoint boxes, at most 2·ndim, of the elements of `a` that do not lie in `b`."""
    if not a.numel:
        return ()
    shared = intersect(a, b)
    if shared is None:
        return (a,)
    rest, left = [], a
    for dim in range(len(a.start)):  # cut off what lies before and after `shared` on this axis; the rest goes on to the next
        before = _along(left, dim, left.start[dim], shared.start[dim])
        after = _along(left, dim, shared.stop[dim], left.stop[dim])
        rest += [part for part in (before, after) if part.numel]
        left = _along(left, dim, shared.start[dim], shared.stop[dim])
    return tuple(rest)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes that make up a flat range, in row-major order: at most 2·ndim−1 (1 if 0-d), none of an empty range.

    Each is itself a run of the row-major order, so a flat piece is cut into them by their `numel` alone; see `runs`.

    >>> [(box.start, box.stop) for box in boxes_of_range((3, 4), 2, 10)]
    [((0, 2), (1, 4)), ((1, 0), (2, 4)), ((2, 0), (3, 2))]

    Raises:
        ValueError: If the range does not lie in the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"expected a range inside 0 to {numel}, of shape {shape}, found {start} to {stop}")
    return tuple(_decomposed(tuple(shape), start, stop)) if start < stop else ()


def runs(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, Box]]:
    """Return ``(offset in the range, box)`` of each box of a flat range: ``piece[offset : offset + box.numel]`` is that box.

    Raises:
        ValueError: As `boxes_of_range`.
    """
    boxes = boxes_of_range(shape, start, stop)
    offsets = itertools.accumulate((box.numel for box in boxes), initial=0)
    return list(zip(offsets, boxes, strict=False))  # the last offset is the length of the range


def rows(shape: tuple[int, ...], box: Box) -> Rows:
    """Return the maximal runs of a box with elements in the row-major order of a tensor of this shape.

    >>> rows((3, 4, 5), Box((1, 2, 0), (3, 4, 5)))
    Rows(first=30, length=10, counts=(2,), strides=(20,))
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    lengths, length, dim = box.shape, 1, len(shape)
    while dim and length == math.prod(shape[dim:]):  # every axis inside is held in full: this one continues the run
        dim -= 1
        length *= lengths[dim]
    return Rows(first, length, lengths[:dim], tuple(strides[:dim]))


def cover(shape: tuple[int, ...], boxes: Iterable[Box]) -> Cover:
    """Return how well the boxes cover a tensor of this shape, from their corners alone.

    Raises:
        ValueError: If a box does not lie in the tensor.
    """
    held = [box for box in boxes if box.numel]
    for box in held:
        if len(box.start) != len(shape) or intersect(box, whole(shape)) != box:
            raise ValueError(f"expected boxes inside a tensor of shape {shape}, found {box.start} to {box.stop}")
    touched, doubled = _measure(held, 0)
    return Cover(math.prod(shape) - touched, doubled)


def _along(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))


def _decomposed(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range with elements: the end of a begun row, the full rows, the begin of a last one."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first_full, after_full = -(-start // row), stop // row
    if first_full > after_full:  # inside one row
        yield from _in_row(shape, after_full, start - after_full * row, stop - after_full * row)
        return
    if start < first_full * row:
        yield from _in_row(shape, first_full - 1, start - (first_full - 1) * row, row)
    if first_full < after_full:
        yield _along(whole(shape), 0, first_full, after_full)
    if after_full * row < stop:
        yield from _in_row(shape, after_full, 0, stop - after_full * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in _decomposed(shape[1:], start, stop):
        yield Box((row, *box.start), (row + 1, *box.stop))


def _measure(boxes: list[Box], dim: int) -> tuple[int, int]:
    """Return how many elements of the axes from `dim` on lie in any of the boxes, and how many in more than one.

    Sweeps `dim` from cut to cut: between two cuts the same boxes are open, and they are measured on the next axis.
    """
    if len(boxes) < 2 or dim == len(boxes[0].start):
        return sum(math.prod(box.shape[dim:]) for box in boxes[:1]), int(len(boxes) > 1)
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for index, box in enumerate(boxes):
        opening.setdefault(box.start[dim], []).append(index)
        closing.setdefault(box.stop[dim], []).append(index)
    touched = doubled = last = 0
    live: dict[int, Box] = {}
    for cut in sorted({*opening, *closing}):
        inner_touched, inner_doubled = _measure(list(live.values()), dim + 1)
        touched += (cut - last) * inner_touched
        doubled += (cut - last) * inner_doubled
        for index in closing.get(cut, ()):
            del live[index]
        live.update((index, boxes[index]) for index in opening.get(cut, ()))
        last = cut
    return touched, doubled
