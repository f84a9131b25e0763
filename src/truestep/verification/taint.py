"""What a task may have left changed in its process: it shows whether the process can be used again."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from truestep.state import ranks

MODULES: Final = (
    "torch",
    "torch.nn.functional",
    "torch.autograd",
    "torch.distributed",
    "torch.nn.utils.clip_grad",
    "torch.optim.lr_scheduler",
)
CLASSES: Final = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.nn", "Parameter"), ("torch.optim", "Optimizer"))
HOOKS: Final = ("torch.nn.modules.module", "torch.optim.optimizer")
SETTINGS: Final = ("get_default_dtype", "get_default_device", "is_grad_enabled", "are_deterministic_algorithms_enabled")
OPEN_FILES_MORE: Final = 200  # each process group holds sockets; a member that gathers them is replaced


def snapshot() -> dict[str, Any]:
    """Return what a task must leave as it was: callables by identity, hook dicts by length, settings by value.

    Attributes that a task adds are not told of: lazy imports add some to `torch` itself.
    """
    found: dict[str, Any] = {}
    for name in MODULES:
        found.update({f"{name}.{key}": value for key, value in vars(sys.modules[name]).items() if callable(value)})
    for module, name in CLASSES:
        for base in reversed(getattr(sys.modules[module], name).__mro__[:-1]):
            # Descriptors too: a patched property or classmethod is no less patched.
            found.update({f"{module}.{name}.{key}": value for key, value in vars(base).items() if _is_code(value)})
    for name in HOOKS:
        hooks = {f"{name}.{key}": value for key, value in vars(sys.modules[name]).items() if key.startswith("_global_")}
        found.update({key: len(value) for key, value in hooks.items() if isinstance(value, dict)})
    found.update({f"torch.{name}()": getattr(sys.modules["torch"], name)() for name in SETTINGS})
    found["the default process group"] = ranks.default_group()
    return found


def taints(before: dict[str, Any], files_before: int) -> tuple[str, ...]:
    """Return the names of what is not as it was.

    Args:
        before: A `snapshot` from before the task.
        files_before: `open_files` when the process was new.
    """
    after = snapshot()
    changed = [name for name, value in before.items() if not _same(value, after.get(name))]
    worn = ["open files"] if open_files() > files_before + OPEN_FILES_MORE else []
    return (*changed, *worn)


def open_files() -> int:
    """Return how many files and sockets this process holds open; 0 where the system does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))


def _same(one: Any, other: Any) -> bool:
    by_value = (int, type(sys.modules["torch"].get_default_device()))
    return one is other or (isinstance(one, by_value) and type(one) is type(other) and bool(one == other))
