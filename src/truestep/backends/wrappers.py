"""accelerate: it wraps a model that another backend knows, and acts through its own calls.

On CPU ranks accelerate needs help (1.15): it refuses FSDP there, so its state is told by hand; with ``cpu=True`` it silently
ignores a DeepSpeed plugin, so that is left out; under DeepSpeed it calls every rank process 0 of 1, so ranks come from torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from truestep.backends import base, slots, zero_ops
from truestep.backends.base import Contract, Identity, Piece, SeeGradient, Session, Settings, Undo
from truestep.backends.session import need_process_group
from truestep.state.view import StateView
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Finding

_SWITCH: Final = "ACCELERATE_USE_DEEPSPEED"
_PREFIX: Final = "ACCELERATE_"  # of the variables by which accelerate is told, and tells itself, what it runs under


class AcceleratedSession:
    """What `prepare` returned, over the session of the backend that it wraps.

    Args:
        backend: Name of the row.
        model: What `prepare` returned.
        optimizer: Likewise.
        under: The session that knows params, slots and steps.
        accelerator: None where the user keeps it to themselves: then this session acts through the one under it.
        forget: What `close` calls last.
    """

    def __init__(
        self,
        backend: str,
        model: Any,
        optimizer: Any,
        under: Session,
        accelerator: Accelerator | None = None,
        forget: Undo = lambda: None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.optimizer = optimizer
        self.extras: dict[str, Any] = {"accelerator": accelerator}
        self._under = under
        self._accelerator = accelerator
        self._forget = forget
        self.optimizers = under.optimizers
        self.is_engine = under.is_engine

    def modules(self) -> list[nn.Module]:
        """Return the unwrapped models."""
        return self._under.modules()

    def view(self) -> StateView:
        """Return all slots, live."""
        return self._under.view()

    def identity(self) -> Identity:
        """Return who is who."""
        return self._under.identity()

    def contract(self) -> Contract:
        """Return how gradients are accumulated and reduced."""
        return self._under.contract()

    def warnings(self) -> list[Finding]:
        """Return what is legal here but known to do harm."""
        return self._under.warnings()

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Call ``see(name, gradient)`` with each param's local gradient of each backward."""
        return self._under.hook_gradients(see)

    def on_step(self, before: Callable[[int], None], after: Callable[[int, dict[str, Piece | None]], None]) -> Undo:
        """Bracket the place where a step really happens: under DeepSpeed that is inside `backward`."""
        return self._under.on_step(before, after)

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield the engine's own clipping."""
        return self._under.clips()

    def pieces(self, held: Sequence[Tensor]) -> dict[str, Piece] | None:
        """Return copies of this rank's part of the gradients that these params have now, by name."""
        return self._under.pieces(held)

    def plant(self, fault: str) -> None:
        """Break the reduction of the backend under it."""
        self._under.plant(fault)

    @contextmanager
    def micro_batch(self, last: bool, reduce: bool | None = None) -> Iterator[None]:
        """Tell accelerate, by its own flag, whether this is the window's last micro-batch."""
        accelerator = self._accelerator
        if accelerator is None:
            with self._under.micro_batch(last, reduce):
                yield
            return
        accelerator.gradient_state._set_sync_gradients(last)
        try:
            # With an engine the boundary follows `sync_gradients` inside `backward`; its no_sync is another mechanism.
            if (last if reduce is None else reduce) or self.is_engine:
                yield
            else:
                with accelerator.no_sync(self.model):
                    yield
        finally:
            accelerator.gradient_state._set_sync_gradients(True)

    def sync_modes(self) -> tuple[str, ...]:
        """Return when gradients can be reduced."""
        return self._under.sync_modes()

    def backward(self, loss: Tensor) -> None:
        """Run ``accelerator.backward``."""
        (self._accelerator or self._under).backward(loss)

    def loss_scale(self) -> float:
        """Return 1/K: accelerate, or the engine under it, divides the loss by the window's length."""
        if self._accelerator is None:
            return self._under.loss_scale()
        if self.is_engine:
            return 1.0 / int(self.model.gradient_accumulation_steps())
        return 1.0 / int(self._accelerator.gradient_accumulation_steps)

    def declare_clip(self, max_norm: float | None) -> float | None:
        """Set the engine's limit, where there is an engine."""
        return self._under.declare_clip(max_norm)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what the window has accumulated by a 0-d tensor."""
        self._under.scale_gradients(factor)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip through accelerate; an engine clips inside its step, by its own setting."""
        if self.is_engine or self._accelerator is None:
            return self._under.clip(max_norm)
        params = [param for module in self._under.modules() for param in module.parameters()]
        norm: Any = self._accelerator.clip_grad_norm_(params, max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]

    def grad_norm(self) -> Tensor | None:
        """Return the norm by which the engine clipped."""
        return self._under.grad_norm()

    def step(self) -> bool:
        """Step the prepared optimizer; under an engine of the Accelerator's the step is already over."""
        if self._accelerator is None:
            return self._under.step()
        self.optimizer.step()
        return not self.optimizer.step_was_skipped

    def advance(self, scheduler: Any) -> None:
        """Step the scheduler under accelerate's wrapper, which would step it once a process."""
        self._under.advance(scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        (self._under if self._accelerator is None else self.optimizer).zero_grad()

    def discard(self) -> None:
        """Drop what a window has accumulated."""
        self._under.discard()

    def close(self) -> None:
        """Undo every hook; where the Accelerator is ours, forget its process-wide state, which outlives it."""
        self._under.close()
        self._forget()


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> AcceleratedSession:
    """Build the optimizer, then call ``Accelerator().prepare(model, optimizer)``, as accelerate's documentation has it.

    Raises:
        UnsupportedError: If there are several models or optimizers, a `wrap` in the settings, or no process group.
    """
    if settings.wrap is not None:
        raise UnsupportedError(
            f"backend {backend!r} wraps by accelerate's prepare, and the recipe has a wrap of its own. "
            "Leave it out, or use single, ddp, fsdp2 or a zero backend."
        )
    optimizer = make_optimizer(slots.trainable(slots.named_params(model)))
    if any(isinstance(things, (list, tuple, Mapping)) for things in (model, optimizer)):
        raise UnsupportedError(
            f"backend {backend!r} takes one model and one optimizer, and was given several. Use single, ddp or fsdp2 for several."
        )
    need_process_group(backend)
    forget = _fresh()
    try:
        accelerator = _MAKERS[backend](model, settings)
        accelerator.gradient_accumulation_steps = settings.micro_batches if backend != "accelerate-zero2" else 1
        prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
        under = base.attach(prepared) if backend == "accelerate-zero2" else base.attach(prepared, innermost(prepared_optimizer))
    except BaseException:
        forget()
        raise
    return AcceleratedSession(backend, prepared, prepared_optimizer, under, accelerator, forget)


def _replicated(model: nn.Module, settings: Settings) -> Accelerator:
    ddp = DistributedDataParallelKwargs(find_unused_parameters=bool(settings.unused))
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[ddp])


def _sharded(model: nn.Module, settings: Settings) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap")
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def _engine(model: nn.Module, settings: Settings) -> Accelerator:
    from accelerate.utils import DeepSpeedPlugin

    dtypes = {param.dtype for param in model.parameters()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": settings.max_norm or 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtypes == {torch.bfloat16}},
        "steps_per_print": 10**9,
        **settings.extra,
    }
    os.environ[_SWITCH] = "true"
    zero_ops.ready()
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


_MAKERS: Mapping[str, Callable[[nn.Module, Settings], Accelerator]] = {
    "accelerate-ddp": _replicated,
    "accelerate-fsdp2": _sharded,
    "accelerate-zero2": _engine,
}


def _fresh() -> Undo:
    """Let the next Accelerator be the first of this process; the undo does so again, and gives the environment back."""
    earlier = {key: value for key, value in os.environ.items() if key.startswith(_PREFIX)}

    def reset(environment: Mapping[str, str]) -> None:
        for key in [key for key in os.environ if key.startswith(_PREFIX)]:
            del os.environ[key]
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset({})
    return lambda: reset(earlier)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer under accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether some optimizer here is one that `prepare` returned."""
    return any(isinstance(item, AcceleratedOptimizer) for _, item in slots.labelled_items(optimizer))


def attach(model: Any, optimizer: Any) -> AcceleratedSession:
    """Return a session that reads what `prepare` returned."""
    inner = slots.like(optimizer, [innermost(item) for _, item in slots.labelled_items(optimizer)])
    under = base.attach(model, inner)
    session = AcceleratedSession(f"accelerate-{under.backend}", model, optimizer, under)
    scalers = (getattr(item, "scaler", None) for _, item in slots.labelled_items(optimizer))
    session.extras["scaler"] = next((scaler for scaler in scalers if scaler is not None), None)
    return session


def drawn() -> Undo:
    """Return what sets accelerate's record of the loaders under way to what it is now: whether they are at their end, and how."""
    if not GradientState._shared_state:  # nothing is prepared
        return lambda: None
    state = GradientState()
    loaders = state.dataloader_references
    active = loaders[-1]
    flags = {name: getattr(active, name) for name in ("end_of_dataloader", "remainder")} if active is not None else {}

    def restore() -> None:
        state.dataloader_references = loaders
        for name, value in flags.items():
            setattr(active, name, value)

    return restore
