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
    return (model(tokens).float() - targets).square().sum(-1)[tokens.flatten() != 0]


def mean_loss(model, batch):
    return errors(model, batch).mean()


def sum_loss(model, batch):
    return errors(model, batch).sum()


def recipe(optimizer, *, weights="ahead", reduction="mean", tail=False, max_norm=None, sync="auto", model=tagger, **pieces):
    """Return a recipe for `verify`.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        weights: ``equal``, ``ahead`` (num_items given to `windows`) or ``late`` (given to `backward`).
        reduction: What the loss is over its own items.
        tail: The window is the shorter last one of a loader.
        max_norm: To clip at, or None.
        sync: When to reduce.
        model: Makes the model.
        pieces: Others of the recipe's.
    """
    loss = {"mean": mean_loss, "sum": sum_loss}[reduction]
    # One accumulator for the run: `verify` calls the loop once a step.
    accumulator = functools.cache(
        lambda model, optimizer, scheduler, length: ts.Accumulator(
            model, optimizer, micro_batches=length, max_norm=max_norm, scheduler=scheduler, reduction=reduction, sync=sync
        )
    )

    def train_step(model, optimizer, batches, scheduler):
        acc = accumulator(model, optimizer, scheduler, len(batches) + tail)
        for window in acc.windows(batches, num_tokens if weights == "ahead" else None):
            for batch in window:
                late = {"num_items": num_tokens(batch)} if weights == "late" else {}
                window.backward(loss(model, batch), **late)
            window.step()
        return window.loss

    return SimpleNamespace(
        model=model,
        optimizer=lambda named_params: OPTIMIZERS[optimizer]([param for _, param in named_params]),
        batches=batches,
        loss=loss,
        train_step=train_step,
        reduction=reduction,
        num_items=None if weights == "equal" else num_tokens,
        max_norm=max_norm,
        **pieces,
    )


def halved_each_step(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def bf16_tagger():
    return tagger().bfloat16()


scheduled = recipe("adamw", scheduler=halved_each_step)
bf16 = recipe("adamw", model=bf16_tagger)


# --- done wrong by hand: what no program of tests/verification has


def by_hand(train_step, **pieces):
    """Return a recipe whose loop is a user's own."""
    return SimpleNamespace(**{**vars(recipe("adamw")), "train_step": train_step, **pieces})


def _divides_a_tail_by_the_full_count(model, optimizer, batches):
    for batch in batches:
        (mean_loss(model, batch) / (len(batches) + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _divides_what_is_normalised_already(model, optimizer, batches):
    counts = torch.tensor([float(num_tokens(batch)) for batch in batches])
    total = counts.sum()
    torch.distributed.all_reduce(total)
    for batch in batches:
        (sum_loss(model, batch) / total * torch.distributed.get_world_size() / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


tail_by_hand = by_hand(_divides_a_tail_by_the_full_count, num_items=None)
divided_again = by_hand(_divides_what_is_normalised_already)


def __getattr__(name):
    """Return the recipe ``adamw_late_sum_tail_clipped``: one name for each combination, as rank processes load it by name."""
    optimizer, _, rest = name.partition("_")
    if optimizer not in OPTIMIZERS:
        raise AttributeError(name)
    weights, reduction, tail, clipped = rest.split("_")
    return recipe(
        optimizer, weights=weights, reduction=reduction, tail=tail == "tail", max_norm=0.3 if clipped == "clipped" else None
    )
