"""DeepSpeed engines against one process: the same content, the same gradients, the same steps."""

import pytest
import torch
from torch import nn

from truestep.backends import base
from truestep.backends.base import Settings
from truestep.state.view import assemble

pytest.importorskip("deepspeed")

STAGES = ("zero0", "zero1", "zero2", "zero3")
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
}
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}


class Net(nn.Module):
    """Sizes that do not divide, a tied param, a frozen one, one that gets no gradient, one smaller than the world."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 4)
        self.cube = nn.Parameter(torch.randn(2, 3, 7) * 0.3)
        self.back = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11)
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.unused = nn.Parameter(torch.randn(6))
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.middle(self.embedding(tokens)).tanh()
        hidden = hidden + self.frozen(hidden).mean(-1, keepdim=True)
        hidden = self.back(torch.einsum("bk,ckl->bl", hidden, self.cube)).tanh() * self.gain
        return self.head(hidden)


def loss_of(model, step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(0, 10, (4,), generator=generator)  # the last row of the embedding is touched by the head alone
    loss = nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + step) % 11)
    return loss * 3.0**step  # gradients whose scale changes


def two_groups(params):
    slow = [param for name, param in params if name.endswith("bias")]
    rest = [param for name, param in params if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": slow, "weight_decay": 0.0, "lr": 0.3}], lr=0.01)


class Steps:
    """Collects what a session tells of its steps and local gradients."""

    def __init__(self, session):
        self.session = session
        self.before, self.entering, self.local = 0, [], []
        self.local_by_name = {}
        session.on_step(self._before, self._after)
        session.hook_gradients(self._see)

    def _before(self, index):
        assert index == 0
        self.before += 1

    def _after(self, index, entering):
        self.entering.append(entering)
        self.local.append(self.local_by_name)
        self.local_by_name = {}

    def _see(self, name, gradient):
        self.local_by_name.setdefault(name, []).append(gradient.detach().clone())

    def window(self, step, micro_batches, rank):
        for micro in range(micro_batches):
            with self.session.micro_batch(last=micro == micro_batches - 1):
                loss = loss_of(self.session.model, step, micro, rank) / micro_batches
                self.session.backward(loss * (1 / self.session.loss_scale()))
        self.session.step()
        self.session.zero_grad()


def made(backend, make, *, dtype=torch.float32, **settings):
    """Return a session over a fresh net, whose optimizer is made of params (not of pairs)."""
    wanted = make if make is two_groups else lambda params: make([param for _, param in params])
    return base.wrap(backend, Net(dtype), wanted, Settings(**settings))


def gathered(thing):
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, thing)
    return everyone


def whole(name, entering, shape):
    """Return a gradient as it entered the step, put together from all ranks."""
    pieces = gathered([(box, tensor) for box, tensor in zip(entering.shard.boxes, entering.local, strict=True)])
    assert entering.shard.shape == tuple(shape)
    return assemble(tuple(shape), [piece for mine in pieces for piece in mine], name)


def is_within_the_bound_of_a_sum(gradient, local_by_rank, dtype):
    ranks, micro_batches, unit = len(local_by_rank), len(local_by_rank[0]), UNIT[dtype]
    terms = [tensor.double() / ranks for tensors in local_by_rank for tensor in tensors]

    def gamma(n):
        return n * unit / (1 - n * unit)

    k, w = gamma(micro_batches + 1), gamma(ranks + 1)
    bound = (k + w + k * w) * sum(term.abs() for term in terms) + (micro_batches + ranks + 2) * TINY[dtype]
    return bool(((gradient.double() - sum(terms)).abs() <= bound).all())


def check_against_one_process(session, make, micro_batches, rank, steps=3):
    """Step an optimizer on plain tensors with the gradients that entered: every slot's digest must be the same at every step."""
    plain = Net()
    names = [name for name, param in plain.named_parameters() if param.requires_grad]
    params = dict(plain.named_parameters())
    optimizer = make([(name, params[name]) for name in names] if make is two_groups else [params[name] for name in names])
    reference = base.attach(plain, optimizer)
    seen = Steps(session)
    for step in range(steps):
        seen.window(step, micro_batches, rank)
        assert seen.before == len(seen.entering) == step + 1
        entering = seen.entering[-1]
        assert sorted(entering) == sorted(names)
        local_by_rank = gathered(seen.local[-1])
        for name in names:
            gradient = whole(name, entering[name], params[name].shape)
            params[name].grad = gradient.to(params[name].dtype)
            if name == "unused":
                assert all(name not in local for local in local_by_rank)
                assert not gradient.any()
            else:
                assert [len(local[name]) for local in local_by_rank] == [micro_batches] * len(local_by_rank)
                assert gradient.abs().max() > 0
                assert is_within_the_bound_of_a_sum(gradient, [local[name] for local in local_by_rank], torch.float32), name
        optimizer.step()
        found = {key: value for key, value in session.view().digests().items() if not key.endswith("/master")}
        assert found == reference.view().digests()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("backend", STAGES)
def test_slots_are_bitwise_one_process_s_given_the_gradients_that_entered(backend, name, micro_batches, rank, world_size):
    session = made(backend, OPTIMIZERS[name], micro_batches=micro_batches)
    try:
        check_against_one_process(session, OPTIMIZERS[name], micro_batches, rank)
    finally:
        session.close()


@pytest.mark.truestep(world_size=3)
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
@pytest.mark.parametrize("backend", STAGES)
def test_three_ranks_hold_what_one_process_holds(backend, name, rank, world_size):
    session = made(backend, OPTIMIZERS[name], micro_batches=2)
    try:
        check_against_one_process(session, OPTIMIZERS[name], 2, rank)
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_two_param_groups_are_mapped_and_reported_as_one_step(backend, rank, world_size):
    extra = {"zero_optimization": {"sub_group_size": 10}} if backend == "zero3" else {}
    session = made(backend, two_groups, micro_batches=2, extra=extra)
    try:
        if backend == "zero3":
            assert len(session.flats()) > 3  # several sub-groups in a group
        check_against_one_process(session, two_groups, 2, rank)
        held = [ids for _, ids in session.identity().held]
        live = session.identity().live
        assert [{live[param].endswith("bias") for param in ids} for ids in held] == [{False}, {True}]
        assert sorted(param for ids in held for param in ids) == sorted(live)
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_inside_the_bracket_all_groups_are_seen(backend, rank, world_size):
    session = made(backend, two_groups)
    seen = []
    session.on_step(lambda _: seen.append(session.view().digests()), lambda _, __: None)
    try:
        before = session.view().digests()
        Steps(session).window(0, 1, rank)
        assert seen == [before]
        assert {key.split("/")[1] for key in before if key.startswith("@group")} == {"0", "1"}
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_a_view_creates_nothing_and_is_live(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["adamw"])
    try:
        inner = session.optimizers[0]
        view = session.view()
        assert len(inner.state) == 0
        assert view.names == [name for name, _ in Net().named_parameters()]
        assert {key for name, key in view if not name.startswith("@")} <= {"param", "master"}
        Steps(session).window(0, 1, rank)
        count = len(inner.state)
        view = session.view()
        assert len(inner.state) == count
        for (name, key), slot in view.items():
            if key in ("exp_avg", "master") and name == "cube":
                for box, tensor in zip(slot.boxes, slot.local, strict=True):
                    tensor.copy_(torch.arange(42.0).reshape(2, 3, 7)[box.slices])
        for key in {key for name, key in view if name == "cube"} & {"exp_avg", "master"}:
            again = session.view()["cube", key].full("all")
            assert torch.equal(again, torch.arange(42.0).reshape(2, 3, 7))
        held = any(bool(tensor.eq(41).any()) for entry in inner.state.values() for tensor in entry.values())
        assert any(gathered(held))  # in the optimizer's own tensors, on the rank that holds the last element
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_every_rank_lists_the_same_slots(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["adamw"])
    try:
        Steps(session).window(0, 1, rank)
        listed = gathered([(slot_id, slot.shape, slot.dtype) for slot_id, slot in session.view().items()])
        assert listed[0] == listed[1]
        assert not session.view().orphans
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_bf16_params_have_fp32_masters_and_state_and_obey_the_bound(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["adamw"], dtype=torch.bfloat16, micro_batches=2)
    try:
        seen = Steps(session)
        for step in range(3):
            seen.window(step, 2, rank)
            local_by_rank = gathered(seen.local[-1])
            for name, param in Net().named_parameters():
                if param.requires_grad and name != "unused":
                    gradient = whole(name, seen.entering[-1][name], param.shape)
                    locals_of = [local[name] for local in local_by_rank]
                    assert is_within_the_bound_of_a_sum(gradient, locals_of, torch.bfloat16), name
        view = session.view()
        assert {view[name, "param"].dtype for name in view.names} == {torch.bfloat16}
        assert view["cube", "master"].dtype == view["cube", "exp_avg"].dtype == torch.float32
        assert torch.equal(view["cube", "master"].full("all").bfloat16(), view["cube", "param"].full("all"))
        contract = session.contract()
        assert (contract.reduction, contract.accumulate_dtype, contract.reduce_dtype) == ("mean", torch.bfloat16, torch.bfloat16)
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
def test_bf16_accumulated_in_fp32_on_zero1_is_read_too(rank, world_size):
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    session = made("zero1", OPTIMIZERS["adamw"], dtype=torch.bfloat16, micro_batches=2, extra=extra)
    try:
        seen = Steps(session)
        seen.window(0, 2, rank)
        view = session.view()
        assert torch.equal(view["cube", "master"].full("all").bfloat16(), view["cube", "param"].full("all"))
        local_by_rank = gathered(seen.local[-1])
        gradient = whole("cube", seen.entering[-1]["cube"], (2, 3, 7))
        assert is_within_the_bound_of_a_sum(gradient, [local["cube"] for local in local_by_rank], torch.bfloat16)
        assert session.contract().accumulate_dtype == torch.float32
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_what_a_gradient_hook_returns_replaces_the_gradient(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["sgd"])
    session.hook_gradients(lambda name, gradient: torch.full_like(gradient, 1.0 + rank) if name == "cube" else None)
    try:
        seen = Steps(session)
        seen.window(0, 1, rank)
        assert torch.equal(whole("cube", seen.entering[0]["cube"], (2, 3, 7)), torch.full((2, 3, 7), 1.5))
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_the_engine_clips_at_max_norm_and_says_by_which_norm(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["sgd"], max_norm=0.01)
    try:
        seen = Steps(session)
        seen.window(0, 1, rank)
        [(max_norm, norm)] = session.clips()
        local_by_rank = gathered(seen.local[0])
        means = [sum(local[name][0].double() for local in local_by_rank) / 2 for name in local_by_rank[0]]
        expected = torch.stack([mean.norm() for mean in means]).norm()
        entered = [whole(name, piece, Net().get_parameter(name).shape) for name, piece in seen.entering[0].items()]
        assert max_norm == 0.01
        assert norm.shape == ()
        assert abs(norm - expected) <= 2.0**-18 * expected
        assert abs(torch.stack([tensor.double().norm() for tensor in entered]).norm() - 0.01) < 1e-5
        assert list(session.clips()) == []
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_windows_of_any_length_step_once_and_only_at_their_end(backend, rank, world_size):
    session = made(backend, OPTIMIZERS["sgd"], micro_batches=3)
    try:
        seen = Steps(session)
        for step, micro_batches in enumerate((2, 4, 1)):
            for micro in range(micro_batches - 1):
                with session.micro_batch(last=False):
                    session.backward(loss_of(session.model, step, micro, rank) / micro_batches)
                session.model.step()  # what accelerate does: no boundary, no step
            assert len(seen.entering) == seen.before == step
            with session.micro_batch(last=True):
                session.backward(loss_of(session.model, step, micro_batches - 1, rank) / micro_batches)
            session.step()
            assert len(seen.entering) == seen.before == step + 1
            local_by_rank = gathered(seen.local[-1])
            gradient = whole("cube", seen.entering[-1]["cube"], (2, 3, 7))
            assert is_within_the_bound_of_a_sum(gradient, [local["cube"] for local in local_by_rank], torch.float32)
    finally:
        session.close()


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_closing_takes_every_hook_away(backend, rank, world_size):
    linear = nn.functional.linear
    session = made(backend, OPTIMIZERS["sgd"], extra={"zero_optimization": {"memory_efficient_linear": True}})
    seen = Steps(session)
    replaced = session.contract().operators_replaced
    assert (replaced is not None) == (backend == "zero3")
    session.close()
    assert nn.functional.linear is linear
    assert not session.optimizers[0]._optimizer_step_pre_hooks
    assert "step" not in vars(session.model)
    assert not session.model.module._forward_pre_hooks
    assert seen.before == 0


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", STAGES)
def test_a_rebuilt_adagrad_is_told_from_one_that_steps(backend, rank, world_size):
    for name, steps in (("adamw", True), ("adagrad", backend == "zero0")):
        session = made(backend, OPTIMIZERS[name])
        identity = session.identity()
        session.close()
        assert identity.user_optimizer_steps is steps
        assert set(identity.live.values()) == {key for key, param in Net().named_parameters() if param.requires_grad}
        assert set(identity.frozen.values()) == {"frozen.weight", "frozen.bias"}
        assert set(identity.state_keys) <= set(identity.live)
