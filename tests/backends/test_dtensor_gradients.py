"""FSDP2: local gradients bitwise a plain model's, reduced once, by the contract that its settings make."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from truestep.backends import base
from truestep.backends.base import Settings
from truestep.state import ranks
from truestep.words.errors import UnsupportedError

U = 2.0**-24


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).tanh())


class Checkpointed(Block):
    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=False)


class Net(nn.Module):
    """Sizes that do not divide, a head that is tied to the embedding and used without its module's forward, a frozen param."""

    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([block(5, 3), block(5, 1)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(self.norm(hidden) * self.gain, self.embedding.weight)


NAMES = [name for name, _ in Net().named_parameters()]
TRAINED = [name for name, param in Net().named_parameters() if param.requires_grad]


def loss_of(model, step, micro, rank):
    tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + step) % 7) * 3.0**step


def adamw(params):
    return torch.optim.AdamW([param for _, param in params], lr=0.02)


def local_gradients(step, micro, rank):
    model = Net()
    loss_of(model, step, micro, rank).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def record(session):
    seen = []
    session.hook_gradients(lambda name, gradient: seen.append((name, gradient.detach().clone())))
    return seen


def same(ours, theirs):
    return sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def sharded(**options):
    """Return a wrap that shards the blocks and the root with these options of `fully_shard`."""

    def wrap(model, backend="fsdp2"):
        for layer in model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


# -- Local gradients


VARIANTS = {
    "blocks and root": {},
    "root alone": {"wrap": lambda model, backend: fully_shard(model)},
    "kept": {"wrap": sharded(reshard_after_forward=False)},
    "freed": {"wrap": sharded(reshard_after_forward=True)},
    "blocks alone": {"wrap": lambda model, backend: [fully_shard(layer) for layer in model.layers] and model},
    "parts of blocks": {"wrap": lambda model, backend: [fully_shard(part.up) for part in model.layers] and sharded()(model)},
}


@pytest.mark.truestep(world_size=4)
def test_hooks_see_every_gradient_of_params_that_go_to_a_smaller_mesh_after_forward(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings(wrap=sharded(reshard_after_forward=2)))
    seen = record(session)
    session.backward(loss_of(session.model, 1, 0, rank))
    assert len(seen) == len(TRAINED)
    assert same(dict(seen), local_gradients(1, 0, rank))


@pytest.mark.truestep(world_size=3)
def test_the_gradient_that_enters_is_the_mean_of_the_windows_local_ones(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings(micro_batches=3))
    told = []
    session.on_step(lambda index: told.append(index), lambda index, entering: told.append(entering))
    for micro in range(3):
        with session.micro_batch(last=micro == 2):
            session.backward(loss_of(session.model, 2, micro, rank))
    session.step()
    local = [local_gradients(2, micro, other) for other in range(world_size) for micro in range(3)]
    index, entering = told
    assert (index, sorted(entering)) == (0, sorted(TRAINED))
    n = 3 + world_size + 2
    for name, piece in entering.items():
        for box, found in zip(piece.shard.boxes, piece.local, strict=True):
            terms = [each[name][box.slices].double() / world_size for each in local]
            bound = n * U / (1 - n * U) * sum(term.abs() for term in terms)
            assert bool(((found.double() - sum(terms)).abs() <= bound).all())


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("block", [Block, Checkpointed])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hooks_see_each_micro_batch_bitwise_as_a_plain_model_makes_it_once_a_backward(variant, block, rank, world_size):
    session = base.wrap("fsdp2", Net(block), adamw, Settings(micro_batches=3, **VARIANTS[variant]))
    seen = record(session)
    for micro in range(3):
        with session.micro_batch(last=micro == 2):
            session.backward(loss_of(session.model, 1, micro, rank))
        assert sorted(name for name, _ in seen) == sorted(TRAINED)
        assert same(dict(seen), local_gradients(1, micro, rank))
        seen.clear()
    session.close()
    session.backward(loss_of(session.model, 1, 0, rank))
    assert seen == []


@pytest.mark.truestep(world_size=2)
def test_hooks_placed_while_params_are_gathered_or_frozen_see_what_comes(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings())
    session.model.layers[0].requires_grad_(False)
    with torch.no_grad():
        loss_of(session.model, 1, 0, rank)
    seen = record(session)
    loss_of(session.model, 1, 0, rank).backward()
    assert sorted(name for name, _ in seen) == [name for name in sorted(TRAINED) if "layers.0" not in name]
    session.model.layers[0].requires_grad_(True)
    seen.clear()
    loss_of(session.model, 1, 0, rank).backward()
    assert same(dict(seen), local_gradients(1, 0, rank))


@pytest.mark.truestep(world_size=2)
def test_hooks_see_what_another_method_than_forward_gathers(rank, world_size):
    class Scorer(nn.Linear):
        def score(self, values):
            return super().forward(values).sum()

    model = fully_shard(Scorer(3, 2))
    register_fsdp_forward_method(model, "score")
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = record(session)
    model.score(torch.full((1, 3), 1.0 + rank)).backward()
    assert {name: gradient.flatten().tolist() for name, gradient in seen} == {"weight": [1.0 + rank] * 6, "bias": [1.0] * 2}


@pytest.mark.truestep(world_size=2)
def test_hooks_come_and_go_in_any_order_and_leave_nothing(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings())
    first, second = [], []
    undo_first = session.hook_gradients(lambda name, gradient: first.append(name))
    undo_second = session.hook_gradients(lambda name, gradient: second.append(name))
    loss_of(session.model, 1, 0, rank).backward()
    undo_first()
    loss_of(session.model, 1, 0, rank).backward()
    assert (len(first), len(second)) == (len(TRAINED), 2 * len(TRAINED))
    undo_second()
    undo_second()
    loss_of(session.model, 1, 0, rank).backward()
    assert len(second) == 2 * len(TRAINED)
    assert not any("to_unsharded" in vars(record) for record in session._records())


@pytest.mark.truestep(world_size=2)
def test_what_the_hook_returns_takes_the_gradients_place_and_is_what_is_reduced(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings())
    session.hook_gradients(lambda name, gradient: torch.full_like(gradient, 1.0 + rank) if name == "embedding.weight" else None)
    session.backward(loss_of(session.model, 1, 0, rank))
    gradient = dict(session.params())["embedding.weight"].grad
    assert gradient.full_tensor().flatten().tolist() == [1.5] * 35


# -- Reduction


def reductions(session, last, micro, rank):
    """Run a micro-batch; return how many reductions it ran: `foreach_reduce` runs once a group of params."""
    import unittest.mock

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce = _fsdp_param_group.foreach_reduce
    with unittest.mock.patch.object(_fsdp_param_group, "foreach_reduce", side_effect=reduce) as counted:
        with session.micro_batch(last):
            session.backward(loss_of(session.model, 1, micro, rank))
    return counted.call_count


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("variant", ["blocks and root", "blocks alone"])
def test_gradients_are_reduced_in_the_last_micro_batch_only(variant, rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings(**VARIANTS[variant]))
    groups = 3 if variant == "blocks and root" else 2
    counts = [reductions(session, micro == 2, micro, rank) for micro in [0, 1, 2, 0, 2]]
    assert counts == [0, 0, groups, 0, groups]
    with pytest.raises(ArithmeticError), session.micro_batch(last=False):
        raise ArithmeticError
    session.backward(loss_of(session.model, 1, 0, rank))  # it is switched on again
    assert all(param.grad is not None for name, param in session.params() if name.startswith("layers"))


@pytest.mark.truestep(world_size=2)
def test_planted_faults_break_the_reduction_whatever_the_loop_says(rank, world_size):
    local = [local_gradients(1, 0, other)["gain"] for other in range(world_size)]
    session = base.wrap("fsdp2", Net(), adamw, Settings())
    session.plant("desynchronise")
    session.model.set_requires_gradient_sync(True)
    with session.micro_batch(last=True):
        session.backward(loss_of(session.model, 1, 0, rank))
    assert [param.grad for _, param in session.params()] == [None] * len(NAMES)
    session.close()
    session.model.set_requires_gradient_sync(True)
    session.backward(loss_of(session.model, 1, 0, rank))
    assert all(param.grad is not None for name, param in session.params() if name in TRAINED)
    summed = base.wrap("fsdp2", Net(), adamw, Settings())
    summed.plant("sum")
    summed.backward(loss_of(summed.model, 1, 0, rank))
    assert torch.equal(dict(summed.params())["gain"].grad.full_tensor(), local[0] + local[1])
    with pytest.raises(UnsupportedError, match="'fsdp2' has no switch to scramble"):
        summed.plant("scramble")


# -- The contract


POLICIES = {
    "none": (MixedPrecisionPolicy(), torch.float32, torch.float32),
    "bf16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": (MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.float32, torch.float32),
    "fp32, reduced in bf16": (MixedPrecisionPolicy(None, torch.bfloat16), torch.bfloat16, torch.bfloat16),
}


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_contract_has_the_dtypes_that_the_policy_really_uses(policy, rank, world_size):
    mixed, accumulate, reduce = POLICIES[policy]
    session = base.attach(model := sharded(mp_policy=mixed)(Net()), adamw(list(model.named_parameters())))
    assert session.contract() == base.Contract("mean", accumulate, reduce)
    seen = record(session)
    for micro in range(3):
        with session.micro_batch(last=micro == 2):
            session.backward(loss_of(model, 1, micro, rank))
    assert {gradient.dtype for _, gradient in seen} == {mixed.param_dtype or torch.float32}
    mine = {name: [gradient for seen_name, gradient in seen if seen_name == name] for name in TRAINED}
    everyone = ranks.gather(mine)
    u = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
    k, w = (n * u[dtype] / (1 - n * u[dtype]) for n, dtype in ((4, accumulate), (world_size + 1, reduce)))
    for name, param in session.params():
        if name in TRAINED:
            terms = [term.double() / world_size for theirs in everyone for term in theirs[name]]
            away = (param.grad.full_tensor().double() - sum(terms)).abs()
            assert bool((away <= (k + w + k * w) * sum(term.abs() for term in terms)).all())


@pytest.mark.truestep(world_size=2)
def test_the_contract_is_a_sum_where_the_divide_factor_says_so_and_unknown_in_between(rank, world_size):
    model = sharded()(Net())
    session = base.attach(model)
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    found = []
    for factors in ([None] * 3, [2.0] * 3, [1.0] * 3, [1.0, None, None], [1.5] * 3):
        for part, factor in zip(parts, factors, strict=True):
            part.set_gradient_divide_factor(factor)
        found.append(session.contract().reduction)
    assert found == ["mean", "mean", "sum", None, None]
    model.set_gradient_divide_factor(None)
    model.set_all_reduce_hook(lambda reduced: None)
    assert session.contract().reduction is None
