"""The faults that people write into their own loops: each is found and named, and the loop without it is equal."""

from __future__ import annotations

import pytest

MICRO_BATCHES, RANKS, STEPS = 3, 2, 4
ZERO = ("zero0", "zero1", "zero2", "zero3")

# Program, backend -> law, phase, step of the first finding, words of its cause.
FAULTS = {
    # -- which gradients enter the step
    ("with_ddp:steps_in_every_micro_batch", "ddp"): ("gradient", "reduce", 1, "the first micro-batch of 3 alone"),
    ("with_fsdp2:steps_in_every_micro_batch", "fsdp2"): ("gradient", "reduce", 1, "the first micro-batch of 3 alone"),
    **{
        ("with_zero:steps_in_every_micro_batch", backend): ("gradient", "reduce", 1, "the first micro-batch of 3 alone")
        for backend in ZERO
    },
    **{
        ("with_accelerate:does_not_accumulate", backend): ("gradient", "reduce", 1, "the first micro-batch of 3 alone")
        for backend in ("accelerate-ddp", "accelerate-fsdp2", "accelerate-zero2")
    },
    ("with_zero:steps_before_the_last_micro_batch", "zero1"): ("gradient", "reduce", 1, "the first 2 of 3 micro-batches alone"),
    ("with_zero:steps_before_the_last_micro_batch", "zero3"): ("gradient", "reduce", 1, "the first 2 of 3 micro-batches alone"),
    ("with_ddp:clears_before_the_last_micro_batch", "ddp"): ("gradient", "reduce", 1, "the last micro-batch alone"),
    ("with_fsdp2:clears_before_the_last_micro_batch", "fsdp2"): ("gradient", "reduce", 1, "the last micro-batch alone"),
    ("with_zero:accumulates_by_hand", "zero1"): ("gradient", "reduce", 1, "the last micro-batch alone"),
    ("with_zero:accumulates_by_hand", "zero2"): ("gradient", "reduce", 1, "the last micro-batch alone"),
    ("with_accelerate:accumulates_by_hand", "accelerate-zero2"): ("gradient", "reduce", 1, "the first micro-batch of 3 alone"),
    ("with_ddp:never_clears", "ddp"): ("gradient", "reduce", 2, "still holds the previous window's"),
    ("with_ddp_steps:never_steps", "ddp"): ("gradient", "reduce", 1, "no step was taken"),
    ("with_ddp_steps:skips_the_second_step", "ddp"): ("gradient", "reduce", 2, "no step was taken"),
    # -- how they are reduced
    ("with_ddp:stays_in_no_sync", "ddp"): ("gradient", "reduce", 1, "only rank 0's own gradients: they were never reduced"),
    ("with_ddp:calls_the_raw_module", "ddp"): ("gradient", "reduce", 1, "only rank 0's own gradients: they were never reduced"),
    ("with_fsdp2:never_reduces", "fsdp2"): ("gradient", "reduce", 1, "never reduced to where the optimizer looks"),
    ("with_ddp:sums_a_mean_loss", "ddp"): ("gradient", "reduce", 1, "summed over the 2 ranks instead of averaged"),
    ("with_fsdp2:sums_a_mean_loss", "fsdp2"): ("gradient", "reduce", 1, "summed over the 2 ranks instead of averaged"),
    # -- how they are weighed
    ("with_ddp:does_not_divide_by_the_micro_batches", "ddp"): ("gradient", "reduce", 1, "not divided by the 3 micro-batches"),
    ("with_fsdp2:does_not_divide_by_the_micro_batches", "fsdp2"): ("gradient", "reduce", 1, "not divided by the 3 micro-batches"),
    ("with_ddp:divides_by_the_micro_batches_twice", "ddp"): ("gradient", "reduce", 1, "divided by the 3 micro-batches twice"),
    **{
        ("with_zero:divides_by_the_micro_batches_twice", backend): (
            "gradient",
            "reduce",
            1,
            "divided by the 3 micro-batches twice",
        )
        for backend in ZERO
    },
    **{
        ("with_accelerate:divides_by_the_micro_batches_twice", backend): (
            "gradient",
            "reduce",
            1,
            "divided by the 3 micro-batches twice",
        )
        for backend in ("accelerate-ddp", "accelerate-fsdp2", "accelerate-zero2")
    },
    ("with_ddp:forgets_that_ddp_divides_by_the_ranks", "ddp"): ("gradient", "reduce", 1, "divided by the 2 ranks twice"),
    ("with_ddp:means_the_means", "ddp"): ("gradient", "reduce", 1, "a mean of means"),
    ("with_fsdp2:means_the_means", "fsdp2"): ("gradient", "reduce", 1, "a mean of means"),
    ("with_zero:means_the_means", "zero2"): ("gradient", "reduce", 1, "a mean of means"),
    ("with_ddp:weighs_by_the_tokens_of_its_own_rank", "ddp"): ("gradient", "reduce", 1, "a mean of the ranks' means"),
    # -- between backward and step
    ("with_ddp_steps:edits_a_gradient", "ddp"): ("gradient", "reduce", 1, "no combination of this window's local gradients"),
    ("with_fsdp2:edits_a_gradient", "fsdp2"): ("gradient", "reduce", 1, "no combination of this window's local gradients"),
    ("with_ddp_steps:clips_before_the_last_backward", "ddp"): ("gradient", "clip", 1, "clipped before the last backward"),
    ("with_fsdp2:clips_before_the_last_backward", "fsdp2"): ("gradient", "clip", 1, "clipped before the last backward"),
    ("with_ddp_steps:clips_twice", "ddp"): ("gradient", "clip", 1, "clipped more than once"),
    ("with_ddp_steps:clips_at_another_norm", "ddp"): ("gradient", "clip", 1, "another norm than the recipe declares"),
    ("with_ddp_steps:clips_every_param_by_itself", "ddp"): ("gradient", "clip", 1, "a factor of its own"),
    ("with_ddp_steps:clips_the_head_alone", "ddp"): ("gradient", "clip", 1, "only some of the params"),
    ("with_ddp_steps:clips_on_one_rank_only", "ddp"): ("gradient", "clip", 1, "the ranks do not clip alike"),
    ("with_ddp_steps:edits_a_gradient_after_clipping", "ddp"): ("gradient", "clip", 1, "changed after clipping"),
    ("with_fsdp2:clips_by_the_norm_of_its_own_shards", "fsdp2"): ("gradient", "clip", 1, "not that of the whole reduced"),
    ("with_fsdp2:clips_each_rank_by_its_own_norm", "fsdp2"): ("gradient", "reduce", 1, "no combination"),
    ("with_zero:clips_at_another_norm", "zero1"): ("gradient", "clip", 1, "another norm than the recipe declares"),
    ("with_zero:clips_with_torch", "zero2"): ("gradient", "clip", 1, "no clipping acted on what enters the step"),
    ("with_zero:clips_with_torch", "zero3"): ("gradient", "clip", 1, "no clipping acted on what enters the step"),
    ("with_accelerate:clips_by_a_value_that_the_engine_ignores", "accelerate-zero2"): (
        "gradient",
        "clip",
        1,
        "no clipping acted on what enters the step",
    ),
    # -- the optimizer
    ("with_fsdp2:builds_the_optimizer_before_sharding", "fsdp2"): ("params", "update", 1, "built before the model was wrapped"),
    ("with_ddp_steps:forgets_the_head", "ddp"): ("params", "update", 1, "no optimizer was given this param"),
    ("with_accelerate:adagrad_keeps_its_old_state", "accelerate-fsdp2"): ("params", "update", 1, "the params were swapped"),
    **{
        ("with_zero:schedules_the_optimizer_that_was_handed_over", backend): (
            "params",
            "update",
            2,
            "the optimizer that the loop and its schedule hold is not the one that steps",
        )
        for backend in ("zero1", "zero2", "zero3")
    },
    ("with_ddp_steps:steps_its_schedule_in_every_micro_batch", "ddp"): ("params", "update", 1, "set otherwise than by one step"),
    # -- between two steps, and between ranks
    ("with_ddp_steps:zeroes_its_state_before_each_window", "ddp"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_fsdp2:zeroes_its_state_before_each_window", "fsdp2"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_zero:zeroes_its_state_before_each_window", "zero1"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_zero:zeroes_its_state_before_each_window", "zero3"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_ddp_steps:parks_moments_in_bf16_each_step", "ddp"): (
        "drift",
        "between",
        2,
        "something other than the optimizer",
    ),
    ("with_fsdp2:parks_moments_in_bf16_each_step", "fsdp2"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_zero:parks_moments_in_bf16_each_step", "zero2"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_ddp_steps:edits_a_weight_on_one_rank", "ddp"): ("drift", "between", 2, "something other than the optimizer"),
    ("with_ddp_steps:steps_on_one_rank_only", "ddp"): ("ranks", "update", 1, "some ranks stepped and others skipped"),
    ("with_fsdp2:looks_at_the_loss_between_backward_and_step", "fsdp2"): (
        "ranks",
        "forward",
        2,
        "the forward read other values than the params that the last step wrote",
    ),
}

HEALTHY = [
    ("with_ddp:healthy", "ddp"),
    ("with_ddp:healthy_and_reduced_in_every_micro_batch", "ddp"),
    ("with_ddp:healthy_and_clipped", "ddp"),
    ("with_ddp_steps:healthy_and_clipped_twice_alike", "ddp"),
    ("with_ddp:healthy_sum", "ddp"),
    ("with_ddp:healthy_sum_of_counted_items", "ddp"),
    ("with_ddp:healthy_sum_of_padded", "ddp"),
    ("with_ddp:healthy_weights", "ddp"),
    ("with_ddp_steps:healthy_rate_set_by_hand", "ddp"),
    ("with_ddp_steps:healthy_schedule", "ddp"),
    ("with_fsdp2:healthy", "fsdp2"),
    ("with_fsdp2:healthy_and_reduced_in_every_micro_batch", "fsdp2"),
    ("with_fsdp2:healthy_and_clipped", "fsdp2"),
    ("with_fsdp2:healthy_and_clipped_by_a_norm_made_whole", "fsdp2"),
    ("with_fsdp2:healthy_sum", "fsdp2"),
    ("with_fsdp2:healthy_sum_of_counted_items", "fsdp2"),
    ("with_fsdp2:healthy_sum_of_padded", "fsdp2"),
    ("with_fsdp2:healthy_weights", "fsdp2"),
    ("with_fsdp2:healthy_look_that_reshards", "fsdp2"),
    ("with_fsdp2:healthy_look_after_the_step", "fsdp2"),
    *(("with_zero:healthy", backend) for backend in ZERO),
    *(("with_zero:healthy_and_clipped", backend) for backend in ZERO),
    *(("with_zero:healthy_schedule", backend) for backend in ZERO),
    ("with_zero:healthy_weights", "zero1"),
    ("with_zero:accumulates_by_hand", "zero0"),
    ("with_zero:accumulates_by_hand", "zero3"),
    ("with_zero:schedules_the_optimizer_that_was_handed_over", "zero0"),
    *(("with_accelerate:healthy", f"accelerate-{under}") for under in ("ddp", "fsdp2", "zero2")),
    *(("with_accelerate:healthy_and_clipped", f"accelerate-{under}") for under in ("ddp", "fsdp2", "zero2")),
    ("with_accelerate:accumulates_by_hand", "accelerate-ddp"),
    ("with_accelerate:accumulates_by_hand", "accelerate-fsdp2"),
    ("with_accelerate:healthy_adagrad", "accelerate-fsdp2"),
    ("with_accelerate:adagrad_keeps_its_old_state", "accelerate-ddp"),
]


def asked(backend):
    return {"backend": backend, "micro_batches": MICRO_BATCHES, "world_size": RANKS, "steps": STEPS}


@pytest.mark.parametrize(("program", "backend"), FAULTS)
def test_a_fault_in_a_loop_of_the_users_is_found_and_named(judged, program, backend):
    report = judged(program, **asked(backend))
    assert report.verdict == "different"
    first = report.first
    law, phase, step, words = FAULTS[program, backend]
    assert (first.law, first.phase, first.step) == (law, phase, step), str(first)
    assert words in (first.cause or ""), str(first)
    assert first.fix.endswith(".")
    assert report.cells[0].loop == "yours"


@pytest.mark.parametrize(("program", "backend"), HEALTHY)
def test_a_right_loop_of_the_users_is_equal(equal, program, backend):
    assert equal(program, **asked(backend)).loop == "yours"
