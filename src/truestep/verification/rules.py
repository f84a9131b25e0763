"""Which judge an optimizer's update needs: the textbook's word where it has the rule, else the probe's.

The textbook judges what is not bitwise, within the operand bound of the optimizer's own rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from truestep.optimizers import textbook
from truestep.optimizers.probe import probe
from truestep.proof.bounds import Expected, worst
from truestep.proof.update import Judgement
from truestep.state.view import SlotId
from truestep.words.errors import TrueStepError
from truestep.words.scope import Scope


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the textbook has an element-wise rule for this optimizer: then its operand bound judges."""
    rule = textbook.rule_of(optimizer)
    return rule is not None and rule.scope is Scope.ELEMENT


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether what becomes of an element depends on that element alone, and on no random number.

    The textbook knows; of other classes the probe is asked, with the settings of each group. It takes a second the first time.
    """
    if textbook.rule_of(optimizer) is not None:
        return has_rule(optimizer)
    return all(_probed_element_wise(type(optimizer), group) for group in optimizer.param_groups)


def _probed_element_wise(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    try:
        takes = inspect.signature(cls).parameters
        found = probe(cls, **{name: value for name, value in group.items() if name in takes and name != "params"})
    except (TrueStepError, ValueError, TypeError):  # it has no signature, or does not take what it keeps
        return False
    return found.checked and found.scope == Scope.ELEMENT.value and not found.draws


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
