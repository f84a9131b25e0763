"""Collectives are counted, not timed; where gradients are to stay sharded, none outlives its micro-batch."""

from __future__ import annotations

from collections import Counter

import accumulate_recipes as recipes
import pytest
import torch
from accumulate_beside import Beside, accumulator, wrapped
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.accumulate.sync import whole_gradient_bytes
from truestep.backends import dtensor

K = 4
NUMEL = sum(param.numel() for param in recipes.tagger().parameters())
SMALLEST = 30  # elements of the smallest bucket of gradients here; what else is summed has fewer
pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")


def reductions(act):
    """Return how often gradients were reduced, by their number of elements: gloo reduce-scatters by an all-reduce."""
    with torch.profiler.profile(record_shapes=True) as profile:
        act()
    sizes = [event.input_shapes[0][0] for event in profile.events() if event.name == "gloo:all_reduce" and event.input_shapes[0]]
    return Counter(size for size in sizes if size >= SMALLEST)


def plain_step(session):
    """Take one step as the vendor's documentation has it."""
    loss = recipes.mean_loss(session.model, recipes.micro_batch(0))
    if session.is_engine:
        session.model.backward(loss)
        session.model.step()
    else:
        loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()


def window_of(acc, session, count=K):
    def act():
        window = acc.open(count)
        for index in range(count):
            window.backward(recipes.mean_loss(session.model, recipes.micro_batch(index)))
        window.step()

    return act


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize(
    ("backend", "sync", "times"),
    [
        ("ddp", "last", 1),
        ("ddp", "auto", 1),
        ("ddp", "every", K),
        ("fsdp2", "last", 1),
        ("fsdp2", "every", K),
        ("fsdp2", "auto", K),
        ("fsdp1", "last", 1),
        ("fsdp1", "auto", K),
        ("zero0", "auto", 1),
        ("zero1", "last", 1),
        ("zero2", "auto", K),
        ("zero3", "every", K),
    ],
)
def test_a_window_reduces_as_often_as_plain_steps_do(backend, sync, times, rank):
    with wrapped(backend) as session:
        plain_step(session)  # DDP plans its buckets anew after the first
        once = reductions(lambda: plain_step(session))
        assert sum(once.elements()) >= NUMEL
        acc = accumulator(session, micro_batches=K, sync=sync)
        window_of(acc, session)()
        assert reductions(window_of(acc, session)) == Counter({size: count * times for size, count in once.items()})


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("sync", ["last", "every"])
def test_with_fsdp2_by_default_no_whole_gradient_outlives_its_micro_batch(sync, rank):
    with wrapped("fsdp2") as session:
        window = accumulator(session, micro_batches=K, sync=sync).open(K)
        kept = []
        for index in range(K):
            window.backward(recipes.mean_loss(session.model, recipes.micro_batch(index)))
            records = [record for module in session.modules() for state in dtensor.states(module) for record in members(state)]
            whole = [part for record in records for part in (record.unsharded_accumulated_grad, unsharded_grad(record))]
            kept.append(sum(part.numel() * part.itemsize for part in whole if part is not None))
        window.step()
        cost = whole_gradient_bytes(session)
        assert cost == 4 * NUMEL
        assert kept == ([0] * K if sync == "every" else [cost] * (K - 1) + [0])


def members(state):
    return [record for group in dtensor.groups(state) for record in group.fsdp_params]


def unsharded_grad(record):
    made = getattr(record, "_unsharded_param", None)
    return None if made is None else made.grad


@pytest.mark.truestep(world_size=2)
def test_the_choice_is_told_with_what_the_other_would_cost(rank):
    with wrapped("fsdp2") as session:
        assert accumulator(session, micro_batches=K).describe() == (
            "fsdp2, 4 micro-batches a window; sync every: gradients stay sharded; 'last' would keep "
            f"{4 * NUMEL:,} bytes of whole gradients on each rank"
        )
    with wrapped("ddp") as session:
        assert (
            accumulator(session, micro_batches=K).describe().endswith("sync last: gradients are whole on every rank either way")
        )
    with wrapped("zero2") as session:
        assert accumulator(session, micro_batches=K).describe().endswith("sync every: zero2 has no other")


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("sync", ["last", "every"])
def test_fsdp2_s_switches_are_as_before_between_windows(sync, rank):
    with wrapped("fsdp2") as session:
        acc = accumulator(session, micro_batches=K, sync=sync)
        window_of(acc, session)()
        states = [state for module in session.modules() for state in dtensor.states(module)]
        assert all(group.reduce_grads for state in states for group in dtensor.groups(state))
        assert all(state._state_ctx.is_last_backward for state in states)


@pytest.mark.truestep(world_size=2)
def test_ddp_with_a_static_graph_reduces_its_first_window_each_time_and_later_ones_once(rank, world_size):
    static = {"wrap": lambda model, backend: DistributedDataParallel(model, static_graph=True)}
    with wrapped("ddp", **static) as session:
        acc = accumulator(session, micro_batches=K)
        beside = Beside(session, recipes.mean_loss)
        counts = []
        for _ in range(3):
            beside.take()
            counts.append(reductions(window_of(acc, session))[NUMEL])
            batches = [[recipes.micro_batch(index) for index in range(K)]] * world_size
            beside.hold(batches, [[1 / K] * K] * world_size, 1 / world_size)
        assert counts[1:] == [1, 1]
        assert beside.worst > 0


# --- the host reads nothing from the device


class Reads(TorchDispatchMode):
    """Counts what a host would wait for: a device value that becomes a Python one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("weights", ["equal", "late"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_nothing_inside_a_window_becomes_a_number_of_the_host_s(backend, weights, rank):
    with wrapped(backend) as session:
        acc = accumulator(session, micro_batches=K, max_norm=1.0)
        window = acc.open(K)
        with Reads() as reads:
            for index in range(K):
                batch = recipes.micro_batch(index)
                loss = recipes.mean_loss(session.model, batch)
                late = {"num_items": float(batch[0].numel())} if weights == "late" else {}
                window.backward(loss, **late)
            window.step()
        assert reads.seen == []
        assert window.loss.shape == window.grad_norm.shape == ()
