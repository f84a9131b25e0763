"""Looking at a model and its optimizers, whatever wraps them."""

from __future__ import annotations

from typing import Any

from truestep.backends import base
from truestep.state.view import StateView


def inspect(model: Any, optimizer: Any = None) -> StateView:
    """Return a live view of every slot by name: nothing is copied or created.

    Args:
        model: A module, a DeepSpeed engine, what accelerate's `prepare` returned; a sequence or a mapping of these.
        optimizer: The optimizer over it, or several; not needed with an engine.

    Raises:
        UnsupportedError: If no backend knows this pair.

    Example:
        >>> import torch, truestep as ts
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> view = ts.inspect(layer, optimizer)
        >>> view["weight", "param"].shape, ("weight", "momentum_buffer") in view
        ((2, 3), False)
    """
    return base.attach(model, optimizer).view()
