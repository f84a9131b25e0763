"""Fused and 16-bit steps agree bit for bit with a replica on the same shards: what a bound lets pass is found there."""

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
def test_right_steps_agree_and_only_fused_and_16_bit_ones_are_run_again(cls, fused, dtype):
    found = stepped(lambda params: cls(params, lr=1e-2, fused=fused), dtype=dtype)
    assert found.wrong == []
    assert found.bitwise == (0 if dtype == torch.float32 and not fused else 2 * {torch.optim.Adagrad: 3}.get(cls, 4))


def test_a_fused_step_on_a_slice_of_columns_is_found():
    whole = torch.zeros(6, 8)
    param = nn.Parameter(torch.empty(0))
    param.data = whole[:, :5]  # torch's fused kernels pass the strides by (2.13, CPU)
    found = stepped(lambda params: torch.optim.SGD(params, lr=1e-2, fused=True), param=param, steps=1)
    assert [(finding.param, finding.key) for finding in found.wrong] == [("w", "param")]
    assert "bit for bit" in found.wrong[0].expected


def test_steps_with_a_closure_are_left_alone():
    assert stepped(lambda params: torch.optim.Adagrad(params, fused=True), closure=True) == stepped(torch.optim.SGD)


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
