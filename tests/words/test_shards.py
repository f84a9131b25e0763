"""The algebra of boxes and flat ranges, against sets of indices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from truestep.words.shards import (
    Box,
    Cover,
    Rows,
    boxes_of_range,
    cover,
    intersect,
    rows,
    runs,
    split,
    split_box,
    subtract,
    whole,
)

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    cuts = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Box(tuple(start for start, _ in cuts), tuple(stop for _, stop in cuts))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in zip(box.start, box.stop, strict=True))))


def flat_indices(shape: tuple[int, ...], box: Box) -> list[int]:
    """Where the elements of a box lie in the row-major order, in the box's own."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(index * stride for index, stride in zip(place, strides, strict=True)) for place in sorted(indices(box))]


# -- split


@given(length=st.integers(0, 40), parts=st.integers(1, 12))
def test_split_is_chunk_with_its_missing_tail_as_empty_ranges(length, parts):
    ranges = split(length, parts)
    assert len(ranges) == parts
    pieces = [list(range(start, stop)) for start, stop in ranges]
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(parts)]
    assert [piece for piece in pieces if piece] == [chunk for chunk in chunks if chunk]
    assert all(start <= stop <= length for start, stop in ranges)


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0)])
def test_split_refuses_what_cannot_be_cut(length, parts):
    with pytest.raises(ValueError, match=rf"found length {length} and {parts} parts"):
        split(length, parts)


def test_split_box_cuts_one_axis_and_keeps_empty_parts():
    assert split_box((5, 3), 0, 4) == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (4, 3)),
        Box((4, 0), (5, 3)),
        Box((5, 0), (5, 3)),
    ]
    assert split_box((2, 6), -1, 2) == [Box((0, 0), (2, 3)), Box((0, 3), (2, 6))]


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((2, 3), 2), ((2, 3), -3)])
def test_split_box_refuses_an_axis_that_is_not_there(shape, dim):
    with pytest.raises(ValueError, match=f"found dim {dim}"):
        split_box(shape, dim, 2)


# -- boxes of a flat range


@given(data=st.data(), shape=SHAPES)
def test_boxes_of_a_range_are_its_elements_in_order_in_few_runs(data, shape):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = boxes_of_range(shape, start, stop)
    assert [place for box in boxes for place in flat_indices(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in boxes)


@given(data=st.data(), shape=SHAPES)
def test_runs_say_where_each_box_lies_in_the_piece(data, shape):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    piece = list(range(start, stop))
    for offset, box in runs(shape, start, stop):
        assert piece[offset : offset + box.numel] == flat_indices(shape, box)
    assert tuple(box for _, box in runs(shape, start, stop)) == boxes_of_range(shape, start, stop)


def test_as_many_boxes_as_the_bound_allows_do_occur():
    assert len(boxes_of_range((3, 3, 3), 1, 26)) == 5


@pytest.mark.parametrize(("shape", "start", "stop"), [((), 0, 1), ((), 0, 0), ((0, 3), 0, 0), ((2, 0), 0, 0)])
def test_ranges_of_0d_and_of_empty_tensors(shape, start, stop):
    assert boxes_of_range(shape, start, stop) == ((Box((), ()),) if stop else ())


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_is_refused(start, stop):
    with pytest.raises(ValueError, match=rf"inside 0 to 6, of shape \(2, 3\), found {start} to {stop}"):
        boxes_of_range((2, 3), start, stop)


# -- rows


@given(drawn=shapes_with_boxes(1))
def test_rows_are_the_runs_of_a_box(drawn):
    shape, (box,) = drawn
    if not box.numel:
        return
    found = rows(shape, box)
    starts = [
        found.first + sum(index * stride for index, stride in zip(place, found.strides, strict=True))
        for place in itertools.product(*map(range, found.counts))
    ]
    assert [place for start in starts for place in range(start, start + found.length)] == flat_indices(shape, box)


def test_rows_run_as_far_as_they_can():
    assert rows((4, 3, 2), Box((1, 0, 0), (3, 3, 2))) == Rows(6, 12, (), ())
    assert rows((4, 3, 2), Box((1, 0, 0), (3, 3, 1))) == Rows(6, 1, (2, 3), (6, 2))
    assert rows((), Box((), ())) == Rows(0, 1, (), ())


# -- intersect, subtract, cover


@given(drawn=shapes_with_boxes(2))
def test_intersect_is_the_shared_elements_or_none(drawn):
    _, (a, b) = drawn
    shared = intersect(a, b)
    assert (indices(shared) if shared else set()) == indices(a) & indices(b)
    assert shared is None or shared.numel
    assert shared == intersect(b, a)


@given(drawn=shapes_with_boxes(2))
def test_subtract_leaves_the_other_elements_in_few_disjoint_boxes(drawn):
    shape, (a, b) = drawn
    rest = subtract(a, b)
    left = [index for box in rest for index in indices(box)]
    assert len(left) == len(set(left))
    assert set(left) == indices(a) - indices(b)
    assert len(rest) <= max(2 * len(shape), 1)
    assert all(box.numel for box in rest)


def test_boxes_of_two_tensors_are_refused():
    with pytest.raises(ValueError, match="found 1 and 2 axes"):
        intersect(whole((3,)), whole((3, 4)))


@given(drawn=st.integers(0, 5).flatmap(shapes_with_boxes))
def test_cover_counts_elements_in_no_box_and_in_several(drawn):
    shape, boxes = drawn
    times = dict.fromkeys(indices(whole(shape)), 0)
    for box in boxes:
        for index in indices(box):
            times[index] += 1
    found = cover(shape, boxes)
    assert found == Cover(sum(n == 0 for n in times.values()), sum(n > 1 for n in times.values()))
    assert found.exact == all(n == 1 for n in times.values())


@given(data=st.data(), shape=SHAPES)
def test_the_boxes_of_any_cuts_cover_exactly(data, shape):
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    boxes = [box for start, stop in itertools.pairwise(cuts) for box in boxes_of_range(shape, start, stop)]
    assert cover(shape, boxes).exact


def test_cover_never_makes_the_tensor():
    shape = (10**9, 10**9)
    boxes = [box for part in split_box(shape, 0, 64) for box in [part]]
    assert cover(shape, boxes) == Cover(0, 0)
    assert cover(shape, boxes[1:]) == Cover(boxes[0].numel, 0)
    assert cover(shape, [*boxes, boxes[5]]) == Cover(0, boxes[5].numel)


def test_a_box_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"inside a tensor of shape \(2, 3\), found \(0, 1\) to \(2, 4\)"):
        cover((2, 3), [Box((0, 1), (2, 4))])
    with pytest.raises(ValueError, match=r"found \(0,\) to \(2,\)"):
        cover((2, 3), [Box((0,), (2,))])


def test_a_box_cuts_itself_out():
    tensor = torch.arange(24).view(2, 3, 4)
    box = Box((1, 0, 2), (2, 2, 4))
    assert tensor[box.slices].tolist() == [[[14, 15], [18, 19]]]
    assert (box.shape, box.numel) == ((1, 2, 2), 4)
    assert (whole(()).shape, whole(()).numel, whole((0, 2)).numel) == ((), 1, 0)
