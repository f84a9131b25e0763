"""The phase `reduce`: the gradient that enters the step is the weighted sum of this window's local ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truestep.backends.base import Contract
from truestep.proof import bounds, causes
from truestep.proof.fit import fit
from truestep.verification.clipping import Clipping, Wholes, clippings
from truestep.verification.record import StepRecord
from truestep.verification.sheet import Sheet
from truestep.verification.whole import whole_gradients
from truestep.words.finding import SHOWN_AT_MOST, Finding

# A param, the ranks that hold this gradient of it, the gradient (None: absent), and where it is furthest out.
Failed = tuple[str, tuple[int, ...], "Tensor | None", "bounds.Worst | None"]
Local = Sequence[Sequence[Mapping[str, Tensor]]]  # [rank][micro-batch] -> name -> gradient


@dataclass(frozen=True, eq=False)
class Window:
    """What a window's backward passes made, and what of it should enter the step.

    Attributes:
        local: ``[rank][micro-batch]``: the local gradients.
        coefficients: Laid out likewise: what each counts in the reduced gradient.
        weights: Likewise: what each loss counts in the window's.
        previous: The local gradients of the window before.
    """

    local: Local
    coefficients: Sequence[Sequence[float]]
    weights: Sequence[Sequence[float]]
    previous: Local = field(default_factory=list)

    @property
    def made(self) -> set[str]:
        """Names of the params for which some backward of the window made a gradient, on any rank."""
        return {name for row in self.local for micro_batch in row for name in micro_batch}

    def of(self, name: str, shape: torch.Size) -> list[list[Tensor]]:
        """Return one param's local gradients, zeros where there was none."""
        return [[micro_batch.get(name, torch.zeros(shape)) for micro_batch in row] for row in self.local]


@dataclass(frozen=True, eq=False)
class Reduced:
    """The gradient that the ranks reduced, whole.

    Attributes:
        found: ``name -> [(ranks, gradient)]``, several where replicas differ; before clipping where that could be seen.
        entering: What entered the innermost step.
        factor: By which `found` is already clipped, where an engine did it inside its step.
        clippings: In their order.
    """

    found: Wholes
    entering: Wholes
    factor: float
    clippings: Sequence[Clipping]


def reduced(records: Sequence[StepRecord]) -> Reduced:
    """Return the reduced gradient of a step from all ranks' records."""
    names = dict.fromkeys(name for record in records for name in record.entering)
    entering = {name: whole_gradients([record.entering.get(name) for record in records], name) for name in names}
    made = clippings(records)
    seen_first: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for clipping in reversed(made):
        seen_first.update(clipping.unclipped or {})
    found = {name: seen_first.get(name, whole) for name, whole in entering.items()}
    factor = math.prod(clipping.factor for clipping in made if clipping.unclipped is None)
    return Reduced(found, entering, factor, made)


def judge_reduction(sheet: Sheet, window: Window, seen: Reduced, contract: Contract, shapes: Mapping[str, torch.Size]) -> None:
    """Judge every param's reduced gradient against the sum of the local ones; name the cause where it fails."""
    failed: list[Failed] = []
    for name in shapes:
        if name in seen.entering:
            failed += _judge(sheet, name, window, seen, contract, shapes[name])
    if not failed:
        return
    for name, ranks, _, worst in failed[:SHOWN_AT_MOST]:
        told = _cause([row for row in failed if row[1] == ranks], window)
        sheet.add(_finding(name, ranks, worst, told, window, len({row[0] for row in failed})), "reduce")


def _judge(sheet: Sheet, name: str, window: Window, seen: Reduced, contract: Contract, shape: torch.Size) -> list[Failed]:
    made = name in window.made
    if not seen.found[name]:
        any_due = made and any(gradient.any() for row in window.of(name, shape) for gradient in row)
        return [(name, (), None, None)] if any_due else []
    if made:
        expected = _expected(sheet, name, window, seen, contract, shape)
        if expected is None:
            return []
    else:
        zeros = torch.zeros(shape, dtype=torch.float64)
        expected = bounds.Expected(zeros, zeros)
    failed: list[Failed] = []
    for ranks, gradient in seen.found[name]:
        worst = bounds.worst(gradient, expected)
        if worst.ratio <= 1:
            sheet.bounded("reduce", worst.ratio)
        else:
            failed.append((name, ranks, gradient, worst))
    return failed


def _expected(
    sheet: Sheet, name: str, window: Window, seen: Reduced, contract: Contract, shape: torch.Size
) -> bounds.Expected | None:
    local, factor = window.of(name, shape), seen.factor
    coefficients = [[factor * c for c in row] for row in window.coefficients]
    accumulate: torch.dtype | None = contract.accumulate_dtype
    micro_batches, ranks = max(map(len, local)), len(local)
    if bounds.says_nothing(ranks + 1, bounds.unit_roundoff(contract.reduce_dtype)):
        sheet.not_checked("reduce", f"{ranks} ranks reduce in {contract.reduce_dtype}: the bound of such a sum says nothing")
        return None
    if bounds.says_nothing(micro_batches + 1, bounds.unit_roundoff(contract.accumulate_dtype)):
        if any(len(set(row)) > 1 for row in coefficients):
            sheet.not_checked(
                "reduce", f"{micro_batches} unequally weighted micro-batches add up in {accumulate}: no bound says anything"
            )
            return None
        local = [[bounds.replayed(row, contract.accumulate_dtype)] for row in local]
        coefficients, accumulate = [row[:1] for row in coefficients], None
    return bounds.reduction_bound(
        local,
        coefficients,
        accumulate_dtype=accumulate,
        reduce_dtype=contract.reduce_dtype,
        n_extra=bounds.CLIP_ROUNDINGS if factor != 1.0 else 0,
    )


def _cause(rows: Sequence[Failed], window: Window) -> causes.Cause | None:
    """Return the cause that the gradients of the same ranks show together."""
    ranks, names = rows[0][1], [name for name, *_ in rows]

    def columns(local: Local) -> list[list[list[Tensor | None]]]:
        return [[[micro_batch.get(name) for name in names] for micro_batch in row] for row in local]

    coefficients = fit([gradient for *_, gradient, _ in rows], columns(window.local), previous=columns(window.previous) or None)
    return causes.cause(coefficients, window.coefficients, ranks[0] if ranks else 0, window.weights)


def _finding(
    name: str, ranks: tuple[int, ...], worst: bounds.Worst | None, told: causes.Cause | None, window: Window, params: int
) -> Finding:
    many = f" ({params} params in all)" if params > 1 else ""
    if worst is None:
        expected, found = "the reduced gradient of this window", "no gradient at all" + many
    else:
        at = f" at {worst.index}" if worst.index is not None else ""
        expected = f"{worst.expected:.8g}{at}, the sum of the window's local gradients"
        found = f"{worst.found:.8g}, {worst.ratio:.3g} times the bound of rounding away" + many
    slug = told.slug if told else "not-conserved"
    return Finding(
        f"gradient/{slug}",
        "gradient",
        "error",
        param=name,
        key="grad",
        expected=expected,
        found=found,
        ranks=ranks,
        cause=told.text if told else None,
        fix=told.fix if told else "",
    )
