"""Content digests: equal for equal bits, however a tensor is cut into pieces and wherever the pieces lie.

The row-major bytes of the whole tensor are read as little-endian 32-bit words. With ``bits(e)`` the bits of an element at their
place in its word ``w(e)``, and two keys per word,

    S_1 = sum over elements of (bits(e)          + 2^32) key_1(w(e))   mod 2^64
    S_2 = sum over elements of (rotated(bits(e)) + 2^32) key_2(w(e))   mod 2^64      (rotated by 16 in the word)

An element of 8 or 16 bytes is two or four words; its + 2^32 goes to the first. These two *lanes* are sums over elements, so
they add over any pieces, cuts inside a word too, and over ranks, replicas once. The digest is BLAKE2b-128 of dtype, shape, S_1
and S_2. Why that tells contents apart is proved in docs/digests.md.

Keys. With BLOCK words a block, word BLOCK·q + r has ``key_l = inner_l(r) · outer_l(q)``, each mixed from its index; all are odd
but inner_2. So a block is weighed by one fixed table and its sum by one number: no key is made while the bytes stream through.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from truestep.words.errors import TrueStepError
from truestep.words.shards import Box, Rows, rows

Lanes: TypeAlias = tuple[int, int]

BLOCK: Final = 1 << 14  # words; the block as int64, its upper halves and the two tables are 512 KiB: they stay in the L2 cache
_WORD_BYTES: Final = 4
_MOD: Final = 1 << 64
_HALF: Final = 1 << 16
_ONCE: Final = 1 << 32  # what an element counts for beside its bits
_KEPT_BLOCKS: Final = 1024  # whose keys are kept: enough for tensors of 64 MiB
_LOOPED_ROW: Final = BLOCK // 8  # words; rows at least this long go one by one, shorter ones many at a time by looked-up keys
_BLOCKS_AT_ONCE: Final = 256  # on accelerators, where every launch costs; on the CPU one, for the cache
_BITS: Final[Mapping[int, torch.dtype]] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lanes(tensor: Tensor, box: Box, shape: tuple[int, ...]) -> Lanes:
    """Return the two lanes of a piece of a tensor.

    Args:
        tensor: The piece, of any strides, device and dtype of 1, 2, 4, 8 or 16 bytes; its elements in the box's row-major order.
        box: Where it lies in the whole.
        shape: Of the whole.

    Raises:
        TrueStepError: If the piece does not fill the box, or is not a plain dense tensor.
    """
    _demand_plain(tensor)
    if tensor.numel() != box.numel:
        raise TrueStepError(
            f"expected a piece of {box.numel} elements, as its box {box.start} to {box.stop} has, found one of {tensor.numel()}. "
            "Pass the box that the tensor lies at."
        )
    if not box.numel:
        return 0, 0
    units, each = _units(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for piece, count, where in _whole_words_apart(units, _scaled(rows(shape, box), each)):
        streams = piece.device.type == "cpu" and piece.dtype == torch.int32 and where.length >= _LOOPED_ROW
        sums += (_of_words if streams else _looked_up)(piece, each, count, where)
    first, second = sums.tolist()
    return first % _MOD, second % _MOD


def total(pieces: Iterable[Lanes]) -> Lanes:
    """Return the lanes of what the pieces make up together; of no piece ``(0, 0)``."""
    first = second = 0
    for one, two in pieces:
        first, second = first + one, second + two
    return first % _MOD, second % _MOD


def digest(dtype: str, shape: tuple[int, ...], lanes: Lanes) -> str:
    """Return the digest of a whole, 32 hex digits, from its dtype in words, its shape and its lanes."""
    about = f"{dtype}\0{','.join(map(str, shape))}\0".encode()
    return hashlib.blake2b(about + struct.pack("<QQ", *lanes), digest_size=16).hexdigest()


def value_lanes(value: Any) -> Lanes:
    """Return lanes that stand for a Python value: None, a bool, int, float, complex, str, or a container of these.

    Floats count by their bits; 1, 1.0 and True, and a list and a tuple, are told apart.

    Raises:
        TrueStepError: If the value is, or holds, anything else.
    """
    first, second = struct.unpack("<QQ", hashlib.blake2b(_canonical(value), digest_size=16).digest())
    return first, second


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether both have one dtype and shape and the same bits: equal NaNs are equal, -0.0 is not 0.0.

    Tensors of two devices are compared on the first one's.

    Raises:
        TrueStepError: If one is not a plain dense tensor.
    """
    for tensor in (a, b):
        _demand_plain(tensor)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_as_bits(a), _as_bits(b).to(a.device))


# -- Bits


def _demand_plain(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise TrueStepError(f"expected a dense tensor with its own bits, found a {kind} one. Leave it out, or convert it first.")


def _as_bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers; complex128, too wide for one, as a last axis of two."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() > max(_BITS):
        plain = torch.view_as_real(plain)
    return plain.view(_BITS[plain.element_size()])


def _units(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements as flat integers of at most a word, and how many of these are one element."""
    bits = _as_bits(tensor.contiguous()).reshape(-1)
    if bits.element_size() > _WORD_BYTES:
        bits = bits.view(torch.int32)
    return bits, max(1, tensor.element_size() // _WORD_BYTES)


def _scaled(where: Rows, factor: int) -> Rows:
    return Rows(where.first * factor, where.length * factor, where.counts, tuple(stride * factor for stride in where.strides))


def _whole_words_apart(units: Tensor, where: Rows) -> Iterator[tuple[Tensor, int, Rows]]:
    """Yield units as pieces ``(units, elements in one, their rows)``: as whole words where they are, parts of words as they are.

    Rows of units smaller than a word that begin or end inside one are taken as they are, but a single one loses its ends.
    """
    per = _WORD_BYTES // units.element_size()
    if all(number % per == 0 for number in (where.first, where.length, *where.strides)):
        scaled = Rows(where.first // per, where.length // per, where.counts, tuple(stride // per for stride in where.strides))
        yield _as_words(units), per, scaled
    elif where.counts or len(units) < 3 * per:
        yield units, 1, where
    else:
        head = -where.first % per
        full = (len(units) - head) // per * per
        yield _as_words(units[head : head + full]), per, Rows((where.first + head) // per, full // per, (), ())
        for begin, end in ((0, head), (head + full, len(units))):
            if begin < end:
                yield units[begin:end], 1, Rows(where.first + begin, end - begin, (), ())


def _as_words(units: Tensor) -> Tensor:
    """Return flat units as int32 words, copied where they do not lie at a word's begin in memory."""
    if units.storage_offset() * units.element_size() % _WORD_BYTES:
        units = units.clone()
    return units.view(torch.int32)


# -- Sums: by whole words on the CPU, where a block and its keys stay in the cache; by looked-up keys elsewhere


class _Span(NamedTuple):
    """A run of words inside one block: `width` words from `offset` in this piece, from `inside` in block `block` of the whole."""

    offset: int
    width: int
    block: int
    inside: int


def _spans(where: Rows) -> Iterator[_Span]:
    """Yield the spans that rows of whole words are cut into by the blocks of the whole."""
    starts = _starts(where, torch.arange(math.prod(where.counts), device="cpu")).tolist()
    for number, start in enumerate(starts):
        done = 0
        while done < where.length:
            block, inside = divmod(start + done, BLOCK)
            width = min(BLOCK - inside, where.length - done)
            yield _Span(number * where.length + done, width, block, inside)
            done += width


def _of_words(words: Tensor, each: int, count: int, where: Rows) -> Tensor:
    """Return the lanes, int64 of shape ``(2,)``, of long rows of whole int32 words; `count` elements lie in one word."""
    spans = list(_spans(where))
    offset, width, block, inside = torch.tensor(spans, device="cpu").unbind(1)
    plain_1, plain_2, upper_2 = torch.tensor(_weighed(words.view(torch.uint32), spans), device="cpu").unbind(1)
    # With u = 2^16 hi + lo, rotated(u) = 2^16 lo + hi = 2^16 u + (1 - 2^32) hi: the words need not be rotated.
    by_span = torch.stack((plain_1, plain_2 * _HALF + upper_2 * (1 - _ONCE)))
    sums_below = _inner_sums(each)
    by_span += (sums_below[:, inside + width] - sums_below[:, inside]) * (count * _ONCE)
    outer = _outer(spans[0].block, spans[-1].block, words.device)
    return (by_span * outer.numbers[:, block - outer.first]).sum(1)


def _weighed(words: Tensor, spans: list[_Span]) -> list[tuple[int, int, int]]:
    """Return of each span the sums of words by the first and by the second inner keys, and of upper halves by the second."""
    first, second = _inner(words.device)
    room, upper_room = torch.empty(2, BLOCK, dtype=torch.int64, device="cpu")
    sums = []
    for offset, width, _, inside in spans:
        plain, upper = room[:width], upper_room[:width]
        plain.copy_(words[offset : offset + width])
        torch.bitwise_right_shift(plain, 16, out=upper)
        key_1, key_2 = first[inside : inside + width], second[inside : inside + width]
        sums.append((int(torch.dot(plain, key_1)), int(torch.dot(plain, key_2)), int(torch.dot(upper, key_2))))
    return sums


def _looked_up(units: Tensor, each: int, count: int, where: Rows) -> Tensor:
    """Return the lanes, int64 of shape ``(2,)``, of any rows of units, some at a time; `count` elements lie in one unit."""
    per = _WORD_BYTES // units.element_size()
    last = where.first + sum((n - 1) * stride for n, stride in zip(where.counts, where.strides, strict=True)) + where.length - 1
    outer = _outer(where.first // per // BLOCK, last // per // BLOCK, units.device)
    from_outer = Rows(where.first - outer.first * BLOCK * per, where.length, where.counts, where.strides)
    sums = torch.zeros(2, dtype=torch.int64, device=units.device)
    for begin, place in _places(from_outer, BLOCK if units.device.type == "cpu" else BLOCK * _BLOCKS_AT_ONCE, units.device):
        plain, word = _placed(units[begin : begin + len(place)], place)
        inside, block = word & (BLOCK - 1), word >> (BLOCK.bit_length() - 1)
        rotated = (plain >> 16) | ((plain << 16) & (_ONCE - 1))
        for lane, words in enumerate((plain, rotated)):
            words[::each] += count * _ONCE  # a piece begins with an element
            keys = _inner(units.device)[lane].index_select(0, inside) * outer.numbers[lane].index_select(0, block)
            sums[lane] += (words * keys).sum()
    return sums


def _placed(units: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return as int64 the bits of units at their place in a word, and which words these are."""
    if units.dtype == torch.int32:
        return units.view(torch.uint32).to(torch.int64), place
    bits, per = 8 * units.element_size(), _WORD_BYTES // units.element_size()
    shift = (place & (per - 1)) * bits
    return (units.to(torch.int64) & ((1 << bits) - 1)) << shift, place >> (per.bit_length() - 1)


def _places(where: Rows, at_once: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield, about `at_once` units at a time, how many came before and the indices in the whole of these."""
    for number in range(0, math.prod(where.counts), rows_at_once := max(1, at_once // where.length)):
        after = min(number + rows_at_once, math.prod(where.counts))
        starts = _starts(where, torch.arange(number, after, device=device))
        for begin in range(0, where.length, at_once):
            inside = torch.arange(begin, min(begin + at_once, where.length), device=device)
            yield number * where.length + begin, (starts[:, None] + inside).reshape(-1)


def _starts(where: Rows, numbers: Tensor) -> Tensor:
    """Return where the rows with these numbers, in row-major order, start."""
    starts = torch.full_like(numbers, where.first)
    for count, stride in zip(reversed(where.counts), reversed(where.strides), strict=True):
        starts += numbers % count * stride
        numbers = numbers // count
    return starts


# -- Keys


@functools.lru_cache(maxsize=16)
def _inner(device: torch.device) -> Tensor:
    """Return the factors of the keys inside a block, int64 of shape ``(2, BLOCK)``; the first row odd."""
    index = torch.arange(BLOCK, device=device)
    return torch.stack((_mixed(index, 0) | 1, _mixed(index, 1)))


@functools.lru_cache(maxsize=3)
def _inner_sums(each: int) -> Tensor:
    """Return, at index i, the sums of the inner keys of the first words of elements below word i: int64 ``(2, BLOCK + 1)``."""
    keys = _inner(torch.device("cpu")).clone()
    keys.view(2, -1, each)[:, :, 1:] = 0
    return torch.nn.functional.pad(keys.cumsum(1), (1, 0))


class _Outer(NamedTuple):
    """The blocks' factors of the keys, odd int64 of shape ``(2, blocks)``, from block `first` on."""

    first: int
    numbers: Tensor


def _outer(first: int, last: int, device: torch.device) -> _Outer:
    """Return factors for the blocks `first` to `last` at least."""
    return _first_outer(device) if last < _KEPT_BLOCKS else _made_outer(first, last, device)


@functools.lru_cache(maxsize=16)
def _first_outer(device: torch.device) -> _Outer:
    return _made_outer(0, _KEPT_BLOCKS - 1, device)


def _made_outer(first: int, last: int, device: torch.device) -> _Outer:
    index = torch.arange(first, last + 1, device=device)
    return _Outer(first, torch.stack((_mixed(index, 2), _mixed(index, 3))) | 1)


def _mixed(index: Tensor, stream: int) -> Tensor:
    """Return a well mixed 64-bit number for each index of a stream.

    Source:
        Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64), with Stafford's Mix13.
    """
    number = (index + (stream << 60) + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        number = (number ^ ((number >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return number


def _signed(number: int) -> int:
    """Return the int64 with the same bits as a 64-bit unsigned number."""
    return number - _MOD if number >= _MOD // 2 else number


# -- Values


_CONTENT: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], bytes]], ...]] = (  # the first that fits
    ((bool, type(None)), lambda value: repr(value).encode()),
    (int, lambda value: str(int(value)).encode()),
    (float, lambda value: struct.pack("<d", value)),
    (complex, lambda value: struct.pack("<dd", value.real, value.imag)),
    (str, lambda value: value.encode("utf-8", "surrogatepass")),
    ((list, tuple, collections.deque), lambda value: b"".join(map(_canonical, value))),
    (dict, lambda value: b"".join(sorted(_canonical(key) + _canonical(part) for key, part in value.items()))),
)


def _canonical(value: Any) -> bytes:
    """Return bytes that no other value has: the type's name, and its content or its parts, each with its length before it."""
    for kind, content_of in _CONTENT:
        if isinstance(value, kind):
            name, content = type(value).__name__.encode(), content_of(value)
            return struct.pack("<QQ", len(name), len(content)) + name + content
    raise TrueStepError(
        f"expected a Python number, string, bool, None or a container of these, found {type(value).__name__}. "
        "Objects are reported, not read: leave it out."
    )
