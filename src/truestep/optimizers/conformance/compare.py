"""Comparing two benches that should have ended alike: bit for bit, or within what rounding does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from truestep.optimizers.conformance.bench import Slots
from truestep.optimizers.conformance.problem import Failed, Problem
from truestep.proof.update import Judgement, judge, sensitivity


def demand_same(
    found: Slots,
    expected: Slots,
    what: str,
    *,
    again: Callable[[], Slots] | None = None,
    but: Collection[str] = (),
    fix: str = "",
    step: int | None = None,
) -> str:
    """Demand that two sets of slots are one; return in words how close they are.

    Args:
        found: What the variant left.
        expected: What it should be.
        what: In words what that is, for the finding.
        again: Does the expected run anew; then differences that its rounding can make are allowed, else none are.
        but: Keys that are not compared.
        fix: For the finding.
        step: For the finding.

    Raises:
        Failed: With a problem for each slot that differs.
    """
    found = {slot: value for slot, value in found.items() if slot[1] not in but}
    expected = {slot: value for slot, value in expected.items() if slot[1] not in but}
    judged = judge(found, expected)
    if again is not None and any(one.verdict == "differs" for one in judged):
        moves = sensitivity(lambda: {slot: value for slot, value in again().items() if slot[1] not in but}, unmoved=expected)
        judged = judge(found, expected, moves=moves)
    if apart := [one for one in judged if one.verdict == "differs"]:
        raise Failed(*(problem_of(one, found, expected, what, fix, step) for one in apart))
    worst = max((one.ratio for one in judged), default=0.0)
    return f"{len(judged)} slots bitwise" if not worst else f"{len(judged)} slots, worst {worst:.2g} of what rounding does"


def problem_of(judged: Judgement, found: Slots, expected: Slots, what: str, fix: str, step: int | None) -> Problem:
    """Return the problem of one slot that differs."""
    name, key = judged.slot
    told = judged.why if judged.why and judged.why != "a counter" else _values(found, expected, judged)
    param, key_told = (None, f"{name}/{key}") if name.startswith("@") else (name, key)
    return Problem(what, told, param, key_told, step, fix)


def _values(found: Slots, expected: Slots, judged: Judgement) -> str:
    mine, theirs = found[judged.slot], expected[judged.slot]
    if _one(mine) and _one(theirs):
        return f"{_told(mine)}, where {_told(theirs)} should be"
    return f"values {judged.distance:.2g} away (2-norm)"


def _one(value: Any) -> bool:
    return not hasattr(value, "numel") or value.numel() == 1


def _told(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.9g}" if isinstance(number, float) else repr(number)
