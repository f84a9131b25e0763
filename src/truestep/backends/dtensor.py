"""DTensor params: FSDP2.

FSDP keeps two objects for a param: the *sharded* one, a DTensor that the optimizer must hold, and the *unsharded* one that
forward and backward use. The module shows either, depending on when it is asked (after a no-grad forward the root shows the
unsharded ones), so names and params come from FSDP's own records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from truestep.backends import slots
from truestep.backends.base import Contract, SeeGradient, Settings, Undo
from truestep.backends.blocks import blocks
from truestep.backends.session import TorchSession, coarsest, hooked, need_all_ranks, need_process_group, no_such_switch
from truestep.words.errors import UnsupportedError
from truestep.words.finding import listed
from truestep.words.layout import Layout, Shard
from truestep.words.shards import Box

NAMES = ("fsdp2",)


def place(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    """Return which box of a DTensor is here, and a view of it; a plain tensor is a replica.

    Of a DTensor that is not reduced yet there is nothing to view: it is reduced into a new one. Collective then.
    """
    if not isinstance(tensor, DTensor):
        return slots.replica(tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    local: Tensor = tensor.to_local().detach()
    shape = tuple(tensor.shape)
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offsets), tuple(offset + length for offset, length in zip(offsets, lengths, strict=True)))
    shard = Shard(_layout(tensor), shape, (box,) if box.numel or box.shape == shape else ())
    return shard, (local,) if shard.boxes else ()


def _layout(tensor: DTensor) -> Layout:
    """Return how a tensor is cut: the same on every rank, also where one of them holds all of it."""
    cuts: Sequence[Any] = tensor.placements
    dims = [cut.dim for cut, ranks in zip(cuts, tensor.device_mesh.shape, strict=True) if hasattr(cut, "dim") and ranks > 1]
    return Layout.WHOLE if not dims else Layout.DIM0 if dims == [0] else Layout.BLOCK


class ShardedSession(TorchSession):
    """Models under `fully_shard`."""

    def __init__(self, backend: str, model: Any, optimizer: Any) -> None:
        super().__init__(backend, model, optimizer, place)

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every param by name, sharded where FSDP has a record of it, whatever the module shows now."""
        sharded = {place: record.sharded_param for record in self._records() for place in places(record)}
        return slots.registered(self._inner, sharded)

    def _records(self) -> list[Any]:
        return [record for group in self._groups() for record in group.fsdp_params]

    def _groups(self) -> list[Any]:
        return [group for root in self.modules() for state in states(root) for group in groups(state)]

    def _named_records(self) -> list[tuple[str, Any]]:
        name_by_id = {id(param): name for name, param in self.params()}
        return [(name_by_id[id(record.sharded_param)], record) for record in self._records()]

    def unsharded(self) -> tuple[str, ...]:
        """Return the names of params of which an optimizer holds what FSDP shows in their place while they are gathered."""
        held = {id(param) for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]}
        return tuple(
            name
            for name, record in self._named_records()
            if any(id(shown) in held for part in _STAND_INS if (shown := getattr(record, part, None)) is not None)
        )

    def contract(self) -> Contract:
        """Return FSDP's contract: mean, or sum where its divide factor says so; dtypes by its mixed-precision policy.

        A rank accumulates in the dtype that the ranks reduce in, and what comes out is cast to the param's own.
        """
        own = super().contract()
        training = [group for group in self._groups() if any(p.sharded_param.requires_grad for p in group.fsdp_params)]
        reductions = {_reduction(group) for group in training} or {"mean"}
        policies = [group.mp_policy for group in training]
        reduced = [policy.reduce_dtype or policy.param_dtype or own.reduce_dtype for policy in policies]
        return replace(
            own,
            reduction=reductions.pop() if len(reductions) == 1 else None,
            accumulate_dtype=coarsest([own.accumulate_dtype, *reduced]),
            reduce_dtype=coarsest(reduced or [own.reduce_dtype]),
        )

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Hook the unsharded params as soon as FSDP has gathered them: it keeps the same objects from then on."""

        def see_whole(name: str, gradient: Tensor) -> Tensor | None:
            return see(name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)

        watched = [Watched(record, name, see_whole) for name, record in self._named_records()]
        recorded = {id(record.sharded_param) for record in self._records()}
        others = hooked(((name, param) for name, param in self.params() if id(param) not in recorded), see_whole)

        def undo() -> None:
            others()
            for each in watched:
                each.close()

        return self._kept(undo)

    def micro_batch(self, last: bool, reduce: bool | None = None) -> AbstractContextManager[None]:
        """Reduce gradients in the last micro-batch only, or where `reduce` says so: from now on, until the context ends."""
        self._switch(last if reduce is None else reduce)
        context = ExitStack()  # no generator: one that is left open would act when the collector finds it, on half a model
        context.callback(self._switch, True)
        return context  # type: ignore[return-value]

    def sync_modes(self) -> tuple[str, ...]:
        """Return when gradients can be reduced.

        Raises:
            UnsupportedError: If params lie on a mesh of several dims, or of some ranks, or FSDP does not know them.
        """
        recorded = {id(record.sharded_param) for record in self._records()}
        for _, param in self.params():
            if isinstance(param, DTensor):
                is_ours = id(param) in recorded and param.device_mesh.ndim == 1
                need_all_ranks(self.backend, param.device_mesh.size() if is_ours else 0)
        return super().sync_modes()

    def _switch(self, reduce: bool) -> None:
        for module in (module for root in self.modules() for module in sharded_modules(root)):
            module.set_requires_gradient_sync(reduce, recurse=False)
            module.set_is_last_backward(reduce)

    def plant(self, fault: str) -> None:
        """Keep the reduction off whatever the loop says, or set the divide factor to 1."""
        if fault not in ("desynchronise", "sum"):
            raise no_such_switch(self.backend, fault)
        for module in (module for root in self.modules() for module in sharded_modules(root)):
            if fault == "sum":
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            else:
                module.set_requires_gradient_sync(False, recurse=False)
                self._kept(_held(module))


def _held(module: FSDPModule) -> Undo:
    """Have a module ignore every later switch of its reduction; the undo lets it go and switches it on."""
    vars(module)["set_requires_gradient_sync"] = lambda *args, **kwargs: None

    def undo() -> None:
        if vars(module).pop("set_requires_gradient_sync", None):
            module.set_requires_gradient_sync(True, recurse=False)

    return undo


def _reduction(group: Any) -> str | None:
    """Return what a group reduces to: FSDP itself divides by the ranks; another factor, or the user's own code, says nothing."""
    own = group._all_reduce_hook is not None or not type(group._reduce_scatter_comm).__module__.startswith("torch.")
    ranks = float(group.mesh_info.mesh.size())
    factor = ranks if group.gradient_divide_factor is None else float(group.gradient_divide_factor)
    return None if own else {1.0: "sum", ranks: "mean"}.get(factor)


class Watched:
    """A hook on the unsharded form of one param, from when FSDP makes it.

    A forward pre-hook would miss a param that is gathered for something else than its module's forward: the head that is tied to
    an embedding, a method given to ``register_fsdp_forward_method``. All of them end in the record's own ``to_unsharded``.
    """

    def __init__(self, record: Any, name: str, see: SeeGradient) -> None:
        self._record = record
        self._name = name
        self._see = see
        self._undo: list[Undo] = [_called_after(record, "to_unsharded", self._look)]
        self._seen: Tensor | None = None
        self._look()

    def _look(self) -> None:
        made = getattr(self._record, "_unsharded_param", None)
        if made is not None and made is not self._seen and made.requires_grad:
            self._seen = made
            self._undo.append(hooked([(self._name, made)], self._see))

    def close(self) -> None:
        """Take the hook away."""
        while self._undo:
            self._undo.pop()()


@dataclass
class Followed:
    """A method after which others are told."""

    original: Callable[..., Any]
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, then its listeners."""
        result = self.original(*args, **kwargs)
        for listener in tuple(self.listeners):
            listener()
        return result


def _called_after(owner: Any, method: str, listener: Callable[[], None]) -> Undo:
    """Call `listener` after every call of a method of this object; several may, and leave in any order."""
    followed = vars(owner).get(method)
    if not isinstance(followed, Followed):
        followed = vars(owner)[method] = Followed(getattr(owner, method))
    followed.listeners.append(listener)

    def undo() -> None:
        if listener in followed.listeners:
            followed.listeners.remove(listener)
        if not followed.listeners and vars(owner).get(method) is followed:
            del vars(owner)[method]

    return undo


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> ShardedSession:
    """Shard each model by `fully_shard`: every block of a module list that shares no param with the rest, then the root.

    Raises:
        UnsupportedError: If there is no process group, or there are params that FSDP cannot shard.
    """
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
    if scalars := [name for name, param in module.named_parameters() if param.dim() == 0]:
        raise UnsupportedError(f"FSDP2 cannot shard 0-d params, found {listed(scalars)}. Give them one element: shape (1,).")
    need_process_group("fsdp2")
    for block in blocks(module):
        fully_shard(block)
    fully_shard(module)  # in place
    return module


def recognises(model: Any, optimizer: Any) -> bool:
    """Return whether some model here has DTensors for params, or holds an FSDP2 module (which may show plain ones now)."""
    modules = [module for _, module in slots.labelled_items(model)]
    return all(isinstance(module, nn.Module) for module in modules) and any(
        sharded_modules(module) or any(isinstance(param, DTensor) for param in module.parameters()) for module in modules
    )


def attach(model: Any, optimizer: Any) -> ShardedSession:
    """Return a session over models with DTensor params."""
    return ShardedSession("fsdp2", model, optimizer)


# -- FSDP's own records (torch 2.11 to 2.13: torch.distributed.fsdp._fully_shard)

_STAND_INS: Final = ("_unsharded_param", "_sharded_post_forward_param")


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was applied to."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def states(root: nn.Module) -> list[Any]:
    """Return FSDP's state of each of them, once."""
    found = {id(state): state for state in (module._get_fsdp_state() for module in sharded_modules(root))}
    return list(found.values())


def groups(state: Any) -> Sequence[Any]:
    """Return its groups of params, with FSDP's record of each: `sharded_param`, `_unsharded_param`, where it is registered."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def places(record: Any) -> Iterator[tuple[int, str]]:
    """Yield ``(id(module), name)`` of every place where the param is registered; tied ones have several."""
    info = record._module_info
    yield id(info.module), info.param_name
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        yield id(module), name
