"""DTensor params: FSDP2.

FSDP keeps two objects for a param: the *sharded* one, a DTensor that the optimizer must hold, and the *unsharded* one that forward and
backward use. The module shows either, depending on when it is asked (after a no-grad forward the root shows the unsharded ones), so
names and params come from FSDP's own records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from truestep.backends import slots
from truestep.backends.base import Contract, SeeGradient, Settings, Undo
from truestep.backends.session import TorchSession, coarsest_dtype, compiled, no_such_switch, unwrapped
from truestep.words.layout import Layout, Shard
from truestep.words.names import clean, labelled
from truestep.words.shards import Box

NAMES = ("fsdp2",)


def place(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    """Return which box of a DTensor is here; a plain tensor is a replica."""
    if not isinstance(tensor, DTensor):
        return slots.replica(tensor)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[_reduced(placement) for placement in tensor.placements])
    shape = tuple(tensor.shape)
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offsets), tuple(offset + length for offset, length in zip(offsets, lengths, strict=True)))
    local = tensor.detach().to_local()
    if box.shape == shape:
        return Shard(Layout.WHOLE, shape, (box,)), (local,)
    dims = [placement.dim for placement in tensor.placements if placement.is_shard()]
    layout = Layout.DIM0 if dims == [0] else Layout.BLOCK
    return (Shard(layout, shape, (box,)), (local,)) if box.numel else (Shard(layout, shape, ()), ())


def _reduced(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if isinstance(placement, Partial) else placement


class ShardedSession(TorchSession):
    """Models under `fully_shard`."""

    def __init__(self, backend: str, model: Any, optimizer: Any) -> None:
        modules = [unwrapped(module) for _, module in slots.labelled_items(model)]
        self._labels = [label for label, _ in slots.labelled_items(model)]
        super().__init__(backend, model, optimizer, modules=modules, params=(), place=place)

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every param by name, sharded where FSDP has a record of it, whatever the module shows now."""
        found, seen = [], set()
        for label, root in zip(self._labels, self._modules, strict=True):
            sharded = {place: record.sharded_param for record in records(root) for place in places(record)}
            for prefix, module in root.named_modules():
                for own, shown in module._parameters.items():
                    param = sharded.get((id(module), own), shown)
                    if param is not None and id(param) not in seen:
                        seen.add(id(param))
                        found.append((labelled(label, clean(f"{prefix}.{own}" if prefix else own)), param))
        return found

    def unsharded(self) -> tuple[str, ...]:
        """Return the names of params of which an optimizer holds the unsharded stand-in."""
        held = {id(param) for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]}
        name_by_id = {id(param): name for name, param in self.params()}
        return tuple(
            name_by_id[id(record.sharded_param)]
            for root in self._modules
            for record in records(root)
            if id(getattr(record, "_unsharded_param", None)) in held
        )

    def contract(self) -> Contract:
        """Return FSDP's contract: mean, or sum where its divide factor says so; dtypes by its mixed-precision policy."""
        groups = [group for root in self._modules for state in states(root) for group in _groups(state)]
        factors = {getattr(group, "gradient_divide_factor", None) for group in groups} - {None}
        own = coarsest_dtype([param for _, param in self.params() if param.requires_grad])
        policies = [record.mp_policy for root in self._modules for record in records(root)]
        computed = {policy.param_dtype or own for policy in policies} or {own}
        reduced = {policy.reduce_dtype or policy.param_dtype or own for policy in policies} or {own}
        return Contract(
            reduction="mean" if not factors else "sum" if factors == {1.0} else None,
            accumulate_dtype=max(computed | reduced, key=lambda dtype: torch.finfo(dtype).eps),
            reduce_dtype=max(reduced, key=lambda dtype: torch.finfo(dtype).eps),
            operators_replaced=compiled(self._modules),
        )

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Hook the unsharded params, as soon as a forward has made them; they are kept across all-gathers."""
        hooked: dict[int, Any] = {}

        def hook(*_: Any) -> None:
            name_by_id = {id(param): name for name, param in self.params()}
            for record in (record for root in self._modules for record in records(root)):
                made = getattr(record, "_unsharded_param", None)
                if made is not None and made.requires_grad and id(made) not in hooked:
                    name = name_by_id[id(record.sharded_param)]
                    hooked[id(made)] = made.register_hook(lambda gradient, name=name: see(name, _plain(gradient)))

        # FSDP's own pre-hook comes first and gathers: only then does the unsharded param exist. A tied param may be used without a
        # forward of its own module, so every FSDP module looks at all records.
        handles = [module.register_forward_pre_hook(hook) for root in self._modules for module in sharded_modules(root)]
        under_fsdp = {id(record.sharded_param) for root in self._modules for record in records(root)}
        handles += [
            param.register_hook(lambda gradient, name=name: see(name, gradient))
            for name, param in self.params()
            if param.requires_grad and id(param) not in under_fsdp
        ]
        return lambda: [handle.remove() for handle in [*handles, *hooked.values()]] and None

    @contextmanager
    def _switched(self, last: bool) -> Iterator[None]:
        for root in self._modules:
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(last)
                root.set_is_last_backward(last)
        yield

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: gradients are reduced in the last only."""
        return self._switched(last)

    def plant(self, fault: str) -> None:
        """Keep the reduction off, or set the divide factor to 1."""
        roots = [root for root in self._modules if isinstance(root, FSDPModule)]
        if fault == "sum":
            for module in (module for root in roots for module in sharded_modules(root)):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        elif fault == "desynchronise":
            keep_off = self.micro_batch
            self.micro_batch = lambda last: keep_off(False)  # type: ignore[method-assign]
        else:
            raise no_such_switch(self.backend, fault)


def _plain(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> ShardedSession:
    """Shard each model by `fully_shard`: every block of a module list that shares no param with the rest, then the root."""
    optimizer = make_optimizer(slots.trainable(slots.named_params(model))) if settings.optimizer_first else None
    if settings.wrap is not None:
        wrapped = settings.wrap(model, backend)
    else:
        wrapped = slots.like(model, [shard(module) for _, module in slots.labelled_items(model)])
    session = ShardedSession(backend, wrapped, optimizer)
    if settings.optimizer_first:
        return session
    return ShardedSession(backend, wrapped, make_optimizer(slots.trainable(session.params())))


def shard(module: nn.Module) -> nn.Module:
    """Apply `fully_shard` to the blocks of a model, then to the rest."""
    for block in blocks(module):
        fully_shard(block)
    return fully_shard(module)


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost module lists whose params belong to them alone (FSDP refuses a param in two groups)."""
    uses: dict[int, int] = {}
    for module in root.modules():
        for param in module._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1
    lists = [module for module in root.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for module in lists for part in module.modules() if part is not module}
    found = [block for module in lists if id(module) not in inner for block in module]
    return [block for block in found if any(True for _ in block.parameters()) and _alone(block, uses)]


def _alone(block: nn.Module, uses: dict[int, int]) -> bool:
    own: dict[int, int] = {}
    for module in block.modules():
        for param in module._parameters.values():
            own[id(param)] = own.get(id(param), 0) + 1
    return all(uses[key] == count for key, count in own.items())


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether some model here is, or holds, an FSDP2 module."""
    modules = [module for _, module in slots.labelled_items(model)]
    return all(isinstance(module, nn.Module) for module in modules) and any(
        sharded_modules(unwrapped(module)) for module in modules
    )


def attach(model: Any, optimizer: Any) -> ShardedSession:
    """Return a session over models under `fully_shard`."""
    return ShardedSession("fsdp2", model, optimizer)


# -- FSDP's own records (torch 2.11 to 2.13: torch.distributed.fsdp._fully_shard)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was applied to."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def states(root: nn.Module) -> list[Any]:
    """Return FSDP's state of each of them, once."""
    found = {id(state): state for state in (module._get_fsdp_state() for module in sharded_modules(root))}
    return list(found.values())


def records(root: nn.Module) -> list[Any]:
    """Return FSDP's record of each param: `sharded_param`, `_unsharded_param`, where it is registered."""
    return [record for state in states(root) for group in _groups(state) for record in group.fsdp_params]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def places(record: Any) -> Iterator[tuple[int, str]]:
    """Yield ``(id(module), name)`` of every place where the param is registered; tied ones have several."""
    info = record._module_info
    yield id(info.module), info.param_name
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        yield id(module), name
