"""The reference: one process that runs every rank's micro-batches, steps on whole tensors, and judges the ranks' records.

At each step it is set to the candidate's params, buffers, RNG states and optimizer state: every difference is of this step. Once
a step has failed, later ones are no longer judged: they start from what is already wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from truestep.backends import slots
from truestep.backends.base import Identity
from truestep.proof.identity import identity_findings
from truestep.state.digest import bitwise_equal
from truestep.state.view import StateView
from truestep.verification import backwards, clipping, gradients, link, made, updates, whole, worker
from truestep.verification.cell import CellPlan, seed_everything
from truestep.verification.loop import measured_reduction, window_weights
from truestep.verification.one_process import FreeRun, OneModel
from truestep.verification.recipe import Recipe, load
from truestep.verification.record import StepRecord
from truestep.verification.sheet import Sheet
from truestep.words.finding import Finding, listed


def serve(plan: CellPlan, where: link.Address) -> dict[str, Any] | None:
    """Judge one cell: receive every rank's records, step by step; return findings, checks and losses.

    None if a rank hung up before its last step: what became of it is the launcher's to tell.
    """
    try:
        return _serve(plan, where)
    except (EOFError, ConnectionResetError):
        return None


def _serve(plan: CellPlan, where: link.Address) -> dict[str, Any]:
    with link.listen(where) as listener:
        connections = [listener.accept() for _ in range(plan.world_size)]
    by_rank = sorted(((link.receive(connection), connection) for connection in connections), key=lambda pair: pair[0]["rank"])
    recipe = load(plan.recipe)
    with recipe.importable():
        return _judged(plan, recipe, by_rank)


def _judged(plan: CellPlan, recipe: Recipe, by_rank: Sequence[tuple[dict[str, Any], Connection]]) -> dict[str, Any]:
    hello = by_rank[0][0]
    reference = Reference(plan, recipe)
    for finding in [*hello["warnings"], *made.differing_models(reference.prints, [each["model"] for each, _ in by_rank])]:
        reference.sheet.add(finding)
    for step in range(1, plan.steps + 1):
        reference.step(step, [link.receive(connection) for _, connection in by_rank])
        worker.report(("judged", step))
    return {
        "findings": reference.sheet.findings,
        "checks": reference.sheet.checks,
        "losses": reference.losses,
        "reference_losses": reference.free_losses,
        "loop": "truestep's" if recipe.train_step is None else "yours",
        "optimizer": plan.optimizer or "+".join(dict.fromkeys(hello["settings"]["optimizer"])).lower(),
        "recipe": recipe.name,
    }


class Reference:
    """One process with the recipe's model and optimizer.

    Args:
        plan: The cell.
        recipe: Loaded here again.
    """

    def __init__(self, plan: CellPlan, recipe: Recipe) -> None:
        self._plan = plan
        self._recipe = recipe
        seed_everything(plan.seed)
        self._one = OneModel(recipe, made.model_of(recipe))
        self.prints = made.prints_of(self._one.model)
        make = recipe.reference_optimizer or recipe.optimizer_named(plan.optimizer)
        optimizer = make(list(self._one.trainable.items()))
        self._scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
        self._free = FreeRun(recipe, copy.deepcopy(self._one.model), make)
        self._batches = [iter(recipe.batches(rank, plan.world_size)) for rank in range(plan.world_size)]
        self._reduction: str | None = recipe.reduction
        self._last: list[StateView] = []
        self._previous: gradients.Local = []
        self.sheet = Sheet()
        self._backwards = backwards.BackwardJudge(self.sheet, self._one, plan)
        self._updates = updates.UpdateJudge(self._one.trainable, slots.labelled_items(optimizer))
        self.losses: list[float] = []
        self.free_losses: list[float] = []

    def step(self, number: int, records: Sequence[StepRecord]) -> None:
        """Judge one step, unless an earlier one failed; take one of the free run."""
        self.sheet.step = number
        weights = self._weights([record.batches for record in records])
        if not self.sheet.failed:
            for finding in identity_findings(records[0].identity or Identity({}, {}, [], []), records[0].orphans):
                self.sheet.add(finding, "update")
            self._judge(records, weights)
        if self._scheduler is not None:
            self._scheduler.step()
        if not all(map(math.isfinite, _losses(records))):
            self.sheet.not_checked("forward", "a loss is not finite: from here on NaN and infinity are compared with themselves")
        self.losses.append(_loss(records, weights))
        self.free_losses.append(self._free.step(records, weights))

    def _weights(self, batches: Sequence[Sequence[Any]]) -> list[list[float]]:
        """Return what each micro-batch's loss counts in the window's, as the recipe means it."""
        self._reduction = self._reduction or measured_reduction(self._recipe, self._one.model, batches[0][0])
        count = self._recipe.num_items
        items = None
        if count is not None:
            items = [[float(torch.as_tensor(count(batch)).item()) for batch in row] for row in batches]
        return window_weights(items, self._plan.micro_batches, len(batches), self._reduction)

    def _judge(self, records: Sequence[StepRecord], weights: Sequence[Sequence[float]]) -> None:
        """Judge the phases in their order of time; stop after the first that fails."""
        self._between(records)
        start = whole.wholes([record.start or last for record, last in zip(records, self._starts(records), strict=True)])
        for finding in whole.replica_findings(start):
            self.sheet.add(finding, "between")
        if self.sheet.failed:
            return
        self._steps_taken(records)
        if self.sheet.failed:
            return
        self._one.set_params(start)
        backwards.judge_data(self.sheet, records, self._batches)
        window = self._backwards.window(records, weights, self._previous)
        contract = records[0].contract
        seen = gradients.reduced(records)
        if self._recipe.train_step is not None and self._reduction == "sum" and self._recipe.reduction is None:
            window = backwards.by_contract(window, contract, seen.found, declared=self._recipe.num_items is not None)
        clipping.judge_time(self.sheet, records, seen.clippings)
        if not self.sheet.failed:
            shapes = {name: param.shape for name, param in self._one.trainable.items()}
            gradients.judge_reduction(self.sheet, window, seen, contract, shapes)
        if not self.sheet.failed:
            self._one_step(records)
            clipping.judge_clip(self.sheet, seen.clippings, seen.entering, seen.found, self._recipe.max_norm, contract)
        if not self.sheet.failed:
            self._update(records, start, window, seen)
        self._last = [record.after for record in records if record.after is not None]
        self._previous = window.local

    def _starts(self, records: Sequence[StepRecord]) -> list[StateView]:
        return self._last or [record.start for record in records if record.start is not None]

    def _between(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            for finding in record.between:
                self.sheet.add(_changed(finding, record.rank), "between")
            if not record.between and self._last:
                self.sheet.bitwise("between", len(self._last[record.rank]))

    def _steps_taken(self, records: Sequence[StepRecord]) -> None:
        """Judge whether every rank stepped; how often is told after the gradient, which names the cause."""
        counts = [max(record.steps, default=0) for record in records]
        if not any(counts):
            self.sheet.add(_stepped(records[0], 0), "reduce")
        elif not all(counts):
            self.sheet.add(_stepped_apart(counts), "update")

    def _one_step(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if (often := max(record.steps, default=0)) != 1 and not self.sheet.failed:
                self.sheet.add(_stepped(record, often), "reduce")

    def _update(
        self, records: Sequence[StepRecord], start: whole.Wholes, window: gradients.Window, seen: gradients.Reduced
    ) -> None:
        after = whole.wholes([record.after for record in records if record.after is not None])
        for finding in whole.replica_findings(after):
            self.sheet.add(finding, "update")
        entering = {name: found[0][1] if found and name in window.made else None for name, found in seen.entering.items()}
        update = updates.Update(start, after, entering, records[0].groups)
        self._hyper_parameters(records[0], update)
        if not self.sheet.failed:
            self._updates.judge(self.sheet, update)
            self._on_shards(records)
            self._copies(after)

    def _on_shards(self, records: Sequence[StepRecord]) -> None:
        """Element-wise steps agree, bit for bit, with a replica on each rank's own shards."""
        for record in records:
            if record.on_shards.not_run:
                self.sheet.add(Finding("update/on-shards", None, "note", found=f"not run: {record.on_shards.not_run}"), "update")
            self.sheet.bitwise("update", record.on_shards.bitwise)
            for finding in record.on_shards.wrong:
                self.sheet.add(dataclasses.replace(finding, ranks=(record.rank,)), "update")

    def _hyper_parameters(self, record: StepRecord, update: updates.Update) -> None:
        """Judge param groups as the step came; of a loop that sets them itself, without a schedule, as it found them."""
        if record.identity is not None:
            self._updates.membership(self.sheet, record.identity)
        known = self._recipe.train_step is None or self._scheduler is not None
        if known or self.sheet.step == 1:
            found = update.groups if known else update.start.values
            held = record.identity is None or record.identity.user_optimizer_steps
            self._updates.hyper_parameters(self.sheet, update, found, held_by_user=held)

    def _copies(self, after: whole.Wholes) -> None:
        """Params are casts of their masters; frozen params stay."""
        for name, param in self._one.params.items():
            found, master = after.values[name, "param"], after.values.get((name, "master"))
            if master is not None and not bitwise_equal(master.to(found.dtype), found):
                self.sheet.add(_stale_copy(name), "update")
            elif name not in self._one.trainable and not bitwise_equal(found, param.detach()):
                self.sheet.add(_moved_frozen(name), "update")
            elif master is not None or name not in self._one.trainable:
                self.sheet.bitwise("update")


def _losses(records: Sequence[StepRecord]) -> list[float]:
    """Return every loss that the loop saw, or returned."""
    seen = [float(each.loss) for record in records for each in record.micro_batches if each.loss is not None]
    return seen + [record.loss for record in records if record.loss is not None]


def _loss(records: Sequence[StepRecord], weights: Sequence[Sequence[float]]) -> float:
    """Return the window's loss as the loop saw it: of the recipe's own losses, else what `train_step` returned."""
    seen = [
        (weight, float(micro_batch.loss))
        for record, row in zip(records, weights, strict=True)
        for micro_batch, weight in zip(record.micro_batches, row, strict=False)
        if micro_batch.loss is not None
    ]
    if seen:
        return math.fsum(weight * loss for weight, loss in seen)
    returned = [record.loss for record in records if record.loss is not None]
    return math.fsum(returned) / len(returned) if returned else math.nan


def _changed(finding: Finding, rank: int) -> Finding:
    return dataclasses.replace(
        finding,
        code="drift/changed-between-steps",
        ranks=(rank,),
        cause="something other than the optimizer changed it after the last step",
        fix="Load, reset or swap only where it is meant, and then start the run anew from there.",
    )


def _stepped(record: StepRecord, often: int) -> Finding:
    return Finding(
        "gradient/stepped-often" if often else "gradient/never-stepped",
        "gradient",
        "error",
        expected="one optimizer step a window",
        found=str(often or "none"),
        ranks=(record.rank,),
        cause=f"the optimizer stepped {often} times in a window of {len(record.batches)} micro-batches"
        if often
        else "no step was taken in this window, on any rank",
        fix="Step once, after the window's last backward, at the engine's boundary.",
    )


def _stepped_apart(counts: Sequence[int]) -> Finding:
    return Finding(
        "ranks/steps-differ",
        "ranks",
        "error",
        expected="an optimizer step on every rank",
        found=f"{listed(counts)}, rank by rank",
        ranks=tuple(rank for rank, count in enumerate(counts) if not count),
        cause="some ranks stepped and others skipped: a condition that depends on the rank or its data",
        fix="Decide on all ranks together whether to step: reduce what the condition looks at.",
    )


def _stale_copy(name: str) -> Finding:
    return Finding(
        "ranks/master-differs",
        "ranks",
        "error",
        param=name,
        key="master",
        expected="the param to be a cast of its master",
        found="other bits",
        cause="the copy that forward reads and the master that the step writes have drifted apart",
        fix="Edit or load weights through the engine, so that the masters follow.",
    )


def _moved_frozen(name: str) -> Finding:
    return Finding(
        "update/frozen-moved",
        "update",
        "error",
        param=name,
        key="param",
        expected="a frozen param left alone",
        found="another value after the step",
        fix="Keep frozen params out of the optimizer.",
    )
