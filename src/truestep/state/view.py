"""All slots of an optimizer by name, live.

A *slot* is one entry of optimizer state: of a param ``(name, key)``, of a group ``("@group/0", key)`` or of the optimizer
``("@optimizer", key)``. The key ``param`` is the param itself, ``master`` its fp32 copy where a vendor keeps one. Containers are
flattened to key paths (``Q/0``). A slot that is absent is not in the view: absent is not zero.

A view copies nothing and creates nothing (``optimizer.state`` is a defaultdict: reading it must not add an entry). Its tensors are
the live ones: writing to them writes to the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from truestep.state import digest, ranks
from truestep.words.errors import TrueStepError
from truestep.words.finding import Finding
from truestep.words.layout import Layout, Shard

Kind: TypeAlias = Literal["tensor", "value", "opaque"]
SlotId: TypeAlias = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Slot:
    """One entry of optimizer state, as this rank holds it.

    Attributes:
        name: Param name, ``@group/NAME`` or ``@optimizer``.
        key: State key; containers as key paths.
        kind: ``tensor``; ``value`` (a Python number, string, bool or None); ``opaque`` (an object that is reported, not read).
        shard: Shape of the whole slot, and the boxes of it that lie on this rank.
        local: One tensor a box, in order: views of the live memory.
        value: The Python value, for kinds ``value`` and ``opaque``.
        dtype, device: Of the tensors; None for the other kinds.
    """

    name: str
    key: str
    kind: Kind
    shard: Shard
    local: tuple[Tensor, ...] = ()
    value: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole slot."""
        return self.shard.shape

    @property
    def boxes(self) -> tuple[Any, ...]:
        """This rank's boxes."""
        return self.shard.boxes

    def full(self, rank: int | Literal["all"] = 0) -> Tensor | None:
        """Return the whole slot on the CPU; None on ranks other than `rank`. Collective: every rank.

        Raises:
            TrueStepError: If the slot is no tensor, or the boxes of all ranks do not cover it.
        """
        if self.kind != "tensor":
            raise TrueStepError(f"{self.name}/{self.key} is no tensor but a {self.kind}: read .value instead")
        mine = [(box, tensor.detach().cpu()) for box, tensor in zip(self.boxes, self.local, strict=True)]
        everyone = ranks.gather(mine)
        if rank != "all" and ranks.here() != rank:
            return None
        return assemble(self.shape, [piece for pieces in everyone for piece in pieces], f"{self.name}/{self.key}")


def assemble(shape: tuple[int, ...], pieces: Iterable[tuple[Any, Tensor]], what: str) -> Tensor:
    """Return the whole CPU tensor that the `(box, tensor)` pieces cover; `what` names it in the error."""
    pieces = list(pieces)
    if not pieces:
        raise TrueStepError(f"{what}: no rank holds a piece of it")
    for box, tensor in pieces:
        if tensor.shape == torch.Size(shape) and box.shape == tuple(shape):
            return tensor.detach().cpu().clone()
    out = torch.empty(shape, dtype=pieces[0][1].dtype)
    seen = torch.zeros(shape, dtype=torch.bool)
    for box, tensor in pieces:
        out[box.slices] = tensor.detach().cpu()
        seen[box.slices] = True
    if not bool(seen.all()):
        raise TrueStepError(f"{what}: the ranks hold {int(seen.sum())} of its {seen.numel()} elements")
    return out


class StateView(Mapping[SlotId, Slot]):
    """All slots of one model and its optimizers on this rank, by ``(name, key)``.

    Args:
        slots: In the order of the model's params, each param's own keys in the optimizer's order, groups and optimizer last.
        orphans: Ids of state entries whose tensor is no live param, as ``(description, keys)``.
    """

    def __init__(self, slots: Iterable[Slot], orphans: Iterable[tuple[str, tuple[str, ...]]] = ()) -> None:
        self._slot_by_id = {(slot.name, slot.key): slot for slot in slots}
        self.orphans = tuple(orphans)

    def __getitem__(self, slot_id: SlotId) -> Slot:
        return self._slot_by_id[slot_id]

    def __iter__(self) -> Iterator[SlotId]:
        return iter(self._slot_by_id)

    def __len__(self) -> int:
        return len(self._slot_by_id)

    @property
    def names(self) -> list[str]:
        """Names of the params, in order."""
        return [name for name, key in self if key == "param"]

    def keys_of(self, name: str) -> list[str]:
        """Return the keys of one param, group or optimizer."""
        return [key for owner, key in self if owner == name]

    def copy(self) -> StateView:
        """Return a frozen copy on the CPU, sharing no memory with the live state."""
        return StateView((_frozen(slot) for slot in self.values()), self.orphans)

    def digests(self) -> dict[str, str]:
        """Return ``"name/key" -> hex``, equal for equal content on any backend, layout and world size. Collective: every rank.

        Opaque objects have no digest and are left out.

        Raises:
            TrueStepError: With ``ranks/replicas-differ`` findings, if ranks hold different content of the same box.
        """
        mine = {slot_id: _lanes(slot) for slot_id, slot in self.items() if slot.kind != "opaque"}
        merged_by_id: dict[SlotId, dict[Any, Any]] = {}
        about: dict[SlotId, tuple[str, tuple[int, ...]]] = {}
        apart: dict[SlotId, set[int]] = {}
        for rank, theirs in enumerate(ranks.gather(mine)):
            for slot_id, (dtype, shape, lanes_by_box) in theirs.items():
                about.setdefault(slot_id, (dtype, shape))
                known = merged_by_id.setdefault(slot_id, {})
                for box, lanes in lanes_by_box.items():
                    if known.setdefault(box, lanes) != lanes or about[slot_id] != (dtype, shape):
                        apart.setdefault(slot_id, set()).add(rank)
        if apart:
            raise TrueStepError("", [_replicas_differ(slot_id, where) for slot_id, where in apart.items()])
        return {
            f"{name}/{key}": digest.digest(*about[name, key], digest.total(lanes_by_box.values()))
            for (name, key), lanes_by_box in merged_by_id.items()
        }

    def diff(self, other: StateView) -> list[Finding]:
        """Return what differs between this rank's two views, bit for bit; a slot that only one has is a difference of its own."""
        findings = []
        for slot_id in [*self, *(slot_id for slot_id in other if slot_id not in self)]:
            mine, theirs = self.get(slot_id), other.get(slot_id)
            if mine is None or theirs is None:
                expected, found = ("present", "absent") if theirs is None else ("absent", "present")
                findings.append(_differs(slot_id, expected, found))
            elif (what := difference(mine, theirs)) is not None:
                findings.append(_differs(slot_id, *what))
        return findings


def difference(mine: Slot, theirs: Slot) -> tuple[str, str] | None:
    """Return what `mine` has and what `theirs` has instead, in words, or None if they are bitwise one."""
    if mine.kind != theirs.kind or mine.dtype != theirs.dtype or mine.shard != theirs.shard:
        return _about(mine), _about(theirs)
    if mine.kind != "tensor":
        same = mine.value is theirs.value or (type(mine.value) is type(theirs.value) and repr(mine.value) == repr(theirs.value))
        return None if same else (repr(mine.value), repr(theirs.value))
    for box, ours, others in zip(mine.boxes, mine.local, theirs.local, strict=True):
        if not digest.bitwise_equal(ours, others):
            away = (others.detach().double().cpu() - ours.detach().double().cpu()).abs().max().item()
            return "the same bits", f"values up to {away:.3g} away in {box.start} to {box.stop}"
    return None


def _about(slot: Slot) -> str:
    return f"{slot.kind} {slot.dtype or type(slot.value).__name__} {slot.shape} ({slot.shard.numel} elements here)"


def _differs(slot_id: SlotId, expected: str, found: str) -> Finding:
    name, key = slot_id
    param = None if name.startswith("@") else name
    return Finding("drift/differs", "drift", "error", param, key if param else f"{name}/{key}", expected, found)


def _replicas_differ(slot_id: SlotId, where: set[int]) -> Finding:
    name, key = slot_id
    return Finding(
        "ranks/replicas-differ",
        "ranks",
        "error",
        None if name.startswith("@") else name,
        key,
        expected="the same bits on every rank that holds this part",
        found="other bits than on the first rank that holds it",
        fix="Look for a reduction that one rank missed: run truestep verify.",
        ranks=tuple(sorted(where)),
    )


def _frozen(slot: Slot) -> Slot:
    local = tuple(tensor.detach().cpu().clone() for tensor in slot.local)
    return dataclasses.replace(slot, local=local, device=torch.device("cpu") if local else slot.device)


def _lanes(slot: Slot) -> tuple[str, tuple[int, ...], dict[Any, Any]]:
    if slot.kind == "value":
        return type(slot.value).__name__, (), {None: digest.value_lanes(slot.value)}
    lanes_by_box = {
        box: digest.lanes(tensor, box, slot.shape) for box, tensor in zip(slot.boxes, slot.local, strict=True) if box.numel
    }
    return str(slot.dtype), slot.shape, lanes_by_box


def slots_of(name: str, key: str, value: Any, place: Any) -> Iterator[Slot]:
    """Yield the slots of one state entry: containers flattened to key paths, tensors cut by `place`.

    Args:
        name: Owner of the entry.
        key: Its key.
        value: The live value.
        place: ``tensor -> (Shard, local tensors)``; how a tensor of this owner lies on this rank.
    """
    if isinstance(value, Tensor):
        shard, local = place(value)
        yield Slot(name, key, "tensor", shard, local, dtype=value.dtype, device=value.device)
    elif isinstance(value, Mapping):
        for part, inner in value.items():
            yield from slots_of(name, f"{key}/{part}", inner, place)
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        if value and all(isinstance(inner, (int, float, bool, type(None), str)) for inner in value):
            yield Slot(name, key, "value", _NO_SHARD, value=value)
        else:
            for index, inner in enumerate(value):
                yield from slots_of(name, f"{key}/{index}", inner, place)
    elif isinstance(value, (bool, int, float, complex, str, type(None))):
        yield Slot(name, key, "value", _NO_SHARD, value=value)
    else:
        yield Slot(name, key, "opaque", _NO_SHARD, value=value)


_NO_SHARD = Shard(Layout.WHOLE, (), ())
