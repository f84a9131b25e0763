"""A right step is `equal`, with every phase checked: on all backends, for the nets, optimizers and settings that people use."""

from __future__ import annotations

import pytest

from truestep.backends.base import BACKENDS
from truestep.proof.update import ZERO_GRADIENT
from truestep.verification.pairwise import covering

STEPS = 4
TINY_GPT = "bytes-gpt:width=16,layers=1,context=16,batch=2"
TINY_BF16_GPT = "bf16-gpt:width=16,layers=1,context=16,batch=2"
ONE_PROCESS_OR_TORCH = ("single", "ddp", "fsdp2")  # several models and optimizers, and params without a gradient
ZERO = ("zero0", "zero1", "zero2", "zero3")


# --- the covering array: every pair of backend, optimizer, K, recipe and world size that is healthy

# Recipe -> where it is healthy. ZeRO and FSDP1 move a param that never got a gradient; ZeRO 0 in bf16 loses Adagrad's state.
RECIPES = {
    "embedding-net": lambda row: row["optimizer"] == "adagrad" or not ("zero" in row["backend"] or row["backend"] == "fsdp1"),
    TINY_GPT: lambda row: True,
    TINY_BF16_GPT: lambda row: (row["backend"], row["optimizer"]) != ("zero0", "adagrad"),
    "healthy:noisy": lambda row: True,  # dropout and batch norm
}
FACTORS = {
    "backend": list(BACKENDS),
    "optimizer": ["adagrad", "adamw", "adamax", "rmsprop", "healthy.py:decayed_sgd"],
    "micro_batches": [1, 2, 5],
    "recipe": list(RECIPES),
    "world_size": [2, 3],
}


def healthy(row):
    lost = row["backend"] == "accelerate-fsdp2" and row["optimizer"] == "adagrad"  # accelerate itself loses its state
    return not lost and RECIPES[row["recipe"]](row)


@pytest.mark.parametrize("row", covering(FACTORS, allowed=healthy, seed=1), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_is_equal(equal, programs, row):
    optimizer = row["optimizer"].replace("healthy.py", str(programs / "healthy.py"))
    equal(**{**row, "optimizer": optimizer}, steps=STEPS)


# --- the net of all edges


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "accelerate-fsdp2"])
def test_the_net_of_all_edges_with_adagrad(equal, backend, world_size):
    equal("embedding-net", backend=backend, optimizer="adagrad", micro_batches=2, world_size=world_size, steps=STEPS)


@pytest.mark.parametrize("optimizer", ["adamw", "decayed_sgd"])
@pytest.mark.parametrize("backend", ONE_PROCESS_OR_TORCH)
def test_a_param_without_gradient_is_left_alone_by_torch(equal, programs, backend, optimizer):
    named = optimizer if optimizer == "adamw" else f"{programs / 'healthy.py'}:{optimizer}"
    equal("embedding-net", backend=backend, optimizer=named, micro_batches=2, steps=STEPS)


@pytest.mark.parametrize("optimizer", ["adamw", "decayed_sgd"])
@pytest.mark.parametrize("backend", [*ZERO, *(name for name in BACKENDS if name == "fsdp1")])
def test_zero_moves_a_param_without_gradient_and_verify_says_so(judged, programs, backend, optimizer):
    named = optimizer if optimizer == "adamw" else f"{programs / 'healthy.py'}:{optimizer}"
    report = judged("embedding-net", backend=backend, optimizer=named, micro_batches=2, steps=STEPS)
    assert report.verdict == "different"
    first = report.first
    assert (first.law, first.phase, first.param, first.key, first.step) == ("update", "update", "unused", "param", 1), str(first)
    assert first.cause == ZERO_GRADIENT == "an absent gradient was treated as zero"


@pytest.mark.parametrize("backend", ONE_PROCESS_OR_TORCH)
@pytest.mark.parametrize("recipe", ["healthy:several", "healthy:two_models", "healthy:several_on_all_edges"])
def test_several_models_and_optimizers(equal, backend, recipe):
    equal(recipe, backend=backend, micro_batches=2, steps=STEPS)


# --- what forwards and losses do


@pytest.mark.parametrize("recipe", ["healthy:summed", "healthy:summed_over_counted"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero2"])
def test_a_loss_that_is_a_sum(equal, backend, recipe):
    equal(recipe, backend=backend, micro_batches=3, steps=STEPS)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_bf16(equal, backend):
    equal(TINY_BF16_GPT, backend=backend, optimizer="adamw", micro_batches=4, steps=STEPS)


# --- optimizers and their settings


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_that_acts(equal, backend):
    cell = equal("healthy:clipped", backend=backend, micro_batches=3, steps=STEPS)
    assert cell.checks["clip"].bounded >= STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule(equal, backend):
    equal("healthy:scheduled", backend=backend, micro_batches=2, steps=STEPS)


@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp2", "zero2", "accelerate-ddp"])
def test_a_schedule_that_moves_betas_too(equal, backend):
    equal("healthy:scheduled_betas", backend=backend, micro_batches=2, steps=STEPS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_param_groups(equal, backend):
    equal("healthy:grouped", backend=backend, micro_batches=2, steps=STEPS)


@pytest.mark.skipif("fsdp1" not in BACKENDS, reason="no backend here flattens params before the optimizer is built")
def test_groups_by_a_shape_that_wrapping_takes_away_are_told_of(judged):
    report = judged("healthy:grouped_by_dim", backend="fsdp1", micro_batches=2, steps=STEPS)
    assert report.verdict == "different"
    assert (report.first.code, report.first.law, report.first.step) == ("params/other-group", "params", 1), str(report.first)
    assert report.first.param == "embedding.weight"


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("healthy:fused", "ddp"),
        ("healthy:fused", "fsdp2"),
        ("healthy:fused", "zero2"),
        ("healthy:fused_momentum", "ddp"),  # DTensor has no strategy for it (torch 2.13)
        ("healthy:fused_momentum", "zero3"),
    ],
)
def test_fused_kernels(equal, recipe, backend):
    equal(recipe, backend=backend, micro_batches=2, steps=STEPS)


@pytest.mark.parametrize(
    ("recipe", "backend", "world_size"),
    [
        ("factored", "ddp", 2),
        ("factored", "ddp", 3),
        ("orthogonal", "ddp", 3),
        ("orthogonal", "fsdp2", 2),  # with 3 ranks its shards are uneven, and torch's Muon raises (2.13)
    ],
)
def test_optimizers_that_look_at_whole_tensors(equal, recipe, backend, world_size):
    equal(f"healthy:{recipe}", backend=backend, micro_batches=2, world_size=world_size, steps=STEPS)


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_such_an_optimizer_on_flat_pieces_is_told_of(judged, backend):
    report = judged("healthy:factored", backend=backend, micro_batches=2, steps=STEPS)
    assert report.verdict == "different"
    assert (report.first.law, report.first.step, report.first.key) == ("update", 1, "row_var")


@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp2", "fsdp1", "zero0", "zero2", "zero3"])
def test_an_optimizer_that_keeps_state_under_keys_of_its_own(equal, backend):
    equal("healthy:counting", backend=backend, micro_batches=2, steps=STEPS)


# --- ways to shard


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["kept_gathered", "resharded", "columns", "recomputed", "root_alone"])
def test_ways_to_shard(equal, how, world_size):
    equal(f"with_fsdp2:healthy_{how}", backend="fsdp2", micro_batches=3, world_size=world_size, steps=STEPS)


def test_resharding_to_a_smaller_group(equal):
    equal("with_fsdp2:healthy_resharded_to_two", backend="fsdp2", micro_batches=3, world_size=2, steps=STEPS)
