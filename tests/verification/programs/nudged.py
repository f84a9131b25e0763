"""Steps that end a little beside where their kernel ends: within every bound of rounding, and wrong."""

from __future__ import annotations

from types import SimpleNamespace

import tiny
import torch

INTEGER = {2: torch.int16, 4: torch.int32}


def nudge(optimizer, *_):
    """Move one element of each param that stepped by one ulp."""
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.grad is not None):
        local = param.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel():
            local.view(-1).view(INTEGER[local.element_size()])[-1] += 1


def nudged(optimizer):
    optimizer.register_step_post_hook(nudge)
    return optimizer


def recipe(optimizer, dtype=torch.float32):
    return SimpleNamespace(model=lambda: tiny.model().to(dtype), optimizer=optimizer, batches=tiny.batches, loss=loss)


def loss(model, batch):
    return tiny.loss(model, batch).float()


def fused_adamw(named_params):
    return nudged(torch.optim.AdamW([param for _, param in named_params], lr=1e-2, fused=True))


def adagrad(named_params):
    return nudged(torch.optim.Adagrad([param for _, param in named_params], lr=1e-2, foreach=False))


fused = recipe(fused_adamw)
narrow = recipe(adagrad, torch.bfloat16)
