"""Whole plain tensors: one process, and DistributedDataParallel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from truestep.backends import slots
from truestep.backends.base import Contract, Settings
from truestep.backends.session import TorchSession, coarsest, need_all_ranks, need_process_group, no_such_switch
from truestep.words.errors import UnsupportedError
from truestep.words.names import clean, labelled

NAMES = ("single", "ddp")

Hook: TypeAlias = Any  # a function; of one that torch builds in, DDP keeps only the name


# DDP compares a hook's annotations with its own classes, and knows them not as the strings that they are here: so it has none.
def summed(state, bucket):  # type: ignore[no-untyped-def]
    """Reduce a bucket by sum: DDP itself divides by the ranks, a hook has to."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True)
    return reduced.get_future().then(lambda future: future.value()[0])


# What a communication hook reduces to, and the dtype that it sends gradients in (None: as they are).
_HOOKS: Final[Mapping[Hook, tuple[str, torch.dtype | None]]] = {
    "": ("mean", None),
    "BuiltinCommHookType.ALLREDUCE": ("mean", None),
    "BuiltinCommHookType.FP16_COMPRESS": ("mean", torch.float16),
    default_hooks.allreduce_hook: ("mean", None),
    default_hooks.fp16_compress_hook: ("mean", torch.float16),
    default_hooks.bf16_compress_hook: ("mean", torch.bfloat16),
    summed: ("sum", None),
}
# Classes whose params are not the model's own, by name: they may not be imported here.
_OTHERS: Final = {
    "DataParallel": "DataParallel copies the model in every forward. Use DistributedDataParallel",
}


class PlainSession(TorchSession):
    """One process, or DDP: the model's own params are what the optimizer holds."""

    def __init__(self, backend: str, model: Any, optimizer: Any) -> None:
        super().__init__(backend, model, optimizer)
        self._first_window = True

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every live param by name, as the model holds it now."""
        return slots.first_names((labelled(label, name), param) for label, module in self._inner for name, param in named(module))

    def contract(self) -> Contract:
        """Return DDP's mean, or what its communication hook does; unknown where that is the user's own, or differs."""
        own = super().contract()
        hooks = [_HOOKS.get(_comm_hook(ddp), (None, None)) for ddp in self._replicated()]
        reductions = {reduction for reduction, _ in hooks} or {"mean"}
        sent = [dtype for _, dtype in hooks if dtype is not None]
        return dataclasses.replace(
            own,
            reduction=reductions.pop() if len(reductions) == 1 else None,
            reduce_dtype=coarsest([own.reduce_dtype, *sent]),
        )

    @contextmanager
    def micro_batch(self, last: bool, reduce: bool | None = None) -> Iterator[None]:
        """Put ``no_sync`` around the forward and backward of all but those to be reduced: by default the last."""
        reduced = last if reduce is None else reduce
        with ExitStack() as without:
            for ddp in self._replicated():
                # With a static graph DDP learns in the first window, and fails if that is not synchronised each time.
                if not reduced and not (ddp.static_graph and self._first_window):
                    without.enter_context(ddp.no_sync())
            yield
        self._first_window = self._first_window and not last

    def sync_modes(self) -> tuple[str, ...]:
        """Return when gradients can be reduced: they are whole in any case, so once is no dearer."""
        for ddp in self._replicated():
            need_all_ranks(self.backend, ddp.process_group.size())
        return ("last", "every")

    def plant(self, fault: str) -> None:
        """Keep ``no_sync`` on, or sum in the communication hook (which DDP never lets go)."""
        replicated = self._replicated()
        if not replicated or fault not in ("desynchronise", "sum"):
            raise no_such_switch(self.backend, fault)
        for ddp in replicated:
            if fault == "sum":
                ddp.register_comm_hook(None, summed)
            else:
                ddp.require_backward_grad_sync = False  # a no_sync of the loop's own leaves it so
                self._kept(lambda ddp=ddp: setattr(ddp, "require_backward_grad_sync", True))  # type: ignore[misc]

    def _replicated(self) -> list[DistributedDataParallel]:
        return [part for _, module in self._wrapped for part in module.modules() if isinstance(part, DistributedDataParallel)]


def named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the params of an unwrapped model by name; a part that is under DDP is called as if it were not."""
    wrappers = [prefix for prefix, part in module.named_modules() if isinstance(part, DistributedDataParallel)]
    for name, param in module.named_parameters():
        for prefix in reversed(wrappers):  # the innermost first: the others' names are not yet changed
            if name.startswith(f"{prefix}.module."):
                name = prefix + name.removeprefix(f"{prefix}.module")
        yield clean(name), param


def _comm_hook(ddp: DistributedDataParallel) -> Hook:
    if ddp._comm_hooks:
        return ddp._comm_hooks[-1][0]
    return ddp._get_ddp_logging_data().get("comm_hook", "")


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> PlainSession:
    """Wrap each model by DDP, or leave it for `single`; the params stay the same objects."""
    wrapped = model
    if settings.wrap is not None:
        wrapped = settings.wrap(model, backend)
    elif backend == "ddp":
        need_process_group(backend)
        wrapped = slots.like(model, [_ddp(module, settings) for _, module in slots.labelled_items(model)])
    params = PlainSession(backend, wrapped, None).params()
    return PlainSession(backend, wrapped, make_optimizer(slots.trainable(params)))


def _ddp(module: nn.Module, settings: Settings) -> nn.Module:
    if not any(param.requires_grad for param in module.parameters()):
        return module  # DDP refuses a module without trainable params
    return DistributedDataParallel(module, find_unused_parameters=bool(settings.unused))


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether these are torch modules and torch optimizers."""
    modules = [module for _, module in slots.labelled_items(model)]
    optimizers = [item for _, item in slots.labelled_items(optimizer)] if optimizer is not None else []
    return all(isinstance(module, nn.Module) for module in modules) and all(
        isinstance(item, torch.optim.Optimizer) for item in optimizers
    )


def attach(model: Any, optimizer: Any) -> PlainSession:
    """Return a session over a plain or DDP model.

    Raises:
        UnsupportedError: If a part of it is wrapped by what is not known.
    """
    for part in (part for _, module in slots.labelled_items(model) for part in module.modules()):
        if (why := _OTHERS.get(type(part).__name__)) and type(part).__module__.startswith("torch."):
            raise UnsupportedError(f"no backend knows {type(part).__name__}: {why}.")
    session = PlainSession("single", model, optimizer)
    session.backend = "ddp" if session._replicated() else "single"
    return session
