"""What an optimizer keeps: each key, what it belongs to, and how its dims follow those of the param."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from truestep.backends.slots import optimizer_slots, replica
from truestep.optimizers.probe.build import groups_of
from truestep.optimizers.probe.plan import dim_layout
from truestep.optimizers.probe.run import Trace
from truestep.state.view import Slot, slots_of

Owner: TypeAlias = Literal["param", "group", "optimizer"]

NUMEL: Final = "numel"
TOTAL: Final = "total"
UNCLEAR: Final = "?"


@dataclass(frozen=True)
class Key:
    """One key of state.

    Attributes:
        key: Its name; containers as key paths (``Q/0``).
        owner: ``param``, ``group`` or ``optimizer``.
        kind: ``tensor``; ``value`` (a Python number, string, bool or None); ``opaque``.
        dtype: Of tensors, else the Python type; several joined by ``|``.
        dims_by_ndim: For each ndim of params that have it, what each of its dims is: ``dim 0``, ``dim 1``, .. of the param,
            ``numel`` of the param, ``total`` of all params, a number that does not follow the param, or ``?``.
    """

    key: str
    owner: Owner
    kind: str
    dtype: str
    dims_by_ndim: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_like_param(self) -> bool:
        """Whether it has the shape of its param, whatever that is."""
        dims = self.dims_by_ndim
        return any(dims) and all(its == tuple(map(dim_layout, range(ndim))) for ndim, its in dims.items())


@dataclass(frozen=True)
class _Seen:
    """A slot as it was found for one param."""

    shape: tuple[int, ...]
    total: int
    slot: Slot


def param_keys(traces: Sequence[Trace]) -> list[Key]:
    """Return the keys that belong to params, from runs with params of unlike sizes."""
    seen_by_key: dict[str, list[_Seen]] = {}
    for trace in traces:
        total = sum(param.numel() for _, param in trace.params)
        for member, param in trace.params:
            for slot in _slots_of_param(member.name, param, trace.optimizers):
                seen_by_key.setdefault(slot.key, []).append(_Seen(tuple(param.shape), total, slot))
    return [_key(key, seen) for key, seen in seen_by_key.items()]


def _slots_of_param(name: str, param: Tensor, optimizers: Sequence[Any]) -> Iterator[Slot]:
    for optimizer in optimizers:
        state = getattr(optimizer, "state", {})
        if param in state:  # `in` first: a defaultdict adds what is read
            for key, value in state[param].items():
                yield from slots_of(name, str(key), value, replica)


def _key(key: str, seen: Sequence[_Seen]) -> Key:
    kinds = "|".join(dict.fromkeys(one.slot.kind for one in seen))
    dtypes = "|".join(dict.fromkeys(_dtype(one.slot) for one in seen))
    ndims = sorted({len(one.shape) for one in seen if one.slot.kind == "tensor"})
    dims = {ndim: _dims([one for one in seen if len(one.shape) == ndim and one.slot.kind == "tensor"]) for ndim in ndims}
    return Key(key, "param", kinds, dtypes, dims)


def _dtype(slot: Slot) -> str:
    return str(slot.dtype).removeprefix("torch.") if slot.dtype is not None else type(slot.value).__name__


def _dims(seen: Sequence[_Seen]) -> tuple[str, ...]:
    """Return what each dim of a slot is, of all sizes that were seen; the first dim of the param that fits is taken."""
    ndims = {len(one.slot.shape) for one in seen}
    if len(ndims) > 1:
        return (UNCLEAR,)
    found: list[str] = []
    for dim in range(ndims.pop()):
        sizes = [one.slot.shape[dim] for one in seen]
        followed = [rule for rule, follow in _rules(len(seen[0].shape)).items() if [follow(one) for one in seen] == sizes]
        followed.sort(key=lambda rule: rule == dim_layout(dim), reverse=True)
        constant = [str(sizes[0])] if len(set(sizes)) == 1 else []
        same = constant if len({one.shape for one in seen}) > 1 else []  # of one size only, a number says nothing
        found.append(next(iter([*followed, *same, *constant]), UNCLEAR))
    return tuple(found)


def _rules(ndim: int) -> dict[str, Any]:
    return {
        **{dim_layout(dim): (lambda one, dim=dim: one.shape[dim]) for dim in range(ndim)},
        NUMEL: lambda one: math.prod(one.shape),
        TOTAL: lambda one: one.total,
    }


# -- Groups and optimizers


def changed_group_entries(fresh: Sequence[Any], stepped: Sequence[Any]) -> list[Key]:
    """Return the entries of groups that steps change or create."""
    found: dict[str, Key] = {}
    for before, after in zip(groups_of(fresh), groups_of(stepped), strict=True):
        for key, value in after.items():
            if key not in ("params", "param_names") and not (key in before and _same(before[key], value)):
                found.setdefault(key, _key_of("group", key, value))
    return list(found.values())


def changed_attributes(fresh: Sequence[Any], stepped: Sequence[Any]) -> list[Key]:
    """Return what optimizers keep for themselves: attributes that steps change or create, and state under no param."""
    found: dict[str, Key] = {}
    for before, after in zip(fresh, stepped, strict=True):
        if isinstance(after, Optimizer):
            old = {slot.key: slot for slot in optimizer_slots(before, None)}
            for slot in optimizer_slots(after, None):
                if slot.key not in old or not _same(_content(old[slot.key]), _content(slot)):
                    found.setdefault(slot.key, Key(slot.key, "optimizer", slot.kind, _dtype(slot)))
    return list(found.values())


def _content(slot: Slot) -> Any:
    return slot.local[0] if slot.local else slot.value


def _key_of(owner: Owner, key: str, value: Any) -> Key:
    slot = next(iter(slots_of("", key, value, replica)))
    return Key(key, owner, slot.kind, _dtype(slot))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


def has_state(optimizers: Sequence[Any]) -> bool:
    """Tell whether any param has state."""
    states = (getattr(optimizer, "state", {}) for optimizer in optimizers)
    return any(isinstance(key, Tensor) and bool(entry) for state in states for key, entry in state.items())
