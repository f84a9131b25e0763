"""The model in one process: set to what a rank had, run as it ran; and a second one that runs freely."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truestep.backends import slots
from truestep.state.generators import restore_rng, rng_states
from truestep.verification.recipe import Recipe
from truestep.verification.record import MicroBatch, StepRecord
from truestep.verification.whole import Wholes
from truestep.words.names import clean


class OneModel:
    """The recipe's model on whole plain tensors.

    Args:
        recipe: Whose loss it runs.
        model: What the recipe made.
    """

    def __init__(self, recipe: Recipe, model: Any) -> None:
        self._recipe = recipe
        self.model = model
        self.params: dict[str, nn.Parameter] = dict(slots.named_params(model))
        self.trainable: dict[str, nn.Parameter] = dict(slots.trainable(list(self.params.items())))

    def set_params(self, start: Wholes) -> None:
        """Set every param to the candidate's."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(start.values[name, "param"])

    def run(
        self, batch: Any, micro_batch: MicroBatch | None = None, factor: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward, under a rank's RNG states and buffers if its micro-batch is given; leave no gradients behind.

        Returns:
            The loss, and the gradient of each param that got one, of the loss times `factor`.
        """
        with _own_rng(micro_batch), _clean_gradients(self.trainable.values()):
            if micro_batch is not None:
                self._set_buffers(micro_batch.buffers)
            loss = self._recipe.loss(self.model, copy.deepcopy(batch))
            loss.backward(torch.ones_like(loss) if factor is None else factor.to(loss.dtype))
            found = {name: param.grad.detach() for name, param in self.trainable.items() if param.grad is not None}
        return loss.detach(), found

    def _set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        known = {clean(name): buffer for name, buffer in buffers.items()}
        modules = [module for _, module in slots.labelled_items(self.model)]
        with torch.no_grad():
            for index, module in enumerate(modules):
                prefix = f"{index}:" if len(modules) > 1 else ""
                for name, buffer in module.named_buffers():
                    if prefix + clean(name) in known:
                        buffer.copy_(known[prefix + clean(name)])


class FreeRun:
    """The recipe trained by one process from the same start, never set to anything: its losses are figures, not judged.

    Args:
        recipe: What is trained.
        model: Of its own.
        make_optimizer: ``named_params -> optimizer``.
    """

    def __init__(self, recipe: Recipe, model: Any, make_optimizer: Any) -> None:
        self._recipe = recipe
        self._model = model
        self._params = slots.trainable(slots.named_params(model))
        self._optimizer = make_optimizer(self._params)
        self._scheduler = recipe.scheduler(self._optimizer) if recipe.scheduler else None

    def step(self, records: Sequence[StepRecord], weights: Sequence[Sequence[float]]) -> float:
        """Take one step on the window of all ranks; return its loss."""
        total = 0.0
        for record, row in zip(records, weights, strict=True):
            for place, (batch, weight) in enumerate(zip(record.batches, row, strict=True)):
                with _own_rng(record.micro_batches[place] if place < len(record.micro_batches) else None):
                    loss = self._recipe.loss(self._model, copy.deepcopy(batch))
                    (loss * weight).backward()
                total += float(loss.detach()) * weight
        if self._recipe.max_norm is not None:
            torch.nn.utils.clip_grad_norm_([param for _, param in self._params], self._recipe.max_norm)
        for _, optimizer in slots.labelled_items(self._optimizer):
            optimizer.step()
            optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        return total


@contextlib.contextmanager
def _own_rng(micro_batch: MicroBatch | None) -> Iterator[None]:
    states = rng_states()
    if micro_batch is not None:
        restore_rng(micro_batch.rng)
    try:
        yield
    finally:
        restore_rng(states)


@contextlib.contextmanager
def _clean_gradients(params: Iterable[nn.Parameter]) -> Iterator[None]:
    held = list(params)
    for param in held:
        param.grad = None
    try:
        yield
    finally:
        for param in held:
            param.grad = None
