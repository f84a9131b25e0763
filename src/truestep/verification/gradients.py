"""The phases `reduce` and `clip`: the gradient that enters the step is the weighted sum of this window's local ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truestep.backends.base import Contract, Piece
from truestep.proof import bounds, causes
from truestep.proof.fit import fit
from truestep.verification.record import Clip, StepRecord
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
        previous: The local gradients of the window before.
    """

    local: Local
    coefficients: Sequence[Sequence[float]]
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
        clipped: Names whose `found` is already clipped, by the factor given here.
    """

    found: Mapping[str, list[tuple[tuple[int, ...], Tensor]]]
    entering: Mapping[str, list[tuple[tuple[int, ...], Tensor]]]
    clipped: Mapping[str, float]


def reduced(records: Sequence[StepRecord]) -> Reduced:
    """Return the reduced gradient of a step from all ranks' records."""
    names = list(dict.fromkeys(name for record in records for name in record.entering))
    entering = {name: whole_gradients([record.entering.get(name) for record in records], name) for name in names}
    found = dict(entering)
    clipped: dict[str, float] = {}
    for place, clip in enumerate(records[0].clips):
        for name in names:
            if clip.unclipped is None:
                clipped[name] = clipped.get(name, 1.0) * bounds.clip_factor(clip.max_norm, float(clip.norm))
            elif name in clip.unclipped or any(name in (_clip(record, place).unclipped or {}) for record in records):
                pieces: list[Piece | None] = [(_clip(record, place).unclipped or {}).get(name) for record in records]
                first_seen = not any(name in (earlier.unclipped or {}) for earlier in records[0].clips[:place])
                found[name] = whole_gradients(pieces, name) if first_seen else found[name]
    return Reduced(found, entering, clipped)


def _clip(record: StepRecord, place: int) -> Clip:
    return record.clips[place] if place < len(record.clips) else Clip(math.inf, torch.tensor(0.0), None)


def judge_reduction(sheet: Sheet, window: Window, seen: Reduced, contract: Contract, shapes: Mapping[str, torch.Size]) -> None:
    """Judge every param's reduced gradient against the sum of the local ones; name the cause where it fails."""
    failed: list[Failed] = []
    for name in shapes:
        if name in seen.entering:
            failed += _judge(sheet, name, window, seen, contract, shapes[name])
    if not failed:
        return
    told = _cause(failed, window)
    for name, ranks, _, worst in failed[:SHOWN_AT_MOST]:
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
    local, factor = window.of(name, shape), seen.clipped.get(name, 1.0)
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


def _cause(failed: Sequence[Failed], window: Window) -> causes.Cause | None:
    first_ranks = failed[0][1]
    rows = [row for row in failed if row[1] == first_ranks]
    names = [name for name, *_ in rows]

    def columns(local: Local) -> list[list[list[Tensor | None]]]:
        return [[[micro_batch.get(name) for name in names] for micro_batch in row] for row in local]

    coefficients = fit([gradient for *_, gradient, _ in rows], columns(window.local), previous=columns(window.previous) or None)
    return causes.cause(coefficients, window.coefficients, first_ranks[0] if first_ranks else 0)


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


def judge_clip(sheet: Sheet, records: Sequence[StepRecord], seen: Reduced, max_norm: float | None, contract: Contract) -> None:
    """Judge clipping: the norm, recomputed from the reduced gradient, and one factor for all."""
    clips = records[0].clips
    if not clips:
        _judge_unclipped(sheet, seen, max_norm)
        return
    for place, clip in enumerate(clips):
        _judge_norm(sheet, place, clip, records, seen, contract)
        if clip.unclipped is not None:
            _judge_factor(sheet, clip, [_clip(record, place) for record in records], seen)


def _judge_unclipped(sheet: Sheet, seen: Reduced, max_norm: float | None) -> None:
    if max_norm is None:
        return
    gradients = [whole[0][1] for whole in seen.entering.values() if whole]
    dtype = max((gradient.dtype for gradient in gradients), key=bounds.unit_roundoff, default=torch.float32)
    norm = float(bounds.norm_bound(gradients, dtype=torch.float64).value)
    # A clip that the engine made but did not tell of leaves the norm at its limit, but for rounding.
    if norm > max_norm * (1 + bounds.gamma(2 * bounds.CLIP_ROUNDINGS, bounds.unit_roundoff(dtype))):
        sheet.add(
            Finding(
                "gradient/not-clipped",
                "gradient",
                "error",
                key="grad",
                expected=f"gradients clipped to a norm of {max_norm:g}",
                found=f"a norm of {norm:.6g} at the step's entry",
                cause="no clipping happened between backward and step",
                fix="Clip before optimizer.step(), or set the engine's gradient_clipping.",
            ),
            "clip",
        )


def _judge_norm(sheet: Sheet, place: int, clip: Clip, records: Sequence[StepRecord], seen: Reduced, contract: Contract) -> None:
    names = [
        name for name in seen.found if clip.unclipped is None or any(name in (_clip(r, place).unclipped or {}) for r in records)
    ]
    factors = {name: seen.clipped.get(name, 1.0) or 1.0 for name in names}
    gradients = [seen.found[name][0][1].double() / factors[name] for name in names if seen.found[name]]
    extra = bounds.CLIP_ROUNDINGS if any(factor != 1.0 for factor in factors.values()) else 0
    # Norms of 16-bit gradients add up in float32, and are rounded to 16 bits once a tensor, a rank, and in the end.
    expected = bounds.norm_bound(gradients, dtype=torch.float32, ranks=len(records), n_extra=extra)
    stages = 3 if contract.reduce_dtype.itemsize < 4 else 0
    coarse = bounds.gamma(stages, bounds.unit_roundoff(contract.reduce_dtype)) * (expected.value + expected.bound)
    allowed = bounds.Expected(expected.value, expected.bound + coarse)
    norms = [float(_clip(record, place).norm) for record in records]
    worst = max((bounds.worst(torch.tensor(norm, dtype=torch.float64), allowed) for norm in norms), key=lambda found: found.ratio)
    if worst.ratio <= 1:
        sheet.bounded("clip", worst.ratio)
        return
    sheet.add(
        Finding(
            "gradient/clip-norm",
            "gradient",
            "error",
            key="grad",
            expected=f"a global norm of {worst.expected:.8g} over all shards",
            found=f"{worst.found:.8g} returned",
            cause="the norm that clipping used is not that of the whole reduced gradient (a local or partial norm)",
            fix="Clip by the global norm: torch's clip_grad_norm_ on the wrapped model's params, or the engine's own setting.",
            ranks=tuple(rank for rank, norm in enumerate(norms) if norm == worst.found),
        ),
        "clip",
    )


def _judge_factor(sheet: Sheet, clip: Clip, clips: Sequence[Clip], seen: Reduced) -> None:
    factor = bounds.clip_factor(clip.max_norm, float(clip.norm))
    for name in [name for name in seen.found if any(name in (rank_clip.unclipped or {}) for rank_clip in clips)]:
        if not seen.found[name] or not seen.entering.get(name):
            continue
        unclipped, entering = seen.found[name][0][1], seen.entering[name][0][1]
        u = bounds.unit_roundoff(entering.dtype)
        value = unclipped.double() * factor
        bound = value.abs() * bounds.gamma(bounds.CLIP_ROUNDINGS, u) + 2 * bounds.smallest_subnormal(entering.dtype)
        worst = bounds.worst(entering, bounds.Expected(value, bound))
        if worst.ratio <= 1:
            sheet.bounded("clip", worst.ratio)
            continue
        sheet.add(
            Finding(
                "gradient/clip-factor",
                "gradient",
                "error",
                param=name,
                key="grad",
                expected=f"the reduced gradient times {factor:.6g}, one factor for all",
                found=f"{worst.found:.8g} where {worst.expected:.8g} should be",
                cause="the gradients were changed after clipping, or clipping did not act on them",
                fix="Clip once, after the last backward and right before the step.",
            ),
            "clip",
        )
