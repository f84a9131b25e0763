"""A small net of everything that goes wrong at the edges of sharding, with a unique shape for every param.

Rows of an embedding that no batch touches, a tied weight, a frozen layer, a param that never gets a gradient, sizes that neither
2 nor 3 divides, params smaller than a world. The targets grow and shrink from batch to batch, and the gradient with them: an
optimizer that is blind to scale at its first step is not at the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from truestep.verification.recipe import NamedParams, Recipe

ROWS, TOUCHED = 13, 9  # of the embedding; tokens are below TOUCHED
TOKENS, SEQUENCES, OUTPUTS = 6, 5, 11
SIZES: Final = ()


class EmbeddingNet(nn.Module):
    """Tokens in, eleven numbers out. `layers` is what a wrapper cuts; everything else lies in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 7)
        self.mix = nn.Linear(7, 7, bias=False)
        self.mix_again = nn.Linear(7, 7, bias=False)
        self.mix_again.weight = self.mix.weight
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 17), nn.Linear(17, OUTPUTS)])
        self.frozen = nn.Linear(7, OUTPUTS, bias=False)
        self.frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.tensor([[0.1, -0.2, 0.3]]))
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.unused = nn.Parameter(torch.linspace(-1.0, 1.0, 23).view(23, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (sequences, tokens) to (sequences, 11)."""
        x = torch.tanh(self.mix(self.embedding(tokens).mean(1)))
        x = torch.tanh(self.mix_again(x))
        shortcut = self.frozen(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.scale * (x + shortcut)
        return torch.cat([y[:, :3] + self.shift, y[:, 3:]], 1)


def model() -> nn.Module:
    """Return the model with its seeded weights; draws nothing from the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return EmbeddingNet()


def optimizer(named_params: NamedParams) -> torch.optim.Optimizer:
    """Return Adagrad over the params that train."""
    return torch.optim.Adagrad([param for _, param in named_params if param.requires_grad], lr=0.05)


def batches(dp_rank: int, dp_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches without end: int64 tokens (5, 6) and float32 targets (5, 11)."""
    for index in itertools.count():
        generator = torch.Generator().manual_seed(index * dp_size + dp_rank)
        tokens = torch.randint(TOUCHED, (SEQUENCES, TOKENS), generator=generator)
        targets = torch.randn(SEQUENCES, OUTPUTS, generator=generator) * 1.5 ** (index % 7)
        yield tokens, targets


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error over all elements of the targets."""
    tokens, targets = batch
    return functional.mse_loss(model(tokens), targets)


def num_items(batch: tuple[Tensor, Tensor]) -> int:
    """Return the number of elements of the targets."""
    return batch[1].numel()


def sized() -> Recipe:
    """Return the recipe; it has no sizes to set."""
    return Recipe(
        model, optimizer, batches, loss, num_items=num_items, name="embedding-net", source=__name__, spec="embedding-net"
    )
