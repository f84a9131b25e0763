"""Faults that verify plants into its own loop: each must be found, and its clean twin must be equal.

A fault is a row: where it may be planted, which law it breaks, and how: a change of the backend's settings before wrapping, an
act on the session before training, or an act between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from truestep.backends.base import BACKENDS, Session, Settings
from truestep.words.errors import UnsupportedError
from truestep.words.finding import Law

Act = Callable[[Session, int, int], None]  # session, ranks, micro-batches

ALL: Final = tuple(BACKENDS)
DROP_AFTER_STEP: Final = 2  # the first step at which every optimizer has state whose loss shows


@dataclass(frozen=True)
class Fault:
    """One fault that can be planted.

    Attributes:
        backends: Where it is a fault.
        law: The law that it breaks.
        about: One line for people.
        min_micro_batches: The least K at which it acts.
        needs_key: State key that the optimizer must have.
        own_loop: Whether it is planted in verify's loop, so that a recipe's `train_step` cannot have it.
        settings: Changes the backend's settings.
        plant: Acts on the session before the recorder attaches.
        tamper: Acts on the session after the recorder attached.
        between: Acts after step `DROP_AFTER_STEP`.
    """

    backends: tuple[str, ...]
    law: Law
    about: str
    min_micro_batches: int = 1
    needs_key: str | None = None
    own_loop: bool = False
    settings: Callable[[Settings], Settings] | None = None
    plant: Act | None = None
    tamper: Act | None = None
    between: Act | None = None


def _lose_all_but_last(session: Session, ranks: int, micro_batches: int) -> None:
    """Zero every local gradient but the last micro-batch's, after the recorder has seen it."""
    counts: dict[str, int] = {}

    def see(name: str, gradient: Tensor) -> Tensor | None:
        counts[name] = counts.get(name, 0) + 1
        return None if counts[name] % micro_batches == 0 else torch.zeros_like(gradient)

    session.hook_gradients(see)


def _step_each(session: Session, ranks: int, micro_batches: int) -> None:
    """Step, and clear, after every backward of the window, and not at its end."""
    held: Any = session
    micro_batch, backward, step, zero_grad = session.micro_batch, session.backward, session.step, session.zero_grad

    def stepping(loss: Tensor) -> None:
        backward(loss)
        step()
        zero_grad()

    held.micro_batch = lambda last, reduce=None: micro_batch(True, True)
    held.backward, held.step = stepping, lambda: True


def _desynchronise(session: Session, ranks: int, micro_batches: int) -> None:
    session.plant("desynchronise")


def _sum(session: Session, ranks: int, micro_batches: int) -> None:
    session.plant("sum")


def _feed_global_gradient(session: Session, ranks: int, micro_batches: int) -> None:
    """After each step, make Adagrad's `sum` what it were if it had been fed W times the gradient that moved the param."""

    def swell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param.grad is not None and param in optimizer.state:
                    optimizer.state[param]["sum"].add_(param.grad * param.grad * (ranks * ranks - 1))

    for optimizer in session.optimizers:
        optimizer.register_step_post_hook(swell)


def _drop_state(session: Session, ranks: int, micro_batches: int) -> None:
    """Zero every state tensor of every param, counters apart."""
    with torch.no_grad():
        for slot in session.view().values():
            if not slot.name.startswith("@") and slot.key not in ("param", "master") and slot.shape:
                for tensor in slot.local:
                    tensor.zero_()


FAULTS: Final[Mapping[str, Fault]] = {
    "step-every-micro-batch": Fault(
        ALL,
        "gradient",
        "the optimizer steps in every micro-batch of the window",
        min_micro_batches=2,
        own_loop=True,
        plant=_step_each,
    ),
    "last-micro-batch-only": Fault(
        ALL,
        "gradient",
        "all gradients of the window but the last micro-batch's are lost",
        min_micro_batches=2,
        tamper=_lose_all_but_last,
    ),
    "state-dropped": Fault(ALL, "drift", "optimizer state is zeroed between two steps", between=_drop_state),
    "sync-missing": Fault(
        ("ddp", "fsdp2", "zero0"), "gradient", "gradients are never reduced over the ranks", plant=_desynchronise
    ),
    "sum-with-a-mean-loss": Fault(
        ("ddp", "fsdp2"), "gradient", "gradients are summed over the ranks though the loss is a mean", plant=_sum
    ),
    "moment-from-global-gradient": Fault(
        tuple(name for name in ALL if name not in ("single", "accelerate-fsdp2")),
        "update",
        "Adagrad's sum is fed the gradient summed over ranks while the param moves by the mean",
        needs_key="sum",
        plant=_feed_global_gradient,
    ),
    "optimizer-before-wrap": Fault(
        ("fsdp2",),
        "params",
        "the optimizer is built before fully_shard",
        settings=lambda settings: replace(settings, optimizer_first=True),
    ),
}
# Legal to plant where it is known to be no fault: the verdict must be `equal` (accelerate-fsdp2 always does it).
HARMLESS: Final[Mapping[str, tuple[str, ...]]] = {
    "optimizer-before-wrap": (
        "ddp",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "accelerate-fsdp2",
        "accelerate-ddp",
        "accelerate-zero2",
    ),
}


def chosen(names: Sequence[str], backend: str, micro_batches: int, own_loop: bool, world_size: int) -> list[Fault]:
    """Return the faults of these names.

    Raises:
        UnsupportedError: If one is unknown, or cannot act in this cell.
    """
    for name in names:
        if name not in FAULTS:
            raise UnsupportedError(f"unknown fault {name!r}: expected one of {', '.join(FAULTS)}. Choose one of these.")
        fault = FAULTS[name]
        allowed = (*fault.backends, *HARMLESS.get(name, ()))
        if backend not in allowed:
            raise UnsupportedError(
                f"fault {name!r} cannot be planted on {backend!r}: it acts on {', '.join(allowed)}. Choose one of these."
            )
        if micro_batches < fault.min_micro_batches:
            raise UnsupportedError(
                f"fault {name!r} does not act with {micro_batches} micro-batch a step. "
                f"Give --micro-batches {fault.min_micro_batches} or more."
            )
        if fault.own_loop and not own_loop:
            raise UnsupportedError(
                f"fault {name!r} is planted in verify's own loop, and this recipe has a train_step. Write it there."
            )
    return [FAULTS[name] for name in names]


def act(when: str, faults: Sequence[Fault], session: Session, ranks: int, micro_batches: int) -> None:
    """Carry out what the faults do at one point: ``plant``, ``tamper`` or ``between``."""
    for fault in faults:
        if (acts := getattr(fault, when)) is not None:
            acts(session, ranks, micro_batches)
