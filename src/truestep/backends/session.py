"""What the sessions over torch's own optimizers share: ``optimizer.step`` is the step, and gradients are in ``.grad``."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from truestep.backends import slots
from truestep.backends.base import Contract, Identity, Piece, SeeGradient, Undo
from truestep.backends.slots import Place
from truestep.state.view import Slot, StateView
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Finding

# The code of what torch puts around the `step` of every optimizer class: it is the same for all.
_STEP_WRAPPER: Final = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


class TorchSession(ABC):
    """One wrapped model, or several, under torch optimizers.

    Args:
        backend: Name of the row.
        model: As the user's loop holds it.
        optimizer: Likewise; None to look at the model alone.
        place: How a tensor of an optimizer lies on this rank.
    """

    is_engine: bool = False

    def __init__(self, backend: str, model: Any, optimizer: Any, place: Place = slots.replica) -> None:
        self.backend = backend
        self.model = model
        self.optimizer = optimizer
        self.extras: dict[str, Any] = {}
        self._place = place
        self._wrapped = slots.labelled_items(model)
        self._inner = [(label, unwrapped(module)) for label, module in self._wrapped]
        self._labelled_optimizers = slots.labelled_items(optimizer) if optimizer is not None else []
        self.optimizers: list[torch.optim.Optimizer] = [item for _, item in self._labelled_optimizers]
        self._undo: list[Undo] = []

    # -- reads

    def modules(self) -> list[nn.Module]:
        """Return the unwrapped models."""
        return [module for _, module in self._inner]

    @abstractmethod
    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every live param by name, as the optimizer should hold it."""

    def view(self) -> StateView:
        """Return all slots, live."""
        found = self._param_slots()
        for label, optimizer in self._labelled_optimizers:
            found += slots.group_slots(optimizer, label, self._place)
            found += slots.optimizer_slots(optimizer, label, self._place)
        return StateView(found, slots.orphans(self.optimizers, [param for _, param in self.params()]))

    def _param_slots(self) -> list[Slot]:
        optimizers, place_of = self._labelled_optimizers, self._places()
        return [slot for name, param in self.params() for slot in slots.param_slots(name, param, optimizers, place_of(param))]

    def _places(self) -> Callable[[Tensor], Place]:
        """Return, as of now, how tensors that are laid out like a param lie on this rank: ``param -> place``."""
        return lambda param: self._place

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
        replaced = compiled([module for _, module in self._wrapped])
        return Contract(accumulate_dtype=coarsest, reduce_dtype=coarsest, operators_replaced=replaced)

    def warnings(self) -> list[Finding]:
        """Return what is legal here but known to do harm."""
        return []

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Call ``see(name, gradient)`` with each param's local gradient of each backward."""
        return self._kept(hooked(self.params(), see))

    def on_step(self, before: Callable[[int], None], after: Callable[[int, dict[str, Piece | None]], None]) -> Undo:
        """Bracket ``optimizer.step`` of each optimizer."""
        entering: dict[int, dict[str, Piece | None]] = {}
        handles = []
        for index, optimizer in enumerate(self.optimizers):

            def enter(optimizer: torch.optim.Optimizer, *_: Any, index: int = index) -> None:
                if not _is_inside_its_own_step(optimizer):
                    before(index)
                    entering[index] = self._gradients(optimizer)

            def leave(optimizer: torch.optim.Optimizer, *_: Any, index: int = index) -> None:
                if not _is_inside_its_own_step(optimizer):
                    after(index, entering.pop(index))

            handles += [optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)]
        return self._kept(removal(handles))

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Piece | None]:
        held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        name_by_id, pieces = {id(param): name for name, param in self.params()}, self.pieces(held)
        return {name: pieces.get(name) for param in held if (name := name_by_id.get(id(param))) is not None}

    def pieces(self, held: Sequence[Tensor]) -> dict[str, Piece]:
        """Return copies of this rank's part of the gradients that some params have now, by name."""
        name_by_id, place_of = {id(param): name for name, param in self.params()}, self._places()
        found = {}
        for param in held:
            if id(param) in name_by_id and param.grad is not None:
                shard, local = place_of(param)(param.grad)
                found[name_by_id[id(param)]] = Piece(shard, tuple(tensor.detach().clone() for tensor in local))
        return found

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield nothing: no engine clips here."""
        return iter(())

    # -- acts

    def micro_batch(self, last: bool, reduce: bool | None = None) -> AbstractContextManager[None]:
        """Return the context of one micro-batch."""
        return nullcontext()

    def sync_modes(self) -> tuple[str, ...]:
        """Return when gradients can be reduced: they are sharded, so that only reducing in every backward frees whole ones."""
        return ("every", "last")

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        loss.backward()

    def loss_scale(self) -> float:
        """Return 1: nobody else scales the loss."""
        return 1.0

    def declare_clip(self, max_norm: float | None) -> float | None:
        """Return the limit: no engine clips here."""
        return max_norm

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor."""
        for gradient in (param.grad for param in self.held() if param.grad is not None):
            gradient.mul_(factor.to(gradient.device))

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the global norm of all gradients, over all shards, and return it as it was."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.held(), max_norm)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def grad_norm(self) -> Tensor | None:
        """Return None: no engine clips here."""
        return None

    def held(self) -> list[nn.Parameter]:
        """Return the params that the optimizers hold."""
        return [param for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]]

    def step(self) -> bool:
        """Step every optimizer once."""
        for optimizer in self.optimizers:
            optimizer.step()
        return True

    def advance(self, scheduler: Any) -> None:
        """Step a scheduler once."""
        scheduler.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def discard(self) -> None:
        """Clear the gradients: they are all there is."""
        for param in self.held():
            param.grad = None

    def plant(self, fault: str) -> None:
        """Break the reduction on purpose."""
        raise no_such_switch(self.backend, fault)

    def close(self) -> None:
        """Undo every hook and every fault that can be undone; nothing is kept in globals."""
        while self._undo:
            self._undo.pop()()

    def _kept(self, undo: Undo) -> Undo:
        """Return `undo`, which `close` calls too: it does nothing the second time."""
        self._undo.append(undo)
        return undo


def hooked(params: Iterable[tuple[str, Tensor]], see: SeeGradient) -> Undo:
    """Place ``see(name, gradient)`` on those of these leaves that train: called once a backward, with the local gradient."""
    return removal(
        [param.register_hook(lambda gradient, name=name: see(name, gradient)) for name, param in params if param.requires_grad]
    )


def removal(handles: Sequence[Any]) -> Undo:
    """Return what removes these handles."""

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _is_inside_its_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether this hook runs in a step within a step of the same optimizer.

    torch wraps the `step` of each class that was ever made, so one that calls its parent's runs all hooks twice. The stack is
    asked, not a counter: a step that raises runs no post-hooks, and a counter would stay up.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP_WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def need_all_ranks(backend: str, ranks: int) -> None:
    """Demand that gradients are reduced over all ranks: what a loss of theirs weighs depends on their number.

    Raises:
        UnsupportedError: If they are reduced over `ranks` of them only, or by several dims of a mesh.
    """
    if ranks != dist.get_world_size():
        raise UnsupportedError(
            f"backend {backend!r}: expected gradients reduced over all {dist.get_world_size()} ranks by one dim of a mesh, found "
            f"{ranks or 'another mesh'}. Hybrid sharding, tensor parallel and groups of ranks are not supported here yet."
        )


def need_process_group(backend: str) -> None:
    """Demand the process group that this backend reduces over.

    Raises:
        UnsupportedError: If there is none.
    """
    if not dist.is_initialized():
        raise UnsupportedError(
            f"backend {backend!r} needs a process group, found none. Start ranks with torchrun, or call init_process_group."
        )


def no_such_switch(backend: str, fault: str) -> UnsupportedError:
    """Return the error of a backend that cannot be broken in this way."""
    return UnsupportedError(f"backend {backend!r} has no switch to {fault}. Plant this fault where it is one.")


def coarsest_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Return the floating dtype with the largest unit roundoff among the params; float32 if there are none."""
    return coarsest(param.dtype for param in params)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the floating dtype with the largest unit roundoff; float32 if there are none."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module under torch.compile."""
    return getattr(module, "_orig_mod", module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module under torch.compile and DDP, in whatever order."""
    inner = uncompiled(module)
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return module if inner is module else unwrapped(inner)


def compiled(modules: Sequence[nn.Module]) -> str | None:
    """Return why local gradients need not be bitwise one process's: torch.compile replaces operators."""
    parts = (part for module in modules for part in module.modules())
    return "torch.compile replaces operators" if any(_is_compiled(part) for part in parts) else None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
