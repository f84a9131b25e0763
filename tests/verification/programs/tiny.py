"""What the programs beside this file train: a small net that maps tokens to numbers, on padded sequences.

Token 0 is padding. The targets grow and shrink from micro-batch to micro-batch, and the gradient with them; no two params have
the same shape.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import nn

ROWS, LENGTH, OUTPUTS = 3, 7, 5  # of a micro-batch
MICRO_BATCHES, RANKS = 3, 2  # that the programs are run with
GLOBAL_TOKENS = ROWS * LENGTH * MICRO_BATCHES * RANKS  # of a window without padding


class Tagger(nn.Module):
    """Tokens (rows, length) in, numbers (rows, length, 5) out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 13)])
        self.norm = nn.LayerNorm((LENGTH, 13))
        self.head = nn.Linear(13, OUTPUTS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Tagger()


def adamw(named_params):
    return torch.optim.AdamW([param for _, param in named_params], lr=1e-2)


def adagrad(named_params):
    return torch.optim.Adagrad([param for _, param in named_params], lr=1e-2)


def sgd(named_params):
    return torch.optim.SGD([param for _, param in named_params], lr=1e-2, momentum=0.9)


def batches(dp_rank, dp_size):
    """Yield full micro-batches."""
    for index in itertools.count():
        yield micro_batch(index * dp_size + dp_rank, 1.6 ** (index % 5))


def padded_batches(dp_rank, dp_size):
    """Yield micro-batches whose rows end in padding: each has another number of tokens."""
    for (tokens, targets), index in zip(batches(dp_rank, dp_size), itertools.count(), strict=False):
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=torch.Generator().manual_seed(7 + index * dp_size + dp_rank))
        yield tokens * (torch.arange(LENGTH) < lengths), targets


def micro_batch(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 19, (ROWS, LENGTH), generator=generator)
    return tokens, scale * torch.randn(ROWS, LENGTH, OUTPUTS, generator=generator)


def errors(model, batch):
    """Return the squared error of every token that is none of padding."""
    tokens, targets = batch
    return (model(tokens) - targets).square().sum(-1)[tokens != 0]


def loss(model, batch):
    """Return the mean over the tokens of the micro-batch."""
    return errors(model, batch).mean()


def num_tokens(batch):
    return int((batch[0] != 0).sum())


def recipe(train_step, **pieces):
    """Return a recipe around a loop; what is not given is as above."""
    return SimpleNamespace(
        **{"model": model, "optimizer": adamw, "batches": batches, "loss": loss, "train_step": train_step, **pieces}
    )


def program(**pieces):
    """Make a recipe of the loop that is written under it."""
    return lambda train_step: recipe(train_step, **pieces)
