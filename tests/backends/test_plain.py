"""One process and DDP: names, what hooks see, where steps are, what is reduced when."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import truestep as ts
from truestep.backends import base
from truestep.backends.base import Settings
from truestep.state import ranks
from truestep.words.errors import UnsupportedError

NAMES = ["gain", "embedding.weight", "inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"]
U = 2.0**-24


class Net(nn.Module):
    """A head that is tied to the embedding, a frozen part, a block that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 5)])
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.inner[1].bias.requires_grad_(False)

    def block(self, hidden):
        return self.inner[1](self.inner[0](hidden).tanh()) * self.gain

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = self.block(self.block(hidden)) + hidden
        return hidden @ self.embedding.weight.T


class Checkpointed(Net):
    def block(self, hidden):
        return checkpoint(super().block, hidden, use_reentrant=False)


def loss_of(model, step, micro, rank):
    tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return nn.functional.cross_entropy(model(tokens), (3 * tokens + step) % 7) * 3.0**step


def adamw(params):
    return torch.optim.AdamW([param for _, param in params], lr=0.02)


def local_gradients(step, micro, rank, make=Net):
    model = make()
    loss_of(model, step, micro, rank).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def record(session):
    """Return the list to which each local gradient is added as ``(name, gradient)``."""
    seen = []
    session.hook_gradients(lambda name, gradient: seen.append((name, gradient.detach().clone())))
    return seen


def run_window(session, step, micro_batches, rank):
    for micro in range(micro_batches):
        with session.micro_batch(last=micro == micro_batches - 1):
            session.backward(loss_of(session.model, step, micro, rank))


def reductions(session, last, micro, rank):
    """Run a micro-batch; return how many collectives its backward started (its forward may have some of DDP's own)."""
    with session.micro_batch(last):
        loss = loss_of(session.model, 1, micro, rank)
        started = ranks.collectives_started()
        session.backward(loss)
        return ranks.collectives_started() - started


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def has_within_sum_bound(found, local, micro_batches, world_size):
    n = micro_batches + world_size + 2
    expected = sum(tensor.double() / world_size for tensor in local)
    size = sum(tensor.double().abs() / world_size for tensor in local)
    return bool(((found.double() - expected).abs() <= n * U / (1 - n * U) * size).all())


# -- Names


def test_names_are_those_of_the_unwrapped_model_and_a_child_may_be_called_module():
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 3))
    assert ts.inspect(model).names == ["module.weight", "module.bias"]


@pytest.mark.parametrize("where", ["outside", "inside", "in place"])
def test_compiling_changes_no_name_and_is_told_in_the_contract(where):
    model = Net()
    if where == "outside":
        model = torch.compile(model, backend="eager")
    elif where == "inside":
        model.inner[0] = torch.compile(model.inner[0], backend="eager")
    else:
        model.compile(backend="eager")
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.view().names == NAMES
    assert isinstance(session.modules()[0], Net)
    assert session.contract().operators_replaced == "torch.compile replaces operators"


def test_hooks_see_the_gradients_of_a_compiled_model():
    model = torch.compile(Net(), backend="eager")
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = record(session)
    session.backward(loss_of(model, 1, 0, 0))
    assert same(dict(seen), local_gradients(1, 0, 0))


@pytest.mark.truestep(world_size=2)
def test_a_model_that_the_user_wrapped_has_the_names_of_the_plain_one(rank):
    for model in (
        DistributedDataParallel(Net()),
        torch.compile(DistributedDataParallel(Net()), backend="eager"),
        DistributedDataParallel(torch.compile(Net(), backend="eager")),
    ):
        session = base.attach(model, adamw(list(model.named_parameters())))
        assert (session.backend, session.view().names) == ("ddp", NAMES)
        assert isinstance(session.modules()[0], Net)


@pytest.mark.truestep(world_size=2)
def test_parts_that_are_wrapped_each_on_their_own_are_named_as_if_they_were_not(rank, world_size):
    parts = nn.ModuleDict({"generator": DistributedDataParallel(nn.Linear(2, 3)), "module": nn.Sequential(nn.Linear(3, 4))})
    parts["module"][0] = DistributedDataParallel(parts["module"][0])
    session = base.attach(parts, torch.optim.SGD(parts.parameters(), lr=0.1))
    assert session.backend == "ddp"
    assert session.view().names == ["generator.weight", "generator.bias", "module.0.weight", "module.0.bias"]
    session.plant("desynchronise")
    parts["module"](parts["generator"](torch.full((1, 2), 1.0 + rank))).sum().backward()
    weights = ranks.gather(parts["generator"].module.weight.grad)
    assert not torch.equal(weights[0], weights[1])


def test_several_models_and_optimizers_are_labelled_by_place_or_by_key():
    first, second = nn.Linear(2, 3), nn.Linear(3, 4)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.5), torch.optim.Adagrad(second.parameters(), lr=0.2)]
    view = ts.inspect([first, second], optimizers)
    assert view.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    view = ts.inspect({"a": first, "b": second}, dict(zip("ab", optimizers, strict=True)))
    assert view.names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert (view["@group/b.0", "lr"].value, view.keys_of("b.bias")) == (0.2, ["param", "step", "sum"])
    assert (
        ts.inspect([first, second], torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)).names[0] == "0.weight"
    )


# -- Local gradients


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("make", [Net, Checkpointed])
def test_hooks_see_each_micro_batch_bitwise_as_a_plain_model_makes_it_once_a_backward(make, rank, world_size):
    for backend in ("single", "ddp"):
        session = base.wrap(backend, make(), adamw, Settings(micro_batches=3))
        seen = record(session)
        for micro in range(3):
            with session.micro_batch(last=micro == 2):
                session.backward(loss_of(session.model, 1, micro, rank))
            assert sorted(name for name, _ in seen) == sorted(set(NAMES) - {"inner.1.bias"})
            assert same(dict(seen), local_gradients(1, micro, rank))
            seen.clear()
        session.close()
        session.backward(loss_of(session.model, 1, 0, rank))
        assert seen == []


@pytest.mark.truestep(world_size=2)
def test_what_the_hook_returns_takes_the_gradients_place_and_is_what_is_reduced(rank, world_size):
    session = base.wrap("ddp", Net(), adamw, Settings())
    undo = session.hook_gradients(lambda name, gradient: torch.full_like(gradient, 1.0 + rank) if name == "gain" else None)
    session.backward(loss_of(session.model, 1, 0, rank))
    assert session.modules()[0].gain.grad.tolist() == [1.5]
    undo()
    session.zero_grad()
    session.backward(loss_of(session.model, 1, 0, rank))
    assert session.modules()[0].gain.grad.tolist() != [1.5]


@pytest.mark.truestep(world_size=2)
def test_the_gradient_that_enters_is_the_mean_of_the_windows_local_ones(rank, world_size):
    session = base.wrap("ddp", Net(), adamw, Settings(micro_batches=3))
    told = []
    session.on_step(lambda index: told.append(index), lambda index, entering: told.append(entering))
    run_window(session, 2, 3, rank)
    session.step()
    local = [local_gradients(2, micro, other) for other in range(world_size) for micro in range(3)]
    index, entering = told
    assert (index, set(entering)) == (0, set(NAMES) - {"inner.1.bias"})
    for name, piece in entering.items():
        (whole,) = piece.local
        assert piece.shard.boxes[0].shape == tuple(whole.shape)
        assert has_within_sum_bound(whole, [each[name] for each in local], 3, world_size)


@pytest.mark.truestep(world_size=2)
def test_gradients_are_reduced_in_the_last_micro_batch_only(rank, world_size):
    session = base.wrap("ddp", Net(), adamw, Settings(micro_batches=3))
    assert [reductions(session, micro == 2, micro, rank) for micro in [0, 1, 2, 0, 1, 2]] == [0, 0, 1, 0, 0, 1]


@pytest.mark.truestep(world_size=2)
def test_planted_faults_break_the_reduction_whatever_the_loop_says(rank, world_size):
    model = Net()
    for fault in ("desynchronise", "sum"):
        session = base.wrap("ddp", Net(), adamw, Settings())
        session.plant(fault)
        with session.micro_batch(last=True):
            session.backward(loss_of(session.model, 1, 0, rank))
        mine = session.modules()[0].gain.grad
        local = [local_gradients(1, 0, other)["gain"] for other in range(world_size)]
        assert torch.equal(mine, local[rank] if fault == "desynchronise" else local[0] + local[1])
        assert session.contract().reduction == ("mean" if fault == "desynchronise" else "sum")
        session.close()
    with pytest.raises(UnsupportedError, match="'single' has no switch to sum"):
        base.wrap("single", model, adamw, Settings()).plant("sum")
    with pytest.raises(UnsupportedError, match="'ddp' has no switch to scramble"):
        session.plant("scramble")


@pytest.mark.truestep(world_size=2)
def test_a_static_graph_learns_in_a_window_that_is_synchronised_each_time(rank, world_size):
    session = base.attach(model := DistributedDataParallel(Net(), static_graph=True), adamw(list(model.named_parameters())))
    local = [local_gradients(1, micro, other)["gain"] for other in range(world_size) for micro in range(2)]
    reduced = []
    for _ in range(2):
        reduced += [reductions(session, micro == 1, micro, rank) > 0 for micro in range(2)]
        assert has_within_sum_bound(session.modules()[0].gain.grad, local, 2, world_size)
        session.zero_grad()
    assert reduced == [True, True, False, True]


@pytest.mark.truestep(world_size=2)
def test_a_param_without_gradient_stays_without_one_when_it_is_told_of(rank, world_size):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(6))

    session = base.wrap("ddp", Unused(), adamw, Settings(micro_batches=2, unused=("spare",)))
    entered = {}
    session.on_step(lambda index: None, lambda index, entering: entered.update(entering))
    run_window(session, 1, 2, rank)
    session.step()
    assert entered["spare"] is None
    assert entered["gain"] is not None


# -- Steps


def test_several_optimizers_are_told_apart_and_a_skipped_one_is_not_told_of():
    model = Net()
    optimizers = [torch.optim.SGD([model.embedding.weight], lr=0.1), torch.optim.Adagrad(model.inner.parameters(), lr=0.1)]
    session, told = base.attach(model, optimizers), []
    undo = session.on_step(lambda index: told.append(index), lambda index, entering: told.append((index, list(entering))))
    loss_of(model, 0, 0, 0).backward()
    optimizers[1].step()
    assert told == [1, (1, ["inner.0.weight", "inner.0.bias", "inner.1.weight"])]
    session.step()
    assert told[2:] == [0, (0, ["embedding.weight"]), 1, (1, ["inner.0.weight", "inner.0.bias", "inner.1.weight"])]
    undo()
    session.step()
    assert len(told) == 6


def test_a_class_that_calls_its_parents_step_steps_once_even_after_one_that_failed():
    class Louder(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch wraps the parent's step when one of it is made
    model = Net()
    session, told = base.attach(model, Louder(model.parameters(), lr=0.1)), []
    session.on_step(lambda index: told.append("before"), lambda index, entering: told.append("after"))
    session.step()
    assert told == ["before", "after"]
    Louder.fails = True
    with pytest.raises(ArithmeticError):
        session.step()
    Louder.fails = False
    session.step()
    assert told == ["before", "after", "before", "before", "after"]


def test_pieces_are_copies_of_what_the_params_have_now():
    model = Net()
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.pieces(list(model.parameters())) == {}
    loss_of(model, 0, 0, 0).backward()
    stranger = nn.Parameter(torch.ones(2))
    pieces = session.pieces([stranger, model.gain, model.embedding.weight])
    assert list(pieces) == ["gain", "embedding.weight"]
    before = model.gain.grad.clone()
    model.gain.grad.zero_()
    assert torch.equal(pieces["gain"].local[0], before)


def test_an_optimizer_of_another_model_is_shown_by_identity_and_orphans():
    model, other = Net(), nn.Linear(2, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    session = base.attach(model, optimizer)
    held = {param_id for _, ids in session.identity().held for param_id in ids}
    assert held.isdisjoint(session.identity().live)
    assert set(session.identity().frozen.values()) == {"inner.1.bias"}
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(session.view().orphans) == 2
    assert len(set(session.identity().state_keys) - set(session.identity().live)) == 2


# -- The contract


def test_the_contract_of_one_process_is_a_mean_in_the_coarsest_dtype_that_trains():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).bfloat16())
    assert base.attach(model).contract() == base.Contract("mean", torch.bfloat16, torch.bfloat16)
    model[1].requires_grad_(False)
    assert base.attach(model).contract() == base.Contract("mean", torch.float32, torch.float32)


@pytest.mark.truestep(world_size=2)
def test_a_communication_hook_is_known_by_torchs_own_or_says_nothing(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def own(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(None, bucket)

    expected = {
        None: ("mean", torch.float32),
        default_hooks.allreduce_hook: ("mean", torch.float32),
        default_hooks.fp16_compress_hook: ("mean", torch.float16),
        own: (None, torch.float32),
    }
    for hook, (reduction, dtype) in expected.items():
        model = DistributedDataParallel(nn.Linear(2, 3))
        if hook is not None:
            model.register_comm_hook(None, hook)
        assert base.attach(model).contract() == base.Contract(reduction, torch.float32, dtype)
    model = DistributedDataParallel(nn.Linear(2, 3))
    model._comm_hooks.append((default_hooks.bf16_compress_hook, None))  # DDP itself refuses it on the CPU
    assert base.attach(model).contract() == base.Contract("mean", torch.float32, torch.bfloat16)
    model = DistributedDataParallel(nn.Linear(2, 3))
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    assert base.attach(model).contract() == base.Contract("mean", torch.float32, torch.float16)


# -- Wrapping


@pytest.mark.truestep(world_size=2)
def test_wrapping_takes_lists_and_mappings_and_leaves_what_cannot_train(rank, world_size):
    frozen = nn.Linear(4, 2).requires_grad_(False)

    def each(params):
        return {"main": torch.optim.SGD([param for name, param in params if name.startswith("a.")], lr=0.1)}

    session = base.wrap("ddp", {"a": nn.Linear(2, 3), "b": frozen}, each, Settings())
    assert isinstance(session.model["a"], DistributedDataParallel)
    assert session.model["b"] is frozen
    assert session.view().names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert [type(module) for module in session.modules()] == [nn.Linear, nn.Linear]
    assert session.view()["@group/main.0", "lr"].value == 0.1
    own = base.wrap("ddp", Net(), adamw, Settings(wrap=lambda model, backend: DistributedDataParallel(model, bucket_cap_mb=1)))
    assert own.view().names == NAMES


def test_ddp_without_a_process_group_is_refused():
    with pytest.raises(UnsupportedError, match="'ddp' needs a process group, found none. Start ranks with torchrun"):
        base.wrap("ddp", Net(), adamw, Settings())


def test_clipping_and_clearing_act_on_what_the_optimizers_hold():
    model = Net()
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 3, 0, 0).backward()
    session.clip(0.125)
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    assert float(norm) == pytest.approx(0.125, rel=1e-5)
    session.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert (list(session.clips()), session.loss_scale(), session.warnings()) == ([], 1.0, [])
