"""Ranks with unequal batches, tokens and lengths: the gradient is still that of the mean over all items of the window."""

from __future__ import annotations

import random

import accumulate_recipes as recipes
import numpy
import pytest
import torch
from accumulate_beside import Beside, accumulator, wrapped
from torch import nn

from truestep.backends.base import BACKENDS
from truestep.state import ranks
from truestep.words.errors import WindowError

SEVERAL = [name for name in BACKENDS if name != "single"]
K = 3
COUNTS = (7, 4)  # batches by rank: windows of 3 and 3, of 3 and 1, of 1 and none


def batches_of(rank, empty=True):
    """Return a rank's batches; of one the tokens are all padding, so that its mean is NaN."""
    batches = [recipes.micro_batch(10 * rank + index, 1.6**index) for index in range(COUNTS[rank])]
    if empty:
        tokens, targets = batches[1]
        batches[1] = (torch.zeros_like(tokens) if rank else tokens, targets)
    return batches


def window_of(rank, number, empty):
    return batches_of(rank, empty)[number * K : (number + 1) * K]


def held(beside, number, weights, reduction, world_size):
    """Hold the window's gradient against the plain model's."""
    windows = [window_of(rank, number, weights != "equal") for rank in range(world_size)]
    kept = [[batch for batch in window if weights == "equal" or recipes.num_tokens(batch)] for window in windows]
    items = sum(recipes.num_tokens(batch) for window in kept for batch in window)
    total = sum(map(len, kept)) if weights == "equal" else items

    def factor(batch):
        share = 1.0 if weights == "equal" or reduction == "sum" else recipes.num_tokens(batch)
        return share if weights == "late" else share / total * world_size

    by_rank = [[factor(batch) for batch in window] for window in kept]
    beside.hold(kept, by_rank, 1 / total if weights == "late" else 1 / world_size)
    return kept, items


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("weights", ["equal", "ahead", "late"])
@pytest.mark.parametrize("backend", SEVERAL)
def test_ranks_that_run_out_replay_and_add_nothing(backend, weights, rank, world_size):
    reduction = "mean" if weights != "late" else "sum"
    loss = {"mean": recipes.mean_loss, "sum": recipes.sum_loss}[reduction]
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=K, reduction=reduction)
        beside = Beside(session, loss)
        mine, lengths = batches_of(rank, weights != "equal"), []
        for number, window in enumerate(acc.windows(mine, recipes.num_tokens if weights == "ahead" else None)):
            beside.take()
            for batch in window:
                late = {"num_items": recipes.num_tokens(batch)} if weights == "late" else {}
                window.backward(loss(session.model, batch), **late)
            window.step()
            lengths.append(window.micro_batches)
            kept, items = held(beside, number, weights, reduction, world_size)
            if weights != "equal":
                assert float(window.num_items) == items
            losses = [loss(beside.plain, batch).item() for batches in kept for batch in batches]
            tokens = [recipes.num_tokens(batch) for batches in kept for batch in batches]
            total = len(losses) if weights == "equal" else items
            share = tokens if (weights, reduction) == ("ahead", "mean") else [1.0] * len(tokens)
            mean = sum(n * value for n, value in zip(share, losses, strict=True)) / total
            assert window.loss.item() == pytest.approx(mean, rel=1e-6)  # one float32 loss each
        assert lengths == [3, 3, 1]
        assert beside.compared


# --- replays leave no trace


class Noisy(recipes.Tagger):
    """Another forward every time, and buffers that every forward changes."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(13)
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens):
        x = self.embedding(tokens.flatten())
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        random.random(), numpy.random.random()
        return self.head(self.batch_norm(x))


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fsdp1", "zero2"])
def test_a_replay_leaves_rng_states_and_buffers_alone(backend, rank):
    with wrapped(backend, model=Noisy) as session:
        acc = accumulator(session, micro_batches=2)
        buffers = dict(session.modules()[0].named_buffers())
        window = next(windows := acc.windows(batches_of(0)[: 1 + rank]))  # noqa: F841  kept: it owns the window
        for index, batch in enumerate(window):
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[2]
            window.backward(recipes.mean_loss(session.model, batch))
            is_replay = rank == 0 and index == 1
            assert torch.equal(states[0], torch.get_rng_state()) == is_replay
            assert (states[1] == random.getstate()) == is_replay
            assert (states[2] == numpy.random.get_state()[2]) == is_replay
            assert all(torch.equal(before[name], buffer) for name, buffer in buffers.items()) == is_replay
        window.step()


# --- what cannot be replayed


class Synced(recipes.Tagger):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.SyncBatchNorm(13)])

    def forward(self, tokens):
        return self.head(self.norms[0](self.layers[1](self.layers[0](self.embedding(tokens.flatten())))))


@pytest.mark.truestep(world_size=2)
def test_statistics_over_all_ranks_are_refused_by_the_module_s_name(rank):
    with wrapped("fsdp2", model=Synced) as session:
        acc = accumulator(session, micro_batches=2)
        with pytest.raises(WindowError, match=r"window/not-replayable.*'norms.0' is a SyncBatchNorm"):
            next(acc.windows(batches_of(0)[: 1 + rank]))


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["ddp", "zero1"])
def test_a_rank_that_never_had_a_batch_is_told_of_on_all_ranks(backend, rank):
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=2)
        with pytest.raises(WindowError, match=r"window/no-batch on rank 1: .*Give every rank at least one batch"):
            next(acc.windows([] if rank else batches_of(0)))


@pytest.mark.truestep(world_size=2)
def test_all_ranks_without_a_batch_have_no_windows(rank):
    with wrapped("ddp") as session:
        assert list(accumulator(session, micro_batches=2).windows(iter(()))) == []


@pytest.mark.truestep(world_size=2)
def test_the_ranks_agree_bitwise_on_the_loss(rank, world_size):
    with wrapped("ddp") as session:
        acc = accumulator(session, micro_batches=K)
        for window in acc.windows(batches_of(rank, False)):
            for batch in window:
                window.backward(recipes.mean_loss(session.model, batch))
            window.step()
            assert window.loss.shape == ()
            assert len(set(ranks.gather(window.loss.item()))) == 1
