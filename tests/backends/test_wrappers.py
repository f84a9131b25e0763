"""accelerate: what `prepare` returned is seen through, acted on by accelerate's own calls, and forgotten when closed."""

import os

import pytest
import torch
from torch import nn

import truestep as ts
from truestep.backends import base
from truestep.backends.base import Settings
from truestep.state import ranks
from truestep.words.errors import UnsupportedError

pytest.importorskip("accelerate")

BACKENDS = [name for name in base.BACKENDS if name.startswith("accelerate-")]
U = 2.0**-24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.embedding = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 3)
        self.back = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.middle.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.back(self.middle(self.embedding(tokens)).tanh()))


NAMES = [name for name, _ in Net().named_parameters()]
TRAINED = [name for name, param in Net().named_parameters() if param.requires_grad]


def adamw(params):
    return torch.optim.AdamW([param for _, param in params], lr=0.02)


def adagrad(params):
    return torch.optim.Adagrad([param for _, param in params], lr=0.05)


def loss_of(model, micro, rank):
    tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(10 * micro + rank))
    return nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % 7)


def local_gradients(micro, rank, factor=1.0):
    model = Net()
    (factor * loss_of(model, micro, rank)).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.fixture
def opened(rank):
    """Wrap nets; close the sessions when the test is over, and look that nothing of accelerate stays."""
    sessions, environment = [], dict(os.environ)

    def wrap(backend, make=adamw, **settings):
        if "zero" in backend:
            pytest.importorskip("deepspeed")
        sessions.append(base.wrap(backend, Net(), make, Settings(**settings)))
        return sessions[-1]

    yield wrap
    from accelerate.state import AcceleratorState

    for session in sessions:
        session.close()
    assert AcceleratorState._shared_state == {}
    assert {key for key in os.environ if key.startswith("ACCELERATE_")} == {
        key for key in environment if key.startswith("ACCELERATE_")
    }


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_acts_by_accelerates_own_calls_and_its_gradients_are_seen(backend, opened, rank, world_size):
    from accelerate.optimizer import AcceleratedOptimizer

    session = opened(backend, micro_batches=2)
    assert (session.backend, session.view().names) == (backend, NAMES)
    assert isinstance(session.optimizer, AcceleratedOptimizer)
    assert [type(optimizer) for optimizer in session.optimizers] == [torch.optim.AdamW]
    assert session.extras["accelerator"].device.type == "cpu"
    seen, told = [], []
    session.hook_gradients(lambda name, gradient: seen.append((name, gradient.detach().clone())))
    session.on_step(lambda index: told.append(index), lambda index, entering: told.append(entering))
    assert session.loss_scale() == 0.5
    factor = 4.0  # of the loop's own; accelerate, or the engine, divides by the two micro-batches
    everyone = []
    for micro in range(2):
        assert told == []
        with session.micro_batch(last=micro == 1):
            session.backward(factor * loss_of(session.model, micro, rank))
        mine = local_gradients(micro, rank, factor / 2)
        assert sorted(name for name, _ in seen) == sorted(TRAINED)
        assert all(torch.equal(gradient, mine[name]) for name, gradient in seen)
        everyone += ranks.gather(mine)
        seen.clear()
    session.step()
    index, entering = told
    assert (index, sorted(entering)) == (0, sorted(TRAINED))
    n = 2 + world_size + 2
    for name, piece in entering.items():
        for box, found in zip(piece.shard.boxes, piece.local, strict=True):
            terms = [each[name][box.slices].double() / world_size for each in everyone]
            bound = n * U / (1 - n * U) * sum(term.abs() for term in terms)
            assert bool(((found.double() - sum(terms)).abs() <= bound).all())
    session.zero_grad()
    assert all(param.grad is None for module in session.modules() for param in module.parameters())


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_is_accelerates_or_the_engines_own(backend, opened, rank, world_size):
    session = opened(backend, max_norm=0.125)
    entered = {}
    session.on_step(lambda index: None, lambda index, entering: entered.update(entering))
    with session.micro_batch(last=True):
        session.backward(8.0 * loss_of(session.model, 0, rank))
    session.clip(0.125)
    session.step()
    pieces = ranks.gather(
        {
            (name, box): tensor
            for name, piece in entered.items()
            for box, tensor in zip(piece.shard.boxes, piece.local, strict=True)
        }
    )
    whole = {key: tensor for theirs in pieces for key, tensor in theirs.items()}
    norm = torch.linalg.vector_norm(torch.stack([tensor.norm() for tensor in whole.values()]))
    assert float(norm) == pytest.approx(0.125, rel=1e-4)
    assert [limit for limit, _ in session.clips()] == ([0.125] if "zero" in backend else [])


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_prepare_returned_is_attached_to_and_acts_without_the_accelerator(backend, opened, rank, world_size):
    from accelerate.state import AcceleratorState

    ours = opened(backend)
    with ours.micro_batch(last=True):
        ours.backward(loss_of(ours.model, 0, rank))
    ours.step()
    session = base.attach(ours.model, ours.optimizer)
    assert list(session.view()) == list(ours.view())
    assert session.view().digests() == ours.view().digests()
    assert ts.inspect({"net": ours.model}, {"net": ours.optimizer} if "zero" not in backend else None).names[0].endswith(NAMES[0])
    if "zero" in backend:
        return
    assert session.backend == backend
    assert session.identity().live == ours.identity().live
    before = session.view().copy()
    with session.micro_batch(last=True):
        session.backward(loss_of(session.model, 1, rank))
    norm = session.clip(1e9)
    assert norm.item() > 0
    assert norm.shape == ()
    assert session.step()
    session.zero_grad()
    assert "back.weight" in {finding.param for finding in before.diff(session.view())}
    session.close()
    assert AcceleratorState._shared_state != {}, "the user's Accelerator goes on"


@pytest.mark.truestep(world_size=2)
def test_prepared_engines_are_known_with_and_without_the_optimizer(opened, rank, world_size):
    session = opened("accelerate-zero2")
    for attached in (base.attach(session.model), base.attach(session.model, session.optimizer)):
        assert (attached.backend, attached.view().names) == ("zero2", NAMES)
        assert attached.optimizers == session.optimizers


@pytest.mark.truestep(world_size=2)
def test_adagrads_state_that_prepare_left_behind_is_told_as_orphans(opened, rank, world_size):
    session = opened("accelerate-fsdp2", adagrad)
    assert len(session.view().orphans) == len(TRAINED)
    assert session.view().keys_of("middle.weight") == ["param"]
    identity = session.identity()
    assert {param_id for _, ids in identity.held for param_id in ids} == set(identity.live)
    assert set(identity.state_keys).isdisjoint(identity.live)


@pytest.mark.truestep(world_size=2)
def test_planting_reaches_the_backend_under_it(opened, rank, world_size):
    session = opened("accelerate-ddp")
    session.plant("desynchronise")
    with session.micro_batch(last=True):
        session.backward(loss_of(session.model, 0, rank))
    gradients = ranks.gather(session.modules()[0].middle.weight.grad)
    assert not torch.equal(*gradients)
    with pytest.raises(UnsupportedError, match="'zero2' has no switch to desynchronise"):
        opened("accelerate-zero2").plant("desynchronise")


@pytest.mark.truestep(world_size=2)
def test_several_models_optimizers_or_a_wrap_are_refused_in_one_message(rank, world_size):
    for backend in BACKENDS:
        with pytest.raises(UnsupportedError, match=f"'{backend}' takes one model and one optimizer"):
            base.wrap(backend, [Net(), Net()], adamw, Settings())
        with pytest.raises(UnsupportedError, match=f"'{backend}' takes one model and one optimizer"):
            base.wrap(backend, Net(), lambda params: [adamw(params[:2]), adamw(params[2:])], Settings())
        with pytest.raises(UnsupportedError, match="wraps by accelerate's prepare"):
            base.wrap(backend, Net(), adamw, Settings(wrap=lambda model, backend: model))


@pytest.mark.truestep(world_size=2)
def test_a_preparation_that_fails_leaves_no_trace_and_the_environment_is_given_back(rank, world_size, monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def fail(self, *args):
        raise ArithmeticError("prepare failed")

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(Accelerator, "prepare", fail)
    with pytest.raises(ArithmeticError):
        base.wrap("accelerate-ddp", Net(), adamw, Settings())
    assert AcceleratorState._shared_state == {}
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_accelerate_without_a_process_group_is_refused():
    with pytest.raises(UnsupportedError, match="'accelerate-ddp' needs a process group, found none"):
        base.wrap("accelerate-ddp", Net(), adamw, Settings())


def test_an_accelerated_optimizer_of_one_process_is_seen_through():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        model, optimizer = Accelerator(cpu=True).prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5))
        session = base.attach(model, optimizer)
        assert session.backend == "accelerate-single"
        assert session.optimizers == [optimizer.optimizer]
        assert ts.inspect(model, optimizer)["@group/0", "lr"].value == 0.25
        several = ts.inspect(
            {"a": model, "b": nn.Linear(2, 3)}, {"a": optimizer, "b": torch.optim.SGD([nn.Parameter(torch.ones(1))])}
        )
        assert several["@group/a.0", "momentum"].value == 0.5
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
