"""What optimizers are given to step: params and gradients that depend on names and steps alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from truestep.optimizers.probe.plan import Shape, scale_of

Shapes: TypeAlias = Mapping[str, Shape]
Gradients: TypeAlias = Mapping[str, "Tensor | None"]


def start(shapes: Shapes, *, dtype: torch.dtype = torch.float32, size: float = 1.0) -> dict[str, Tensor]:
    """Return values for params, each between half and one and a half of `size`, of either sign."""
    return {name: (size * _numbers(name, shape, -1)).to(dtype) for name, shape in shapes.items()}


def gradients(
    params: Mapping[str, Tensor], step: int, *, decades: bool = False, size: float | None = None, times: float = 1.0
) -> dict[str, Tensor]:
    """Return the gradients of a step, from 0, of the params' shapes and dtypes.

    Args:
        params: By name.
        step: Their size changes from step to step: the first step of Adam, Adagrad and Lion is blind to it.
        decades: Spread magnitudes over twelve decades, from 1e-12 up: down to where eps stands.
        size: Instead of the step's own.
        times: What to multiply them by.
    """
    size = scale_of(step) if size is None else size
    made = {}
    for name, param in params.items():
        numbers = _numbers(name, tuple(param.shape), step)
        if decades:
            numbers = numbers.sign() * 10.0 ** (-12 * (numbers.abs() - 0.5))
        made[name] = (times * size * numbers).to(param.dtype)
    return made


def _numbers(name: str, shape: Shape, step: int) -> Tensor:
    """Return float64 numbers of either sign, none nearer to zero than a half: their squares do not cancel, nor sink into eps."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    numbers = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1
    return numbers * signs
