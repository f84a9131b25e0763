"""FSDP1: flat ranges mapped back to names and boxes, gradients seen whole, clipping by all shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import truestep as ts
from truestep.backends import base
from truestep.backends.base import Piece, Settings
from truestep.proof.bounds import reduction_bound, worst
from truestep.state import ranks
from truestep.state.view import assemble
from truestep.words.errors import UnsupportedError
from truestep.words.layout import Layout

NAMES = ["head", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]


class Net(nn.Module):
    """Sizes that do not divide; the head is tied into the forward twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Parameter(torch.randn(5, 3))
        self.blocks = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x @ self.head) @ self.head.T


def adagrad(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([param for _, param in named], lr=0.1)


def batch(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + micro)) * (1 + micro)


def session_of(make=adagrad):
    return base.wrap("fsdp1", Net(), make, Settings(micro_batches=2))


@pytest.mark.truestep(world_size=2)
def test_names_boxes_and_values_are_those_of_the_plain_model(rank: int, world_size: int) -> None:
    session = session_of()
    view, plain = session.view(), dict(Net().named_parameters())
    assert view.names == NAMES
    assert {slot.shard.layout for (_, key), slot in view.items() if key == "param"} == {Layout.FLAT}
    for name in NAMES:
        whole = view[name, "param"].full("all")
        assert whole is not None
        assert torch.equal(whole, plain[name])
        assert view[name, "sum"].shape == plain[name].shape
    session.close()


@pytest.mark.truestep(world_size=3)
def test_a_step_is_that_of_the_mean_of_the_local_gradients_it_saw(rank: int, world_size: int) -> None:
    session = session_of()
    seen: list[dict[str, torch.Tensor]] = []
    entering: dict[str, Piece | None] = {}
    session.hook_gradients(lambda name, gradient: seen[-1].__setitem__(name, gradient.clone()))
    session.on_step(lambda index: None, lambda index, pieces: entering.update(pieces))
    for micro in range(2):
        seen.append({})
        with session.micro_batch(micro == 1):
            session.backward(session.model(batch(rank, micro)).square().mean() / 2)
    session.step()

    plain = Net()
    for micro, gradients in enumerate(seen):
        (plain(batch(rank, micro)).square().mean() / 2).backward()
        for name, param in plain.named_parameters():
            assert torch.equal(gradients[name], param.grad)
            param.grad = None
    everyone = ranks.gather(seen)
    for name in NAMES:
        pieces = [piece for piece in ranks.gather(entering[name]) if piece is not None]
        boxes = [(box, local) for piece in pieces for box, local in zip(piece.shard.boxes, piece.local, strict=True)]
        found = assemble(pieces[0].shard.shape, boxes, name)
        expected = reduction_bound(
            [[micro[name] for micro in theirs] for theirs in everyone],
            [[1 / world_size] * 2] * world_size,
            accumulate_dtype=torch.float32,
            reduce_dtype=torch.float32,
        )
        assert worst(found, expected).ratio <= 1
    session.close()


@pytest.mark.truestep(world_size=2)
def test_clipping_by_the_models_own_method_is_recorded_with_the_global_norm(rank: int, world_size: int) -> None:
    session = session_of()
    session.backward(session.model(batch(rank, 0)).square().mean())
    local = sum(float(param.grad.square().sum()) for _, param in session.params() if param.grad is not None)
    session.clip(0.01)
    ((max_norm, norm),) = list(session.clips())
    total = sum(ranks.gather(local))
    assert max_norm == 0.01
    assert float(norm) ** 2 == pytest.approx(total, rel=100 * 2.0**-24)  # two sums of 71 squares, each within 71 roundings
    assert list(session.clips()) == []
    session.close()


@pytest.mark.truestep(world_size=2)
def test_digests_are_those_of_one_process(rank: int, world_size: int) -> None:
    session = session_of(lambda named: torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9))
    for _ in range(2):
        session.backward(session.model(batch(0, 0)).square().mean())
        session.step()
        session.zero_grad()
    found = ts.inspect(session.model, session.optimizer).digests()
    wholes = {slot_id: slot.full("all") for slot_id, slot in session.view().items() if slot.kind == "tensor"}

    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(wholes[name, "param"])
            optimizer.state[param]["momentum_buffer"] = wholes[name, "momentum_buffer"].clone()
    assert ts.inspect(plain, optimizer).digests() == found
    session.close()


@pytest.mark.truestep(world_size=2)
def test_hidden_params_are_refused_with_the_remedy(rank: int, world_size: int) -> None:
    model = FullyShardedDataParallel(Net(), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="use_orig_params=True"):
        base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
