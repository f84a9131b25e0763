"""DeepSpeed engines: ZeRO 0 to 3.

The optimizer is always built before the engine (`zero_engine`), on the plain model's params; the engine then gives it flat
tensors to step (`zero_layout`), and steps it where `zero_step` says. The window's boundary is set for each micro-batch and the
loss is left undivided, so that a window of any length is exact, whatever the engine's own ``gradient_accumulation_steps``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from truestep.backends import slots, zero_engine, zero_layout
from truestep.backends.base import Contract, Identity, Piece, SeeGradient, Settings, Undo
from truestep.backends.session import coarsest_dtype, compiled, need_all_ranks, no_such_switch
from truestep.backends.zero_layout import Flat, Fragment
from truestep.backends.zero_step import After, Before, StepBracket
from truestep.state.view import StateView
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Finding


class ZeroSession:
    """A DeepSpeed engine on this rank.

    Args:
        backend: Name of the row.
        engine: The engine.
        optimizer: As the user's loop holds it; by default ``engine.optimizer``.
        owned: Whether `close` ends the engine.
        configured: Whether the engine's configuration is ours.
    """

    is_engine = True

    def __init__(
        self, backend: str, engine: Any, optimizer: Any = None, *, owned: bool = False, configured: bool = False
    ) -> None:
        self.backend = backend
        self.model = engine
        self.optimizer = engine.optimizer if optimizer is None else optimizer
        self.optimizers: list[torch.optim.Optimizer] = [innermost(engine.optimizer)]
        self.extras: dict[str, Any] = {}
        self._engine = engine
        self._owned = owned
        self._configured = configured
        self._undo: list[Undo] = []
        self._moved_boundary = False
        self._bracket = StepBracket(engine, self.optimizers[0], self._entering)
        if owned:
            self._bracket.watch()  # so that no step's clipping is missed

    # -- reads

    def modules(self) -> list[nn.Module]:
        """Return the unwrapped model."""
        return [self._engine.module]

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """Return every live param by name; under ZeRO 3 most of them are without their data."""
        return slots.named_params(self._engine.module)

    def flats(self) -> list[Flat]:
        """Return the tensors that the inner optimizer steps."""
        return zero_layout.flats(self._engine.optimizer)

    def view(self) -> StateView:
        """Return all slots, live: whole params under ZeRO 0 to 2, this rank's part of each under ZeRO 3."""
        inner, flats = self.optimizers[0], self.flats()
        held: dict[int, tuple[Flat, Fragment]] = {id(part.param): (flat, part) for flat in flats for part in flat.fragments}
        found = [
            slot for name, param in self.params() for slot in zero_layout.param_slots(name, param, held.get(id(param)), inner)
        ]
        # Inside a step ZeRO shows the inner optimizer one group at a time; the bracket knows them all.
        every_group = cast("torch.optim.Optimizer", SimpleNamespace(param_groups=self._bracket.groups))
        found += slots.group_slots(every_group, None)
        found += slots.optimizer_slots(inner, None)
        return StateView(found, slots.orphans([inner], [flat.tensor for flat in flats]))

    def identity(self) -> Identity:
        """Return who is who, in the model's own params: what lies in a flat tensor stands for the tensor."""
        inner, params, flats = self.optimizers[0], self.params(), self.flats()
        held: dict[int, list[int]] = {group: [] for group in range(len(self._bracket.groups))}
        ids_by_flat: dict[int, list[int]] = {}
        for flat in flats:
            ids_by_flat[id(flat.tensor)] = ids = [id(part.param) for part in flat.fragments]
            held.setdefault(flat.group, []).extend(ids)
        keys = [ids_by_flat.get(id(key), [id(key)]) for key in inner.state if isinstance(key, Tensor)]
        return Identity(
            live={id(param): name for name, param in params if param.requires_grad},
            frozen={id(param): name for name, param in params if not param.requires_grad},
            held=[((0, group), tuple(ids)) for group, ids in held.items()],
            state_keys=[param_id for ids in keys for param_id in ids],
            user_optimizer_steps=self._user_optimizer_steps(),
        )

    def _user_optimizer_steps(self) -> bool:
        """Tell whether what ``initialize`` was given steps: DeepSpeed rebuilds an Adagrad, and a scheduler keeps the old one."""
        given = self._engine.client_optimizer
        return not isinstance(given, torch.optim.Optimizer) or given is self.optimizers[0]

    def contract(self) -> Contract:
        """Return how gradients are accumulated and reduced, by the engine's settings."""
        engine, stage = self._engine, self._engine.zero_optimization_stage()
        own = coarsest_dtype([param for _, param in self.params() if param.requires_grad])
        accumulate = engine.get_data_types()[1] if stage else own
        sent = engine.communication_data_type
        # What a rank gives to the reduction and gets back: ZeRO 1 its sums, ZeRO 0 and 2 gradients, ZeRO 3 a copy in `sent`.
        reduced_in = {0: own, 1: accumulate, 2: own, 3: sent}[stage]
        mean = stage == 3 or engine.gradient_average  # ZeRO 3 does not look at the setting
        return Contract("mean" if mean else "sum", accumulate, _coarser(sent, reduced_in), self._operators_replaced())

    def _operators_replaced(self) -> str | None:
        if _linear_is_replaced():
            return "ZeRO 3's memory_efficient_linear replaces torch.nn.functional.linear in this process"
        return compiled([self._engine.module])

    def warnings(self) -> list[Finding]:
        """Return what is legal here but known to do harm: an engine that clips because nobody said whether it should."""
        engine = self._engine
        max_norm = engine.gradient_clipping()
        if self._configured or not max_norm or "gradient_clipping" in engine._config._param_dict:
            return []
        return [
            Finding(
                "gradient/engine-clips-by-default",
                "gradient",
                "warning",
                expected="gradient_clipping in the DeepSpeed config",
                found=f"nothing, so the engine clips the global norm at {max_norm}",
                fix="Set gradient_clipping in the DeepSpeed config: 0.0 for none.",
            )
        ]

    def hook_gradients(self, see: SeeGradient) -> Undo:
        """Call ``see(name, gradient)`` with each param's whole local gradient of each backward; what it returns replaces it."""
        handles = [
            param.register_hook(lambda gradient, name=name: see(name, gradient))
            for name, param in self.params()
            if param.requires_grad
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        self._undo.append(undo)
        return undo

    def on_step(self, before: Before, after: After) -> Undo:
        """Bracket the engine's step; both are called only for a call in which the inner optimizer really steps."""
        return self._bracket.add(before, after)

    def _entering(self, tensors: Sequence[Tensor]) -> Mapping[str, Piece | None]:
        name_by_id = {id(param): name for name, param in self.params() if param.requires_grad}
        stepping = {id(tensor) for tensor in tensors}
        flats = (flat for flat in self.flats() if id(flat.tensor) in stepping)
        return {name: piece for flat in flats for name, piece in zero_layout.pieces(flat, name_by_id).items()}

    def pieces(self, held: Sequence[Tensor]) -> dict[str, Piece]:
        """Return copies of the gradients that these params have now, where the step will use these: ZeRO 0 in fp32 alone."""
        name_by_id = {id(param): name for name, param in self.params()}
        stepped = {id(flat.tensor) for flat in self.flats()}
        gradients = {name_by_id[id(param)]: param.grad for param in held if id(param) in name_by_id and id(param) in stepped}
        whole = {name: slots.replica(gradient) for name, gradient in gradients.items() if gradient is not None}
        return {name: Piece(shard, tuple(part.clone() for part in local)) for name, (shard, local) in whole.items()}

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield and forget the engine's own clipping since the last call; of an attached engine, since the first."""
        return self._bracket.clips()

    # -- acts

    @contextlib.contextmanager
    def micro_batch(self, last: bool, reduce: bool | None = None) -> Iterator[None]:
        """Tell the engine, before forward, whether this is the window's last micro-batch; when it reduces is its stage's."""
        if self._engine.managed_gradient_accumulation():  # else the window ends where `step` is called
            self._engine.set_gradient_accumulation_boundary(last)
            self._moved_boundary = True
        yield

    def sync_modes(self) -> tuple[str, ...]:
        """Return when the engine reduces: that is its stage's, not ours to choose."""
        need_all_ranks(self.backend, self._engine.dp_world_size)
        return ("every",) if self._engine.zero_optimization_stage() >= 2 else ("last",)

    def backward(self, loss: Tensor) -> None:
        """Run the engine's backward, which then reduces; the loss is not divided by the engine's own accumulation steps."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def loss_scale(self) -> float:
        """Return 1: `backward` leaves the loss undivided, and what fp16 training scales it by the engine's own step undoes."""
        return 1.0

    def declare_clip(self, max_norm: float | None) -> float | None:
        """Set the engine's limit, unless its own configuration names one: then that is to be the same."""
        return zero_engine.declare_clip(self._engine, max_norm)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what the engine has accumulated by a 0-d tensor."""
        for gradient in zero_layout.accumulated(self._engine):
            gradient.mul_(factor.to(gradient.device))

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip nothing: the engine does, inside its step. Return the norm only where it throws that away: ZeRO 0 in fp32."""
        if hasattr(self._engine.optimizer, "clip_grad"):
            return None
        gradients = [param.grad for _, param in self.params() if param.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def grad_norm(self) -> Tensor | None:
        """Return the global norm that the engine's last step measured."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm).detach().clone().reshape(())

    def step(self) -> bool:
        """Step the engine, once at the window's end; return whether it did not skip the step."""
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def advance(self, scheduler: Any) -> None:
        """Step a scheduler once, unless the engine has it: then it did."""
        if scheduler is not self._engine.lr_scheduler:
            scheduler.step()

    def zero_grad(self) -> None:
        """Clear the gradients of the model; the engine has cleared its own in its step."""
        self._engine.zero_grad()

    def discard(self) -> None:
        """Drop what the engine has accumulated, as it does itself when a step overflows."""
        self._engine.zero_grad()
        zero_layout.forget(self._engine)

    def plant(self, fault: str) -> None:
        """Keep the engine from reducing what backward made; only ZeRO 0 has a switch for it."""
        if fault != "desynchronise" or self._engine.zero_optimization_stage():
            raise no_such_switch(self.backend, fault)
        self._engine.enable_backward_allreduce = False

    def close(self) -> None:
        """Take all hooks away; end the engine if it is ours."""
        self._bracket.close()
        while self._undo:
            self._undo.pop()()
        if self._moved_boundary:
            self._engine.set_gradient_accumulation_boundary(None)
            self._moved_boundary = False
        if self._owned:
            self._owned = False
            try:
                self._engine.destroy()
            except Exception as error:  # it takes all that optimizers keep to be of params (0.19.8)
                logging.getLogger("truestep").warning("DeepSpeed could not take all of its engine down: %s", error)
            for hook in (self._engine.module_forward_pre_hook, self._engine.module_forward_post_hook):
                hook.remove()

    def own(self, undo: Undo) -> None:
        """Call `undo` when the session closes."""
        self._undo.append(undo)


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside what ``engine.optimizer`` is."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


# -- wrapping


def wrap(
    backend: str, model: Any, make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any], settings: Settings
) -> ZeroSession:
    """Build the optimizer on the plain model's trainable params, then the engine. Collective: every rank.

    Raises:
        UnsupportedError: If there are several models or optimizers, params that an engine cannot hold, or no process group.
    """
    module = _only(slots.labelled_items(model), backend, "models")
    linear = nn.functional.linear
    if settings.wrap is not None:
        left = zero_engine.join(module)
        session = ZeroSession(backend, _known(settings.wrap(module, backend)), owned=True)
    else:
        dtype, numel = zero_engine.dtype_of(module), sum(param.numel() for param in module.parameters())
        config = zero_engine.configuration(zero_engine.STAGES[backend], dtype, numel, settings)
        made = make_optimizer(slots.trainable(slots.named_params(module)))
        optimizer = _only(slots.labelled_items(made), backend, "optimizers")
        left = zero_engine.join(module)
        session = ZeroSession(backend, zero_engine.engine(module, optimizer, config), owned=True, configured=True)
    session.own(left)
    session.own(lambda: _restore(linear))
    return session


def _restore(linear: Callable[..., Any]) -> None:
    if _linear_is_replaced():
        nn.functional.linear = linear


def _linear_is_replaced() -> bool:
    return getattr(nn.functional.linear, "__module__", "").startswith("deepspeed")


def _only(items: list[tuple[str | None, Any]], backend: str, what: str) -> Any:
    if len(items) != 1:
        raise UnsupportedError(
            f"backend {backend!r} takes one model and one optimizer, found {len(items)} {what}: a DeepSpeed engine holds one of "
            "each. Use single, ddp or fsdp2 for several."
        )
    return items[0][1]


# -- attaching


def recognises(model: Any, optimizer: Any) -> bool:
    """Tell whether this is a DeepSpeed engine, or an optimizer out of one."""
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    engines = [item for _, item in slots.labelled_items(model) if _is_engine(item)]
    return bool(engines) or any(isinstance(item, DeepSpeedOptimizer) for _, item in slots.labelled_items(optimizer))


def attach(model: Any, optimizer: Any = None) -> ZeroSession:
    """Return a session over the user's engine; nothing is changed before something is hooked or switched.

    Raises:
        UnsupportedError: If it is not one engine, or one without an optimizer.
    """
    items = slots.labelled_items(model)
    engine = _known(items[0][1] if len(items) == 1 else items)
    return ZeroSession(f"zero{engine.zero_optimization_stage()}", engine, optimizer)


def _is_engine(thing: Any) -> bool:
    from deepspeed.runtime.engine import DeepSpeedEngine

    return isinstance(thing, DeepSpeedEngine)


def _known(engine: Any) -> Any:
    if not _is_engine(engine):
        found = f"{len(engine)} models" if isinstance(engine, list) else type(engine).__name__
        raise UnsupportedError(f"expected one DeepSpeed engine, found {found}. Pass the engine that initialize returned.")
    if not hasattr(engine.optimizer, "param_groups"):
        raise UnsupportedError("this DeepSpeed engine has no optimizer. Pass one to deepspeed.initialize.")
    zero_layout.flats(engine.optimizer)
    return engine
