"""The textbook as a judge of what is not bitwise: within the operand bound of the optimizer's own rule, where it has one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from truestep.optimizers import textbook
from truestep.proof.bounds import Expected, worst
from truestep.proof.update import Judgement
from truestep.state.view import SlotId
from truestep.words.scope import Scope


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the textbook has an element-wise rule for this optimizer: then its operand bound judges."""
    rule = textbook.rule_of(optimizer)
    return rule is not None and rule.scope is Scope.ELEMENT


def by_rule(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    name: str,
    old: Mapping[str, Any],
    gradient: Tensor,
    found: Mapping[SlotId, Any],
    rough: Collection[SlotId],
) -> list[Judgement]:
    """Judge the slots of one param that are not bitwise by one step of the textbook.

    Args:
        optimizer: Whose rule it is.
        group: The param group, with the settings that the step used.
        name: Of the param.
        old: Its state before the step, and the param itself under ``param``; whole.
        gradient: As it entered.
        found: What the step left.
        rough: The slots to judge; those of other params are passed by, as are those that the rule cannot tell of.
    """
    state = {key: value for key, value in old.items() if key != "param"}
    expected = textbook.expected(optimizer, group, torch.as_tensor(old["param"]), gradient, state)
    keys = [key for owner, key in rough if owner == name and key in expected and _tells(expected[key])]
    return [_judged((name, key), found.get((name, key)), expected[key]) for key in keys]


def _tells(expected: Expected) -> bool:
    return bool(expected.bound.isfinite().all())


def _judged(slot_id: SlotId, value: Any, expected: Expected) -> Judgement:
    if value is None:
        return Judgement(slot_id, "differs", float("inf"), why="absent, expected present")
    found = torch.as_tensor(value)
    found = torch.view_as_real(found) if found.is_complex() else found
    if found.shape != expected.value.shape:
        return Judgement(
            slot_id, "differs", float("inf"), why=f"shape {tuple(found.shape)}, expected {tuple(expected.value.shape)}"
        )
    ratio = worst(found, expected).ratio
    distance = float((found.double() - expected.value).norm())
    return Judgement(slot_id, "within" if ratio <= 1 else "differs", ratio, distance)
