"""What the sessions over torch's own optimizers share: the step is where ``optimizer.step`` is, and gradients are in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from truestep.backends import slots
from truestep.backends.base import Contract, Identity, Piece, SeeGradient, Undo
from truestep.backends.slots import Place
from truestep.state.view import StateView
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Finding


class TorchSession:
    """One wrapped model, or several, under torch optimizers.

    Args:
        backend: Name of the row.
        model: As the user's loop holds it.
        optimizer: Likewise.
        modules: The unwrapped models.
        params: Every live param by name, as the optimizer should hold it.
        place: How a tensor of an optimizer lies on this rank.
    """

    def __init__(
        self,
        backend: str,
        model: Any,
        optimizer: Any,
        *,
        modules: Sequence[nn.Module],
        params: Sequence[tuple[str, nn.Parameter]],
        place: Place = slots.replica,
    ) -> None:
        self.backend = backend
        self.model = model
        self.optimizer = optimizer
        self._modules = list(modules)
        self._params = list(params)
        self._place = place
        self._labelled_optimizers = slots.labelled_items(optimizer) if optimizer is not None else []
        self.optimizers: list[torch.optim.Optimizer] = [item for _, item in self._labelled_optimizers]
        self.extras: dict[str, Any] = {}

    # -- reads

    def modules(self) -> list[nn.Module]:
        """Return the unwrapped models."""
        return self._modules

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every live param by name."""
        return self._params

    def view(self) -> StateView:
        """Return all slots, live."""
        params = self.params()
        found = [slot for name, param in params for slot in slots.param_slots(name, param, self.optimizers, self._place)]
        for label, optimizer in self._labelled_optimizers:
            found += slots.group_slots(optimizer, label)
            found += slots.optimizer_slots(optimizer, label)
        return StateView(found, slots.orphans(self.optimizers, [param for _, param in params]))

    def identity(self) -> Identity:
        """Return who is who."""
        params = self.params()
        return Identity(
            live={id(param): name for name, param in params if param.requires_grad},
            frozen={id(param): name for name, param in params if not param.requires_grad},
            held=[
                ((index, place), tuple(id(param) for param in group["params"]))
                for index, optimizer in enumerate(self.optimizers)
                for place, group in enumerate(optimizer.param_groups)
            ],
            state_keys=[id(key) for optimizer in self.optimizers for key in optimizer.state if isinstance(key, Tensor)],
            unsharded=self.unsharded(),
        )

    def unsharded(self) -> tuple[str, ...]:
        """Return the names of params of which an optimizer holds an unsharded stand-in."""
        return ()

    def contract(self) -> Contract:
        """Return how gradients are accumulated and reduced."""
        coarsest = coarsest_dtype([param for _, param in self.params() if param.requires_grad])
        return Contract(accumulate_dtype=coarsest, reduce_dtype=coarsest)

    def warnings(self) -> list[Finding]:
        """Return what is legal here but known to do harm."""
        return []

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Call ``see(name, gradient)`` with each param's local gradient of each backward."""
        handles = [
            param.register_hook(lambda gradient, name=name: see(name, gradient))
            for name, param in self.params()
            if param.requires_grad
        ]
        return lambda: [handle.remove() for handle in handles] and None

    def on_step(self, before: Callable[[int], None], after: Callable[[int, dict[str, Piece | None]], None]) -> Undo:
        """Bracket ``optimizer.step`` of each optimizer."""
        entering: dict[int, dict[str, Piece | None]] = {}
        handles = []
        for index, optimizer in enumerate(self.optimizers):

            def entry(*_: Any, index: int = index, optimizer: torch.optim.Optimizer = optimizer) -> None:
                before(index)
                entering[index] = self._gradients(optimizer)

            def leave(*_: Any, index: int = index) -> None:
                after(index, entering.pop(index))

            handles += [optimizer.register_step_pre_hook(entry), optimizer.register_step_post_hook(leave)]
        return lambda: [handle.remove() for handle in handles] and None

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Piece | None]:
        name_by_id = {id(param): name for name, param in self.params()}
        held = [param for group in optimizer.param_groups for param in group["params"] if id(param) in name_by_id]
        return {name_by_id[id(param)]: self.piece(param.grad) for param in held if param.requires_grad}

    def piece(self, gradient: Tensor | None) -> Piece | None:
        """Return a copy of this rank's part of a gradient."""
        if gradient is None:
            return None
        shard, local = self._place(gradient)
        return Piece(shard, tuple(tensor.detach().clone() for tensor in local))

    def pieces(self, held: Sequence[Tensor]) -> dict[str, Piece]:
        """Return copies of this rank's part of the gradients that some params have now, by name."""
        name_by_id = {id(param): name for name, param in self.params()}
        gradients = {name_by_id[id(param)]: param.grad for param in held if id(param) in name_by_id}
        return {name: piece for name, gradient in gradients.items() if (piece := self.piece(gradient)) is not None}

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield nothing: no engine clips here."""
        return iter(())

    # -- acts

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def loss_scale(self) -> float:
        """Return 1: nobody else scales the loss."""
        return 1.0

    def clip(self, max_norm: float) -> None:
        """Clip the global norm of all gradients."""
        held = [param for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(held, max_norm)

    def step(self) -> None:
        """Step every optimizer once."""
        for _, optimizer in slots.labelled_items(self.optimizer):
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for _, optimizer in slots.labelled_items(self.optimizer):
            optimizer.zero_grad()

    def plant(self, fault: str) -> None:
        """Break the reduction on purpose."""
        raise no_such_switch(self.backend, fault)

    def close(self) -> None:
        """Nothing is kept in globals."""


def no_such_switch(backend: str, fault: str) -> UnsupportedError:
    """Return the error of a backend that cannot be broken in this way."""
    return UnsupportedError(f"backend {backend!r} has no switch to {fault}. Plant this fault where it is one.")


def coarsest_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Return the floating dtype with the largest unit roundoff among the params; float32 if there are none."""
    return max((param.dtype for param in params), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module under torch.compile."""
    return getattr(module, "_orig_mod", module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module under torch.compile and DDP."""
    inner = uncompiled(module)
    return uncompiled(inner.module) if isinstance(inner, DistributedDataParallel) else inner


def compiled(modules: Sequence[nn.Module]) -> str | None:
    """Return why local gradients need not be bitwise one process's: torch.compile replaces operators."""
    parts = (part for module in modules for part in module.modules())
    return "torch.compile replaces operators" if any(_is_compiled(part) for part in parts) else None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
