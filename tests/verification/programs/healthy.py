"""Recipes for verify's own loop, in which nothing is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import tiny
import torch
from torch import nn

from truestep.verification.recipe import load


def recipe(**pieces):
    """Return a recipe without a loop of its own; what is not given is as in `tiny`."""
    known = {"model": tiny.model, "optimizer": tiny.adamw, "batches": tiny.batches, "loss": tiny.loss}
    return SimpleNamespace(**{**known, **pieces})


plain = recipe()
padded = recipe(batches=tiny.padded_batches, num_items=tiny.num_tokens)
clipped = recipe(batches=tiny.padded_batches, num_items=tiny.num_tokens, max_norm=0.3)
summed = recipe(loss=lambda model, batch: tiny.errors(model, batch).sum())
summed_over_counted = recipe(
    batches=tiny.padded_batches, num_items=tiny.num_tokens, loss=lambda model, batch: tiny.errors(model, batch).sum()
)


# --- dropout and batch norm


class Noisy(tiny.Tagger):
    """Another forward every time, and buffers that every forward changes."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(13)
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        x = self.batch_norm(x.flatten(0, 1)).view(x.shape)
        return self.head(self.norm(x))


def noisy_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Noisy()


noisy = recipe(model=noisy_model)


# --- schedules


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 3)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)  # moves betas, too


scheduled = recipe(scheduler=warm_up)
scheduled_betas = recipe(scheduler=one_cycle)


# --- optimizers


def in_two_groups(decayed, others):
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def decayed_and_not(named_params):
    """Decay the weights of linear layers and the embedding, but nothing else."""
    named = dict(named_params)
    weights = [name for name in named if name.endswith("weight") and not name.startswith("norm")]
    return in_two_groups([named[name] for name in weights], [named[name] for name in named if name not in weights])


def decayed_by_dim(named_params):
    """The same by the shapes that the params have, as people often write it: under FSDP1 these are all flat."""
    params = [param for _, param in named_params]
    return in_two_groups([param for param in params if param.dim() == 2], [param for param in params if param.dim() != 2])


def two_optimizers(named_params):
    named = list(named_params)
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    return [torch.optim.Adagrad(weights, lr=0.02), torch.optim.SGD(others, lr=0.01, momentum=0.9, weight_decay=0.1)]


def decayed_sgd(named_params):
    return torch.optim.SGD([param for _, param in named_params], lr=1e-2, momentum=0.9, weight_decay=0.1)


def fused_adamw(named_params):
    return torch.optim.AdamW([param for _, param in named_params], lr=1e-2, fused=True)


def fused_sgd(named_params):
    return torch.optim.SGD([param for _, param in named_params], lr=1e-2, momentum=0.9, fused=True)


def adafactor(named_params):
    return torch.optim.Adafactor([param for _, param in named_params], lr=1e-2)


def muon(named_params):
    return torch.optim.Muon([param for _, param in named_params], lr=1e-2)


edges = load("embedding-net")
several_on_all_edges = recipe(model=edges.model, batches=edges.batches, loss=edges.loss, optimizer=two_optimizers)
grouped = recipe(optimizer=decayed_and_not)
grouped_by_dim = recipe(optimizer=decayed_by_dim)
several = recipe(optimizer=two_optimizers)
fused = recipe(optimizer=fused_adamw)
fused_momentum = recipe(optimizer=fused_sgd)
factored = recipe(optimizer=adafactor)


class Matrices(nn.Module):
    """Nothing but matrices."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 10, bias=False), nn.Linear(10, 13, bias=False)])
        self.head = nn.Linear(13, tiny.OUTPUTS, bias=False)

    forward = tiny.Tagger.forward
    norm = staticmethod(lambda x: x)


def matrices():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Matrices()


orthogonal = recipe(model=matrices, optimizer=muon)


# --- two models


def pair():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [tiny.Tagger(), nn.Linear(tiny.OUTPUTS, tiny.OUTPUTS)]


def loss_of_pair(models, batch):
    tokens, targets = batch
    tagger, corrector = models
    return (corrector(tagger(tokens)) - targets).square().sum(-1)[tokens != 0].mean()


two_models = recipe(model=pair, loss=loss_of_pair)


# --- an optimizer that counts in its state under a key that is no param


class Counting(torch.optim.Optimizer):
    """Descent by a rate that falls with its own count; older gradients lie in containers under keys that are numbers."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "dtype": torch.float32})

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0.0])
        self.state["k"] += 1
        for group in self.param_groups:
            for param in [param for param in group["params"] if param.grad is not None]:
                older = self.state[param].setdefault("older", {beta: torch.zeros_like(param) for beta in (0.0, 0.9)})
                for beta, moment in older.items():
                    moment.mul_(beta).add_(param.grad)
                    param -= group["lr"] / float(self.state["k"]) * moment.to(group["dtype"])


counting = recipe(optimizer=lambda named_params: Counting([param for _, param in named_params]))
