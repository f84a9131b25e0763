"""The plan of a probe covers what it says, on plain data."""

from __future__ import annotations

import torch

from truestep.optimizers.probe import plan
from truestep.optimizers.probe.plan import BOX, FLAT, FUSED, KINDS, RESHAPED, Subject, plan_of, subjects_of, with_companions
from truestep.optimizers.probe.probing import lowerings
from truestep.optimizers.probe.run import field, start

USUAL = plan_of(subjects_of(None))


def test_the_usual_params_have_unlike_sizes_and_all_ndims() -> None:
    subjects = subjects_of(None)
    assert {one.ndim for one in subjects} == {0, 1, 2, 4}
    assert len({one.numel for one in subjects}) == len(subjects)
    (tall,) = [one for one in subjects if one.ndim == 2 and one.shape[0] > one.shape[1]]
    (wide,) = [one for one in subjects if one.ndim == 2 and one.shape[0] < one.shape[1]]
    assert tall != wide


def test_every_subject_is_there_once_for_each_kind_under_a_name_of_its_own() -> None:
    assert [one.kind for one in USUAL.subjects] == [kind for kind in KINDS for _ in subjects_of(None)]
    assert len({one.name for one in USUAL.subjects}) == len(USUAL.subjects)


def test_ranks_of_a_cut_share_no_element_and_dims_and_flat_ranges_cover_the_whole() -> None:
    for cut in USUAL.cuts:
        places = [place for member in cut.members for place in member.places]
        assert len(set(places)) == len(places)
        if cut.layout not in (BOX, FUSED):
            (whole,) = [member for member in USUAL.wholes if member.subject in cut.subjects]
            assert sorted(places) == sorted(whole.places)


def test_a_piece_holds_the_elements_that_indexing_gives() -> None:
    whole = next(member for member in USUAL.wholes if member.whole_ndim == 4)
    flat = torch.arange(USUAL.numel)
    tensor = flat[list(whole.places)].view(whole.shape)
    for cut in USUAL.cuts:
        if cut.subjects == (whole.subject,) and cut.layout == "dim 1":
            parts = torch.cat([flat[list(member.places)].view(member.shape) for member in cut.members], 1)
            assert torch.equal(parts, tensor)


def test_all_layouts_come_once_and_the_plain_ones_with_every_kind() -> None:
    layouts = {kind: {cut.layout for cut in USUAL.cuts if USUAL.subjects[cut.subjects[0]].kind == kind} for kind in KINDS}
    assert layouts["drift"] == {"dim 0", "dim 1", "dim 2", "dim 3", BOX, FLAT, RESHAPED, FUSED}
    assert layouts["noise"] == layouts["bowl"] == set(plan.PLAIN_LAYOUTS)


def test_a_flat_range_ends_inside_a_row() -> None:
    for cut in USUAL.cuts:
        if cut.layout == FLAT:
            assert len(cut.members[0].places) % USUAL.subjects[cut.subjects[0]].shape[-1] != 0


def test_a_fused_tensor_holds_ranges_of_two_params_that_miss_their_gradients_together() -> None:
    fused = [cut for cut in USUAL.cuts if cut.layout == FUSED]
    assert {number for cut in fused for number in cut.subjects} == set(range(len(USUAL.subjects)))
    for cut in fused:
        first, second = cut.subjects
        assert [plan.absent_in(first, step) for step in range(64)] == [plan.absent_in(second, step) for step in range(64)]


def test_the_short_run_has_a_zero_step_and_one_without_gradients_for_each_half() -> None:
    steps = range(plan.FIRST_STEPS)
    assert any(plan.zero_in(step) for step in steps)
    assert all(any(plan.absent_in(subject, step) for step in steps) for subject in range(4))


def test_few_params_get_companions_of_other_sizes_so_that_each_group_has_two() -> None:
    found = with_companions([Subject("w", (8, 6))])
    assert len(found) == 4
    assert len({one.shape for one in found}) == len({one.name for one in found}) == 4
    assert {one.ndim for one in found} == {2}


def test_gradients_change_their_scale_and_are_the_same_each_time() -> None:
    noise = plan_of(subjects_of(None), ("noise",))
    one, other = field(noise, 16), field(noise, 16)
    assert torch.equal(one.rows, other.rows)
    params = start(noise)
    sizes = [float(one.gradient(step, params).abs().mean()) for step in range(16)]
    assert sizes[5] == sizes[14] == 0.0
    assert max(sizes) > 5 * min(size for size in sizes if size)


def test_what_one_setting_hides_of_another_is_lowered_together_and_alone() -> None:
    assert lowerings([]) == []
    assert lowerings(["a"]) == [("a",)]
    assert lowerings(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c"), ("a",), ("b",), ("c",)]
