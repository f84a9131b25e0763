"""The judge of an update: is what the optimizer left behind what its rule gives?

First bitwise, against a replica that did the same. Where kernels or shards round otherwise, by the step's own *sensitivity*: the
replica is run again from the same old state with every floating result of every operation moved by a random ulp, and what that
moves, measured as a norm per slot, is what rounding can do. A difference of up to twice the largest move is rounding.

Note: what is moved
    What an operation writes: its new tensors, and those it changes in place (the lists of foreach and fused ones too), each
    element one ulp of its own dtype up, down or not at all. Views are not moved, nor what only moves data (a clone, a cast
    that rounds nothing), as no rounding happens there. Zeros stay, as do values that are not finite, and 0-d integers:
    counters are exact in every kernel, and one that is an ulp below 1 is 0 to the code that truncates it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from truestep.state.digest import bitwise_equal
from truestep.state.view import SlotId

Value: TypeAlias = Any  # a tensor, a Python number, or anything else a slot may hold
Slots: TypeAlias = Mapping[SlotId, Value]
Verdict: TypeAlias = Literal["bitwise", "within", "harmless", "differs"]

RUNS: Final = 4
ALLOWED_MOVES: Final = 2
ZERO_GRADIENT: Final = "an absent gradient was treated as zero"
# Operations that round nothing: they make constants, move data, choose among their inputs, or strip a sign or a fraction.
_EXACT: Final = re.compile(
    r"(?:_foreach_)?(?:abs|alias|amax|amin|arange|cat|ceil|clamp|clamp_max|clamp_min|clone|constant_pad_nd|copy|detach|diag_embed"
    r"|empty|empty_like|empty_strided|expand|eye|fill|flip|floor|full|full_like|gather|index|index_copy|index_put|index_select"
    r"|lift_fresh|masked_fill|max|maximum|min|minimum|neg|new_empty|new_full|new_ones|new_zeros|ones|ones_like|relu|repeat"
    r"|resize|roll|round|scalar_tensor|scatter|sign|sort|stack|topk|tril|triu|trunc|where|zero|zeros|zeros_like)_?"
)
_WEIGHTS: Final = ("param", "master")  # keys that never count steps
_CASTS: Final = frozenset(("_to_copy", "copy_", "_foreach_copy_"))
_BITS: Final[Mapping[int, torch.dtype]] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Judgement:
    """What is to be said of one slot.

    Attributes:
        slot: ``(name, key)``.
        verdict: ``bitwise``; ``within`` what rounding does; ``harmless``: only an absent gradient taken for a zero one, seen in
            counters and in zeros against absent slots; ``differs``.
        ratio: Distance over what is allowed: up to 1 holds, infinite where nothing is.
        distance: Norm of the difference.
        why: What differs in kind, in words: absent, dtype, shape, a counter, a gradient that was absent. Empty if only values do.
    """

    slot: SlotId
    verdict: Verdict
    ratio: float = 0.0
    distance: float = 0.0
    why: str = ""


class UlpNoise(TorchDispatchMode):
    """While entered, every floating result of this thread's torch operations is moved by a random ulp; see the note above.

    Args:
        seed: Of its own generators; the global ones are not touched.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operation, then move what it wrote."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        writes = _writes(func)
        if writes.is_cast or not writes.is_exact:
            written = _written(writes, args, kwargs, out)
            if writes.is_cast:
                sources = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                written = [tensor for tensor in written if any(_loses(source, tensor.dtype) for source in sources)]
            for tensor in written:
                self._move(tensor)
        return out

    def _move(self, tensor: Tensor) -> None:
        """Move each element of `tensor`, in place, by one ulp up or down or not at all."""
        if tensor.layout != torch.strided:
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if tensor.ndim == 0 and bool(tensor == tensor.round()):
            return
        generator = self._generator(tensor.device)
        bits = tensor.detach().view(_BITS[tensor.element_size()])
        ulp = torch.randint(-1, 2, bits.shape, generator=generator, dtype=bits.dtype, device=bits.device)
        # The bits of a float order like its magnitude: one more is one ulp away from zero.
        size = tensor.abs()
        bits += ulp.mul_((size > 0) & (size < torch.finfo(tensor.dtype).max))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@dataclass(frozen=True)
class _Writes:
    """What an operation writes, by its schema: which arguments it changes, by place and name, and whether it makes new ones."""

    is_cast: bool
    is_exact: bool
    changed: tuple[tuple[int, str], ...]
    is_fresh: bool


@functools.cache  # asking a schema costs more than a small operation does
def _writes(func: Any) -> _Writes:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    changed = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    is_fresh = all(returned.alias_info is None for returned in schema.returns)
    return _Writes(name in _CASTS, _EXACT.fullmatch(name) is not None, tuple(changed), is_fresh)


def _written(writes: _Writes, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> list[Tensor]:
    """Return what an operation made or changed; views of its inputs are neither."""
    changed = [kwargs.get(name) if place >= len(args) else args[place] for place, name in writes.changed]
    written = [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]
    if writes.is_fresh:
        # Some operations hand an input back without saying so: moving that would move what was given.
        inputs = {_memory(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)}
        written += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _memory(leaf) not in inputs]
    return written


def _memory(tensor: Tensor) -> int:
    """Return where a tensor's memory starts; its own id where it has none of its own (sparse)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether a cast may round."""
    return source != target and torch.promote_types(source, target) != target


def sensitivity(
    step: Callable[[], Slots], *, runs: int = RUNS, seed: int = 0, unmoved: Slots | None = None
) -> dict[SlotId, float]:
    """Return how far a step's result moves when every floating result inside it moves by an ulp: the largest of several runs.

    Args:
        step: Runs a replica from the same old state, each time anew, and returns every slot it leaves: tensors and numbers.
        runs: How often.
        seed: Of the first run; the next ones count up. Global generators are not touched: a step that draws must seed itself.
        unmoved: What `step` returns when nothing is moved, if that is known.

    Returns:
        ``slot -> norm`` of the largest move, for each slot of the unmoved step; 0 for what is no float.
    """
    still = _kept(step() if unmoved is None else unmoved)
    moves = dict.fromkeys(still, 0.0)
    for run in range(runs):
        with UlpNoise(seed + run):
            moved = step()
        for slot_id, value in still.items():
            if _is_float(value) and slot_id in moved:
                moves[slot_id] = max(moves[slot_id], _distance(moved[slot_id], value))
    return moves


def judge(
    found: Slots,
    expected: Slots,
    *,
    old: Slots | None = None,
    moves: Mapping[SlotId, float] | None = None,
    without_gradient: Collection[str] = (),
) -> list[Judgement]:
    """Judge each slot of an update, in the order of `expected`, then those that only `found` has.

    Args:
        found: What the step left, by slot; a slot that is not there is absent, which is not zero.
        expected: What the replica left.
        old: What both started from. With it counters are recognised: single numbers that the replica raised by exactly one.
            These, integers, and whatever is no float are judged exactly.
        moves: The step's `sensitivity`; without it only equal bits hold.
        without_gradient: Names of params for which no backward made a gradient, so that the replica had none either.
    """
    slots = [*expected, *(slot_id for slot_id in found if slot_id not in expected)]
    judged = {slot_id: _judged(slot_id, found, expected, old or {}, moves or {}) for slot_id in slots}
    for name in without_gradient:
        apart = {s: j for s, j in judged.items() if s[0] == name and j.verdict == "differs"}
        harmless = all(s[1] not in _WEIGHTS and _as_if_zero(found.get(s), expected.get(s)) for s in apart)
        for slot_id, judgement in apart.items():
            verdict: Verdict = "harmless" if harmless else "differs"
            judged[slot_id] = Judgement(slot_id, verdict, judgement.ratio, judgement.distance, ZERO_GRADIENT)
    return list(judged.values())


def _judged(slot_id: SlotId, found: Slots, expected: Slots, old: Slots, moves: Mapping[SlotId, float]) -> Judgement:
    mine, theirs = found.get(slot_id), expected.get(slot_id)
    if _same(mine, theirs):
        return Judgement(slot_id, "bitwise")
    if mine is None or theirs is None:
        there = mine if theirs is None else theirs
        why = "present, expected absent" if theirs is None else "absent, expected present"
        return Judgement(slot_id, "differs", math.inf, _size(there), why)
    if why := _other_kind(mine, theirs):
        return Judgement(slot_id, "differs", math.inf, math.inf, why)
    distance = _distance(mine, theirs)
    if not _is_float(theirs) or (slot_id[1] not in _WEIGHTS and is_counter(old.get(slot_id), theirs)):
        return Judgement(slot_id, "differs", math.inf, distance, "a counter" if _numel(theirs) == 1 else "")
    allowed = ALLOWED_MOVES * moves.get(slot_id, 0.0)
    ratio = distance / allowed if allowed else math.inf
    return Judgement(slot_id, "within" if ratio <= 1 else "differs", ratio, distance)


def is_counter(old: Value, new: Value) -> bool:
    """Tell whether a slot counts steps: one number, whole, that rose by exactly one."""
    if not all(_numel(value) == 1 for value in (old, new)):
        return False
    before, after = float(old), float(new)
    return before.is_integer() and after == before + 1


def _as_if_zero(mine: Value, theirs: Value) -> bool:
    """Tell whether two values differ only as a zero gradient's from an absent one's: a counter, or zeros against nothing."""
    if mine is None or theirs is None:
        there = mine if theirs is None else theirs
        return _size(there) == 0 or (_numel(there) == 1 and float(there).is_integer())
    return _numel(mine) == 1 and _numel(theirs) == 1 and (is_counter(theirs, mine) or is_counter(mine, theirs))


def _same(mine: Value, theirs: Value) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return bitwise_equal(mine, theirs)
    if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
        return False
    return mine is theirs or (type(mine) is type(theirs) and repr(mine) == repr(theirs))


def _other_kind(mine: Value, theirs: Value) -> str:
    """Return in words how two values differ in kind, or nothing."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if mine.dtype != theirs.dtype:
            return f"{mine.dtype}, expected {theirs.dtype}"
        return f"shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}" if mine.shape != theirs.shape else ""
    if type(mine) is type(theirs) and _numel(mine) == 1:
        return ""
    return f"{_told(mine)}, expected {_told(theirs)}"


def _told(value: Value) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _is_float(value: Value) -> bool:
    return value.is_floating_point() or value.is_complex() if isinstance(value, Tensor) else isinstance(value, float)


def _numel(value: Value) -> int:
    """Return how many real numbers this is: 0 for what is none."""
    if isinstance(value, Tensor):
        return 0 if value.is_complex() or value.dtype == torch.bool else value.numel()
    return int(isinstance(value, (int, float)) and not isinstance(value, bool))


def _as_float64(value: Value) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor).to(torch.float64) if tensor.is_complex() else tensor.to(torch.float64)


def _distance(mine: Value, theirs: Value) -> float:
    """Return the norm of the difference; infinite where one is not finite and the other is not the same."""
    a, b = _as_float64(mine), _as_float64(theirs)
    b = b.to(a.device)
    if a.shape != b.shape:
        return math.inf
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
    return float(torch.linalg.vector_norm(apart)) if bool(apart.isfinite().all()) else math.inf


def _size(value: Value) -> float:
    return float(torch.linalg.vector_norm(_as_float64(value))) if isinstance(value, (Tensor, int, float)) else math.inf


def _kept(slots: Slots) -> dict[SlotId, Value]:
    """Return the slots with tensors copied: the next run may write to the same memory."""
    return {slot_id: value.detach().clone() if isinstance(value, Tensor) else value for slot_id, value in slots.items()}
