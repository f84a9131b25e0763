"""bf16 params with many micro-batches: with `grad_dtype=torch.float32` nothing is lost, without it something is."""

from __future__ import annotations

import math

import accumulate_recipes as recipes
import pytest
import torch
from accumulate_beside import accumulator, wrapped
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import truestep as ts
from truestep.proof.bounds import Expected, compounded, gamma, unit_roundoff, worst
from truestep.state import ranks

K = 64
U16, U32 = unit_roundoff(torch.bfloat16), unit_roundoff(torch.float32)


def bf16_tagger():
    return recipes.tagger().bfloat16()


def loss_of(model, index, rank):
    """Return a loss in float32 whose gradient does not change its sign from batch to batch."""
    tokens, targets = recipes.micro_batch(index + 1000 * rank)
    return (model(tokens).float() - 3.0 - 0.1 * targets).square().mean()


def mean_of_locals(world_size):
    """Return, by name, the mean of all local bf16 gradients in float64, and that of their magnitudes."""
    plain = bf16_tagger()
    names = [name for name, _ in plain.named_parameters()]
    value = dict.fromkeys(names, 0.0)
    magnitude = dict(value)
    for rank in range(world_size):
        for index in range(K):
            plain.zero_grad()
            loss_of(plain, index, rank).backward()
            for name, param in plain.named_parameters():
                value[name] += param.grad.double() / (K * world_size)
                magnitude[name] += param.grad.double().abs() / (K * world_size)
    return value, magnitude


def entered(session, grad_dtype, sync="auto"):
    """Run one window; return the gradients that entered the step, as pieces."""
    seen = {}
    session.on_step(lambda index: None, lambda index, entering: seen.update(entering))
    acc = accumulator(session, micro_batches=K, grad_dtype=grad_dtype, sync=sync)
    window = acc.open(K)
    for index in range(K):
        window.backward(loss_of(session.model, index, ranks.here()))
    window.step()
    assert acc.open(1).phase  # and the next one can begin
    return seen


def ratio_to_bound(session, seen, world_size):
    """Return how far the worst gradient is from float64, in units of the derived bound.

    Each micro-batch is reduced in bf16 (W + 1 roundings), weighted and added up in float32 (K + 1), and cast to bf16 once.
    """
    value, magnitude = mean_of_locals(world_size)
    relative = compounded([gamma(world_size + 1, U16), gamma(K + 1, U32), U16])
    ratios = []
    for name, piece in seen.items():
        for box, found in zip(piece.shard.boxes, piece.local, strict=True) if piece else ():
            assert found.dtype == torch.bfloat16
            expected = Expected(value[name][box.slices], magnitude[name][box.slices] * relative)
            ratios.append(worst(found, expected).ratio)
    return max(ratios)


def fully_sharded(model, backend):
    for layer in model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


WAYS = [("ddp", None), ("fsdp2", None), ("fsdp2", fully_sharded), ("fsdp1", None), ("accelerate-ddp", None)]


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize(("backend", "wrap"), WAYS, ids=["ddp", "fsdp2", "fsdp2 reduced in fp32", "fsdp1", "accelerate-ddp"])
def test_with_float32_sums_bf16_is_within_the_bound_of_float64(backend, wrap, world_size):
    with wrapped(backend, model=bf16_tagger, **({"wrap": wrap} if wrap else {})) as session:
        assert ratio_to_bound(session, entered(session, torch.float32), world_size) <= 1
        held = [param for group in session.optimizers[0].param_groups for param in group["params"]]
        assert all(param.dtype == param.grad_dtype == torch.bfloat16 for param in held)


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize(("backend", "sync"), [("ddp", "last"), ("fsdp2", "every")])
def test_without_it_precision_is_lost(backend, sync, world_size):
    with wrapped(backend, model=bf16_tagger) as session:
        assert ratio_to_bound(session, entered(session, None, sync), world_size) > 1


def test_one_process_too():
    with wrapped("single", model=bf16_tagger) as session:
        assert ratio_to_bound(session, entered(session, torch.float32), 1) <= 1
    with wrapped("single", model=bf16_tagger) as session:
        assert ratio_to_bound(session, entered(session, None), 1) > 1


def test_a_bf16_loss_cannot_carry_its_weight_and_with_float32_sums_does_not_have_to():
    class Loss16(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def norm(**settings):
        model = Loss16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        acc = ts.Accumulator(model, optimizer, micro_batches=3, max_norm=math.inf, **settings)
        window = acc.open(3)
        for index in range(3):
            window.backward(model.weight.sum() * (0.0 if index else 256.0))
        window.step()
        return window.grad_norm.item()

    assert norm() == 256.0 * float(torch.tensor(1 / 3).bfloat16()) == 85.5
    assert norm(grad_dtype=torch.float32) == pytest.approx(256 / 3, rel=2 * U32)


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("weights", ["ahead", "late"])
def test_clipping_and_counts_act_on_the_float32_sums(weights, rank, world_size):
    with wrapped("fsdp2", model=bf16_tagger) as session:
        acc = accumulator(session, micro_batches=3, grad_dtype=torch.float32, max_norm=0.25)
        seen = {}
        session.on_step(lambda index: None, lambda index, entering: seen.update(entering))
        batches = [recipes.micro_batch(index + 10 * rank) for index in range(3)]
        for window in acc.windows(batches, recipes.num_tokens if weights == "ahead" else None):
            for batch in window:
                late = {"num_items": recipes.num_tokens(batch)} if weights == "late" else {}
                window.backward(recipes.errors(session.model, batch).float().mean(), **late)
            window.step()
        square = sum(float(local.double().square().sum()) for piece in seen.values() for local in piece.local)
        norm = sum(ranks.gather(square)) ** 0.5
        assert window.grad_norm.item() > 0.25
        assert norm == pytest.approx(0.25, rel=U16)  # each element is cast to bf16 once, after the clip
