"""ZeRO's flat tensors as names and boxes.

The inner optimizer of a DeepSpeed engine steps *flat* tensors: under ZeRO 1 and 2 this rank's part of one param group, laid end
to end and cut at equal lengths; under ZeRO 3 this rank's part of each param of a sub-group, laid end to end; under ZeRO 0 each
param, or its fp32 copy. A *fragment* says which range of which param lies where in a flat tensor; padding belongs to no fragment,
and a param of which a rank holds nothing has an empty one, so that every rank lists the same names.

DeepSpeed's own records are read at each call: they are what its step uses, and a loaded checkpoint may replace them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from truestep.backends import slots
from truestep.backends.base import Piece
from truestep.state.view import Slot, slots_of
from truestep.words.errors import UnsupportedError
from truestep.words.layout import Layout, Shard
from truestep.words.shards import runs


@dataclass(frozen=True, eq=False)
class Fragment:
    """Which range of a param's row-major order lies where in a flat tensor.

    Attributes:
        param: The model's own param.
        shape: Of the whole param, which ZeRO 3 takes away from `param` itself.
        offset: Where the range begins in the flat tensor.
        start, stop: The range; empty where this rank holds nothing of the param.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Flat:
    """One tensor that the inner optimizer steps.

    Attributes:
        tensor: The live tensor; state is keyed by it.
        group: Index of its param group.
        layout: ``FUSED``, or ``WHOLE`` where it is one param as it is.
        fragments: What lies in it.
    """

    tensor: Tensor
    group: int
    layout: Layout
    fragments: tuple[Fragment, ...]


def overlap(offset: int, length: int, start: int, stop: int) -> tuple[int, int, int]:
    """Return what of ``[offset, offset + length)`` is in ``[start, stop)``: where it begins there, and its range in the former.

    >>> overlap(10, 6, 0, 12), overlap(10, 6, 12, 24), overlap(10, 6, 24, 36)
    ((10, 0, 2), (0, 2, 6), (0, 0, 0))
    """
    low, high = max(offset, start), min(offset + length, stop)
    return (low - start, low - offset, high - offset) if low < high else (0, 0, 0)


def offsets(lengths: Sequence[int]) -> list[int]:
    """Return where each begins if they are laid end to end.

    >>> offsets([3, 1, 4])
    [0, 3, 4]
    """
    return list(itertools.accumulate(lengths, initial=0))[:-1]


# -- reading DeepSpeed's records: a row for each of its optimizer classes


def _each_param(optimizer: Any) -> Iterator[Flat]:
    for group, entry in enumerate(optimizer.param_groups):
        for param in entry["params"]:
            yield Flat(param, group, Layout.WHOLE, (_all_of(param),))


def _each_master(optimizer: Any) -> Iterator[Flat]:
    for group, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for param, master in zip(params, masters, strict=True):
            yield Flat(master, group, Layout.WHOLE, (_all_of(param),))


def _partitions(optimizer: Any) -> Iterator[Flat]:
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        params = optimizer.round_robin_bit16_groups[group]
        recorded = getattr(optimizer, "round_robin_bit16_offsets", None)  # since params may be aligned, with gaps between them
        starts = recorded[group] if recorded else offsets([param.numel() for param in params])
        yield _partition(optimizer, group, flat, params, starts)


def _partitions_with_fp32_gradients(optimizer: Any) -> Iterator[Flat]:
    for group, flat in enumerate(optimizer.fp32_groups_flat_partition):
        params = optimizer.bf16_groups[group]
        yield _partition(optimizer, group, flat, params, offsets([param.numel() for param in params]))


def _partition(optimizer: Any, group: int, flat: Tensor, params: Sequence[nn.Parameter], starts: Sequence[int]) -> Flat:
    start = torch.distributed.get_rank(optimizer.real_dp_process_group[group]) * flat.numel()
    fragments = tuple(
        Fragment(param, tuple(param.shape), *overlap(offset, param.numel(), start, start + flat.numel()))
        for param, offset in zip(params, starts, strict=True)
    )
    return Flat(flat, group, Layout.FUSED, fragments)


def _sub_groups(optimizer: Any) -> Iterator[Flat]:
    for index, (flat, params) in enumerate(zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)):
        starts = offsets([param.ds_tensor.ds_numel for param in params])
        fragments = tuple(Fragment(param, *_held(param, start)) for param, start in zip(params, starts, strict=True))
        yield Flat(flat, optimizer.sub_group_to_group_id[index], Layout.FUSED, fragments)


def _all_of(param: nn.Parameter) -> Fragment:
    return Fragment(param, tuple(param.shape), 0, 0, param.numel())


def _held(param: Any, offset: int) -> tuple[tuple[int, ...], int, int, int]:
    """Return shape, offset, start and stop of this rank's part of a param that ZeRO 3 has partitioned."""
    length = param.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank(param.ds_process_group) * length, param.ds_numel)
    return tuple(param.ds_shape), offset, start, min(start + length, param.ds_numel)


_READERS: Final[Mapping[str, Callable[[Any], Iterator[Flat]]]] = {
    "DeepSpeedZeroOptimizer_Stage3": _sub_groups,
    "DeepSpeedZeroOptimizer": _partitions,  # ZeRO 1 and 2
    "BF16_Optimizer": _partitions_with_fp32_gradients,  # ZeRO 1 in bf16 that accumulates in fp32
    "FP16_UnfusedOptimizer": _each_master,  # ZeRO 0 in 16 bits
    "Optimizer": _each_param,  # ZeRO 0 in fp32: torch's own
}


def flats(optimizer: Any) -> list[Flat]:
    """Return the flat tensors of what ``engine.optimizer`` is.

    Raises:
        UnsupportedError: If it is of a class whose records are not known.
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _READERS:
            return list(_READERS[kind.__name__](optimizer))
    raise UnsupportedError(
        f"DeepSpeed's {type(optimizer).__name__} is not known: expected that of ZeRO 0 to 3 over a torch optimizer, in fp32 or "
        "bf16. Pass a torch optimizer to deepspeed.initialize."
    )


# -- placing tensors


def place(flat: Flat, fragment: Fragment, tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    """Return which boxes of the param lie in a tensor laid out like the flat one, and views of them; any other is a replica."""
    if flat.layout is Layout.WHOLE or tensor.shape != flat.tensor.shape:
        return slots.replica(tensor)
    return _cut(fragment, tensor)


def _cut(fragment: Fragment, tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    pieces = runs(fragment.shape, fragment.start, fragment.stop)
    shard = Shard(Layout.FUSED, fragment.shape, tuple(box for _, box in pieces))
    line = tensor.detach()
    return shard, tuple(line.narrow(0, fragment.offset + offset, box.numel).view(box.shape) for offset, box in pieces)


def param_place(param: Any) -> tuple[Tensor, tuple[Shard, tuple[Tensor, ...]]]:
    """Return the tensor that holds a param on this rank, and how: ZeRO 3's partition, even while the param is gathered."""
    if hasattr(param, "ds_tensor"):
        return param.ds_tensor, _cut(Fragment(param, *_held(param, 0)), param.ds_tensor)
    return param, slots.replica(param)


def pieces(flat: Flat, name_by_id: Mapping[int, str]) -> dict[str, Piece | None]:
    """Return copies of the gradient of a flat tensor, by the names of the params that lie in it."""
    gradient = flat.tensor.grad
    copies: dict[str, Piece | None] = {}
    for fragment in flat.fragments:
        if (name := name_by_id.get(id(fragment.param))) is None:
            continue
        copies[name] = None
        if gradient is not None:
            shard, local = place(flat, fragment, gradient)
            copies[name] = Piece(shard, tuple(tensor.clone() for tensor in local))
    return copies


def param_slots(
    name: str, param: nn.Parameter, held: tuple[Flat, Fragment] | None, inner: torch.optim.Optimizer
) -> Iterator[Slot]:
    """Yield the slots of one param: itself, its master where there is one, and its part of each state entry."""
    tensor, placed = param_place(param)
    yield from slots_of(name, "param", tensor, lambda _: placed)
    if held is None:
        return
    flat, fragment = held

    def here(value: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
        return place(flat, fragment, value)

    if flat.tensor.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        yield from slots_of(name, "master", flat.tensor, here)
    if flat.tensor in inner.state:  # `in` first: optimizer.state is a defaultdict, and reading adds an entry
        for key, value in inner.state[flat.tensor].items():
            yield from slots_of(name, str(key), value, here)


# -- what a window has accumulated (DeepSpeed 0.19)


def accumulated(engine: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold this rank's part of the gradient between the last backward and the step."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "averaged_gradients"):  # ZeRO 1 to 3
        yield from (part for parts in optimizer.averaged_gradients.values() for part in parts or () if part is not None)
    elif hasattr(optimizer, "fp32_groups_gradients_flat"):  # ZeRO 0 in bf16
        yield from optimizer.fp32_groups_gradients_flat
    else:
        yield from (param.grad for param in engine.module.parameters() if param.grad is not None)


def forget(engine: Any) -> None:
    """Drop it, as the engine does when a step overflows; the next backward begins a new window."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "averaged_gradients"):
        if hasattr(optimizer, "clear_hp_grads"):
            optimizer.clear_hp_grads()
        return
    optimizer.zero_grad(set_to_none=True)  # ZeRO 3: the count of micro-batches too
    for kept in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for group in kept:
            kept[group] = None
    if engine.zero_optimization_stage() < 3:
        optimizer.micro_step_id = -1  # before the first
