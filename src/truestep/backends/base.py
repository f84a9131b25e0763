"""What a backend gives and does: the one place that features know vendors through.

A *session* is one wrapped model with its optimizers on this rank. It reads: names, shards, slots, where the step really happens,
each micro-batch's local gradients, the gradient as it enters the step, by what contract it was reduced. It also acts: switches
synchronisation, runs backward, clips, steps. A *backend* is a row of the table `BACKENDS`: its module is imported only when it is
asked for by name, or when its vendor is already imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from truestep.state.view import StateView
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Finding
from truestep.words.layout import Shard

Undo: TypeAlias = Callable[[], None]
SeeGradient: TypeAlias = Callable[[str, Tensor], "Tensor | None"]


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of one param's gradient as it enters the innermost step: copies, one tensor a box."""

    shard: Shard
    local: tuple[Tensor, ...]


@dataclass(frozen=True)
class Contract:
    """How the vendor is set to turn local gradients into the one that enters the step.

    Attributes:
        reduction: ``mean`` or ``sum`` over the data-parallel ranks; ``None`` where a hook of the user decides.
        accumulate_dtype: In which a rank adds up its micro-batches.
        reduce_dtype: In which the ranks reduce.
        operators_replaced: Why local gradients are not bitwise one process's, where the vendor replaces operators.
    """

    reduction: str | None = "mean"
    accumulate_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    operators_replaced: str | None = None


@dataclass(frozen=True)
class Identity:
    """Who is who, as plain ids: what the law `params` is judged on.

    Attributes:
        live: ``id(param) -> name`` of every trainable live param.
        frozen: The same of the others.
        held: ``(optimizer index, group index) -> ids`` of the params that the optimizers hold.
        state_keys: Ids of the tensors that state is keyed by.
        unsharded: Names of params that the optimizer holds unsharded while the model's are sharded.
        user_optimizer_steps: False where the object that the user holds is not the one that steps.
    """

    live: Mapping[int, str]
    frozen: Mapping[int, str]
    held: Sequence[tuple[tuple[int, int], tuple[int, ...]]]
    state_keys: Sequence[int]
    unsharded: tuple[str, ...] = ()
    user_optimizer_steps: bool = True


@dataclass(frozen=True)
class Settings:
    """What verify tells a backend before it wraps.

    Attributes:
        micro_batches: K, the window's length.
        max_norm: Global gradient norm to clip at, or None.
        unused: Names of params that get no gradient in some micro-batch of the first window.
        wrap: The recipe's own wrapping, ``wrap(model, backend) -> model``, or None.
        optimizer_first: Build the optimizer before wrapping (a planted fault on FSDP2).
        extra: Vendor configuration to merge over ours.
    """

    micro_batches: int = 1
    max_norm: float | None = None
    unused: tuple[str, ...] = ()
    wrap: Callable[[Any, str], Any] | None = None
    optimizer_first: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One wrapped model, or several, with the optimizers over them, on this rank."""

    backend: str
    model: Any  # as the user's loop holds it; a list if there are several
    optimizer: Any  # likewise
    extras: dict[str, Any]  # what else a user's loop may ask for by name: ``accelerator``
    optimizers: list[torch.optim.Optimizer]  # the innermost ones, that step

    # -- reads
    def modules(self) -> list[nn.Module]:
        """Return the unwrapped models: their `forward` is what runs, with buffers as it sees them."""

    def view(self) -> StateView:
        """Return all slots, live."""

    def identity(self) -> Identity:
        """Return who is who."""

    def contract(self) -> Contract:
        """Return how gradients are accumulated and reduced."""

    def warnings(self) -> list[Finding]:
        """Return what is legal in this set-up but known to do harm."""

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Call ``see(name, gradient)`` with each param's local gradient of each backward; what it returns replaces it."""

    def on_step(self, before: Callable[[int], None], after: Callable[[int, dict[str, Piece | None]], None]) -> Undo:
        """Bracket the place where a step really happens.

        ``before(i)`` is called when optimizer i is about to step, ``after(i, entering)`` when it has; `entering` maps the names
        of its params to the gradient that entered the innermost step, after clipping, or to None where it was absent.
        """

    def pieces(self, held: Sequence[Tensor]) -> dict[str, Piece] | None:
        """Return copies of this rank's part of the gradients that these params have now, by name; None if they are elsewhere."""

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield and forget ``(max_norm, returned norm)`` of the clipping that the engine itself did since the last call."""

    # -- acts
    def micro_batch(self, last: bool, reduce: bool | None = None) -> AbstractContextManager[None]:
        """Return the context of one micro-batch's forward and backward: synchronised if it is the window's last.

        Args:
            last: The window's last.
            reduce: Synchronise it whether or not it is the last, where the backend has a choice; by default as `last` says.
        """

    def sync_modes(self) -> tuple[str, ...]:
        """Return when gradients can be reduced: of ``last`` and ``every``, first the one that needs no more memory."""

    is_engine: bool  # gradients, clipping and step are an engine's own: they are not in ``.grad``

    def backward(self, loss: Tensor) -> None:
        """Run backward the vendor's way; inside `micro_batch`."""

    def loss_scale(self) -> float:
        """Return what the vendor itself multiplies the loss by in `backward` (DeepSpeed: 1/K), so that nobody does it twice."""

    def declare_clip(self, max_norm: float | None) -> float | None:
        """Set the limit of an engine that clips inside its step; return the limit that holds from now on, anywhere.

        Raises:
            UnsupportedError: If the engine's own configuration names another limit.
        """

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what the window has accumulated by a 0-d tensor; after its last backward, before clipping."""

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the global norm and return it, 0-d, as it was; nothing, and None, where the engine does it inside its step."""

    def grad_norm(self) -> Tensor | None:
        """Return the global norm by which an engine's last step clipped, 0-d, as it was before; None where it does not."""

    def step(self) -> bool:
        """Step every optimizer once, at the end of a window; return whether an engine did not skip it."""

    def advance(self, scheduler: Any) -> None:
        """Step a scheduler once, whatever wraps it; not where an engine has done so."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def discard(self) -> None:
        """Drop what a window has accumulated, wherever it is kept: the next one begins as after a step."""

    def plant(self, fault: str) -> None:
        """Break the reduction on purpose: ``desynchronise`` (never reduced) or ``sum`` (not divided by the ranks).

        Raises:
            UnsupportedError: If this backend has no such switch.
        """

    def close(self) -> None:
        """Undo every hook, and free what the vendor keeps in globals."""


@dataclass(frozen=True)
class Row:
    """One backend.

    Attributes:
        module: Of this package, holding the functions named below.
        vendor: Top-level module it needs beyond torch, or None.
        extra: The extra that installs it.
        about: One line for people.
        sharded: Whether what the optimizer gets are pieces.
    """

    module: str
    vendor: str | None
    extra: str | None
    about: str


BACKENDS: Final[Mapping[str, Row]] = {
    "single": Row("plain", None, None, "one process"),
    "ddp": Row("plain", None, None, "DistributedDataParallel"),
    "fsdp2": Row("dtensor", None, None, "fully_shard, DTensor params"),
    "fsdp1": Row("fsdp1", None, None, "FullyShardedDataParallel, use_orig_params=True"),
    "zero0": Row("zero", "deepspeed", "deepspeed", "DeepSpeed engine, ZeRO 0"),
    "zero1": Row("zero", "deepspeed", "deepspeed", "DeepSpeed engine, ZeRO 1"),
    "zero2": Row("zero", "deepspeed", "deepspeed", "DeepSpeed engine, ZeRO 2"),
    "zero3": Row("zero", "deepspeed", "deepspeed", "DeepSpeed engine, ZeRO 3"),
    "accelerate-ddp": Row("wrappers", "accelerate", "accelerate", "accelerate over DDP"),
    "accelerate-fsdp2": Row("wrappers", "accelerate", "accelerate", "accelerate over FSDP2"),
    "accelerate-zero2": Row("wrappers", "accelerate", "accelerate", "accelerate over DeepSpeed ZeRO 2"),
}


def row(name: str) -> Row:
    """Return the row of a backend.

    Raises:
        UnsupportedError: If there is no such backend, or its vendor is not installed (names the extra).
    """
    if name not in BACKENDS:
        raise UnsupportedError(f"unknown backend {name!r}: expected one of {' '.join(BACKENDS)}. Choose one of these.")
    found = BACKENDS[name]
    needed = [found.vendor, "deepspeed" if "zero" in name else None]
    for vendor in needed:
        if vendor and not _is_there(vendor):
            raise UnsupportedError(
                f"backend {name!r} needs {vendor}, which is not installed. Run: pip install 'truestep[{vendor}]'."
            )
    return found


def _is_there(vendor: str) -> bool:
    try:
        return importlib.util.find_spec(vendor) is not None
    except ImportError:  # of what stands in for it, or keeps it out
        return False


def wrap(name: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings) -> Session:
    """Wrap a plain model, or several, for this rank by the backend `name`, and build its optimizers. Collective: every rank.

    Args:
        name: A row of `BACKENDS`.
        model: As the recipe made it, whole, the same on every rank.
        make_optimizer: ``named_params -> optimizer`` or a list of them; called with the params that the step must act on.
        settings: What else is to be known before wrapping.
    """
    module = importlib.import_module(f"truestep.backends.{row(name).module}")
    session: Session = module.wrap(name, model, make_optimizer, settings)
    return session


# Asked in this order: the first that knows the pair takes it. `recognises` is only called where the vendor is already imported.
_DETECTORS: Final = (
    ("zero", "deepspeed"),
    ("wrappers", "accelerate"),
    ("dtensor", "torch.distributed.tensor"),  # which FSDP2 imports
    ("fsdp1", "torch.distributed.fsdp"),
    ("plain", "torch"),
)


def attach(model: Any, optimizer: Any = None) -> Session:
    """Return a session over what the user has already wrapped; changes nothing.

    Raises:
        UnsupportedError: If no backend knows this pair.
    """
    for module_name, vendor in () if _is_empty(model) else _DETECTORS:
        if vendor in sys.modules:
            module = importlib.import_module(f"truestep.backends.{module_name}")
            if module.recognises(model, optimizer):
                session: Session = module.attach(model, optimizer)
                return session
    raise UnsupportedError(
        f"no backend knows {_told(model)} with {_told(optimizer)}: expected a torch module, a DeepSpeed engine or what "
        "accelerate's prepare returned, with the optimizer over it, or several of these. Pass what the training loop uses."
    )


def _is_empty(model: Any) -> bool:
    return isinstance(model, (list, tuple, dict)) and not model


def _told(things: Any) -> str:
    """Return the class of one thing, or those of the items of a sequence or mapping."""
    if things is None:
        return "no optimizer"
    if isinstance(things, type):
        return f"the class {things.__name__}"
    if isinstance(things, (list, tuple, Mapping)) and type(things).__module__ == "builtins":
        items = things.values() if isinstance(things, Mapping) else things
        return f"a {type(things).__name__} of {' and '.join(_told(item) for item in items) or 'nothing'}"
    return type(things).__name__


def drawn() -> Undo:
    """Return what tells loaders again how far they are, as of now: accelerate flags an end when the last batch is *drawn*."""
    if "accelerate" not in sys.modules:
        return lambda: None
    restore: Undo = importlib.import_module("truestep.backends.wrappers").drawn()
    return restore
