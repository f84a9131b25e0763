"""How one param lies on one rank: a property of the param, not of the backend."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from truestep.words.shards import Box, whole


class Layout(enum.Enum):
    """How one param lies on one rank."""

    WHOLE = "whole"  # a plain tensor, a replica on every rank
    DIM0 = "dim0"  # FSDP2's default: rows of dim 0
    BLOCK = "block"  # other dims, tensor parallelism, 2-D meshes
    FLAT = "flat"  # FSDP1: a range of the flattened tensor, seen as 1-D
    FUSED = "fused"  # ZeRO: a range inside one 1-D tensor that holds ranges of several params


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a param, or of one of its slots, that this rank holds.

    Attributes:
        layout: How it lies here.
        shape: Of the whole tensor.
        boxes: This rank's part in the whole tensor's coordinates; none if the shard is empty.
    """

    layout: Layout
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return sum(box.numel for box in self.boxes)

    @classmethod
    def replica(cls, shape: tuple[int, ...]) -> Shard:
        """Return the shard of a rank that holds the whole tensor."""
        return cls(Layout.WHOLE, shape, (whole(shape),))
