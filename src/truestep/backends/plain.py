"""Whole plain tensors: one process, and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from truestep.backends import slots
from truestep.backends.base import Contract, Settings
from truestep.backends.session import TorchSession, compiled, no_such_switch, uncompiled, unwrapped

NAMES = ("single", "ddp")


class PlainSession(TorchSession):
    """One process, or DDP: the model's own params are what the optimizer holds."""

    def __init__(self, backend: str, model: Any, optimizer: Any) -> None:
        inner = [(label, unwrapped(module)) for label, module in slots.labelled_items(model)]
        self._wrapped = [module for _, module in slots.labelled_items(model)]
        params = slots.named_params(slots.like(model, [module for _, module in inner]))
        super().__init__(backend, model, optimizer, modules=[module for _, module in inner], params=params)

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every live param by name, as the model holds it now."""
        return slots.named_params(slots.like(self.model, self._modules))

    def contract(self) -> Contract:
        """Return DDP's mean; unknown where the user registered a communication hook."""
        own = super().contract()
        hooked = any(getattr(ddp, "_comm_hooks", None) for ddp in self._replicated())
        return Contract(None if hooked else "mean", own.accumulate_dtype, own.reduce_dtype, compiled(self._wrapped))

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return ``no_sync`` around the forward and backward of all but the last micro-batch."""
        context = ExitStack()
        if not last:
            for ddp in self._replicated():
                context.enter_context(ddp.no_sync())
        return context  # type: ignore[return-value]

    def plant(self, fault: str) -> None:
        """Keep ``no_sync`` on, or sum in the communication hook."""
        if not self._replicated() or fault not in ("desynchronise", "sum"):
            raise no_such_switch(self.backend, fault)
        if fault == "sum":
            for ddp in self._replicated():
                ddp.register_comm_hook(None, _summed)
        else:
            keep_off = self.micro_batch
            self.micro_batch = lambda last: keep_off(False)  # type: ignore[method-assign]

    def _replicated(self) -> list[DistributedDataParallel]:
        return [module for module in map(uncompiled, self._wrapped) if isinstance(module, DistributedDataParallel)]


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> PlainSession:
    """Wrap each model by DDP, or leave it for `single`; the params stay the same objects."""
    wrapped = model
    if settings.wrap is not None:
        wrapped = settings.wrap(model, backend)
    elif backend == "ddp":
        wrapped = slots.like(model, [_ddp(module, settings) for _, module in slots.labelled_items(model)])
    optimizer = make_optimizer(slots.trainable(slots.named_params(model)))
    return PlainSession(backend, wrapped, optimizer)


def _ddp(module: nn.Module, settings: Settings) -> nn.Module:
    if not any(param.requires_grad for param in module.parameters()):
        return module  # DDP refuses a module without trainable params
    return DistributedDataParallel(module, find_unused_parameters=bool(settings.unused))


# DDP compares a hook's annotations with its own classes, and knows them not as the strings that they are here: so it has none.
def _summed(state, bucket):  # type: ignore[no-untyped-def]
    """Reduce a bucket by sum: DDP itself divides by the ranks, a hook has to."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True)
    return reduced.get_future().then(lambda future: future.value()[0])


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether these are torch modules and torch optimizers."""
    modules = [module for _, module in slots.labelled_items(model)]
    optimizers = [item for _, item in slots.labelled_items(optimizer)] if optimizer is not None else []
    return all(isinstance(module, nn.Module) for module in modules) and all(
        isinstance(item, torch.optim.Optimizer) for item in optimizers
    )


def attach(model: Any, optimizer: Any) -> PlainSession:
    """Return a session over a plain or DDP model."""
    replicated = any(isinstance(uncompiled(module), DistributedDataParallel) for _, module in slots.labelled_items(model))
    return PlainSession("ddp" if replicated else "single", model, optimizer)
