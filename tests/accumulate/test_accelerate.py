"""accelerate's own state is kept right: it flags the end of a loader when the last batch is drawn, and windows draw ahead."""

from __future__ import annotations

import accumulate_recipes as recipes
import pytest
import torch
from accumulate_beside import Beside, accumulator, wrapped
from torch.utils.data import DataLoader

import truestep as ts
from truestep.state import ranks
from truestep.words.errors import WindowError

ITEMS, BATCH, K = 21, 2, 3  # 2 ranks: 6 batches a rank, the last with items that pad it; windows of 3


def dataset():
    return [(torch.randint(1, 19, (7,), generator=torch.Generator().manual_seed(n)), n) for n in range(ITEMS)]


def flags(accelerator):
    state = accelerator.gradient_state
    return state.in_dataloader, state.end_of_dataloader, state.remainder


def loss_of(model, batch):
    return model(batch[0]).square().mean()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["accelerate-ddp", "accelerate-fsdp2"])
def test_every_batch_sees_the_flags_that_it_sees_in_a_plain_loop(backend, rank):
    with wrapped(backend) as session:
        accelerator = session.extras["accelerator"]
        loader = accelerator.prepare(DataLoader(dataset(), batch_size=BATCH))
        plain = [(flags(accelerator), accelerator.gather_for_metrics(batch[1]).tolist()) for batch in loader]
        assert [seen[0][1] for seen in plain] == [False] * 5 + [True]
        assert len(plain[-1][1]) == ITEMS % (BATCH * 2)  # its padding is left out
        seen = []
        for window in accumulator(session, micro_batches=4).windows(loader):
            for batch in window:
                window.backward(loss_of(session.model, batch))
                seen.append((flags(accelerator), accelerator.gather_for_metrics(batch[1]).tolist()))
            window.step()
        assert seen == plain
        assert flags(accelerator) == (False, False, -1)


@pytest.mark.truestep(world_size=2)
def test_a_validation_loader_inside_a_window_keeps_its_own(rank):
    with wrapped("accelerate-ddp") as session:
        accelerator = session.extras["accelerator"]
        loader = accelerator.prepare(DataLoader(dataset(), batch_size=BATCH))
        held_out = accelerator.prepare(DataLoader(dataset()[:5], batch_size=BATCH))
        counted = []
        for window in accumulator(session, micro_batches=K).windows(loader):
            for batch in window:
                window.backward(loss_of(session.model, batch))
                outer = flags(accelerator)
                counted.append(sum(len(accelerator.gather_for_metrics(other[1])) for other in held_out))
                assert flags(accelerator) == outer
            window.step()
        assert counted == [5] * 6


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", ["accelerate-ddp", "accelerate-fsdp2", "accelerate-zero2"])
def test_its_own_count_of_micro_batches_does_not_matter(backend, rank, world_size):
    with wrapped(backend, micro_batches=2) as session:  # accelerate divides by 2
        acc = ts.Accumulator(session.model, session.optimizer, micro_batches=K)
        beside = Beside(session, recipes.mean_loss)
        for number in range(2):
            beside.take()
            window = acc.open(K)
            for index in range(K):
                batch = recipes.micro_batch(10 * number + index + 100 * rank)
                window.backward(recipes.mean_loss(session.model, batch))
            window.step()
            batches = [
                [recipes.micro_batch(10 * number + index + 100 * each) for index in range(K)] for each in range(world_size)
            ]
            beside.hold(batches, [[1 / (K * world_size) * world_size] * K] * world_size, 1 / world_size)


class Told:
    """A prepared loader of which one rank's raises."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for index, batch in enumerate(self.loader):
            if index == 4 and ranks.here():
                raise OSError("disk is gone")
            yield batch


@pytest.mark.truestep(world_size=2)
def test_where_a_loader_raises_the_windows_before_it_stand_on_every_rank(rank):
    with wrapped("accelerate-ddp") as session:
        loader = session.extras["accelerator"].prepare(DataLoader(dataset(), batch_size=BATCH))
        acc = accumulator(session, micro_batches=K)
        with pytest.raises(OSError if rank else WindowError, match="disk is gone"):
            run(acc, session, Told(loader))
        assert acc.state_dict()["windows"] == 1


def run(acc, session, loader):
    for window in acc.windows(loader):
        for batch in window:
            window.backward(loss_of(session.model, batch))
        window.step()
