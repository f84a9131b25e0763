"""What must hold before a window opens, and what is said where it does not; each on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from truestep.accumulate.exchange import Row, exchanged, row
from truestep.accumulate.phases import Event
from truestep.accumulate.replay import never_had_a_batch, not_replayable
from truestep.accumulate.weights import no_items
from truestep.backends.base import Session
from truestep.words.errors import UnsupportedError, WindowError
from truestep.words.finding import Finding, listed


def agree_on(session: Session, alone: bool, micro_batches: Any, max_norm: Any, reduction: Any, scaler: Any) -> None:
    """Check an accumulator's settings. Collective: every rank, unless `alone`.

    Raises:
        WindowError: On all ranks, if one of them cannot be, or K differs between the ranks.
        UnsupportedError: If an engine is given a scaler, or there is no optimizer.
    """
    if session.is_engine and scaler is not None:
        raise UnsupportedError("a DeepSpeed engine scales its loss itself. Leave scaler out, and set fp16 in its config.")
    if not session.optimizers:
        raise UnsupportedError("expected an optimizer over the model's params, found none. Pass it after the model.")
    findings = wrong_length(micro_batches)
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        findings.append(_setting("max_norm", "a number above 0, or None", repr(max_norm)))
    if reduction not in ("mean", "sum"):
        findings.append(_setting("reduction", "'mean' or 'sum'", repr(reduction)))
    mine = row(Event.OPEN, micro_batches=0 if findings else micro_batches)
    _check_length(exchanged(alone, mine, findings))


def adds_up_apart(grad_dtype: torch.dtype | None, own: torch.dtype, session: Session) -> bool:
    """Tell whether gradients are to be added up in another dtype than the backend does.

    Raises:
        UnsupportedError: If an engine would have to.
    """
    if grad_dtype is None or grad_dtype == own:
        return False
    if session.is_engine:
        raise UnsupportedError(
            f"grad_dtype={grad_dtype}: the engine adds gradients up itself, in {own}. "
            "Set data_types.grad_accum_dtype in the DeepSpeed config."
        )
    return True


def check(rows: Sequence[Row], length: int, modules: Sequence[nn.Module]) -> None:
    """Check what all ranks brought to open a window; every rank comes to the same.

    Raises:
        WindowError: Another K, counts on some ranks only, no items at all, or a rank that cannot replay a batch.
    """
    _check_length(rows)
    if len({each.counted for each in rows}) > 1:
        found = listed((rank for rank, each in enumerate(rows) if not each.counted), 8)
        raise WindowError("", [_setting("num_items", "num_items on every rank, or on none", f"none on rank {found}")])
    without = [rank for rank, each in enumerate(rows) if not each.ever]
    if without:
        raise WindowError("", [never_had_a_batch(without)])
    if any(each.drawn < length for each in rows) and (findings := not_replayable(modules)):
        raise WindowError("", findings)
    if rows[0].counted and not sum(each.items for each in rows):
        raise WindowError("", [no_items()])


def _check_length(rows: Sequence[Row]) -> None:
    lengths = [each.micro_batches for each in rows]
    if len(set(lengths)) > 1:
        found = listed((f"{length:g} on rank {rank}" for rank, length in enumerate(lengths)), 8)
        raise WindowError("", [_setting("micro_batches", "as many micro-batches a window on every rank", found)])


def wrong_length(micro_batches: Any) -> list[Finding]:
    """Return what is wrong with a window's length."""
    if isinstance(micro_batches, int) and not isinstance(micro_batches, bool) and micro_batches >= 1:
        return []
    return [_setting("micro_batches", "a whole number of micro-batches, 1 or more", repr(micro_batches))]


def _setting(name: str, expected: str, found: str) -> Finding:
    return Finding("window/settings", None, "error", expected=expected, found=found, fix=f"Change {name}.")


def not_finite(value: float, window: int) -> Finding:
    """Return what is said of a loss over items that is no finite number."""
    return Finding(
        "window/not-finite",
        None,
        "error",
        expected="a finite loss over the items of a window",
        found=f"{value} in window {window}, whose step is taken",
        fix="Go back to a checkpoint before it, and look at its batches; window.skip() drops a window before its step.",
        step=window,
    )
