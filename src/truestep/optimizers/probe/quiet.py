"""Around a probe: it leaves generators, defaults, hooks and the terminal as they were, and finds them the same each time."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from truestep.optimizers.replica import no_global_hooks

SEED = 20
_Random = tuple[torch.Tensor, Any, Any]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run with seeded generators, float32 and the CPU as defaults, no global hooks, and nothing said; restore all of it after."""
    before, dtype, threads = randomness(), torch.get_default_dtype(), torch.get_num_threads()
    with contextlib.ExitStack() as around:
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        around.enter_context(contextlib.redirect_stdout(io.StringIO()))
        around.enter_context(contextlib.redirect_stderr(io.StringIO()))
        around.enter_context(no_global_hooks())
        around.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":  # as a mode it costs more than the small steps of a probe
            around.enter_context(torch.device("cpu"))
        around.callback(_restore, before)
        around.callback(torch.set_default_dtype, dtype)
        around.callback(torch.set_num_threads, threads)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)  # the same order of sums each time; and threads only get in the way of tensors this small
        around.enter_context(torch.enable_grad())
        yield


def seed() -> None:
    """Seed every global CPU generator; those of devices are not touched, as nothing of a probe runs there."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(SEED)


def randomness() -> _Random:
    """Return the state of every global CPU generator."""
    numpy = _numpy()
    return torch.default_generator.get_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def drew(before: _Random, after: _Random) -> bool:
    """Tell whether any generator has moved."""
    numbers = (
        (repr(before[2]), repr(after[2]))
        if before[2] is None
        else tuple((state[2][0], state[2][1].tobytes(), *state[2][2:]) for state in (before, after))
    )
    return not torch.equal(before[0], after[0]) or before[1] != after[1] or numbers[0] != numbers[1]


def _restore(before: _Random) -> None:
    torch.default_generator.set_state(before[0])
    random.setstate(before[1])
    if before[2] is not None and (numpy := _numpy()) is not None:
        numpy.random.set_state(before[2])


def _numpy() -> ModuleType | None:
    """Return numpy if something has imported it: nobody draws from it else."""
    return sys.modules.get("numpy")
