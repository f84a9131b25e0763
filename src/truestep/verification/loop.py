"""Verify's own training loop: the accumulator's, as a user would write it around a recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truestep.accumulate.accumulator import Accumulator
from truestep.backends import slots
from truestep.backends.base import Session
from truestep.state.generators import restore_rng, rng_states
from truestep.verification.recipe import Recipe


@dataclass(frozen=True)
class Loop:
    """One call a step.

    Attributes:
        session: Of any backend.
        accumulator: Over it.
        loss: The recipe's, watched.
        num_items: ``batch -> items``, or None: every micro-batch weighs the same.
    """

    session: Session
    accumulator: Accumulator
    loss: Callable[[Any, Any], Tensor]
    num_items: Callable[[Any], float] | None

    def run(self, batches: Sequence[Any]) -> None:
        """Run one window over this rank's micro-batches."""
        for window in self.accumulator.windows(batches, self.num_items):
            for batch in window:
                window.backward(self.loss(self.session.model, batch))
            window.step()


def accumulator(session: Session, recipe: Recipe, reduction: str, micro_batches: int, scheduler: Any) -> Accumulator:
    """Return what owns the windows of a recipe without a loop; before a fault is planted, which it would take for a setting.

    A loss that is not finite is judged, as everything is: it ends nothing.
    """
    settings = {"reduction": reduction, "max_norm": recipe.max_norm, "scheduler": scheduler}
    return Accumulator.over(session, micro_batches, ends_on_nan=False, **settings)


def window_weights(items: Sequence[Sequence[float]] | None, micro_batches: int, ranks: int, reduction: str) -> list[list[float]]:
    """Return the weight of every loss in the window's, ``[rank][micro-batch]``.

    Args:
        items: How many items each loss is over, or None where nobody says: then all weigh the same.
        micro_batches: K of each rank, where `items` is None.
        ranks: W.
        reduction: ``mean``: each loss is a mean over its items; ``sum``: it is their sum.

    >>> window_weights([[1, 3], [2, 2]], 2, 2, "mean")
    [[0.125, 0.375], [0.25, 0.25]]
    """
    if items is None:
        share = 1.0 / (micro_batches * ranks) if reduction == "mean" else 1.0
        return [[share] * micro_batches for _ in range(ranks)]
    total = sum(sum(row) for row in items)
    if total == 0:
        return [[0.0] * len(row) for row in items]
    return [[(count if reduction == "mean" else 1.0) / total for count in row] for row in items]


def measured_reduction(recipe: Recipe, model: Any, batch: Any) -> str:
    """Return what a loss is over its own items, by trying: with every item twice a ``mean`` stays and a ``sum`` doubles.

    Run in evaluation mode and without gradients; leaves RNG, buffers and modes as they were. What cannot be doubled counts as a
    mean.
    """
    modules = [module for _, module in slots.labelled_items(model)]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    states = rng_states()
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            once = float(recipe.loss(model, copy.deepcopy(batch)))
            twice = float(recipe.loss(model, doubled(batch)))
    except Exception:  # a loss that takes no other batch size says nothing about itself
        return "mean"
    finally:
        for part, mode in modes:
            part.training = mode
        restore_rng(states)
    return "sum" if abs(twice - 2 * once) < abs(twice - once) else "mean"


def doubled(batch: Any) -> Any:
    """Return a batch with every item twice: tensors along their first dim, containers part by part."""
    if isinstance(batch, Tensor):
        return torch.cat([batch, batch]) if batch.ndim else batch
    if isinstance(batch, dict):
        return type(batch)({key: doubled(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        parts = [doubled(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return copy.copy(batch)
