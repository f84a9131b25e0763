"""A live fault, as people write it: gradients accumulated by hand under accelerate and DeepSpeed.

The loop divides each loss by the number of micro-batches, and calls ``optimizer.step()`` once, after the last: right under DDP.
But DeepSpeed steps inside ``accelerator.backward``, wherever accelerate says that a window ends, and with
``gradient_accumulation_steps`` left at 1 that is after every micro-batch (accelerate 1.15; a larger number in DeepSpeed's config
alone does not change it). Nothing complains. Adagrad, because its accumulator never forgets the extra steps.

The healthy twin says ``gradient_accumulation_steps`` to accelerate too, and opens each micro-batch with
``accelerator.accumulate(model)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from truestep.verification.recipe import NamedParams, Recipe
from truestep.verification.recipes.bytes_gpt import BytesGPT

_NET: Final = BytesGPT(width=48, layers=2, heads=4, context=32, batch=2)

SIZES: Final = ()

deepspeed_config: Final = {"gradient_accumulation_steps": 1}


def model() -> nn.Module:
    """Return a small byte-level GPT."""
    return _NET.model()


def optimizer(named_params: NamedParams) -> torch.optim.Optimizer:
    """Return Adagrad."""
    return torch.optim.Adagrad([param for _, param in named_params], lr=0.01)


def batches(dp_rank: int, dp_size: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches without end: int64 (2, 33)."""
    return _NET.batches(dp_rank, dp_size)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross entropy, the mean over target tokens."""
    return _NET.loss(model, batch)


def train_step(model: Any, optimizer: Any, batches: Sequence[Tensor], accelerator: Any) -> Tensor:
    """Take what is meant as one optimizer step; return the mean loss of the window."""
    total = torch.zeros(())
    for batch in batches:
        part = loss(model, batch) / len(batches)
        accelerator.backward(part)
        total += part.detach().cpu()
    optimizer.step()
    optimizer.zero_grad()
    return total


def sized() -> Recipe:
    """Return the recipe; it has no sizes to set."""
    return Recipe(
        model,
        optimizer,
        batches,
        loss,
        train_step=train_step,
        num_items=_NET.num_items,
        deepspeed_config=deepspeed_config,
        name="accumulation-by-hand",
        source=__name__,
        spec="accumulation-by-hand",
    )
