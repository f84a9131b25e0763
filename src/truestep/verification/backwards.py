"""The phases `data`, `forward` and `backward`: each rank's loss and local gradients are bitwise those of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from truestep.backends.base import Contract
from truestep.state.digest import bitwise_equal
from truestep.verification.cell import CellPlan
from truestep.verification.clipping import Wholes
from truestep.verification.gradients import Local, Window
from truestep.verification.one_process import OneModel
from truestep.verification.record import MicroBatch, StepRecord
from truestep.verification.sheet import Sheet
from truestep.words.finding import Finding

Gradients = Mapping[str, Tensor]


def judge_data(sheet: Sheet, records: Sequence[StepRecord], own: Sequence[Any]) -> None:
    """Count the micro-batches that the recipe, asked again, yields bitwise the same; warn where all ranks were given the same.

    Args:
        sheet: What is found.
        records: Of all ranks.
        own: By rank: this process's own iterator over that rank's batches, moved on by a window.
    """
    for record, iterator in zip(records, own, strict=True):
        sheet.bitwise("data", sum(tensors_equal(batch, next(iterator, None)) for batch in record.batches))
    first, *others = (record.batches for record in records)
    if others and all(tensors_equal(first, batches) for batches in others):
        sheet.add(
            Finding(
                "gradient/same-on-all-ranks",
                "gradient",
                "warning",
                expected="micro-batches of its own on each rank",
                found="the same ones on all",
                fix="Split the data by rank: batches(dp_rank, dp_size) is given both.",
            ),
            "data",
        )


class BackwardJudge:
    """Runs every rank's micro-batches in one process and compares.

    Args:
        sheet: What is found.
        one: The model in one process, set to the candidate's params.
        plan: The cell.
    """

    def __init__(self, sheet: Sheet, one: OneModel, plan: CellPlan) -> None:
        self._sheet = sheet
        self._one = one
        self._plan = plan

    def window(self, records: Sequence[StepRecord], weights: Sequence[Sequence[float]], previous: Local) -> Window:
        """Judge a window's forward and backward passes; return its local gradients and what each counts in the reduced one."""
        local: list[list[Gradients]] = []
        coefficients: list[list[float]] = []
        for record, row in zip(records, weights, strict=True):
            ran = [micro_batch for micro_batch in record.micro_batches if micro_batch.backwards]
            if len(ran) > len(record.batches):
                self._sheet.not_checked(
                    "data",
                    f"{len(ran)} backward passes for {len(record.batches)} micro-batches: which is whose is not known",
                )
            reached = [*ran[: record.micro_batches_at_step], *[None] * len(record.batches)]
            pairs = [
                self._micro_batch(record, batch, micro_batch, weight)
                for batch, micro_batch, weight in zip(record.batches, reached, row, strict=False)
            ]
            local.append([gradients for gradients, _ in pairs])
            coefficients.append([coefficient for _, coefficient in pairs])
        return Window(local, coefficients, weights, previous)

    def _micro_batch(
        self, record: StepRecord, batch: Any, micro_batch: MicroBatch | None, weight: float
    ) -> tuple[Gradients, float]:
        if micro_batch is None:  # it never reached the step: judged by what it would have given
            return self._one.run(batch)[1], weight
        seen = micro_batch.factor if micro_batch.factors_seen == 1 and _usable(micro_batch.factor) else None
        loss, own = self._one.run(batch, micro_batch, seen)
        factor = seen
        if micro_batch.loss is None:
            factor = factor_between(micro_batch.root, loss, self._plan)
        else:
            self._forward(record, micro_batch.loss, loss)
            if micro_batch.factors_seen <= 1 and not _usable(micro_batch.factor):
                return own, weight  # nothing of it can be in the gradient: judged likewise
        if factor is None:
            self._sheet.not_checked(
                "backward", "the factor that reached the loss was not seen: train_step does not call the recipe's loss once"
            )
            root = micro_batch.root
            return micro_batch.gradients, weight * (float(loss) / float(root) if root is not None and float(root) else 1.0)
        if seen is None and float(factor) != 1.0:
            loss, own = self._one.run(batch, micro_batch, factor)
        if micro_batch.joint:
            self._sheet.not_checked(
                "backward", "one backward ran over the losses of several micro-batches: theirs cannot be told apart"
            )
            return own, weight / float(factor)
        self._backward(record, batch, micro_batch, factor, own)
        return micro_batch.gradients, weight / float(factor)

    def _forward(self, record: StepRecord, found: Tensor, expected: Tensor) -> None:
        if record.contract.operators_replaced:
            return
        if bitwise_equal(expected, found):
            self._sheet.bitwise("forward")
            return
        self._sheet.add(
            Finding(
                "ranks/forward-differs",
                "ranks",
                "error",
                key="param",
                expected=f"a loss of {float(expected):.9g}, from the params that the optimizer holds",
                found=f"{float(found):.9g}",
                ranks=(record.rank,),
                cause="the forward read other values than the params that the last step wrote, or was not the recipe's own",
                fix="Look for a copy that was gathered before the step (FSDP2 after a no-grad forward: call reshard()).",
            ),
            "forward",
        )

    def _backward(self, record: StepRecord, batch: Any, micro_batch: MicroBatch, factor: Tensor, own: Gradients) -> None:
        found = micro_batch.gradients
        apart = [name for name in self._one.trainable if not _alike(own.get(name), found.get(name))]
        self._sheet.bitwise("backward", len(self._one.trainable) - len(apart))
        if not apart:
            return
        name = apart[0]
        why = record.contract.operators_replaced
        if why is None:
            again = self._one.run(batch, micro_batch, factor)[1]
            unstable = any(not _alike(own.get(name), again.get(name)) for name in own)
            why = "one process run twice is not bitwise itself" if unstable else None
        away = _distance(own.get(name), found.get(name))
        if why:
            self._sheet.not_checked("backward", f"{why} (gradients up to {away:.2g} of their norm away)", param=name)
            return
        one, other = _told(own.get(name), away), _told(found.get(name), away)
        self._sheet.add(
            Finding(
                "gradient/backward-differs",
                "gradient",
                "error",
                param=name,
                key="grad",
                expected=f"{'a local gradient' if name in own else one} as in one process, bit for bit",
                found=other,
                ranks=(record.rank,),
                cause="the backward of this rank is not that of one process on the same micro-batch",
                fix="Compare what the wrapped model computes with the plain one on this batch.",
            ),
            "backward",
        )


def by_contract(window: Window, contract: Contract, found: Wholes, *, declared: bool) -> Window:
    """Return the window of a sum loss whose denominator is the user's own: the vendor's contract says what the gradients count.

    Args:
        window: With coefficients for losses that are sums over items, and divided by nobody.
        contract: How the ranks reduce.
        found: What they reduced, where the contract leaves open whether that is a sum or a mean.
        declared: Whether the recipe counts items: each then weighs the same, whatever the denominator.
    """
    share = _share(window, contract, found)
    counts = [count for row in window.coefficients for count in row]
    scale = share * len(counts) / math.fsum(counts) if declared and math.fsum(counts) else 0.0
    rows = [[count * scale if scale else share for count in row] for row in window.coefficients]
    return Window(window.local, rows, window.weights, window.previous)


def _share(window: Window, contract: Contract, found: Wholes) -> float:
    """Return what a rank's gradient counts in the reduced one."""
    ranks = len(window.local)
    if contract.reduction is not None:
        return 1.0 if contract.reduction == "sum" else 1.0 / ranks
    along = across = 0.0  # a user's hook decides: a sum or a mean, whichever is nearer
    for name, whole in found.items():
        for _, gradient in whole[:1]:
            local = [each.double() for row in window.of(name, gradient.shape) for each in row]
            summed = torch.stack(local).sum(0)
            along += float((summed * gradient.double()).sum())
            across += float(summed.square().sum())
    return min((1.0, 1.0 / ranks), key=lambda share: abs(along - share * across))


def factor_between(root: Tensor | None, loss: Tensor, plan: CellPlan) -> Tensor | None:
    """Return the factor between the recipe's loss and the tensor that backward was called on, where it is one that people use."""
    if root is None or root.shape != loss.shape:
        return None
    for count in dict.fromkeys((1, plan.micro_batches, plan.world_size, plan.micro_batches * plan.world_size)):
        if bitwise_equal(loss / count, root):
            return torch.ones_like(loss) / count
        if bitwise_equal(loss * count, root):
            return torch.ones_like(loss) * count
    return None


def tensors_equal(mine: Any, theirs: Any) -> bool:
    """Return whether two batches hold the same: tensors bit for bit, containers part by part."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return bitwise_equal(mine, theirs)
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(tensors_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(tensors_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if type(mine) is not type(theirs):
        return False
    if getattr(mine, "__dict__", None):
        return tensors_equal(vars(mine), vars(theirs))
    return bool(mine == theirs)


def _usable(factor: Tensor | None) -> bool:
    return factor is not None and bool(factor.isfinite()) and float(factor) != 0


def _alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return bitwise_equal(mine, theirs)


def _distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return math.inf
    size = float(mine.double().norm())
    return float((mine.double() - theirs.double()).norm()) / size if size else math.inf


def _told(gradient: Tensor | None, away: float) -> str:
    return "none" if gradient is None else f"one {away:.3g} of its norm away" if math.isfinite(away) else "one"
