"""Element-wise steps agree bit for bit with a replica on the same shards: what a bound lets pass is found there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from truestep.verification.own_shards import ShardWatch


def stepped(make, shape=(6, 5), dtype=torch.float32, param=None, closure=False, steps=2):
    """Step an optimizer under a watch; return what was found, and the watch's optimizer."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(shape, dtype=dtype)) if param is None else param
    optimizer = make([param])
    watch = ShardWatch([optimizer], {id(param): "w"})
    for _ in range(steps):
        param.grad = torch.randn(param.shape, dtype=param.dtype)
        optimizer.step(*[lambda: torch.zeros(())] * closure)
    found = watch.take()
    watch.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_right_steps_agree(cls, fused, dtype):
    found = stepped(lambda params: cls(params, lr=1e-2, fused=fused), dtype=dtype)
    assert found.wrong == []
    assert found.bitwise == 2 * {torch.optim.Adagrad: 3}.get(cls, 4)


def test_a_fused_step_on_a_slice_of_columns_is_found():
    whole = torch.zeros(6, 8)
    param = nn.Parameter(torch.empty(0))
    param.data = whole[:, :5]  # torch's fused kernels pass the strides by (2.13, CPU)
    found = stepped(lambda params: torch.optim.SGD(params, lr=1e-2, fused=True), param=param, steps=1)
    assert [(finding.param, finding.key) for finding in found.wrong] == [("w", "param")]
    assert "bit for bit" in found.wrong[0].expected


def test_steps_with_a_closure_are_left_alone():
    assert stepped(torch.optim.Adagrad, closure=True).bitwise == 0


class Halved(torch.optim.Optimizer):
    """A rule that no textbook has, of one element or of the whole tensor; it may draw, or refuse to step when copied."""

    def __init__(self, params, lr=0.1, whole=False, noise=0.0):
        super().__init__(params, {"lr": lr, "whole": whole, "noise": noise})
        self.own_id = id(self)
        self.is_strict = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.is_strict and self.own_id != id(self):
            raise RuntimeError("this is a copy")
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.grad is not None]:
                state = self.state[param]
                state["half"] = state.get("half", 0 * param.grad) / 2 + param.grad
                size = state["half"].norm() if group["whole"] else 1
                param -= group["lr"] * state["half"] / size
                if group["noise"]:
                    param += group["noise"] * torch.randn_like(param)


def strict(params):
    optimizer = Halved(params)
    optimizer.is_strict = True
    return optimizer


def test_the_probe_tells_of_classes_that_the_textbook_does_not_know():
    assert stepped(Halved).bitwise == 4
    assert stepped(lambda params: Halved(params, whole=True)).bitwise == 0
    assert stepped(lambda params: Halved(params, noise=0.1)).bitwise == 0


def test_what_cannot_step_beside_is_told_of_and_stops_nothing():
    found = stepped(strict)
    assert (found.bitwise, found.wrong) == (0, [])
    assert found.not_run == "Halved on this rank's own shards: RuntimeError: this is a copy"


def test_watching_changes_nothing():
    def run(watched):
        torch.manual_seed(1)
        param = nn.Parameter(torch.randn(33))
        optimizer = torch.optim.AdamW([param], fused=True)
        watch = ShardWatch([optimizer] * watched, {id(param): "w"})
        for _ in range(3):
            param.grad = torch.randn(33)
            optimizer.step()
        watch.close()
        return param.detach().clone(), torch.get_rng_state(), len(optimizer.state)

    for mine, theirs in zip(run(watched=True), run(watched=False), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
