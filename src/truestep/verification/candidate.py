"""One rank of the loop that is verified: wrap, train, and send a record of every step to the reference."""

from __future__ import annotations

import copy
import inspect as signatures
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from truestep.accumulate.accumulator import Accumulator
from truestep.backends import base, slots
from truestep.backends.base import Session, Settings
from truestep.state import ranks
from truestep.state.generators import restore_rng, rng_states
from truestep.verification import link, made, planted, worker
from truestep.verification.cell import CellPlan, seed_everything
from truestep.verification.loop import Loop, accumulator, measured_reduction
from truestep.verification.recipe import Recipe, load
from truestep.verification.record import Recorder
from truestep.words.errors import VerifyError


def run(plan: CellPlan, where: link.Address) -> None:
    """Run this rank's part of a cell. Collective: every rank of the crew.

    Ends early if the reference hangs up: what became of it is the launcher's to tell.
    """
    connection = link.connect(where)
    try:
        with ExitStack() as clean_up:
            _train(plan, connection, clean_up)
    except link.HungUp:
        return
    finally:
        connection.close()


def _train(plan: CellPlan, connection: Connection, clean_up: ExitStack) -> None:
    recipe = load(plan.recipe)
    clean_up.enter_context(recipe.importable())
    rank, count = (0, 1) if plan.backend == "single" else (ranks.here(), ranks.count())
    faults = planted.chosen(plan.faults, plan.backend, plan.micro_batches, recipe.train_step is None, count)
    seed_everything(plan.seed)
    model = made.model_of(recipe)
    prints = made.prints_of(model)
    made.need_one_model(ranks.gather(prints) if count > 1 else [prints])
    batches = _Batches(recipe, rank, count, plan.micro_batches)
    settings = _settings(plan, recipe, model, batches.window(1), faults)
    reduction = recipe.reduction or measured_reduction(recipe, model, batches.window(1)[0])
    session = base.wrap(plan.backend, model, made.optimizer_maker(recipe, plan.optimizer), settings)
    clean_up.callback(session.close)
    _need_keys(plan, faults, session)
    scheduler = recipe.scheduler(_schedulable(session)) if recipe.scheduler else None
    seed_everything(plan.seed + 1 + rank)
    acc = None
    if recipe.train_step is None:
        made.need_no_closure(session.optimizers)
        acc = accumulator(session, recipe, reduction, plan.micro_batches, scheduler)
    planted.act("plant", faults, session, count, plan.micro_batches)
    recorder = Recorder(session, hyper_parameters(session))
    clean_up.callback(recorder.close)
    planted.act("tamper", faults, session, count, plan.micro_batches)
    if acc is not None:
        run_step = _own_step(recipe, recorder, session, acc)
    else:
        run_step = _their_step(recipe, recorder, session, scheduler, plan.device, clean_up)
    link.send(connection, {"rank": rank, "warnings": session.warnings(), "settings": _about(session), "model": prints})
    for step in range(1, plan.steps + 1):
        window = batches.window(step)
        with recorder.step(step, rank, copy.deepcopy(window)) as record:
            record.loss = run_step(window)
        link.send(connection, record)
        worker.report(("step", step))
        if step == planted.DROP_AFTER_STEP:
            planted.act("between", faults, session, count, plan.micro_batches)


def _settings(plan: CellPlan, recipe: Recipe, model: Any, window: list[Any], faults: list[planted.Fault]) -> Settings:
    settings = Settings(
        micro_batches=plan.micro_batches,
        max_norm=recipe.max_norm,
        unused=unused_params(recipe, model, window),
        wrap=recipe.wrap,
        extra=dict(recipe.deepspeed_config or {}),
    )
    for fault in faults:
        settings = fault.settings(settings) if fault.settings else settings
    return settings


def _schedulable(session: Session) -> Any:
    """Return what a schedule can be built on: what the user holds, or where that is no torch optimizer, the one that steps."""
    held = [item for _, item in slots.labelled_items(session.optimizer)]
    if all(isinstance(item, torch.optim.Optimizer) for item in held):
        return session.optimizer
    return slots.like(session.optimizer, session.optimizers)


def _about(session: Session) -> dict[str, Any]:
    return {"optimizer": [type(optimizer).__name__ for optimizer in session.optimizers]}


def _need_keys(plan: CellPlan, faults: list[planted.Fault], session: Session) -> None:
    for name, fault in zip(plan.faults, faults, strict=True):
        keys = {key for optimizer in session.optimizers for state in optimizer.state.values() for key in state}
        if fault.needs_key and fault.needs_key not in keys:
            raise VerifyError(
                f"fault {name!r} needs an optimizer with the state {fault.needs_key!r}, and "
                f"{type(session.optimizers[0]).__name__} has {', '.join(sorted(map(str, keys))) or 'none yet'}. "
                "Give --optimizer adagrad."
            )


class _Batches:
    """This rank's micro-batches, a window at a time."""

    def __init__(self, recipe: Recipe, rank: int, count: int, micro_batches: int) -> None:
        batches = recipe.batches(rank, count)
        if not isinstance(batches, Iterable):
            found = type(batches).__name__
            raise VerifyError(f"recipe {recipe.name!r}: expected batches(dp_rank, dp_size) to return an iterable, found {found}.")
        self._iterator: Iterator[Any] = iter(batches)
        self._rank = rank
        self._micro_batches = micro_batches
        self._windows: dict[int, list[Any]] = {}

    def window(self, step: int) -> list[Any]:
        """Return the micro-batches of a step; the first may be asked for ahead."""
        if step not in self._windows:
            self._windows = {step: [self._next(step) for _ in range(self._micro_batches)]}
        return self._windows[step]

    def _next(self, step: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise VerifyError(
                f"the recipe's batches ended in step {step} on rank {self._rank}: expected {self._micro_batches} a step on every "
                "rank. Give fewer --steps, or yield more batches."
            ) from None


def unused_params(recipe: Recipe, model: Any, window: list[Any]) -> tuple[str, ...]:
    """Return the params that get no gradient in some micro-batch of a window: tried on the model before it is wrapped.

    Leaves RNG, buffers and gradients as they were.
    """
    params = slots.trainable(slots.named_params(model))
    modules = [module for _, module in slots.labelled_items(model)]
    states = rng_states()
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    missing: set[str] = set()
    for batch in copy.deepcopy(window):
        loss = made.loss_of(recipe, model, batch)
        gradients = torch.autograd.grad(loss, [param for _, param in params], allow_unused=True)
        missing |= {name for (name, _), gradient in zip(params, gradients, strict=True) if gradient is None}
    with torch.no_grad():
        for buffer, old in buffers:
            buffer.copy_(old)
    restore_rng(states)
    return tuple(name for name, _ in params if name in missing)


def hyper_parameters(session: Session) -> frozenset[str]:
    """Return the keys of param groups that people change between steps: the class's own hyper-parameters."""
    return frozenset(str(key) for optimizer in session.optimizers for key in optimizer.defaults) | {"initial_lr"}


def _own_step(recipe: Recipe, recorder: Recorder, session: Session, acc: Accumulator) -> Callable[[list[Any]], float | None]:
    loop = Loop(session, acc, recorder.loss(recipe.loss), recipe.num_items)

    def step(window: list[Any]) -> None:
        loop.run(window)

    return step


def _their_step(
    recipe: Recipe, recorder: Recorder, session: Session, scheduler: Any, device: str, clean_up: ExitStack
) -> Callable[[list[Any]], float | None]:
    clean_up.enter_context(_patched_loss(recipe, recorder))
    train_step = recipe.train_step
    # A scaler that is switched off hands losses and steps on as they are: verify runs no fp16 that would need one.
    offered = {"scheduler": scheduler, "scaler": torch.amp.GradScaler(device, enabled=False), **session.extras}
    wanted = list(signatures.signature(train_step).parameters)[3:] if train_step else []
    unknown = [name for name in wanted if name not in offered]
    if unknown:
        raise VerifyError(
            f"train_step asks for {', '.join(unknown)}, and {session.backend} has only {', '.join(offered)} to give. "
            "Leave it out, or choose a backend that has it."
        )

    def step(window: list[Any]) -> float | None:
        result = train_step(session.model, session.optimizer, window, **{name: offered[name] for name in wanted})  # type: ignore[misc]
        return None if result is None else float(torch.as_tensor(result).detach().float().mean())

    return step


@contextmanager
def _patched_loss(recipe: Recipe, recorder: Recorder) -> Iterator[None]:
    """Watch the recipe's `loss` wherever its `train_step` finds it: among globals, in a closure, or on the recipe object."""
    loss, watched = recipe.loss, recorder.loss(recipe.loss)
    functions = [getattr(function, "__func__", function) for function in (recipe.train_step, loss)]
    scopes = {id(scope): scope for function in functions if (scope := getattr(function, "__globals__", None)) is not None}
    names = [(scope, name) for scope in scopes.values() for name, value in list(scope.items()) if value is loss]
    cells = [cell for cell in getattr(functions[0], "__closure__", None) or () if cell.cell_contents is loss]
    owner = getattr(loss, "__self__", None)
    try:
        for scope, name in names:
            scope[name] = watched
        for cell in cells:
            cell.cell_contents = watched
        if owner is not None:
            setattr(owner, loss.__name__, watched)
        yield
    finally:
        for scope, name in names:
            scope[name] = loss
        for cell in cells:
            cell.cell_contents = loss
        if owner is not None:
            delattr(owner, loss.__name__)
