"""Gradients added up in another dtype than the params have: a bf16 gradient forgets what is below 1/256 of it.

After each backward the reduced gradient of every param is added, times its weight, to a sum in `grad_dtype`, sharded as it is. At
the window's end the sums stand in ``.grad`` while they are clipped, and are then cast to the params' dtype, once, for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Fold:
    """The sums of one window.

    Args:
        params: Whose gradients are folded; their ``.grad`` is None between two backwards.
        dtype: Of the sums.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._params = params
        self._dtype = dtype
        self._sum_by_id: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, weight: float | Tensor) -> None:
        """Add what the last backward left in ``.grad``, and clear it."""
        for param in self._params:
            if param.grad is None:
                continue
            part = param.grad.to(self._dtype).mul_(weight)
            known = self._sum_by_id.get(id(param))
            self._sum_by_id[id(param)] = part if known is None else known.add_(part)
            param.grad = None

    def show(self) -> None:
        """Let the sums be the gradients."""
        for param in self._params:
            if id(param) in self._sum_by_id:
                param.grad_dtype = self._dtype
                param.grad = self._sum_by_id.pop(id(param))

    def cast(self) -> None:
        """Cast them to the params' dtype."""
        for param in self._params:
            if param.grad is not None:
                gradient, param.grad = param.grad.to(param.dtype), None
                param.grad_dtype = param.dtype
                param.grad = gradient

    def drop(self) -> None:
        """Forget the sums."""
        self._sum_by_id.clear()
        for param in self._params:
            param.grad, param.grad_dtype = None, param.dtype
