"""The random generators of a process: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import torch


def rng_states() -> dict[str, Any]:
    """Return the states of the generators that a forward may draw from: torch's, Python's and numpy's."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy
    except ImportError:
        return states
    return {**states, "numpy": numpy.random.get_state()}


def restore_rng(states: dict[str, Any]) -> None:
    """Set the generators to states that `rng_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
