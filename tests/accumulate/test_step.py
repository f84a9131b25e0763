"""What a window's end does, once: clip, step, schedule, clear; or nothing at all."""

from __future__ import annotations

import copy
import math

import accumulate_recipes as recipes
import pytest
import torch
from accumulate_beside import Beside, accumulator, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import truestep as ts
from truestep.backends.base import BACKENDS
from truestep.proof.bounds import clip_factor
from truestep.state import ranks
from truestep.words.errors import UnsupportedError

K = 3


def run(acc, session, start=0, count=K, scale=1.0):
    """Run one window up to its step."""
    window = acc.open(count)
    for index in range(count):
        batch = recipes.micro_batch(10 * start + index + 100 * ranks.here(), scale)
        window.backward(recipes.mean_loss(session.model, batch))
    return window


def batches(start, world_size, count=K, scale=1.0):
    return [[recipes.micro_batch(10 * start + index + 100 * rank, scale) for index in range(count)] for rank in range(world_size)]


def equal_share(count, world_size):
    """Return the factors of every rank's losses in a window in which all micro-batches weigh the same."""
    return [[1 / (count * world_size) * world_size] * count] * world_size


# --- clipping


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "single"])
def test_the_norm_is_that_of_the_whole_gradient_and_one_factor_acts_on_all_of_it(backend, rank, world_size):
    with wrapped(backend, model=recipes.tagger) as session:
        acc = accumulator(session, micro_batches=K, max_norm=0.7)
        beside = Beside(session, recipes.mean_loss)
        for number in range(2):
            beside.take()
            window = run(acc, session, number)
            window.step()
            grads = [
                [beside.local(batch, share) for batch, share in zip(of_rank, shares, strict=True)]
                for of_rank, shares in zip(batches(number, world_size), equal_share(K, world_size), strict=True)
            ]
            whole = [
                sum(local[name].double() for of_rank in grads for local in of_rank) / world_size
                for name, _ in beside.plain.named_parameters()
            ]
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole))
            assert norm > 0.7
            assert window.grad_norm.shape == ()
            assert window.grad_norm.item() == pytest.approx(norm, rel=1e-6)  # one float32 norm of a few hundred elements
            assert len(set(ranks.gather(window.grad_norm.item()))) == 1
            beside.hold(batches(number, world_size), equal_share(K, world_size), 1 / world_size, clip=clip_factor(0.7, norm))


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fsdp1", "zero0", "zero2", "zero3"])
def test_an_infinite_limit_only_measures(backend, rank, world_size):
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=K, max_norm=math.inf)
        beside = Beside(session, recipes.mean_loss)
        beside.take()
        window = run(acc, session)
        window.step()
        assert window.grad_norm.item() > 1
        beside.hold(batches(0, world_size), equal_share(K, world_size), 1 / world_size)


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["zero0", "zero1", "zero2", "zero3"])
def test_an_engine_whose_config_is_silent_does_not_clip_at_one(backend, rank, world_size):
    with wrapped(backend) as session:
        del session.model._config._param_dict["gradient_clipping"]
        session.model._config.gradient_clipping = 1.0  # what DeepSpeed takes it for
        if hasattr(session.model.optimizer, "clip_grad"):
            session.model.optimizer.clip_grad = 1.0
        acc = accumulator(session, micro_batches=K)
        beside = Beside(session, recipes.mean_loss)
        beside.take()
        run(acc, session, scale=4.0).step()
        beside.hold(batches(0, world_size, scale=4.0), equal_share(K, world_size), 1 / world_size)


# --- the engine's own idea of a window


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("unmanaged", [False, True])
@pytest.mark.parametrize("backend", ["zero0", "zero1", "zero2", "zero3"])
def test_windows_of_any_length_are_exact_whatever_the_config_says(backend, unmanaged, rank, world_size):
    extra = {"managed_gradient_accumulation": False} if unmanaged else {}
    with wrapped(backend, micro_batches=2, extra=extra) as session:
        acc = accumulator(session, micro_batches=K)
        beside = Beside(session, recipes.mean_loss)
        for number, count in enumerate((4, 1, 3, 2)):
            beside.take()
            run(acc, session, number, count).step()
            beside.hold(batches(number, world_size, count), equal_share(count, world_size), 1 / world_size)


# --- dropping a window


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("over", [1, K])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "single"])
def test_a_window_that_was_skipped_leaves_nothing_to_the_next(backend, over, rank, world_size):
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=K)
        beside = Beside(session, recipes.mean_loss)
        run(acc, session, 5).step()
        beside.take()
        before = ts.inspect(session.model, session.optimizer).copy()
        dropped = acc.open(K)
        for index in range(over):
            dropped.backward(recipes.mean_loss(session.model, recipes.micro_batch(index, 50.0)))
        dropped.skip()
        assert not dropped.stepped
        assert not before.diff(ts.inspect(session.model, session.optimizer).copy())
        window = run(acc, session, 1)
        window.step()
        assert window.stepped
        beside.hold(batches(1, world_size), equal_share(K, world_size), 1 / world_size)


# --- schedulers


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero1", "accelerate-ddp", "accelerate-fsdp2"])
def test_the_scheduler_advances_once_a_window(backend, rank):
    with wrapped(backend) as session:
        inner = session.optimizers[0]
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
        held = scheduler
        if backend.startswith("accelerate"):
            held = session.extras["accelerator"].prepare(scheduler)
            assert held is not scheduler
        acc = accumulator(session, micro_batches=4, scheduler=held)
        for number in range(2):
            run(acc, session, number, 4).step()
        run(acc, session, 3, 4).skip()
        assert scheduler.last_epoch == 2
        assert inner.param_groups[0]["lr"] == 1e-2 * 0.25


@pytest.mark.truestep(world_size=2)
def test_a_scheduler_that_the_engine_steps_is_not_stepped_twice(rank):
    with wrapped("zero1") as session:
        engine = session.model
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(session.optimizers[0], lambda step: 0.5**step)
        acc = accumulator(session, micro_batches=2, scheduler=engine.lr_scheduler)
        run(acc, session, 0, 2).step()
        assert engine.lr_scheduler.last_epoch == 1


# --- several models and optimizers


class Pair(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, tokens):
        return self.outer(self.inner(tokens))


def corrector():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return nn.Linear(recipes.OUTPUTS, recipes.OUTPUTS)


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", WRAPPERS)
def test_several_models_and_optimizers_are_one_window(backend, rank, world_size):
    wrap = WRAPPERS[backend]
    models = {"tagger": wrap(recipes.tagger()), "corrector": wrap(corrector())}
    optimizers = [
        torch.optim.SGD(models["tagger"].parameters(), lr=0.5),
        torch.optim.SGD(models["corrector"].parameters(), lr=0.25),
    ]
    plain = Pair(recipes.tagger(), corrector())
    acc = ts.Accumulator(models, optimizers, micro_batches=K, max_norm=0.5)
    window = acc.open(K)
    for index in range(K):
        tokens, targets = recipes.micro_batch(index + 100 * rank)
        window.backward((models["corrector"](models["tagger"](tokens)) - targets).square().mean())
    window.step()
    losses = [
        (plain(tokens) - targets).square().mean()
        for each in range(world_size)
        for tokens, targets in (recipes.micro_batch(index + 100 * each) for index in range(K))
    ]
    torch.stack(losses).mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert window.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    view = ts.inspect(models, optimizers)
    for label, part, rate in (("tagger", plain.inner, 0.5), ("corrector", plain.outer, 0.25)):
        for name, param in part.named_parameters():
            found = view[f"{label}.{name}", "param"].full("all")
            expected = param.detach() - rate * param.grad
            # The two gradients are sums of some tens of float32 terms each, and the step rounds once more.
            assert torch.allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * float(param.detach().abs().max() + 1)), name


@pytest.mark.truestep(world_size=2)
def test_two_accumulators_over_two_models_have_windows_of_their_own(rank):
    judge, maker = DistributedDataParallel(corrector()), DistributedDataParallel(recipes.tagger())
    of_judge = ts.Accumulator(judge, torch.optim.SGD(judge.parameters(), lr=0.1), micro_batches=2)
    of_maker = ts.Accumulator(maker, torch.optim.SGD(maker.parameters(), lr=0.1), micro_batches=4)
    steps = {"judge": 0, "maker": 0}
    making = of_maker.open(4)
    for _ in range(2):
        judging = of_judge.open(2)
        for index in range(2):
            tokens, targets = recipes.micro_batch(index + 10 * rank)
            judging.backward((judge(targets) - targets).square().mean())
            before = copy.deepcopy(judge.state_dict())
            making.backward((maker(tokens) - targets).square().mean())
            assert all(torch.equal(before[name], value) for name, value in judge.state_dict().items())
        judging.step()
        steps["judge"] += judging.stepped
    making.step()
    steps["maker"] += making.stepped
    assert steps == {"judge": 2, "maker": 1}


# --- GradScaler


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fsdp1"])
def test_a_scaler_skips_on_all_ranks_or_on_none(backend, rank, world_size):
    with wrapped(backend, optimizer="adamw") as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        scheduler = torch.optim.lr_scheduler.LambdaLR(session.optimizers[0], lambda step: 0.5**step)
        acc = accumulator(session, micro_batches=K, scaler=scaler, scheduler=scheduler, max_norm=math.inf)
        beside = Beside(session, recipes.mean_loss)
        beside.take()
        window = run(acc, session)
        window.step()
        assert window.stepped
        beside.hold(batches(0, world_size), [[1 / K * 2.0**10] * K] * world_size, 1 / world_size / 2.0**10)
        before = ts.inspect(session.model, session.optimizer).copy()
        window = acc.open(K)
        for index in range(K):
            loss = recipes.mean_loss(session.model, recipes.micro_batch(index))

            window.backward(loss * (math.inf if rank == index == 1 else 1.0))
        window.step()
        assert not window.stepped
        after = ts.inspect(session.model, session.optimizer).copy()
        assert not before.diff(after)
        assert scaler.get_scale() == 2.0**9
        assert scheduler.last_epoch == 1
        window = run(acc, session)
        window.step()
        assert window.stepped


@pytest.mark.truestep(world_size=2)
def test_an_overflow_in_one_shard_alone_is_agreed_on(rank):
    with wrapped("fsdp2") as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        acc = accumulator(session, micro_batches=1, scaler=scaler)
        window = run(acc, session, count=1)
        local = session.optimizers[0].param_groups[0]["params"][0].grad._local_tensor
        if rank == 1:
            local[0] = math.inf
        window.step()
        assert not window.stepped
        assert ranks.gather(scaler.get_scale()) == [2.0, 2.0]


@pytest.mark.truestep(world_size=2)
def test_a_scaler_that_accelerate_keeps_is_found(rank):
    with wrapped("accelerate-ddp") as session:
        session.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        acc = accumulator(session, micro_batches=1)
        window = acc.open(1)
        window.backward(recipes.mean_loss(session.model, recipes.micro_batch(0)) * math.nan)
        window.step()
        assert not window.stepped
        assert session.optimizer.scaler.get_scale() == 2.0


def test_fsdp1_clips_one_model_by_one_norm():
    from truestep.backends.fsdp1 import FlatSession

    with pytest.raises(UnsupportedError, match="FSDP1 clips one model by one norm, found 0"):
        FlatSession("fsdp1", recipes.tagger(), None).clip(1.0)
