"""The phase `clip`: the norm is that of the whole reduced gradient, one factor acts on all of it, after the last backward.

A loop may clip several times. Of each call it is known which gradients it was given, as they were before: what one call leaves is
what the next one finds, and what the last one leaves enters the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truestep.backends.base import Contract
from truestep.proof import bounds
from truestep.verification.record import Clip, StepRecord
from truestep.verification.sheet import Sheet
from truestep.verification.whole import whole_gradients
from truestep.words.finding import Finding, listed

Wholes = Mapping[str, list[tuple[tuple[int, ...], Tensor]]]  # name -> [(ranks, gradient)], several where replicas differ
ONCE = "Clip once, by the global norm of all params, after the last backward and right before the step."


@dataclass(frozen=True, eq=False)
class Clipping:
    """One clipping on all ranks.

    Attributes:
        max_norm: Its limit.
        norms: By rank: the norm that it returned.
        unclipped: What it was given; None where an engine clips inside its step, on all of it.
        micro_batches: How many were over on each rank; None likewise.
    """

    max_norm: float
    norms: tuple[float, ...]
    unclipped: Wholes | None
    micro_batches: tuple[int, ...] | None

    @property
    def factor(self) -> float:
        """What it multiplies each gradient by."""
        return bounds.clip_factor(self.max_norm, self.norms[0])

    def covers(self, name: str) -> bool:
        """Tell whether it acts on this param's gradient."""
        return self.unclipped is None or name in self.unclipped


def clippings(records: Sequence[StepRecord]) -> list[Clipping]:
    """Return the clippings before the step, in order; of ranks that clipped more often than others only the common ones."""
    made = [_joined(clips) for clips in zip(*(record.clips for record in records), strict=False)]
    return [clipping for clipping in made if clipping.unclipped is None or clipping.unclipped]


def _joined(clips: Sequence[Clip]) -> Clipping:
    norms = tuple(float(clip.norm) for clip in clips)
    if clips[0].unclipped is None:
        return Clipping(clips[0].max_norm, norms, None, None)
    names = dict.fromkeys(name for clip in clips for name in clip.unclipped or ())
    unclipped = {name: whole_gradients([(clip.unclipped or {}).get(name) for clip in clips], name) for name in names}
    return Clipping(clips[0].max_norm, norms, unclipped, tuple(clip.micro_batches for clip in clips))


def judge_time(sheet: Sheet, records: Sequence[StepRecord], made: Sequence[Clipping]) -> None:
    """Judge whether every rank clipped, and after the window's last backward: what comes later is not clipped."""
    counts = [len(record.clips) for record in records]
    if len(set(counts)) > 1:
        sheet.add(_on_some_ranks(counts), "clip")
    for clipping in made:
        for rank, (over, record) in enumerate(zip(clipping.micro_batches or (), records, strict=False)):
            if over < record.micro_batches_at_step:
                sheet.add(_early(rank, over, record.micro_batches_at_step), "clip")
                return


def judge_clip(
    sheet: Sheet, made: Sequence[Clipping], entering: Wholes, reduced: Wholes, max_norm: float | None, contract: Contract
) -> None:
    """Judge each clipping, and that together they are what the recipe declares.

    Args:
        sheet: What is found.
        made: The clippings, in order.
        entering: What entered the step.
        reduced: What the ranks reduced, where it is not known from the clippings: an engine's is already clipped.
        max_norm: The global norm that the recipe declares, if it does.
        contract: How the ranks reduce.
    """
    if max_norm is not None:
        _judge_declared(sheet, made, entering, max_norm)
    for place, clipping in enumerate(made):
        given = clipping.unclipped or {name: _unclipped(whole, clipping.factor) for name, whole in reduced.items()}
        _judge_norm(sheet, clipping, given, contract)
        for name in clipping.unclipped or ():
            later = (other.unclipped for other in made[place + 1 :] if other.unclipped and name in other.unclipped)
            _judge_factor(sheet, clipping, name, next(later, entering))


def _unclipped(whole: list[tuple[tuple[int, ...], Tensor]], factor: float) -> list[tuple[tuple[int, ...], Tensor]]:
    return [(ranks, gradient.double() / (factor or 1.0)) for ranks, gradient in whole]


def _judge_declared(sheet: Sheet, made: Sequence[Clipping], entering: Wholes, max_norm: float) -> None:
    present = [name for name, whole in entering.items() if whole]
    if bare := [name for name in present if not any(clipping.covers(name) for clipping in made)]:
        if not made:
            _judge_unclipped(sheet, entering, max_norm)
        elif _norm(entering[name][0][1] for name in bare) > 0:
            sheet.add(_not_covered(bare), "clip")
    elif partial := [clipping for clipping in made if not all(map(clipping.covers, present))]:
        sheet.add(_by_parts(len(partial)), "clip")
    elif others := [clipping.max_norm for clipping in made if clipping.max_norm != max_norm]:
        sheet.add(_another_limit(others[0], max_norm, len(made)), "clip")


def _judge_unclipped(sheet: Sheet, entering: Wholes, max_norm: float) -> None:
    gradients = [whole[0][1] for whole in entering.values() if whole]
    dtype = max((gradient.dtype for gradient in gradients), key=bounds.unit_roundoff, default=torch.float32)
    norm = _norm(gradients)
    # A clip that the engine made but did not tell of leaves the norm at its limit, but for rounding.
    if norm > max_norm * (1 + bounds.gamma(2 * bounds.CLIP_ROUNDINGS, bounds.unit_roundoff(dtype))):
        sheet.add(_not_clipped(norm, max_norm), "clip")


def _norm(gradients: Iterable[Tensor]) -> float:
    return float(bounds.norm_bound(gradients, dtype=torch.float64).value)


def _judge_norm(sheet: Sheet, clipping: Clipping, given: Wholes, contract: Contract) -> None:
    gradients = [whole[0][1] for whole in given.values() if whole]
    extra = bounds.CLIP_ROUNDINGS if clipping.unclipped is None and clipping.factor != 1.0 else 0
    # Norms of 16-bit gradients add up in float32, and are rounded to 16 bits once a tensor, a rank, and in the end.
    expected = bounds.norm_bound(gradients, dtype=torch.float32, ranks=len(clipping.norms), n_extra=extra)
    stages = 3 if contract.reduce_dtype.itemsize < 4 else 0
    coarse = bounds.gamma(stages, bounds.unit_roundoff(contract.reduce_dtype)) * (expected.value + expected.bound)
    allowed = bounds.Expected(expected.value, expected.bound + coarse)
    told = [bounds.worst(torch.tensor(norm, dtype=torch.float64), allowed) for norm in clipping.norms]
    worst = max(told, key=lambda found: found.ratio)
    if worst.ratio <= 1:
        sheet.bounded("clip", worst.ratio)
    else:
        sheet.add(_wrong_norm(worst, tuple(rank for rank, norm in enumerate(clipping.norms) if norm == worst.found)), "clip")


def _judge_factor(sheet: Sheet, clipping: Clipping, name: str, later: Wholes) -> None:
    before, after = (clipping.unclipped or {})[name], later.get(name)
    if not before or not after:
        return
    found = after[0][1]
    value = before[0][1].double() * clipping.factor
    roundoff = bounds.gamma(bounds.CLIP_ROUNDINGS, bounds.unit_roundoff(found.dtype))
    bound = value.abs() * roundoff + 2 * bounds.smallest_subnormal(found.dtype)
    worst = bounds.worst(found, bounds.Expected(value, bound))
    if worst.ratio <= 1:
        sheet.bounded("clip", worst.ratio)
    else:
        sheet.add(_wrong_factor(name, clipping.factor, worst), "clip")


# -- what is said


def _error(code: str, **about: object) -> Finding:
    return Finding(**{"code": f"gradient/{code}", "law": "gradient", "severity": "error", "key": "grad", **about})  # type: ignore[arg-type]


def _on_some_ranks(counts: Sequence[int]) -> Finding:
    most = max(counts)
    return _error(
        "clipped-on-some-ranks",
        expected=f"{most} clippings on every rank",
        found=f"{listed(counts)}, rank by rank",
        ranks=tuple(rank for rank, count in enumerate(counts) if count < most),
        cause="the ranks do not clip alike: a condition that depends on the rank or its data",
        fix=ONCE,
    )


def _early(rank: int, over: int, count: int) -> Finding:
    return _error(
        "clipped-early",
        expected="clipping after the window's last backward",
        found=f"it after {over} of {count} micro-batches",
        ranks=(rank,),
        cause="the gradients were clipped before the last backward, which then added to them",
        fix=ONCE,
    )


def _not_clipped(norm: float, max_norm: float) -> Finding:
    return _error(
        "not-clipped",
        expected=f"gradients clipped to a norm of {max_norm:g}",
        found=f"a norm of {norm:.6g} at the step's entry",
        cause="no clipping acted on what enters the step",
        fix="Clip before optimizer.step(), or set the engine's gradient_clipping.",
    )


def _not_covered(names: Sequence[str]) -> Finding:
    return _error(
        "clipped-in-part",
        param=names[0],
        expected="one clipping of all gradients",
        found=f"none of {listed(names)}",
        cause="clipping was given only some of the params",
        fix=ONCE,
    )


def _by_parts(count: int) -> Finding:
    return _error(
        "clipped-by-parts",
        expected="one clipping by the norm of all gradients together",
        found=f"{count} clippings, each of some params by the norm of these alone",
        cause="the params were clipped in parts, so that each part has a factor of its own",
        fix=ONCE,
    )


def _another_limit(limit: float, max_norm: float, count: int) -> Finding:
    return _error(
        "clip-limit",
        expected=f"gradients clipped at {max_norm:g}, the recipe's max_norm",
        found=f"a clipping at {limit:g}" + (f", one of {count} in this step" if count > 1 else ""),
        cause="clipped at another norm than the recipe declares" if count == 1 else "clipped more than once, at several norms",
        fix="Clip once, at the norm that is meant; an engine by its own setting.",
    )


def _wrong_norm(worst: bounds.Worst, ranks: tuple[int, ...]) -> Finding:
    return _error(
        "clip-norm",
        expected=f"a global norm of {worst.expected:.8g} over all shards",
        found=f"{worst.found:.8g} returned",
        ranks=ranks,
        cause="the norm that clipping used is not that of the whole reduced gradient (a local or partial norm)",
        fix="Clip by the global norm: torch's clip_grad_norm_ on the wrapped model's params, or the engine's own setting.",
    )


def _wrong_factor(name: str, factor: float, worst: bounds.Worst) -> Finding:
    return _error(
        "clip-factor",
        param=name,
        expected=f"the reduced gradient times {factor:.6g}, one factor for all",
        found=f"{worst.found:.8g} where {worst.expected:.8g} should be",
        cause="the gradients were changed after clipping, or clipping did not act on them",
        fix=ONCE,
    )
