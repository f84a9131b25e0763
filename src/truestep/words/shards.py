"""Boxes and flat ranges: the algebra of which part of a tensor lies where. Torch-free and pure.

A *box* is an axis-aligned, half-open block of a tensor's own coordinates. A *flat range* is a half-open range of its row-major
order; it decomposes into at most 2·ndim−1 boxes. A 0-d tensor has one box, with no axes and one element.
"""

from __future__ import annotations

import math
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
