"""Whole tensors from what the ranks hold, and whether ranks that hold the same part hold the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from truestep.backends.base import Piece
from truestep.state.containers import Level, nested
from truestep.state.digest import bitwise_equal
from truestep.state.view import SlotId, StateView, assemble
from truestep.words.finding import Finding


@dataclass(frozen=True, eq=False)
class Wholes:
    """All slots of all ranks, whole.

    Attributes:
        values: ``slot id -> tensor or Python value``.
        opaque: Slots that cannot be read.
        apart: Ranks that hold other content than the first that holds the same part.
        within: The containers of the slots that lie in some.
    """

    values: dict[SlotId, Any]
    opaque: tuple[SlotId, ...]
    apart: dict[SlotId, tuple[int, ...]]
    within: dict[SlotId, tuple[Level, ...]] = field(default_factory=dict)

    def of_param(self, name: str) -> dict[str, Any]:
        """Return the state of one param as its optimizer has it, containers and all, copied; without the param and its master."""
        return {key: value for key, value in self.kept_by(name).items() if key not in ("param", "master")}

    def kept_by(self, name: str) -> dict[str, Any]:
        """Return all that is kept under one name, containers and all, copied."""
        flat = {key: value for (owner, key), value in self.values.items() if owner == name}
        return nested(flat, {key: self.within.get((name, key), ()) for key in flat})


def wholes(views: Sequence[StateView]) -> Wholes:
    """Return the slots of all ranks' views, whole."""
    ids = list(dict.fromkeys(slot_id for view in views for slot_id in view))
    values: dict[SlotId, Any] = {}
    opaque, apart = [], {}
    for slot_id in ids:
        slots = [(rank, view[slot_id]) for rank, view in enumerate(views) if slot_id in view]
        kind = slots[0][1].kind
        if others := tuple(rank for rank, slot in slots if slot.kind != kind):
            apart[slot_id] = others
            slots = [(rank, slot) for rank, slot in slots if slot.kind == kind]
        if kind == "opaque":
            opaque.append(slot_id)
        elif kind == "value":
            values[slot_id] = slots[0][1].value
            if others := tuple(rank for rank, slot in slots if repr(slot.value) != repr(slots[0][1].value)):
                apart[slot_id] = others
        else:
            # A rank that holds nothing of a param cannot tell the shape of what would be kept for it.
            shape = next((slot.shape for _, slot in slots if slot.boxes), slots[0][1].shape)
            alike = [(rank, slot) for rank, slot in slots if slot.shape == shape]
            pieces = [(rank, box, local) for rank, slot in alike for box, local in zip(slot.boxes, slot.local, strict=True)]
            other_shapes = [rank for rank, slot in slots if slot.boxes and slot.shape != shape]
            if others := tuple(sorted({*_apart(pieces), *other_shapes})):
                apart[slot_id] = others
            values[slot_id] = assemble(shape, [(box, local) for _, box, local in pieces], "/".join(slot_id)) if pieces else None
    there = {key: value for key, value in values.items() if value is not None or key[0].startswith("@")}
    within = {slot_id: slot.within for view in views for slot_id, slot in view.items() if slot.within}
    return Wholes(there, tuple(opaque), apart, within)


def _apart(pieces: Sequence[tuple[int, Any, Tensor]]) -> tuple[int, ...]:
    first: dict[Any, Tensor] = {}
    return tuple(sorted({rank for rank, box, local in pieces if not bitwise_equal(first.setdefault(box, local), local)}))


def replica_findings(found: Wholes) -> list[Finding]:
    """Return a finding for each slot in which replicas differ."""
    return [
        Finding(
            "ranks/replicas-differ",
            "ranks",
            "error",
            param=None if name.startswith("@") else name,
            key=key if not name.startswith("@") else f"{name}/{key}",
            expected="the same bits on every rank that holds this part",
            found="other bits than on the first of them",
            ranks=ranks,
            cause="replicas have drifted apart",
        )
        for (name, key), ranks in found.apart.items()
    ]


def whole_gradients(pieces: Sequence[Piece | None], what: str) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the distinct whole gradients that the ranks hold, each with its ranks: one if they agree or hold shards."""
    held = [(rank, piece) for rank, piece in enumerate(pieces) if piece is not None]
    if not held:
        return []
    boxes = [(rank, box, local) for rank, piece in held for box, local in zip(piece.shard.boxes, piece.local, strict=True)]
    shape = held[0][1].shard.shape
    if not all(len(piece.local) == 1 and piece.local[0].shape == shape for _, piece in held):
        return [(tuple(rank for rank, _ in held), assemble(shape, [(box, local) for _, box, local in boxes], what))]
    distinct: list[tuple[list[int], Tensor]] = []
    for rank, _, local in boxes:
        for ranks, known in distinct:
            if bitwise_equal(known, local):
                ranks.append(rank)
                break
        else:
            distinct.append(([rank], local))
    return [(tuple(ranks), tensor) for ranks, tensor in distinct]
