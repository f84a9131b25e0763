"""`verify`: run cells, each a candidate on real ranks against one process, and report."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from truestep.verification import launch, link
from truestep.verification.cell import CellPlan
from truestep.verification.report import Cell, Event, Report
from truestep.words.errors import UnsupportedError, VerifyError

CANDIDATE = "truestep.verification.candidate:run"
REFERENCE = "truestep.verification.reference:serve"
VERSIONS = ("truestep", "torch", "deepspeed", "accelerate")
TIMEOUT_S = 120.0
DEFAULT_RANKS: Final = 2
BUILD_S: Final = 900.0  # for an op to be compiled

Hear = Callable[[int], None]  # a step was judged
Tell = Callable[[Event], None]


def verify(
    recipe: Any,
    *,
    backend: str | Sequence[str],
    world_size: int = DEFAULT_RANKS,
    micro_batches: int | Sequence[int] = 1,
    steps: int = 10,
    optimizer: str | Sequence[str] | None = None,
    device: str = "auto",
    faults: Sequence[str] = (),
    allow: Sequence[str] = (),
    timeout: float = TIMEOUT_S,
    progress: Tell | None = None,
) -> Report:
    """Prove the optimizer steps of a training loop equal to one process, or name the first thing that differs.

    Starts its own rank processes; under a launcher such as torchrun (WORLD_SIZE is set, or there is a process group) it uses the
    ranks it is given. Then: collective, every rank; all return the same or raise; `progress` is called on rank 0 only.

    Args:
        recipe: A built-in name, a file, ``MODULE:OBJECT``, or an importable object; see `truestep.verification.recipe`.
        backend: One backend or several: each combination with `micro_batches` and `optimizer` is a cell.
        world_size: Rank processes; `single` runs on one. Under a launcher leave it out, or give the number of its ranks.
        micro_batches: K, a step.
        steps: Optimizer steps to check, at least 1; from 3 on every optimizer's scale shows.
        optimizer: A torch.optim class in any case, ``MODULE:OBJECT``, or None for the recipe's own.
        device: ``cpu``, ``cuda`` or ``auto``.
        faults: Names of faults to plant.
        allow: ``CODE[:PARAM]`` globs of what may stay unchecked.
        timeout: Seconds without a sign of life from any process after which a run has hung.
        progress: Called with what happens.

    Returns:
        A report with one cell a combination; ``report.verdict`` is the worst of them.

    Raises:
        UnsupportedError: An unknown backend, optimizer or fault, or a vendor that is not installed.
        VerifyError: A bad recipe, or a run that could not be finished: a rank raised, died or hung.
    """
    from truestep.state import ranks

    _need_outermost()
    given = _given(timeout, world_size) if ranks.launched() else None
    with _together("plan the cells", timeout) if given else nullcontext():
        plans = planned(
            recipe,
            backends=_several(backend),
            world_size=given or world_size,
            micro_batches=_several(micro_batches),
            steps=steps,
            optimizers=_several(optimizer),
            device=device,
            faults=tuple(faults),
        )
        if given:
            _need_ranks(plans, given)
    tell = progress if progress and ranks.here() == 0 else lambda event: None
    cells = [_run(plan, place, len(plans), tuple(allow), timeout, tell, given is not None) for place, plan in enumerate(plans)]
    return Report(cells, versions())


def _need_outermost() -> None:
    from truestep.verification.importing import being_loaded

    if (path := being_loaded()) is not None:
        raise VerifyError(
            f"expected {path} to define a recipe, found that it calls truestep.verify when it is imported, as every rank process "
            "does. Put the call under: if __name__ == '__main__':"
        )


def _given(timeout: float, world_size: int) -> int:
    from truestep.verification import given

    return given.join(timeout, world_size, DEFAULT_RANKS)


def _together(what: str, timeout: float) -> AbstractContextManager[None]:
    """Make what one rank raises in the block an error on every rank."""
    from truestep.state import ranks

    return ranks.agreeing(what, timeout=timeout)


def _need_ranks(plans: Sequence[CellPlan], given: int) -> None:
    for plan in plans:
        if plan.world_size != given:
            raise UnsupportedError(
                f"backend {plan.backend!r} runs on {plan.world_size} rank, and the launcher gives {given}. "
                f"Start {plan.world_size}, or run it without a launcher."
            )


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def planned(
    recipe: Any,
    *,
    backends: Sequence[str],
    world_size: int,
    micro_batches: Sequence[int],
    steps: int,
    optimizers: Sequence[str | None],
    device: str,
    faults: tuple[str, ...],
) -> list[CellPlan]:
    """Return the cells of the product, every setting checked before anything runs."""
    from truestep.backends import base
    from truestep.verification import planted
    from truestep.verification.recipe import load

    loaded = load(recipe)
    _positive(world_size=world_size, steps=steps, micro_batches=min(micro_batches, default=0))
    for name in backends:
        base.row(name)
    for named in optimizers:
        loaded.optimizer_named(named)
    for name, count in itertools.product(backends, micro_batches):
        planted.chosen(faults, name, count, loaded.train_step is None, world_size)
    return [
        CellPlan(loaded, name, optimizer, 1 if name == "single" else world_size, count, steps, faults, _device(device))
        for name, optimizer, count in itertools.product(backends, optimizers, micro_batches)
    ]


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UnsupportedError(f"{name} must be at least 1, found {number}. Give --{name.replace('_', '-')} 1 or more.")


def _device(device: str) -> str:
    if device not in ("auto", "cpu"):
        raise UnsupportedError(f"device {device!r} cannot be verified on yet: expected auto or cpu. Give one of these.")
    return "cpu"


def _run(
    plan: CellPlan, place: int, count: int, allow: tuple[str, ...], timeout: float, tell: Tell, on_given_ranks: bool
) -> Cell:
    about: dict[str, Any] = {
        "cell": place,
        "cells": count,
        "backend": plan.backend,
        "optimizer": plan.optimizer or "",
        "world_size": plan.world_size,
        "micro_batches": plan.micro_batches,
        "steps": plan.steps,
    }
    prepare(plan.backend, lambda text: tell(Event("message", text=text, **about)), on_given_ranks)
    tell(Event("start", **about))
    began = time.monotonic()

    def hear(step: int) -> None:
        tell(Event("step", step=step, **about))

    told = _on_given_ranks(plan, timeout, hear) if on_given_ranks else _on_own_ranks(plan, timeout, hear)
    cell = judged(plan, told, allow, time.monotonic() - began)
    tell(Event("cell", result=cell, **about))
    return cell


def _on_given_ranks(plan: CellPlan, timeout: float, hear: Hear) -> dict[str, Any]:
    from truestep.verification import given

    return given.run(plan, timeout, hear)


def _on_own_ranks(plan: CellPlan, timeout: float, hear: Hear) -> dict[str, Any]:
    def heard(progress: launch.Progress) -> None:
        what, step = progress.said
        if what == "judged":
            hear(step)

    pool = launch.pool()
    where = link.address(pool.folder)
    results = pool.run(
        CANDIDATE,
        (plan, where),
        world_size=plan.world_size,
        reference_task=REFERENCE,
        reference_args=(plan, where),
        timeout=timeout,
        progress=heard,
        what=plan.title,
    )
    told: dict[str, Any] = results.reference
    return told


def judged(plan: CellPlan, told: dict[str, Any], allow: tuple[str, ...], seconds: float) -> Cell:
    """Return the cell that the reference's answer makes."""
    return Cell.judged(
        told["findings"],
        allow=allow,
        backend=plan.backend,
        optimizer=told["optimizer"],
        world_size=plan.world_size,
        micro_batches=plan.micro_batches,
        steps=plan.steps,
        loop=told["loop"],
        losses=told["losses"],
        reference_losses=told["reference_losses"],
        seconds=seconds,
        checks=told["checks"],
        faults=list(plan.faults),
        recipe=told["recipe"],
    )


def prepare(backend: str, say: Callable[[str], None], on_given_ranks: bool = False) -> None:
    """Build what a vendor compiles at first use, once, before ranks train."""
    if "zero" not in backend:
        return
    from truestep.backends import zero_ops
    from truestep.state import ranks

    with _together("build what the backend compiles", BUILD_S) if on_given_ranks else nullcontext():
        if ranks.here() == 0 or not on_given_ranks:
            zero_ops.prepare(say)


def versions() -> dict[str, str]:
    """Return the versions of what was run, where installed."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
