"""Misuse is one clear error, on all ranks at once, and what may be done after it still can be."""

from __future__ import annotations

import math
import re

import accumulate_recipes as recipes
import pytest
import torch
from accumulate_beside import accumulator, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import truestep as ts
from truestep.accumulate.accumulator import Accumulator
from truestep.words.errors import UnsupportedError, WindowError

BACKENDS = ["single", "ddp", "fsdp2", "zero1", "zero3"]
BATCH = recipes.micro_batch(1)


def mean(session):
    return recipes.mean_loss(session.model, BATCH)


def step_too_early(acc, session, rank):
    for window in acc.windows([BATCH, BATCH]):
        for _ in window:
            window.backward(mean(session))
            window.step()


def step_twice(acc, session, rank):
    window = acc.open(1)
    window.backward(mean(session))
    window.step()
    window.step()


def step_after_an_exception(acc, session, rank):
    window = acc.open(2)
    try:
        with window:
            window.backward(mean(session))
            raise KeyError("of the user's own")
    except KeyError:
        pass
    window.step()


def step_after_a_loop_that_raised(acc, session, rank):
    for window in acc.windows([BATCH, BATCH]):
        try:
            for index, _ in enumerate(window):
                if index:
                    raise KeyError("of the user's own")
                window.backward(mean(session))
        except KeyError:
            window.step()


def backward_after_the_step(acc, session, rank):
    step_then = acc.open(1)
    step_then.backward(mean(session))
    step_then.step()
    step_then.backward(mean(session))


def one_backward_too_many(acc, session, rank):
    window = acc.open(1)
    window.backward(mean(session))
    window.backward(mean(session))


def a_micro_batch_without_a_backward(acc, session, rank):
    for window in acc.windows([BATCH, BATCH]):
        for _ in window:
            pass


def leaving_it(acc, session, rank):
    for window in acc.windows([BATCH, BATCH, BATCH, BATCH]):
        for _ in window:
            window.backward(mean(session))


def nesting(acc, session, rank):
    acc.open(2)
    acc.open(2)


def nesting_over_the_same_model(acc, session, rank):
    acc.open(2)
    accumulator(session, micro_batches=2).open(2)


def a_loss_per_item(acc, session, rank):
    acc.open(1).backward(recipes.errors(session.model, BATCH))


def a_detached_loss(acc, session, rank):
    acc.open(1).backward(mean(session).detach())


def a_loss_that_is_a_number(acc, session, rank):
    acc.open(1).backward(mean(session).item())


def a_negative_count(acc, session, rank):
    acc.open(1).backward(mean(session), num_items=-3)


def a_count_that_is_none(acc, session, rank):
    acc.open(1).backward(mean(session), num_items=torch.tensor(math.nan))


def a_negative_count_ahead(acc, session, rank):
    next(acc.windows([BATCH], lambda batch: -1))


def no_items_ahead(acc, session, rank):
    next(acc.windows([BATCH], lambda batch: 0))


def no_items_late(acc, session, rank):
    window = acc.open(2)
    for _ in range(2):
        window.backward(mean(session), num_items=0)
    window.step()


def counts_in_some_backwards_only(acc, session, rank):
    window = acc.open(2)
    window.backward(mean(session), num_items=3)
    window.backward(mean(session))


def counts_in_both_places(acc, session, rank):
    for window in acc.windows([BATCH], recipes.num_tokens):
        for _ in window:
            window.backward(mean(session), num_items=3)


def a_window_of_none(acc, session, rank):
    acc.open(0)


def an_accumulator_of_none(acc, session, rank):
    accumulator(session, micro_batches=0)


def a_limit_of_none(acc, session, rank):
    accumulator(session, micro_batches=1, max_norm=0.0)


def an_unknown_reduction(acc, session, rank):
    accumulator(session, micro_batches=1, reduction="average")


def its_state_inside_a_window(acc, session, rank):
    acc.open(2)
    acc.state_dict()


# What people do -> the code, and words of the message.
MISUSE = {
    step_too_early: ("window/accumulating", "after 1 of 2 micro-batches"),
    step_twice: ("window/stepped", "found window.step()"),
    step_after_an_exception: ("window/broken", "can only be dropped"),
    step_after_a_loop_that_raised: ("window/broken", "can only be dropped"),
    backward_after_the_step: ("window/stepped", "found window.backward"),
    one_backward_too_many: ("window/reduced", "Call window.step()"),
    a_micro_batch_without_a_backward: ("window/accumulating", "0 backwards in 1 micro-batches"),
    leaving_it: ("window/reduced", "found leave it"),
    nesting: ("window/accumulating", "window.skip() to drop"),
    nesting_over_the_same_model: ("window/accumulating", "found open a window"),
    a_loss_per_item: ("window/loss", "found shape (17,)"),
    a_detached_loss: ("window/loss", "detached"),
    a_loss_that_is_a_number: ("window/loss", "found a float"),
    a_negative_count: ("window/item-count", "found -3"),
    a_count_that_is_none: ("window/item-count", "found nan"),
    a_negative_count_ahead: ("window/item-count", "found -1 in micro-batch 1"),
    no_items_ahead: ("window/no-items", "a mean over nothing"),
    no_items_late: ("window/no-items", "a mean over nothing"),
    counts_in_some_backwards_only: ("window/counts-mixed", "num_items in some backwards only"),
    counts_in_both_places: ("window/counts-mixed", "in a window that counts ahead"),
    a_window_of_none: ("window/settings", "found 0"),
    an_accumulator_of_none: ("window/settings", "found 0"),
    a_limit_of_none: ("window/settings", "found 0.0"),
    an_unknown_reduction: ("window/settings", "found 'average'"),
    its_state_inside_a_window: ("window/accumulating", "found leave it"),
}
# Of these a rank does nothing else that the others could meet it at.
OF_ONE_RANK = [
    step_too_early,
    a_loss_per_item,
    a_detached_loss,
    a_negative_count,
    a_count_that_is_none,
    a_negative_count_ahead,
    a_window_of_none,
]


def refused(act, acc, session, rank):
    code, words = MISUSE[act]
    with pytest.raises(WindowError) as caught:
        act(acc, session, rank)
    assert caught.value.findings[0].code == code, caught.value
    assert words in str(caught.value)
    assert str(caught.value).rstrip().endswith(".")
    return str(caught.value)


@pytest.mark.truestep(world_size=2, timeout=60)
@pytest.mark.parametrize("backend", BACKENDS)
def test_misuse_is_refused_and_the_next_window_is_sound(backend, rank):
    with wrapped(backend) as session:
        for act in MISUSE:
            acc = accumulator(session, micro_batches=2)
            try:
                refused(act, acc, session, rank)
            except BaseException as error:
                raise AssertionError(f"{act.__name__}: {error}") from error
            if acc._window is not None and not acc._window.is_over:
                acc._window.skip()
            for window in acc.windows([BATCH, BATCH]):
                for _ in window:
                    window.backward(mean(session))
                window.step()
                assert window.stepped


def rightly(act, acc, session):
    """Do what the other ranks do while one misuses."""
    if act is step_too_early:
        for window in acc.windows([BATCH, BATCH]):
            for _ in window:
                window.backward(mean(session))
    elif act is a_negative_count_ahead:
        next(acc.windows([BATCH], lambda batch: 5))
    elif act is a_window_of_none:
        acc.open(1)
    else:
        counted = {"num_items": 5} if "count" in act.__name__ else {}
        window = acc.open(1)
        window.backward(mean(session), **counted)
        window.step()


@pytest.mark.truestep(world_size=2, timeout=60)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero1", "zero3"])
def test_misuse_on_one_rank_is_an_error_on_all_at_once(backend, rank):
    with wrapped(backend) as session:
        for act in OF_ONE_RANK:
            acc = accumulator(session, micro_batches=2)
            code, words = MISUSE[act]
            with pytest.raises(WindowError) as caught:
                (act(acc, session, rank) if rank else rightly(act, acc, session))
            assert code in str(caught.value), (act, caught.value)
            assert "on rank 1" in str(caught.value)
            assert words in str(caught.value)
            if acc._window is not None:
                acc._window.skip()


@pytest.mark.truestep(world_size=2, timeout=60)
def test_other_lengths_on_other_ranks(rank):
    with wrapped("ddp") as session:
        with pytest.raises(WindowError, match="window/settings.*2 on rank 0, 3 on rank 1"):
            accumulator(session, micro_batches=2 + rank)
        acc = accumulator(session, micro_batches=2)
        with pytest.raises(WindowError, match="window/settings.*1 on rank 0, 2 on rank 1"):
            acc.open(1 + rank)


@pytest.mark.truestep(world_size=2, timeout=60)
def test_counts_on_some_ranks_only(rank):
    with wrapped("ddp") as session:
        acc = accumulator(session, micro_batches=1)
        with pytest.raises(WindowError, match="num_items on every rank, or on none, found none on rank 1"):
            next(acc.windows([BATCH], None if rank else recipes.num_tokens))


@pytest.mark.truestep(world_size=2, timeout=60)
def test_ranks_on_other_paths(rank):
    with wrapped("ddp") as session:
        window = accumulator(session, micro_batches=1).open(1)
        window.backward(mean(session))
        with pytest.raises(WindowError, match=r"window/ranks-apart .*rank 0 at window.step\(\), rank 1 at window.skip\(\)"):
            (window.skip if rank else window.step)()


class Stops:
    """A loader that raises in the middle."""

    def __iter__(self):
        yield BATCH
        raise OSError("disk is gone")


@pytest.mark.truestep(world_size=2, timeout=60)
def test_a_loader_that_raises_on_one_rank_ends_all(rank):
    with wrapped("ddp") as session:
        acc = accumulator(session, micro_batches=2)
        if rank:
            with pytest.raises(OSError, match="disk is gone"):
                next(acc.windows(Stops()))
        else:
            with pytest.raises(WindowError, match="run/rank-raised on rank 1: .*OSError: disk is gone"):
                next(acc.windows([BATCH, BATCH]))


@pytest.mark.truestep(world_size=2, timeout=60)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_loss_that_is_not_finite_is_told_of_before_the_next_step(backend, rank):
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=1)
        for number, window in enumerate(acc.windows([BATCH, BATCH])):
            for _ in window:
                loss = mean(session)
                window.backward(loss * math.inf if rank and not number else loss)
            if number:
                with pytest.raises(WindowError, match="window/not-finite .*at step 1: .*found inf in window 1"):
                    window.step()
                window.skip()
                break
            window.step()


@pytest.mark.truestep(world_size=2, timeout=60)
def test_a_last_loss_that_is_not_finite_is_told_of_at_the_loader_s_end(rank):
    with wrapped("ddp") as session:
        acc = accumulator(session, micro_batches=1)
        windows = acc.windows([BATCH])
        for _ in (window := next(windows)):
            window.backward(mean(session) * math.nan)
        window.step()
        with pytest.raises(WindowError, match="window/not-finite"):
            next(windows)


def test_what_a_backend_cannot_do_is_refused():
    model, other = recipes.tagger(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=re.escape("sync='shard': expected one of auto last every on single")):
        ts.Accumulator(model, optimizer, micro_batches=2, sync="shard")
    with pytest.raises(UnsupportedError, match="expected an optimizer over the model's params, found none"):
        ts.Accumulator(other, micro_batches=2)
    with pytest.raises(UnsupportedError, match="sync='last' with a grad_dtype"):
        ts.Accumulator(model.bfloat16(), optimizer, micro_batches=2, sync="last", grad_dtype=torch.float32)


def hybrid(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})


def of_one_rank(model):
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    return nn.parallel.DistributedDataParallel(model, process_group=groups[torch.distributed.get_rank()])


@pytest.mark.truestep(world_size=2, timeout=60)
@pytest.mark.parametrize("wrap", [hybrid, tensor_parallel, of_one_rank])
def test_ranks_that_do_not_all_reduce_together_are_refused(wrap, rank):
    model = wrap(recipes.tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="expected gradients reduced over all 2 ranks by one dim of a mesh"):
        ts.Accumulator(model, optimizer, micro_batches=2)


@pytest.mark.truestep(world_size=2, timeout=60)
def test_what_an_engine_cannot_do_is_refused(rank):
    with wrapped("zero2") as session:
        with pytest.raises(UnsupportedError, match="ZeRO 0 and 1 reduce at the window's end, 2 and 3 in every backward"):
            accumulator(session, micro_batches=2, sync="last")
        with pytest.raises(UnsupportedError, match="scales its loss itself"):
            accumulator(session, micro_batches=2, scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(UnsupportedError, match="Set data_types.grad_accum_dtype"):
            accumulator(session, micro_batches=2, grad_dtype=torch.float64)
    with wrapped("zero2", max_norm=0.5) as session:
        with pytest.raises(UnsupportedError, match=r"max_norm=1 and gradient_clipping 0.5 in the DeepSpeed config"):
            accumulator(session, micro_batches=2, max_norm=1.0)
        assert isinstance(accumulator(session, micro_batches=2), Accumulator)
