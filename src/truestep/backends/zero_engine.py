"""How an engine of ours is made: its configuration, what it cannot hold, and DeepSpeed's joining of the process group."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from truestep.backends import slots, zero_ops
from truestep.backends.base import Settings, Undo
from truestep.words.errors import UnsupportedError
from truestep.words.finding import listed

STAGES: Final[Mapping[str, int]] = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_DTYPES: Final = (torch.float32, torch.bfloat16)


def configuration(stage: int, dtype: torch.dtype, numel: int, settings: Settings) -> dict[str, Any]:
    """Return the DeepSpeed config of our own engines; ``settings.extra`` is merged over it.

    Args:
        stage: Of ZeRO.
        dtype: Of the model's params.
        numel: Elements of all params together: buckets are made that large, not of DeepSpeed's 500 million elements.
        settings: What is to be known before wrapping.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": max(1, numel)}
    if stage == 3:
        zero["memory_efficient_linear"] = False  # it replaces F.linear, and gradients are no longer bitwise one process's
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": settings.max_norm or 0.0,  # silent, it would be 1.0
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "steps_per_print": sys.maxsize,
    }
    return _merged(ours, settings.extra)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over` in place of its own, at every depth.

    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    both = {**base, **over}
    nested = [key for key in over if isinstance(base.get(key), Mapping) and isinstance(over[key], Mapping)]
    return {**both, **{key: _merged(base[key], over[key]) for key in nested}}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the one dtype of the model's params.

    Raises:
        UnsupportedError: If an engine cannot hold them: not all fp32 or all bf16, or 0-d ones.
    """
    params = slots.named_params(module)
    found = {param.dtype for _, param in params}
    if len(found) != 1 or not found <= set(_DTYPES):
        names = " and ".join(sorted(str(dtype) for dtype in found)) or "no params"
        raise UnsupportedError(
            f"DeepSpeed engines take params that are all torch.float32 or all torch.bfloat16, found {names}. "
            "Cast the model to one of them."
        )
    scalars = [name for name, param in params if param.dim() == 0]
    if scalars:  # it broadcasts params as bytes, which torch refuses for 0-d tensors
        raise UnsupportedError(f"DeepSpeed cannot take 0-d params, found {listed(scalars)}. Give them one element: shape (1,).")
    return found.pop()


def join(module: nn.Module) -> Undo:
    """Have DeepSpeed use the process group that exists already; the undo takes back what the process's environment needed.

    Raises:
        UnsupportedError: If there is none.
    """
    if not torch.distributed.is_initialized():
        raise UnsupportedError("a DeepSpeed engine needs a process group. Start ranks with torchrun, or call init_process_group.")
    if all(param.device.type == "cpu" for param in module.parameters()):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, at the first use of its accelerator
    set_here = "LOCAL_RANK" not in os.environ
    if set_here:
        os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # read at every step of ZeRO 3
    zero_ops.ready()
    with _stderr_dropped(unless="deepspeed" in sys.modules):
        import deepspeed
        from deepspeed.utils import groups
    with quiet():
        if _is_dead(groups._WORLD_GROUP):
            groups._release_process_group_references()
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)

    def undo() -> None:
        if set_here:
            os.environ.pop("LOCAL_RANK", None)

    return undo


def engine(module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """Return the engine that DeepSpeed makes of these. Collective: every rank."""
    import deepspeed

    with quiet():
        made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return made


def declare_clip(engine: Any, max_norm: float | None) -> float | None:
    """Set the limit at which an engine clips; return the one that holds: with None that of its own configuration, or none.

    An engine whose configuration is silent would clip at 1.0.

    Raises:
        UnsupportedError: If the configuration names another limit.
    """
    configured = float(engine._config._param_dict.get("gradient_clipping") or 0.0) or None
    if max_norm is not None and configured not in (None, max_norm):
        raise UnsupportedError(
            f"expected one limit to clip at, found max_norm={max_norm:g} and gradient_clipping {configured:g} in the DeepSpeed "
            "config. Leave one of them out."
        )
    limit = configured if max_norm is None else max_norm
    engine._config.gradient_clipping = limit or 0.0
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = limit or 0.0
    return limit


def _is_dead(group: Any) -> bool:
    """Tell whether DeepSpeed still holds a group of a default group that is gone."""
    if group is None:
        return False
    try:
        torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return True
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep DeepSpeed off standard output while an engine is made, its warnings of what is our choice too; let it find ninja."""
    earlier = os.environ.get("PATH")
    os.environ["PATH"] = zero_ops.search_path()
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if earlier is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = earlier


@contextlib.contextmanager
def _stderr_dropped(unless: bool) -> Iterator[None]:
    """Drop what programs write to standard error: importing DeepSpeed tries the linker on libraries that it can do without."""
    if unless:
        yield
        return
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
