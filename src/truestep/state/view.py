"""All slots of an optimizer by name, live.

A *slot* is one entry of optimizer state: of a param ``(name, key)``, of a group ``("@group/0", key)`` or of the optimizer
``("@optimizer", key)``. The key ``param`` is the param itself, ``master`` its fp32 copy where a vendor keeps one. Containers are
flattened to key paths (``Q/0``). A slot that is absent is not in the view: absent is not zero.

A view copies nothing and creates nothing (``optimizer.state`` is a defaultdict: reading it must not add an entry). Its tensors
are the live ones: writing to them writes to the optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from truestep.state import digest, ranks
from truestep.state.containers import Level, is_plain, parts
from truestep.words.errors import TrueStepError
from truestep.words.finding import Finding
from truestep.words.layout import Layout, Shard
from truestep.words.shards import Box, Cover, cover

Kind: TypeAlias = Literal["tensor", "value", "opaque"]
SlotId: TypeAlias = tuple[str, str]
Place: TypeAlias = Callable[[Tensor], tuple[Shard, tuple[Tensor, ...]]]
# What one rank knows of a slot's content: dtype in words, whole shape, and lanes by box (by None for a Python value).
Content: TypeAlias = tuple[str, tuple[int, ...], Mapping["Box | None", digest.Lanes]]


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
        within: The containers of its key path, outermost first, each with the key in it as it is.
    """

    name: str
    key: str
    kind: Kind
    shard: Shard
    local: tuple[Tensor, ...] = ()
    value: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    within: tuple[Level, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole slot."""
        return self.shard.shape

    @property
    def boxes(self) -> tuple[Box, ...]:
        """This rank's boxes."""
        return self.shard.boxes

    def full(self, rank: int | Literal["all"] = 0) -> Tensor | None:
        """Return the whole slot on the CPU; None on ranks other than `rank`. Collective: every rank.

        Raises:
            TrueStepError: If the slot is no tensor, or the boxes of all ranks do not cover it.
        """
        if self.kind != "tensor":
            raise TrueStepError(f"{self.name}/{self.key} is no tensor but a {self.kind}: read .value instead")
        # Cloned, since a pickled view takes all of its memory along: of ZeRO, the state of every param.
        mine = [(box, tensor.detach().cpu().clone()) for box, tensor in zip(self.boxes, self.local, strict=True)]
        pieces = [piece for theirs in ranks.gather(mine) for piece in theirs]
        what = f"{self.name}/{self.key}"
        if rank != "all" and ranks.here() != rank:
            _demand_covered(self.shape, [box for box, _ in pieces], what)  # all raise, or none
            return None
        return assemble(self.shape, pieces, what) if pieces else torch.empty(self.shape, dtype=self.dtype)


def assemble(shape: tuple[int, ...], pieces: Iterable[tuple[Box, Tensor]], what: str) -> Tensor:
    """Return the whole CPU tensor that the `(box, tensor)` pieces cover, a copy; `what` names it in the error.

    Raises:
        TrueStepError: If there is no piece, or they do not cover it.
    """
    pieces = list(pieces)
    if not pieces:
        raise TrueStepError(f"{what}: expected a piece of it on some rank, found none. Look at its slot on every rank.")
    _demand_covered(shape, [box for box, _ in pieces], what)
    out = torch.empty(shape, dtype=pieces[0][1].dtype)
    for box, tensor in dict(reversed(pieces)).items():  # of replicas the first
        out[box.slices] = tensor.detach().cpu().reshape(box.shape)
    return out


def _demand_covered(shape: tuple[int, ...], boxes: Iterable[Box], what: str) -> None:
    if missing := cover(shape, set(boxes)).missing:
        raise TrueStepError(
            f"{what}: expected pieces that cover its shape {shape}, found none for {missing} elements. "
            "Look at its slot's boxes on every rank."
        )


class StateView(Mapping[SlotId, Slot]):
    """All slots of one model and its optimizers on this rank, by ``(name, key)``.

    Args:
        slots: In the order of the model's params, each param's own keys in the optimizer's order, groups and optimizer last.
        orphans: Ids of state entries whose tensor is no live param, as ``(description, keys)``.

    Two views are equal only if they are one object: `diff` compares what they hold.

    Raises:
        TrueStepError: If two slots have one name and key.
    """

    def __init__(self, slots: Iterable[Slot], orphans: Iterable[tuple[str, tuple[str, ...]]] = ()) -> None:
        self._slot_by_id: dict[SlotId, Slot] = {}
        for slot in slots:
            if self._slot_by_id.setdefault((slot.name, slot.key), slot) is not slot:
                raise TrueStepError(
                    f"expected one slot {slot.name}/{slot.key}, found two. Give the models or optimizers names: pass a mapping."
                )
        self.orphans = tuple(orphans)

    __eq__ = object.__eq__  # that of Mapping would compare slots, which are equal only if they are one object
    __hash__ = object.__hash__

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
            TrueStepError: With ``ranks/replicas-differ`` findings, if ranks hold different content of the same box; with
                ``state/pieces`` findings, if the boxes of all ranks do not cover a slot once.
        """
        with ranks.agreeing("take digests", error=TrueStepError):
            mine = {slot_id: _content(slot) for slot_id, slot in self.items() if slot.kind != "opaque"}
        everyone: list[dict[SlotId, Content]] = ranks.gather(mine)
        found = {
            slot_id: _digest(slot_id, {rank: theirs[slot_id] for rank, theirs in enumerate(everyone) if slot_id in theirs})
            for slot_id in dict.fromkeys(slot_id for theirs in everyone for slot_id in theirs)
        }
        if findings := [what for what in found.values() if isinstance(what, Finding)]:
            raise TrueStepError("", findings)
        return {f"{name}/{key}": str(what) for (name, key), what in found.items()}

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
    """Return what `mine` has and what `theirs` has instead, in words, or None if they are bitwise one, layouts apart."""
    if (mine.kind, mine.dtype, mine.shape, mine.boxes) != (theirs.kind, theirs.dtype, theirs.shape, theirs.boxes):
        return _about(mine), _about(theirs)
    if mine.kind != "tensor":
        same = mine.value is theirs.value or (type(mine.value) is type(theirs.value) and repr(mine.value) == repr(theirs.value))
        return None if same else (repr(mine.value), repr(theirs.value))
    for box, ours, others in zip(mine.boxes, mine.local, theirs.local, strict=True):
        if not digest.bitwise_equal(ours, others):
            return "the same bits", _distance(ours, others, box)
    return None


def _distance(ours: Tensor, others: Tensor, box: Box) -> str:
    wide = torch.complex128 if ours.is_complex() else torch.float64
    before, after = ours.detach().cpu().to(wide), others.detach().cpu().to(wide).reshape(ours.shape)
    return f"values up to {(after - before).abs().max().item():.3g} away in {box.start} to {box.stop}"


def _about(slot: Slot) -> str:
    if slot.kind != "tensor":
        return f"{slot.kind} {type(slot.value).__name__}"
    where = ", ".join(f"{box.start} to {box.stop}" for box in slot.boxes) or "nothing of it"
    return f"{slot.dtype} {slot.shape} (here {where})"


def _differs(slot_id: SlotId, expected: str, found: str) -> Finding:
    return Finding("drift/differs", "drift", "error", *_named(slot_id), expected, found)


def _named(slot_id: SlotId) -> tuple[str | None, str]:
    """Return ``param, key`` as findings have them: no param for what groups and optimizers keep."""
    name, key = slot_id
    return (None, f"{name}/{key}") if name.startswith("@") else (name, key)


def _frozen(slot: Slot) -> Slot:
    local = tuple(tensor.detach().to("cpu", copy=True) for tensor in slot.local)
    value = copy.deepcopy(slot.value) if slot.kind == "value" else slot.value  # a list goes on growing
    return dataclasses.replace(slot, local=local, value=value, device=torch.device("cpu") if local else slot.device)


# -- Digests of what several ranks hold


def _content(slot: Slot) -> Content:
    if slot.kind == "value":
        return type(slot.value).__name__, (), {None: digest.value_lanes(slot.value)}
    pieces = [(box, tensor) for box, tensor in zip(slot.boxes, slot.local, strict=True) if box.numel]
    return str(slot.dtype), slot.shape, {box: digest.lanes(tensor, box, slot.shape) for box, tensor in pieces}


def _digest(slot_id: SlotId, content_by_rank: Mapping[int, Content]) -> str | Finding:
    """Return the digest of one slot from what the ranks hold of it, or why it has none."""
    dtype, shape, _ = next(iter(content_by_rank.values()))
    lanes_by_box: dict[Box | None, digest.Lanes] = {}
    apart = []
    for rank, (its_dtype, its_shape, its_lanes) in content_by_rank.items():
        known = {box: lanes_by_box.setdefault(box, lanes) for box, lanes in its_lanes.items()}
        if (its_dtype, its_shape, known) != (dtype, shape, its_lanes):
            apart.append(rank)
    if apart:
        return _replicas_differ(slot_id, apart)
    covered = cover(shape, [box for box in lanes_by_box if box is not None])
    if not covered.exact and None not in lanes_by_box:
        return _not_covered(slot_id, shape, covered)
    return digest.digest(dtype, shape, digest.total(lanes_by_box.values()))


def _replicas_differ(slot_id: SlotId, where: Sequence[int]) -> Finding:
    return Finding(
        "ranks/replicas-differ",
        "ranks",
        "error",
        *_named(slot_id),
        expected="the same bits on every rank that holds this part",
        found="other bits than on the first rank that holds it",
        fix="Look for a reduction that one rank missed: run truestep verify.",
        ranks=tuple(where),
    )


def _not_covered(slot_id: SlotId, shape: tuple[int, ...], covered: Cover) -> Finding:
    return Finding(
        "state/pieces",
        "state",
        "error",
        *_named(slot_id),
        expected=f"pieces that cover its shape {shape} once",
        found=f"{covered.missing} elements on no rank, {covered.doubled} in pieces that overlap",
        fix="Look for a rank whose state was not created or loaded.",
    )


# -- From live state to slots


def slots_of(name: str, key: str, value: Any, place: Place, within: tuple[Level, ...] = ()) -> Iterator[Slot]:
    """Yield the slots of one state entry: containers flattened to key paths, tensors cut by `place`.

    A container of nothing, or a sequence of plain values alone, is one slot of kind ``value``.

    Args:
        name: Owner of the entry.
        key: Its key.
        value: The live value.
        place: ``tensor -> (Shard, local tensors)``; how a tensor of this owner lies on this rank.
        within: The containers that the value was found in.
    """
    if isinstance(value, Tensor):
        shard, local = place(value)
        yield Slot(name, key, "tensor", shard, local, dtype=value.dtype, device=value.device, within=within)
        return
    inside = parts(value)
    if inside is None:
        yield Slot(name, key, "value" if is_plain(value) else "opaque", _NO_SHARD, value=value, within=within)
        return
    for level, inner in inside:
        yield from slots_of(name, f"{key}/{level[2]}", inner, place, (*within, level))


_NO_SHARD: Final = Shard(Layout.WHOLE, (), ())
