"""A view says the same of the same content on every backend: names, keys, shapes, dtypes, digests; taking it changes nothing.

Two ranks get the same batches, so that the mean over them is bitwise one process's gradient, and so is all that follows.
"""

import importlib.util

import pytest
import torch
from torch import nn

import truestep as ts
from truestep.backends import base
from truestep.backends.base import Settings

STEPS = 3
BACKENDS = [name for name in base.BACKENDS if name != "single"]


class Net(nn.Module):
    """Sizes that do not divide, dims of 1, a head that is tied to the embedding, a frozen part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 5)])
        self.cube = nn.Parameter(torch.randn(2, 5, 3) * 0.3)
        self.back = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.frozen = nn.Parameter(torch.tensor([0.5, -0.25, 0.125]))
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden + self.back(torch.einsum("bi,kij->bkj", hidden, self.cube).flatten(1) + self.frozen.repeat(2))
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden) * self.gain


def in_two_groups(make, **settings):
    def made(params):
        vectors = [param for name, param in params if name.endswith("bias")]
        matrices = [param for name, param in params if not name.endswith("bias")]
        return make([{"params": matrices}, {"params": vectors, "lr": 0.03, "weight_decay": 0.0}], **settings)

    return made


def in_one_group(make, **settings):
    return lambda params: make([param for _, param in params], **settings)


OPTIMIZERS = {
    "adamw": in_one_group(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": in_one_group(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "sgd, two groups": in_two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "rmsprop": in_one_group(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "amsgrad, two groups": in_two_groups(torch.optim.AdamW, lr=0.02, amsgrad=True),
}


def loss_of(model, step):
    tokens = torch.arange(7)
    return nn.functional.cross_entropy(model(tokens), (3 * tokens + step) % 7) * 3.0**step


def train(session, steps):
    for step in steps:
        with session.micro_batch(last=True):
            session.backward(loss_of(session.model, step) / session.loss_scale())
        session.step()
        session.zero_grad()


def described(view):
    """Return what a view says of each slot but a vendor's own fp32 copies."""
    digests = view.digests()
    return {
        f"{name}/{key}": (slot.kind, slot.shape, slot.dtype, digests.get(f"{name}/{key}"))
        for (name, key), slot in view.items()
        if key != "master"
    }


def held_by(session):
    """Return all that taking a view may not change."""
    entries = [(len(optimizer.state), sorted(map(len, optimizer.state.values()))) for optimizer in session.optimizers]
    params = [param for module in session.modules() for param in module.parameters()]
    values = [param.detach().clone() for param in params]
    gradients = [None if param.grad is None else param.grad.detach().clone() for param in params]
    states = [
        value.detach().clone()
        for optimizer in session.optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return entries, [torch.get_rng_state(), *values, *states], gradients


def is_same(before, after):
    def equal(one, other):
        one, other = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (one, other))
        return torch.equal(one, other)

    return (
        before[0] == after[0]
        and len(before[1]) == len(after[1])
        and all(equal(*pair) for pair in zip(before[1], after[1], strict=True))
        and all(one is other or equal(one, other) for one, other in zip(before[2], after[2], strict=True))
    )


def demand_equal(session, one):
    before = held_by(session)
    view = session.view()
    found = described(view)
    assert is_same(before, held_by(session))
    expected = described(one.view())
    assert list(found) == list(expected)
    assert {slot: (found[slot], expected[slot]) for slot in found if found[slot] != expected[slot]} == {}
    assert view.orphans == ()
    public = ts.inspect(session.model, session.optimizer)
    assert list(public) == list(view)


# accelerate wraps backends that have all of them; its Adagrad on FSDP2 shows a fault of that pair, with a test of its own.
CELLS = [(name, backend) for backend in BACKENDS for name in OPTIMIZERS if "accelerate" not in backend or "two groups" in name]


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize(("optimizer", "backend"), CELLS)
def test_equal_content_looks_equal_before_and_after_steps(optimizer, backend, rank, world_size):
    if (vendor := base.BACKENDS[backend].vendor) and importlib.util.find_spec(vendor) is None:
        pytest.skip(f"{vendor} is not installed")
    one = base.wrap("single", Net(), OPTIMIZERS[optimizer], Settings())
    session = base.wrap(backend, Net(), OPTIMIZERS[optimizer], Settings())
    try:
        demand_equal(session, one)
        train(session, range(STEPS))
        train(one, range(STEPS))
        demand_equal(session, one)
        with session.micro_batch(last=False):
            loss = loss_of(session.model, STEPS)
            demand_equal(session, one)  # between forward and backward
            session.backward(loss / session.loss_scale())
        demand_equal(session, one)  # with gradients that wait
        assert list(session.identity().live.values()) == list(one.identity().live.values())
        assert list(session.identity().frozen.values()) == ["frozen"]
    finally:
        session.close()
