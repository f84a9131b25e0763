"""One cell of a verification: what is to be run, as plain data that ranks and reference are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CellPlan:
    """One combination of backend, optimizer and window, with everything a process needs to run its part of it.

    Attributes:
        recipe: What `recipe.load` takes: a name, a path, ``MODULE:OBJECT``.
        backend: A row of the backends' table.
        optimizer: ``--optimizer``, or None for the recipe's own.
        world_size: Ranks; 1 on `single`.
        micro_batches: K, a step.
        steps: How many.
        faults: Names of planted faults.
        device: ``cpu`` or ``cuda``.
        seed: Of everything that is drawn.
    """

    recipe: Any
    backend: str
    optimizer: str | None
    world_size: int
    micro_batches: int
    steps: int
    faults: tuple[str, ...] = ()
    device: str = "cpu"
    seed: int = 1234

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"cell {self.backend}{f' {self.optimizer}' if self.optimizer else ''} x{self.micro_batches}"


def seed_everything(seed: int) -> None:
    """Seed torch, Python and numpy."""
    import random

    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)
