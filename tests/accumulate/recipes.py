"""Recipes whose loop is the accumulator's: a covering array sends each through `verify`."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import torch
from torch import nn

import truestep as ts

ROWS, LENGTH, OUTPUTS = 4, 7, 5
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


class Tagger(nn.Module):
    """Tokens (rows, length) in, numbers (rows x length, 5) out; no two params of one shape."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 13)])
        self.head = nn.Linear(13, OUTPUTS)

    def forward(self, tokens):
        x = self.embedding(tokens.flatten())
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def tagger():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Tagger()


def batches(dp_rank, dp_size):
    """Yield micro-batches whose rows end in padding (token 0), of unequal token counts, their targets growing and falling."""
    for index in itertools.count():
        yield micro_batch(index * dp_size + dp_rank, 1.6 ** (index % 5))


def micro_batch(seed, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 19, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=draw)
    return tokens * (torch.arange(LENGTH) < lengths), scale * torch.randn(ROWS * LENGTH, OUTPUTS, generator=draw)


def num_tokens(batch):
    return int((batch[0] != 0).sum())


def errors(model, batch):
    tokens, targets = batch
    return (model(tokens) - targets).square().sum(-1)[tokens.flatten() != 0]


def mean_loss(model, batch):
    return errors(model, batch).mean()


def sum_loss(model, batch):
    return errors(model, batch).sum()


def recipe(optimizer, *, weights, reduction, tail, max_norm, sync="auto"):
    """Return a recipe for `verify`.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        weights: ``equal``, ``ahead`` (num_items given to `windows`) or ``late`` (given to `backward`).
        reduction: What the loss is over its own items.
        tail: The window is the shorter last one of a loader.
        max_norm: To clip at, or None.
        sync: When to reduce.
    """
    loss = {"mean": mean_loss, "sum": sum_loss}[reduction]
    # One accumulator for the run: `verify` calls the loop once a step.
    accumulator = functools.cache(
        lambda model, optimizer, length: ts.Accumulator(
            model, optimizer, micro_batches=length, max_norm=max_norm, reduction=reduction, sync=sync
        )
    )

    def train_step(model, optimizer, batches):
        acc = accumulator(model, optimizer, len(batches) + tail)
        for window in acc.windows(batches, num_tokens if weights == "ahead" else None):
            for batch in window:
                late = {"num_items": num_tokens(batch)} if weights == "late" else {}
                window.backward(loss(model, batch), **late)
            window.step()
        return window.loss

    return SimpleNamespace(
        model=tagger,
        optimizer=lambda named_params: OPTIMIZERS[optimizer]([param for _, param in named_params]),
        batches=batches,
        loss=loss,
        train_step=train_step,
        reduction=reduction,
        num_items=None if weights == "equal" else num_tokens,
        max_norm=max_norm,
    )


def __getattr__(name):
    """Return the recipe ``adamw_late_sum_tail_clipped``: one name for each combination, as rank processes load it by name."""
    optimizer, _, rest = name.partition("_")
    if optimizer not in OPTIMIZERS:
        raise AttributeError(name)
    weights, reduction, tail, clipped = rest.split("_")
    return recipe(
        optimizer, weights=weights, reduction=reduction, tail=tail == "tail", max_norm=0.3 if clipped == "clipped" else None
    )
