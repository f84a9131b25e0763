"""A GradScaler in a window: unscale once, and skip the step on all ranks or on none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truestep.state import ranks


def unscale(scaler: Any, optimizers: list[torch.optim.Optimizer], alone: bool) -> bool:
    """Unscale the gradients of every optimizer; return whether all are finite, on every rank. Collective: every rank.

    What one shard holds may be finite while another's is not; and of several optimizers none steps if one cannot.
    """
    found: list[Tensor] = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        found += scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    if not found:
        return True
    agreed = torch.stack([each.to(found[0].device) for each in found]).sum()
    if not alone:
        ranks.total(agreed)
    for each in found:
        each.copy_(agreed.clamp(max=1.0))
    return not bool(agreed)  # the read that GradScaler itself does


def step(scaler: Any, optimizers: list[torch.optim.Optimizer], finite: bool) -> None:
    """Step every optimizer unless a gradient is not finite, and let the scaler set its scale for the next window."""
    if finite:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
