"""Public reports of wrong accumulation: done by hand the step is `different` at the right phase; the accumulator's is `equal`."""

from __future__ import annotations

from pathlib import Path

import pytest

from truestep.verification.verifying import verify

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "verification" / "programs"
K, STEPS = 3, 4

# Report -> the loop that is wrong, the backend, its law and phase, and the accumulator's recipe for the same.
REPORTS = {
    "open-instruct 1498: engine's K and the loop's disagree": ("with_zero:accumulates_by_hand", "zero2", "reduce", "plain"),
    "accelerate 3877: the last micro-batch alone": ("with_zero:accumulates_by_hand", "zero1", "reduce", "plain"),
    "transformers 35808: divided by K twice": ("with_zero:divides_by_the_micro_batches_twice", "zero2", "reduce", "plain"),
    "accelerate 1970: a step in each micro-batch": (
        "with_accelerate:does_not_accumulate",
        "accelerate-zero2",
        "reduce",
        "plain",
    ),
    "pytorch-lightning 9237: not reduced": ("with_ddp:calls_the_raw_module", "ddp", "reduce", "plain"),
    "accelerate 3762: a switch left off": ("with_fsdp2:never_reduces", "fsdp2", "reduce", "plain"),
    "transformers 24725: a mean of means": ("with_ddp:means_the_means", "ddp", "reduce", "plain"),
    "transformers 34242: counts not summed": ("with_ddp:weighs_by_the_tokens_of_its_own_rank", "ddp", "reduce", "plain"),
    "ms-swift 10117: normalised, and divided by K again": ("accumulate_recipes:divided_again", "ddp", "reduce", "plain"),
    "miles 3231: not normalised": ("with_fsdp2:does_not_divide_by_the_micro_batches", "fsdp2", "reduce", "plain"),
    "pytorch-lightning 19987: a tail divided by the full K": ("accumulate_recipes:tail_by_hand", "ddp", "reduce", "tail"),
    "accelerate 963: a scheduler that runs ahead": (
        "with_ddp_steps:steps_its_schedule_in_every_micro_batch",
        "ddp",
        "update",
        "scheduled",
    ),
    "clipped in every micro-batch": ("with_ddp_steps:clips_before_the_last_backward", "ddp", "clip", "clipped"),
}
RIGHT = {
    "plain": "adamw_ahead_mean_full_free",
    "tail": "adamw_equal_mean_tail_free",
    "clipped": "adamw_ahead_mean_full_clipped",
    "scheduled": "scheduled",
}


def judged(recipe, backend):
    program, _, name = recipe.partition(":")
    folder = HERE if program == "accumulate_recipes" else PROGRAMS
    return verify(f"{folder / program}.py:{name}", backend=backend, micro_batches=K, steps=STEPS)


@pytest.mark.parametrize("report", REPORTS)
def test_done_by_hand_it_is_found(report):
    wrong, backend, phase, _ = REPORTS[report]
    found = judged(wrong, backend)
    assert found.verdict == "different"
    assert found.first.phase == phase, str(found.first)


@pytest.mark.parametrize(("recipe", "backend"), sorted({(right, backend) for _, backend, _, right in REPORTS.values()}))
def test_done_by_the_accumulator_it_is_right(recipe, backend):
    found = judged(f"accumulate_recipes:{RIGHT[recipe]}", backend)
    assert found.verdict == "equal", "\n".join(map(str, found.findings))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_bf16_params_of_which_engines_lost_gradients(backend):
    """DeepSpeed 7985 (the boundary micro-batch never averaged) and 7839 (divided in the step, never cleared)."""
    found = judged("accumulate_recipes:bf16", backend)
    assert found.verdict == "equal", "\n".join(map(str, found.findings))
