"""A plain model beside the wrapped one: what one process makes of the same micro-batches, and how far a backend may be from it.

Before each window the plain model takes the wrapped one's params; after it, the gradient that entered the step is held against
the plain model's local gradients, summed in float64, by the bound of a sum in any order. So errors do not add up over steps.
"""

from __future__ import annotations

from contextlib import contextmanager

import accumulate_recipes as recipes
import torch

import truestep as ts
from truestep.backends import base
from truestep.backends.base import Settings
from truestep.proof.bounds import CLIP_ROUNDINGS, reduction_bound, worst

EXTRA = 2 + CLIP_ROUNDINGS  # the late weight, a cast, a clip


@contextmanager
def wrapped(backend, *, model=recipes.tagger, optimizer="momentum", unused=(), **settings):
    """Give a session over a wrapped model, its optimizer built as that backend wants it."""

    def make(named):
        return recipes.OPTIMIZERS[optimizer]([param for _, param in named])

    session = base.wrap(backend, model(), make, Settings(unused=unused, **settings))
    try:
        yield session
    finally:
        session.close()


def accumulator(session, **settings):
    """Return an accumulator as a user would make it: by what the loop holds."""
    return ts.Accumulator(session.model, session.optimizer, **settings)


class Beside:
    """The plain model.

    Args:
        session: Whose steps are held against it.
        loss: ``(model, batch) -> loss``.
        model: Makes the plain one.
    """

    def __init__(self, session, loss, model=recipes.tagger):
        self.session = session
        self.loss = loss
        self.plain = model()
        self.entered = None
        self.worst = 0.0
        self.compared = 0
        session.on_step(lambda index: None, self._see)

    def _see(self, index, entering):
        self.entered = dict(entering)

    def take(self):
        """Take the wrapped model's params: collective."""
        self.entered = None
        view = self.session.view()
        with torch.no_grad():
            for name, param in self.plain.named_parameters():
                param.copy_(view[name, "param"].full("all"))

    def local(self, batch, factor):
        """Return the local gradients of one micro-batch, its loss times a factor."""
        self.plain.zero_grad()
        (self.loss(self.plain, batch) * factor).backward()
        return {name: param.grad.clone() for name, param in self.plain.named_parameters() if param.grad is not None}

    def hold(self, batches_by_rank, factors_by_rank, coefficient, dtype=torch.float32, clip=1.0):
        """Hold the gradient that entered against that of these micro-batches.

        Args:
            batches_by_rank: Every rank's own micro-batches of the window, without those of no items.
            factors_by_rank: What each loss is multiplied by.
            coefficient: What the backend and a late weight multiply each local gradient by.
            dtype: In which gradients are summed.
            clip: The factor of clipping.
        """
        grads = [
            [self.local(batch, factor) for batch, factor in zip(batches, factors, strict=True)]
            for batches, factors in zip(batches_by_rank, factors_by_rank, strict=True)
        ]
        for name in grads[0][0] if grads[0] else grads[1][0]:
            expected = reduction_bound(
                [[local[name] for local in of_rank] for of_rank in grads],
                [[coefficient * clip] * len(of_rank) for of_rank in grads],
                accumulate_dtype=dtype,
                reduce_dtype=dtype,
                n_extra=EXTRA,
            )
            piece = self.entered[name]
            for box, found in zip(piece.shard.boxes, piece.local, strict=True) if piece is not None else ():
                part = type(expected)(expected.value[box.slices], expected.bound[box.slices])
                ratio = worst(found.detach().cpu(), part).ratio
                assert ratio <= 1, (name, ratio)
                self.worst = max(self.worst, ratio)
                self.compared += 1
