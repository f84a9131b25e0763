"""``three-linears``: a small regression by three Linears of unlike sizes, to try any optimizer class on in a second."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from truestep.verification.recipe import NamedParams, Recipe

SIZES: Final = ("bias",)
WIDTHS: Final = (6, 10, 8, 4)  # even, so that FSDP2 shards without remainder: some classes raise on uneven shards alone
ROWS: Final = 5


def optimizer(named_params: NamedParams) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW([param for _, param in named_params], lr=0.01)


def batches(dp_rank: int, dp_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches without end: float32 (5, 6) and targets (5, 4), their scale growing and falling."""
    for index in itertools.count():
        generator = torch.Generator().manual_seed(index * dp_size + dp_rank)
        x = torch.randn(ROWS, WIDTHS[0], generator=generator)
        yield x, torch.randn(ROWS, WIDTHS[-1], generator=generator) * 1.5 ** (index % 5)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(model(batch[0]), batch[1])


def num_items(batch: tuple[Tensor, Tensor]) -> int:
    """Return the number of elements of the targets."""
    return batch[1].numel()


def sized(bias: int = 1) -> Recipe:
    """Return the recipe; with ``bias=0`` all params have two dims, as Muon needs."""

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            layers = [nn.Linear(wide, narrow, bias=bool(bias)) for wide, narrow in itertools.pairwise(WIDTHS)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    spec = f"three-linears:bias={bias}"
    return Recipe(model, optimizer, batches, loss, num_items=num_items, name=spec, source=__name__, spec=spec)
