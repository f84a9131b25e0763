"""FSDP1 (FullyShardedDataParallel, ``use_orig_params=True``): the optimizer gets plain 1-D pieces of flattened params.

A wrapped module's params are laid end to end in one flat param, which is cut evenly over the ranks. Each original param lives on:
as a 1-D view of what this rank holds of it, empty where that is nothing. While the module runs, its attributes are views of the
gathered flat param instead: those are what autograd sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.weak import WeakIdKeyDictionary

from truestep.backends import slots
from truestep.backends.base import Contract, SeeGradient, Settings, Undo
from truestep.backends.blocks import blocks
from truestep.backends.session import TorchSession, coarsest, need_process_group, removal
from truestep.backends.slots import Place
from truestep.state.view import Slot
from truestep.words.errors import UnsupportedError
from truestep.words.layout import Layout, Shard
from truestep.words.shards import runs

NAMES = ("fsdp1",)


@dataclass(frozen=True, eq=False)
class Range:
    """Where one original param lies: this rank's flat range of it.

    Attributes:
        param: The original one, a 1-D view of this rank's part.
        shape: Of the whole param.
        start, stop: In its row-major order.
        kept: Returns the view of the gathered param that the last forward used, while FSDP keeps it.
        module: Where it is registered, under `own`.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    start: int
    stop: int
    module: nn.Module
    own: str
    kept: Callable[[], Tensor | None]

    def place(self, tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
        """Return the boxes of a tensor that is laid out like the param's local view; of any other, the whole.

        Where this rank holds nothing of the param FSDP gives it no gradient, and what an optimizer keeps for it says nothing.
        """
        if self.start == self.stop:
            return Shard(Layout.FLAT, self.shape if tensor.ndim else (), ()), ()
        if tensor.ndim != 1 or tensor.numel() != self.stop - self.start:
            return slots.replica(tensor)
        pieces = runs(self.shape, self.start, self.stop)
        local = tuple(tensor.detach()[offset : offset + box.numel].view(box.shape) for offset, box in pieces)
        return Shard(Layout.FLAT, self.shape, tuple(box for _, box in pieces)), local


class FlatSession(TorchSession):
    """Models under FullyShardedDataParallel."""

    def __init__(self, backend: str, model: Any, optimizer: Any) -> None:
        super().__init__(backend, model, optimizer)
        self._clips: list[tuple[float, Tensor]] = []
        self._watching = False

    def _roots(self) -> list[FullyShardedDataParallel]:
        return [module for module in self.modules() if isinstance(module, FullyShardedDataParallel)]

    def ranges(self) -> list[Range]:
        """Return where each original param under FSDP lies."""
        return [found for root in self.modules() for unit in units(root) for found in _ranges(unit)]

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every original param by name, whatever the module shows now."""
        original = {(id(found.module), found.own): found.param for found in self.ranges()}
        return slots.registered(self._inner, original)

    def _places(self) -> Callable[[Tensor], Place]:
        """Return the place of each param: its own flat range."""
        place_by_id: dict[int, Place] = {id(found.param): found.place for found in self.ranges()}
        return lambda param: place_by_id.get(id(param), self._place)

    def _param_slots(self) -> list[Slot]:
        found = super()._param_slots()
        order = {name: place for place, (name, _) in enumerate(self.params())}
        return sorted([*found, *self._elsewhere(found)], key=lambda slot: order[slot.name])

    def _elsewhere(self, found: Sequence[Slot]) -> list[Slot]:
        """Return empty slots for the state of params of which nothing is here, and which therefore were never stepped here.

        Other ranks have that state, and a view lists the same slots on every rank; its keys are taken to be those of the params
        that are here.
        """
        shape_by_name = {slot.name: slot.shape for slot in found if slot.key == "param"}
        here = {slot.name for slot in found if slot.key == "param" and slot.boxes}
        held = {id(param) for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]}
        stepped = {name for name, param in self.params() if id(param) in held and param.requires_grad}
        kept = {slot.name for slot in found if slot.key != "param"}
        like = {slot.key: slot for slot in found if slot.name in here and slot.key != "param" and slot.kind == "tensor"}
        return [
            dataclasses.replace(
                slot, name=name, shard=Shard(Layout.FLAT, shape if slot.shape == shape_by_name[slot.name] else (), ()), local=()
            )
            for name, shape in shape_by_name.items()
            if name in stepped and name not in here and name not in kept
            for slot in like.values()
        ]

    def contract(self) -> Contract:
        """Return FSDP's mean; dtypes by its mixed precision."""
        own = super().contract()
        policies = [unit.mixed_precision for root in self.modules() for unit in units(root)]
        reduced = [policy.reduce_dtype or policy.param_dtype or own.reduce_dtype for policy in policies]
        hooked = any(unit._comm_hook is not None for root in self.modules() for unit in units(root))
        return replace(
            own,
            reduction=None if hooked else "mean",
            accumulate_dtype=coarsest([own.accumulate_dtype, *reduced]),
            reduce_dtype=coarsest(reduced or [own.reduce_dtype]),
        )

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Hook the views that a forward uses: they are made anew in each."""
        hooked = WeakIdKeyDictionary()

        def hook(*_: Any) -> None:
            name_by_id = {id(param): name for name, param in self.params()}
            for found in self.ranges():
                # Between a forward and its backward the module shows the shards again, and FSDP keeps what autograd saw.
                for view in (getattr(found.module, found.own), found.kept()):
                    if isinstance(view, Tensor) and view.requires_grad and view is not found.param and view not in hooked:
                        name = name_by_id[id(found.param)]
                        hooked[view] = view.register_hook(lambda gradient, name=name: see(name, gradient))

        hook()

        # The wrapped module's own pre-hook comes after FSDP has gathered. A tied param may be used without a forward of its own
        # module, so every unit looks at all of them.
        inner = [unit._fsdp_wrapped_module for root in self.modules() for unit in units(root)]
        return self._kept(removal([module.register_forward_pre_hook(hook) for module in inner]))

    def _watch_clip(self, root: FullyShardedDataParallel) -> Undo:
        clip = root.clip_grad_norm_

        def watched(max_norm: float, norm_type: float = 2.0) -> Tensor:
            norm = clip(max_norm, norm_type)
            self._clips.append((float(max_norm), norm.detach().clone()))
            return norm

        root.clip_grad_norm_ = watched  # type: ignore[method-assign]
        return lambda: vars(root).pop("clip_grad_norm_", None)

    def watch_clips(self) -> None:
        """Record clippings by the model's own method from now on."""
        if not self._watching:
            self._watching = True
            self._undo += [self._watch_clip(root) for root in self._roots()]

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield and forget what the wrapped model's own ``clip_grad_norm_`` did; of an attached model, since the first call."""
        self.watch_clips()
        while self._clips:
            yield self._clips.pop(0)

    def micro_batch(self, last: bool, reduce: bool | None = None) -> AbstractContextManager[None]:
        """Return ``no_sync`` around all but the last micro-batch, or but those that `reduce` says."""
        context = ExitStack()
        if not (last if reduce is None else reduce):
            for root in self._roots():
                context.enter_context(root.no_sync())
        return context  # type: ignore[return-value]

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip by the model's own method: torch's would take the norm of this rank's pieces.

        Raises:
            UnsupportedError: If there are several models: each would be clipped by a norm of its own.
        """
        roots = self._roots()
        if len(roots) != 1:
            raise UnsupportedError(
                f"FSDP1 clips one model by one norm, found {len(roots)}. Wrap them as parts of one, or use fully_shard."
            )
        return roots[0].clip_grad_norm_(max_norm)


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> FlatSession:
    """Wrap the blocks of each model, then the rest, with ``use_orig_params=True``; build the optimizer after."""
    if settings.wrap is not None:
        wrapped = settings.wrap(model, backend)
    else:
        wrapped = slots.like(model, [flattened(module) for _, module in slots.labelled_items(model)])
    params = attach(wrapped, None).params()
    session = attach(wrapped, make_optimizer(slots.trainable(params)))
    session.watch_clips()
    return session


def flattened(module: nn.Module) -> FullyShardedDataParallel:
    """Return a model under FSDP1, its blocks as units of their own."""
    need_process_group("fsdp1")
    apart = {id(block) for block in blocks(module)}
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    return FullyShardedDataParallel(
        module, use_orig_params=True, device_id=device, auto_wrap_policy=CustomPolicy(lambda part: id(part) in apart)
    )


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether some model here holds an FSDP1 module."""
    modules = [module for _, module in slots.labelled_items(model)]
    return all(isinstance(module, nn.Module) for module in modules) and any(units(module) for module in modules)


def attach(model: Any, optimizer: Any) -> FlatSession:
    """Return a session over models under FSDP1.

    Raises:
        UnsupportedError: If one was wrapped with ``use_orig_params=False``.
    """
    for _, module in slots.labelled_items(model):
        if any(unit._handle is not None and not unit._handle._use_orig_params for unit in units(module)):
            raise UnsupportedError("FSDP1 was set up with use_orig_params=False, which hides params. Pass use_orig_params=True.")
    return FlatSession("fsdp1", model, optimizer)


def units(root: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the modules that FSDP1 wraps."""
    return [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]


def _ranges(unit: FullyShardedDataParallel) -> Iterator[Range]:
    """Yield the range of each original param in a unit's flat param (torch.distributed.fsdp._flat_param, 2.11 to 2.13)."""
    if unit._handle is None:
        return
    flat = unit._handle.flat_param
    infos = zip(flat._params or (), flat._shapes, flat._shard_param_infos, flat._param_infos, strict=True)
    for index, (param, shape, shard, (own, module, _)) in enumerate(infos):
        start, last = shard.intra_param_start_idx, shard.intra_param_end_idx
        start, stop = (0, 0) if start is None or last is None else (start, last + 1)

        def kept(index: int = index) -> Tensor | None:
            return (flat._tensors or {index: None})[index]

        yield Range(param, tuple(shape), start, stop, module, own, kept)
