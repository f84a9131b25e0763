"""Digests against their definition, and every change that real faults make."""

from __future__ import annotations

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from truestep.state import digest
from truestep.words.errors import TrueStepError
from truestep.words.shards import Box, boxes_of_range, runs, split_box, whole

MOD = 1 << 64
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    *FLOATS,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
WIDTHS = (torch.uint8, torch.int16, torch.float32, torch.float64)  # 1, 2, 4 and 8 bytes


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of random bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
    octets = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return octets.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def mixed(index: int, stream: int) -> int:
    number = (index + (stream << 60) + 1) * 0x9E3779B97F4A7C15 % MOD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        number = (number ^ (number >> shift)) * factor % MOD
    return number


def by_definition(tensor: Tensor, first: int = 0) -> tuple[int, int]:
    """The lanes of a flat range that starts at element `first` of the whole, an element at a time."""
    lanes = [0, 0]
    size = tensor.element_size()
    octets = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    for element in range(tensor.numel()):
        content = octets[element * size : (element + 1) * size]
        place = (first + element) * size
        for part in range(0, size, 4):
            word, inside = divmod(place + part, 4)
            bits = int.from_bytes(content[part : part + 4], "little") << (8 * inside)
            rotated = (bits >> 16) | (bits << 16) & 0xFFFFFFFF
            once = (1 << 32) if part == 0 else 0
            block, within = divmod(word, digest.BLOCK)
            lanes[0] += (bits + once) * (mixed(within, 0) | 1) * (mixed(block, 2) | 1)
            lanes[1] += (rotated + once) * mixed(within, 1) * (mixed(block, 3) | 1)
    return lanes[0] % MOD, lanes[1] % MOD


def of_whole(tensor: Tensor) -> tuple[int, int]:
    return digest.lanes(tensor, whole(tuple(tensor.shape)), tuple(tensor.shape))


def of_range(tensor: Tensor, start: int, stop: int) -> tuple[int, int]:
    shape = (tensor.numel(),)
    return digest.lanes(tensor.reshape(-1)[start:stop], Box((start,), (stop,)), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 3, 5), (0,), (4, 0, 3)], ids=str)
def test_lanes_follow_the_definition(dtype, shape):
    tensor = drawn(dtype, shape, seed=len(shape))
    assert of_whole(tensor) == by_definition(tensor)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_lanes_follow_the_definition_over_several_blocks(dtype):
    numel = (2 * digest.BLOCK + 77) * 4 // dtype.itemsize + 1
    tensor = drawn(dtype, (numel,), seed=3)
    assert of_whole(tensor) == by_definition(tensor)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("start", [digest.BLOCK * 4 - 3, digest.BLOCK * 4 * 1500 + 5])
def test_a_piece_that_lies_far_inside_counts_from_its_own_place(dtype, start):
    piece = drawn(dtype, (33,), seed=5)
    stop = start + 33
    assert digest.lanes(piece, Box((start,), (stop,)), (stop + 100,)) == by_definition(piece, start)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize(("shape", "dim"), [((23, 9), 0), ((23, 9), 1), ((5, 11, 6), 1), ((3, 5 * digest.BLOCK), 1)], ids=str)
def test_boxes_on_any_axis_add_up_to_the_whole(dtype, parts, shape, dim):
    tensor = drawn(dtype, shape, seed=7)
    pieces = [(tensor[box.slices], box) for box in split_box(shape, dim, parts)]
    assert digest.total(digest.lanes(piece, box, shape) for piece, box in pieces) == of_whole(tensor)
    assert digest.total(digest.lanes(piece.clone(), box, shape) for piece, box in pieces) == of_whole(tensor)


@given(data=st.data(), dtype=st.sampled_from(WIDTHS), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
def test_any_cuts_of_the_flat_tensor_add_up_inside_a_word_too(data, dtype, shape):
    tensor = drawn(dtype, shape, seed=11)
    numel = tensor.numel()
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=5))})
    flat, seen = tensor.reshape(-1), []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        for offset, box in runs(shape, start, stop):
            seen.append(digest.lanes(flat[start + offset : start + offset + box.numel].view(box.shape), box, shape))
    assert digest.total(seen) == of_whole(tensor)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_strides_do_not_matter(dtype):
    tensor = drawn(dtype, (13, 6, 5), seed=13)
    dense = of_whole(tensor)
    assert of_whole(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == dense
    apart = torch.stack((tensor, tensor), -1)[..., 0]
    assert of_whole(apart) == dense
    shifted = torch.cat((tensor.reshape(-1)[:1], tensor.reshape(-1)))[1:].view(13, 6, 5)  # begins inside a word of memory
    assert of_whole(shifted) == dense


def test_conjugate_views_are_read_as_what_they_say():
    tensor = drawn(torch.complex64, (3, 4), seed=17)
    assert of_whole(tensor.conj()) == of_whole(tensor.conj().resolve_conj()) != of_whole(tensor)


@given(data=st.data(), dtype=st.sampled_from(WIDTHS))
def test_any_single_bit_changes_the_first_lane(data, dtype):
    tensor = drawn(dtype, (6, 7), seed=19)
    changed = tensor.clone()
    octets = changed.reshape(-1).view(torch.uint8)
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert of_whole(changed)[0] != of_whole(tensor)[0]


@given(data=st.data(), dtype=st.sampled_from(FLOATS))
def test_two_sign_flips_are_seen(data, dtype):
    tensor = drawn(dtype, (9, 5), seed=23)
    one, two = data.draw(st.lists(st.integers(0, 44), min_size=2, max_size=2, unique=True))
    changed = tensor.clone()
    octets = changed.reshape(-1).view(torch.uint8).view(45, -1)
    octets[[one, two], -1] ^= 128
    assert of_whole(changed) != of_whole(tensor)


@given(data=st.data(), dtype=st.sampled_from(WIDTHS))
def test_swapped_elements_are_seen(data, dtype):
    tensor = drawn(dtype, (8, 5), seed=29).reshape(-1)
    one, two = data.draw(st.lists(st.integers(0, 39), min_size=2, max_size=2, unique=True))
    changed = tensor.clone()
    changed[[one, two]] = tensor[[two, one]]
    same = digest.bitwise_equal(changed, tensor)
    assert (of_whole(changed) == of_whole(tensor)) == same


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", [2, 35, digest.BLOCK * 4])
def test_negation_is_seen(dtype, numel):
    tensor = torch.arange(1, numel + 1).remainder(100).to(dtype)
    assert of_whole(-tensor) != of_whole(tensor)
    assert of_whole(-torch.zeros(numel, dtype=dtype)) != of_whole(torch.zeros(numel, dtype=dtype))


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("row", [1, 3, 16, digest.BLOCK * 4])  # the last: a whole number of blocks, for every dtype
def test_swapped_and_shifted_rows_are_seen(dtype, row):
    tensor = drawn(dtype, (5, row), seed=31)
    tensor[3] = tensor[1] + 1  # no two rows alike, also where one element is a byte
    for other in (tensor[[0, 3, 2, 1, 4]], tensor.roll(1, 0), tensor.roll(1, 1) if row > 1 else tensor.flip(0), tensor.flip(0)):
        if not digest.bitwise_equal(other, tensor):
            assert of_whole(other) != of_whole(tensor)


@given(data=st.data(), dtype=st.sampled_from(WIDTHS))
def test_a_dropped_and_a_doubled_piece_of_zeros_are_seen(data, dtype):
    tensor = torch.zeros(61, dtype=dtype)
    start = data.draw(st.integers(0, 60))
    stop = data.draw(st.integers(start + 1, 61))
    before, piece, after = of_range(tensor, 0, start), of_range(tensor, start, stop), of_range(tensor, stop, 61)
    assert digest.total([before, piece, after]) == of_whole(tensor)
    assert digest.total([before, after]) != of_whole(tensor)
    assert digest.total([before, piece, piece, after]) != of_whole(tensor)


def test_every_contiguous_piece_of_zero_words_inside_a_block_counts():
    # Its lanes are 2^32 c (sum of keys), c up to 4, zero only if two of these running sums agree modulo 2^30 in both lanes.
    for each in (1, 2, 4):
        sums = digest._inner_sums(each).remainder(1 << 30)[:, ::each]
        assert len(torch.unique(sums, dim=1)[0]) == digest.BLOCK // each + 1


def test_shape_dtype_and_lanes_all_enter_the_digest():
    lanes = of_whole(torch.arange(12.0))
    hexes = {
        digest.digest("torch.float32", (12,), lanes),
        digest.digest("torch.float32", (3, 4), lanes),
        digest.digest("torch.int32", (12,), lanes),
        digest.digest("torch.float32", (12,), (lanes[0], lanes[1] ^ 1)),
        digest.digest("torch.float32", (12,), (lanes[1], lanes[0])),
        digest.digest("torch.float32", (), (0, 0)),
        digest.digest("torch.float32", (0,), (0, 0)),
    }
    assert len(hexes) == 7
    assert all(len(text) == 32 for text in hexes)


def test_the_digest_of_fixed_content_never_changes():
    tensor = torch.arange(1000, dtype=torch.float32).view(25, 40)
    assert digest.digest("torch.float32", (25, 40), of_whole(tensor)) == FIXED


FIXED = "38d6603f2f11cc4cf4a588dbfc6170c9"


def test_a_piece_that_does_not_fill_its_box_is_refused():
    with pytest.raises(TrueStepError, match=r"expected a piece of 6 elements.*found one of 5"):
        digest.lanes(torch.zeros(5), Box((0, 0), (2, 3)), (4, 3))


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_its_own_bits_is_refused(tensor):
    with pytest.raises(TrueStepError, match="expected a dense tensor with its own bits"):
        digest.lanes(tensor, whole((3, 3)), (3, 3))


def test_digesting_leaves_the_tensor_and_the_generator_alone():
    tensor = drawn(torch.float32, (40, 50), seed=37).requires_grad_()
    before, state = tensor.detach().clone(), torch.get_rng_state()
    of_whole(tensor)
    assert digest.bitwise_equal(tensor, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensor.grad_fn is None


VALUES = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan, math.inf, 1e-3, 0j, complex(0.0, -0.0), "", "1", "None",
    (), [], {}, (1, 2), [1, 2], (1.0, 2), ((1,), 2), (1, (2,)), (1, 2, 0), ("1", "2"), ("12",), {"a": 1}, {"a": 1.0}, {"b": 1},
]  # fmt: skip


def test_every_two_values_are_told_apart():
    lanes = [digest.value_lanes(value) for value in VALUES]
    assert len(set(lanes)) == len(VALUES)
    assert lanes == [digest.value_lanes(value) for value in VALUES]


def test_a_mapping_counts_without_its_order_and_a_deque_by_its_items():
    assert digest.value_lanes({"a": 1, "b": 2}) == digest.value_lanes({"b": 2, "a": 1})
    assert digest.value_lanes(collections.deque([1, 2])) != digest.value_lanes(collections.deque([2, 1]))


def test_an_object_is_no_value():
    with pytest.raises(TrueStepError, match="found object"):
        digest.value_lanes((1, object()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitwise_equal_knows_copies_whatever_bits_they_hold(dtype):
    tensor = drawn(dtype, (4, 5), seed=41)
    assert digest.bitwise_equal(tensor, tensor.clone())
    assert digest.bitwise_equal(tensor.T, tensor.T.contiguous())
    changed = tensor.clone()
    changed.view(torch.uint8)[3, -1] ^= 1
    assert not digest.bitwise_equal(tensor, changed)


def test_bitwise_equal_tells_zeros_nans_dtypes_and_shapes_apart():
    assert not digest.bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert digest.bitwise_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not digest.bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not digest.bitwise_equal(torch.zeros(2, 1), torch.zeros(2))
    assert digest.bitwise_equal(torch.zeros(0, 3), torch.ones(0, 3))
    assert digest.bitwise_equal(torch.tensor(2.5), torch.tensor(2.5))


@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_a_box_inside_follows_the_definition_row_by_row(data, shape):
    tensor = drawn(torch.int16, shape, seed=43)
    start = tuple(data.draw(st.integers(0, length)) for length in shape)
    stop = tuple(data.draw(st.integers(low, length)) for low, length in zip(start, shape, strict=True))
    box = Box(start, stop)
    places = torch.arange(tensor.numel()).view(shape)[box.slices].reshape(-1).tolist()
    flat = tensor.reshape(-1)
    expected = digest.total(by_definition(flat[place], place) for place in places)
    assert digest.lanes(tensor[box.slices], box, shape) == expected


def test_boxes_of_a_flat_range_give_the_lanes_of_the_range():
    tensor = drawn(torch.float64, (4, 5, 6), seed=47)
    boxes = boxes_of_range((4, 5, 6), 7, 101)
    assert digest.total(digest.lanes(tensor[box.slices], box, (4, 5, 6)) for box in boxes) == of_range(tensor, 7, 101)
