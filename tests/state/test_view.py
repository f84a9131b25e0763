"""Views of hand-made slots: live, copied, compared, digested."""

from __future__ import annotations

import math
from collections import defaultdict, deque

import pytest
import torch
from torch import Tensor

from truestep.state import digest
from truestep.state.view import Slot, StateView, assemble, difference, slots_of
from truestep.words.errors import TrueStepError
from truestep.words.layout import Layout, Shard
from truestep.words.shards import Box, boxes_of_range, runs, split_box, whole


def replica(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    return Shard.replica(tuple(tensor.shape)), (tensor,)


def tensor_slot(name: str, key: str, tensor: Tensor, boxes: list[Box] | None = None) -> Slot:
    """The slot of the rank that holds these boxes of a tensor, views of it."""
    boxes = [whole(tuple(tensor.shape))] if boxes is None else boxes
    shard = Shard(Layout.WHOLE, tuple(tensor.shape), tuple(boxes))
    return Slot(name, key, "tensor", shard, tuple(tensor[box.slices] for box in boxes), dtype=tensor.dtype, device=tensor.device)


def value_slot(name: str, key: str, value: object) -> Slot:
    (slot,) = slots_of(name, key, value, replica)
    return slot


def adam_like() -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {("w", "param"): (3, 5), ("w", "exp_avg"): (3, 5), ("w", "step"): (), ("b", "param"): (7,), ("b", "exp_avg"): (7,)}
    return {slot_id: torch.randn(shape, generator=generator) for slot_id, shape in shapes.items()}


def a_view() -> StateView:
    slots = [tensor_slot(*slot_id, tensor) for slot_id, tensor in adam_like().items()]
    return StateView([*slots, value_slot("@group/0", "lr", 0.1), value_slot("@optimizer", "hook", print)])


# -- Looking


def test_a_view_is_a_mapping_in_the_order_it_was_given():
    view = a_view()
    assert list(view)[:3] == [("w", "param"), ("w", "exp_avg"), ("w", "step")]
    assert view.names == ["w", "b"]
    assert view.keys_of("w") == ["param", "exp_avg", "step"]
    assert view.keys_of("@group/0") == ["lr"]
    assert view["@group/0", "lr"].value == 0.1
    assert ("w", "exp_avg_sq") not in view
    assert len(view) == 7


def test_tensors_of_a_view_are_the_live_ones():
    tensor = torch.zeros(4, 3)
    view = StateView([tensor_slot("w", "param", tensor, split_box((4, 3), 0, 2)[1:])])
    view["w", "param"].local[0].fill_(9.0)
    assert tensor.tolist() == [[0.0] * 3] * 2 + [[9.0] * 3] * 2


def test_looking_creates_no_entry_in_a_defaultdict():
    state: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    state["w"]["exp_avg"] = torch.ones(2)
    view = StateView(slot for name, entry in state.items() for key in entry for slot in slots_of(name, key, entry[key], replica))
    assert view.get(("b", "exp_avg")) is None
    with pytest.raises(KeyError):
        view["b", "exp_avg"]
    view.copy(), view.digests(), view.diff(view)
    assert list(state) == ["w"]


def test_two_views_are_one_only_if_they_are_the_same_object():
    view = a_view()
    assert view == view
    assert view != a_view()
    assert len({view, a_view(), view}) == 2


def test_two_slots_of_one_name_and_key_are_refused():
    with pytest.raises(TrueStepError, match="expected one slot @group/0/lr, found two"):
        StateView([value_slot("@group/0", "lr", 0.1), value_slot("@group/0", "lr", 0.2)])


# -- From live state to slots


def test_containers_become_key_paths():
    state = {"Q": [torch.ones(2), None, torch.zeros(3)], "inner": {"a": torch.ones(1), "deep": {"b": 4}}}
    slots = [slot for key, value in state.items() for slot in slots_of("w", key, value, replica)]
    assert [(slot.key, slot.kind) for slot in slots] == [
        ("Q/0", "tensor"),
        ("Q/1", "value"),
        ("Q/2", "tensor"),
        ("inner/a", "tensor"),
        ("inner/deep/b", "value"),
    ]


@pytest.mark.parametrize(
    "value", [(0.9, 0.999), [1, 2, 3], deque([1.0]), (1 + 2j, None), [], (), {}, 3, True, None, "mean", math.nan]
)
def test_plain_values_and_containers_of_nothing_are_one_slot(value):
    slot = value_slot("@group/0", "x", value)
    assert (slot.kind, slot.key) == ("value", "x")
    assert slot.value is value


@pytest.mark.parametrize("value", [print, torch.float32, object(), {1, 2}, torch.Generator()])
def test_objects_are_reported_and_not_read(value):
    slot = value_slot("@optimizer", "x", value)
    assert (slot.kind, slot.value) == ("opaque", value)
    view = StateView([slot])
    assert view.digests() == {}
    assert view.diff(view.copy()) == []


def test_a_tensor_lies_as_its_place_says():
    pieces = [torch.ones(2, 3)]
    shard = Shard(Layout.DIM0, (4, 3), (Box((2, 0), (4, 3)),))
    (slot,) = slots_of("w", "exp_avg", torch.ones(4, 3), lambda tensor: (shard, tuple(pieces)))
    assert (slot.shape, slot.boxes, slot.dtype) == ((4, 3), shard.boxes, torch.float32)
    assert slot.local[0] is pieces[0]
    assert slot.shard.numel == 6


# -- Copies


def test_a_copy_shares_nothing_and_stays_as_it_was():
    tensors = adam_like()
    history = deque([1.0])
    view = StateView([*(tensor_slot(*slot_id, tensor) for slot_id, tensor in tensors.items()), value_slot("w", "seen", history)])
    copy = view.copy()
    before = {slot_id: tensor.clone() for slot_id, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.add_(1.0)
    history.append(2.0)
    assert all(torch.equal(copy[slot_id].local[0], tensor) for slot_id, tensor in before.items())
    assert copy["w", "seen"].value == deque([1.0])
    assert {finding.key for finding in copy.diff(view)} == {"param", "exp_avg", "step", "seen"}
    assert copy.orphans == view.orphans


def test_a_copy_of_a_strided_param_under_grad_is_a_plain_equal_tensor():
    base = torch.arange(24.0).view(4, 6)
    strided = base.T[1:4, ::2].requires_grad_()
    copy = StateView([tensor_slot("w", "param", strided)]).copy()["w", "param"]
    assert digest.bitwise_equal(copy.local[0], strided)
    assert not copy.local[0].requires_grad
    assert copy.local[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


# -- Differences


def test_a_view_and_its_copy_do_not_differ_even_where_it_is_not_a_number():
    view = StateView([tensor_slot("w", "param", torch.tensor([math.nan, -0.0])), value_slot("@group/0", "lr", math.nan)])
    assert view.diff(view.copy()) == []


def test_a_difference_says_where_and_by_how_much():
    before = torch.zeros(4, 3)
    boxes = split_box((4, 3), 0, 2)
    after = before.clone()
    after[3, 1] = -2.5
    (finding,) = StateView([tensor_slot("w", "exp_avg", before, boxes)]).diff(
        StateView([tensor_slot("w", "exp_avg", after, boxes)])
    )
    assert (finding.code, finding.severity, finding.param, finding.key) == ("drift/differs", "error", "w", "exp_avg")
    assert (finding.expected, finding.found) == ("the same bits", "values up to 2.5 away in (2, 0) to (4, 3)")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64], ids=str
)
def test_a_difference_is_measured_in_any_dtype(dtype):
    zeros, ones = torch.zeros(2, 3).to(dtype), torch.ones(2, 3).to(dtype)
    assert difference(tensor_slot("w", "x", zeros), tensor_slot("w", "x", ones)) == (
        "the same bits",
        "values up to 1 away in (0, 0) to (2, 3)",
    )


def test_zeros_of_two_signs_differ():
    assert difference(tensor_slot("w", "x", torch.tensor([0.0])), tensor_slot("w", "x", torch.tensor([-0.0]))) is not None


def test_absent_is_not_zero():
    zero = StateView([tensor_slot("w", "param", torch.ones(2)), tensor_slot("w", "exp_avg", torch.zeros(2))])
    none = StateView([tensor_slot("w", "param", torch.ones(2))])
    (gone,), (come,) = zero.diff(none), none.diff(zero)
    assert (gone.expected, gone.found, gone.key) == ("present", "absent", "exp_avg")
    assert (come.expected, come.found, come.key) == ("absent", "present", "exp_avg")
    assert set(zero.digests()) - set(none.digests()) == {"w/exp_avg"}


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (1, 1.0, ("1", "1.0")),
        (1, True, ("1", "True")),
        (0.0, -0.0, ("0.0", "-0.0")),
        ((0.9, 0.99), (0.9, 0.999), ("(0.9, 0.99)", "(0.9, 0.999)")),
        (None, 0, ("None", "0")),
        (3, print, ("value int", "opaque builtin_function_or_method")),
    ],
)
def test_values_differ_by_type_and_content(mine, theirs, words):
    assert difference(value_slot("@group/0", "x", mine), value_slot("@group/0", "x", theirs)) == words
    (finding,) = StateView([value_slot("@group/0", "x", mine)]).diff(StateView([value_slot("@group/0", "x", theirs)]))
    assert (finding.param, finding.key) == (None, "@group/0/x")


def test_dtype_shape_and_boxes_differ_in_words_but_a_layout_alone_does_not():
    tensor = torch.zeros(4, 3)
    upper, lower = split_box((4, 3), 0, 2)
    assert difference(tensor_slot("w", "x", tensor, [upper]), tensor_slot("w", "x", tensor, [lower])) == (
        "torch.float32 (4, 3) (here (0, 0) to (2, 3))",
        "torch.float32 (4, 3) (here (2, 0) to (4, 3))",
    )
    assert difference(tensor_slot("w", "x", tensor), tensor_slot("w", "x", tensor.double())) is not None
    assert difference(tensor_slot("w", "x", tensor), tensor_slot("w", "x", torch.zeros(3, 4))) is not None
    rows = Slot(
        "w", "x", "tensor", Shard(Layout.DIM0, (4, 3), (whole((4, 3)),)), (tensor,), dtype=tensor.dtype, device=tensor.device
    )
    assert difference(rows, tensor_slot("w", "x", tensor)) is None


# -- Whole slots


def test_full_is_a_copy_of_the_whole_from_any_pieces():
    tensor = torch.arange(60.0).view(3, 4, 5)
    slot = tensor_slot("w", "param", tensor, list(boxes_of_range((3, 4, 5), 0, 60)))
    pieces = tensor_slot("w", "param", tensor, [*boxes_of_range((3, 4, 5), 0, 33), *boxes_of_range((3, 4, 5), 33, 60)])
    for one in (slot, pieces):
        full = one.full()
        assert torch.equal(full, tensor)
        assert full.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_flat_pieces_find_their_boxes():
    tensor = torch.arange(24.0).view(2, 3, 4)
    flat = tensor.view(-1)[5:21]
    pieces = [(box, flat[offset : offset + box.numel]) for offset, box in runs((2, 3, 4), 5, 21)]
    rest = [(box, tensor[box.slices]) for box in (*boxes_of_range((2, 3, 4), 0, 5), *boxes_of_range((2, 3, 4), 21, 24))]
    assert torch.equal(assemble((2, 3, 4), [*pieces, *rest], "w"), tensor)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_slot_without_elements_has_a_whole_and_a_digest(shape):
    for boxes in ([], [whole(shape)]):
        slot = tensor_slot("w", "param", torch.empty(shape, dtype=torch.bfloat16), boxes)
        assert (slot.full().shape, slot.full().dtype) == (shape, torch.bfloat16)
        assert StateView([slot]).digests() == {"w/param": digest.digest("torch.bfloat16", shape, (0, 0))}


def test_a_whole_with_a_hole_is_refused():
    slot = tensor_slot("w", "param", torch.zeros(4, 3), split_box((4, 3), 0, 2)[:1])
    with pytest.raises(TrueStepError, match=r"w/param: expected pieces that cover its shape \(4, 3\), found none for 6 elements"):
        slot.full()
    with pytest.raises(TrueStepError, match="expected a piece of it on some rank"):
        assemble((2,), [], "w/param")


def test_a_value_has_no_whole():
    with pytest.raises(TrueStepError, match="@group/0/lr is no tensor but a value"):
        value_slot("@group/0", "lr", 0.1).full()


# -- Digests


def test_digests_do_not_depend_on_the_pieces():
    tensor = torch.randn(6, 7, generator=torch.Generator().manual_seed(11))
    cuts = ([whole((6, 7))], split_box((6, 7), 1, 3), [*boxes_of_range((6, 7), 0, 17), *boxes_of_range((6, 7), 17, 42)])
    digests = [StateView([tensor_slot("w", "param", tensor, boxes)]).digests() for boxes in cuts]
    assert digests[0] == digests[1] == digests[2]


def test_digests_name_every_slot_but_opaque_ones():
    assert list(a_view().digests()) == ["w/param", "w/exp_avg", "w/step", "b/param", "b/exp_avg", "@group/0/lr"]


def test_digests_tell_values_and_dtypes_apart():
    values = [1, 1.0, True, None, (1,), [1], "1", 0.0, -0.0]
    slots = [value_slot("@group/0", "x", value) for value in values]
    slots += [tensor_slot("@group/0", "x", torch.ones((), dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.int64)]
    assert len({StateView([slot]).digests()["@group/0/x"] for slot in slots}) == len(slots)


@pytest.mark.parametrize(
    ("boxes", "found"),
    [
        (split_box((4, 3), 0, 2)[:1], "6 elements on no rank, 0 in pieces that overlap"),
        ([whole((4, 3)), split_box((4, 3), 0, 2)[0]], "0 elements on no rank, 6 in pieces that overlap"),
        ([], "12 elements on no rank, 0 in pieces that overlap"),
    ],
)
def test_pieces_that_do_not_cover_a_slot_once_have_no_digest(boxes, found):
    with pytest.raises(TrueStepError) as caught:
        StateView([tensor_slot("w", "exp_avg", torch.zeros(4, 3), boxes)]).digests()
    (finding,) = caught.value.findings
    assert (finding.code, finding.param, finding.key, finding.found) == ("state/pieces", "w", "exp_avg", found)


# -- On ranks


@pytest.mark.truestep(world_size=3)
def test_shards_on_ranks_have_the_digests_of_the_whole_and_give_it_back(rank, world_size):
    tensor = torch.randn(5, 4, generator=torch.Generator().manual_seed(13)).to(torch.bfloat16)
    lonely = {
        slot_id: digest.digest(str(tensor.dtype), (5, 4), digest.lanes(tensor, whole((5, 4)), (5, 4))) for slot_id in ("w/x",)
    }
    flat = [boxes_of_range((5, 4), start, stop) for start, stop in ((0, 7), (7, 7), (7, 20))]
    for boxes in (split_box((5, 4), 0, world_size)[rank : rank + 1], list(flat[rank]), [whole((5, 4))]):
        slot = tensor_slot("w", "x", tensor, boxes)
        assert StateView([slot]).digests() == lonely
        assert torch.equal(slot.full(rank="all"), tensor)
        assert (slot.full(rank=1) is not None) == (rank == 1)


@pytest.mark.truestep(world_size=2)
def test_a_slot_that_one_rank_alone_has_is_digested_on_all(rank):
    view = StateView([tensor_slot("w", "x", torch.arange(3.0))] if rank == 1 else [])
    assert list(view.digests()) == ["w/x"]


@pytest.mark.truestep(world_size=3)
def test_replicas_that_differ_raise_on_all_ranks_and_name_the_odd_one(rank):
    tensor = torch.full((3,), 0.0 if rank != 1 else -0.0)
    view = StateView([tensor_slot("w", "x", tensor), value_slot("@group/0", "lr", 0.1 * (1 + (rank == 2)))])
    with pytest.raises(TrueStepError) as caught:
        view.digests()
    found = [(finding.code, finding.param, finding.key, finding.ranks) for finding in caught.value.findings]
    assert found == [("ranks/replicas-differ", "w", "x", (1,)), ("ranks/replicas-differ", None, "@group/0/lr", (2,))]


@pytest.mark.truestep(world_size=2)
def test_a_hole_in_the_whole_raises_on_all_ranks(rank):
    slot = tensor_slot("w", "x", torch.zeros(4, 3), split_box((4, 3), 0, 4)[rank : rank + 1])
    with pytest.raises(TrueStepError, match="found none for 6 elements"):
        slot.full(rank=0)


@pytest.mark.truestep(world_size=2)
def test_a_tensor_that_one_rank_cannot_read_raises_on_all_ranks(rank):
    tensor = torch.zeros(2, 2, device="meta" if rank == 1 else "cpu")
    with pytest.raises(TrueStepError, match="found a torch.strided on meta one"):
        StateView([tensor_slot("w", "x", tensor)]).digests()
