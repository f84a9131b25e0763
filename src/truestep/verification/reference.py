"""The reference: one process that runs every rank's micro-batches and steps on whole tensors, and judges the records.

At each step it is set to the candidate's params, buffers, RNG states and optimizer state, so that every difference is of this step. A
second copy of the model runs freely from the same start: its losses are figures, not judged.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truestep.backends import slots
from truestep.backends.base import Contract
from truestep.proof.identity import identity_findings
from truestep.state.digest import bitwise_equal
from truestep.state.view import StateView
from truestep.verification import gradients, link, updates, whole, worker
from truestep.verification.cell import CellPlan, seed_everything
from truestep.verification.loop import measured_reduction, window_weights
from truestep.verification.recipe import Recipe, load
from truestep.verification.record import MicroBatch, StepRecord, restore_rng, rng_states
from truestep.verification.sheet import Sheet
from truestep.words.finding import Finding
from truestep.words.names import clean


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
    hellos = sorted(((link.receive(connection), connection) for connection in connections), key=lambda pair: pair[0]["rank"])
    recipe = load(plan.recipe)
    judge = Reference(plan, recipe)
    for finding in hellos[0][0]["warnings"]:
        judge.sheet.add(finding)
    losses: list[float] = []
    for step in range(1, plan.steps + 1):
        messages = [link.receive(connection) for _, connection in hellos]
        records = [message["record"] for message in messages]
        free = judge.step(step, messages)
        losses.append(_loss(records, judge.weights))
        judge.reference_losses.append(free)
        worker.report(("judged", step))
    return {
        "findings": judge.sheet.findings,
        "checks": judge.sheet.checks,
        "losses": losses,
        "reference_losses": judge.reference_losses,
        "loop": "truestep's" if recipe.train_step is None else "yours",
        "optimizer": plan.optimizer or "+".join(dict.fromkeys(hellos[0][0]["settings"]["optimizer"])).lower(),
        "recipe": recipe.name,
    }


def _loss(records: Sequence[StepRecord], weights: Sequence[Sequence[float]]) -> float:
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
        self._model = recipe.model()
        make = recipe.reference_optimizer or recipe.optimizer_named(plan.optimizer)
        self._params = dict(slots.trainable(slots.named_params(self._model)))
        self._all_params = dict(slots.named_params(self._model))
        self._optimizer = make(list(self._params.items()))
        self._scheduler = recipe.scheduler(self._optimizer) if recipe.scheduler else None
        self._free_model = copy.deepcopy(self._model)
        self._free_params = dict(slots.trainable(slots.named_params(self._free_model)))
        self._free_optimizer = make(list(self._free_params.items()))
        self._free_scheduler = recipe.scheduler(self._free_optimizer) if recipe.scheduler else None
        self._updates = updates.UpdateJudge(self._params, slots.labelled_items(self._optimizer))
        self._own_batches = [iter(recipe.batches(rank, plan.world_size)) for rank in range(plan.world_size)]
        self._last: list[StateView] = []
        self._previous: gradients.Local = []
        self._reduction: str | None = recipe.reduction
        self._starting_tensors = {name: param.detach().clone() for name, param in self._all_params.items()}
        self.sheet = Sheet()
        self.weights: list[list[float]] = []
        self.reference_losses: list[float] = []

    def step(self, number: int, messages: Sequence[dict[str, Any]]) -> float:
        """Judge one step, unless an earlier one failed; return the free-running loss."""
        records: list[StepRecord] = [message["record"] for message in messages]
        self.sheet.step = number
        batches = [record.batches for record in records]
        self._reduction = self._reduction or measured_reduction(self._recipe, self._model, batches[0][0])
        items = None
        if self._recipe.num_items is not None:
            items = [[float(torch.as_tensor(self._recipe.num_items(batch)).item()) for batch in row] for row in batches]
        self.weights = window_weights(items, self._plan.micro_batches, len(records), self._reduction)
        if not self.sheet.failed:
            self._judge(records, messages)
        if self._scheduler is not None:
            self._scheduler.step()
        return self._run_freely(records)

    def _judge(self, records: Sequence[StepRecord], messages: Sequence[dict[str, Any]]) -> None:
        for finding in identity_findings(messages[0]["identity"], messages[0]["orphans"]):
            self.sheet.add(finding, "update")
        self._between(records)
        if self.sheet.failed:
            return
        starts = [record.start or last for record, last in zip(records, self._last or [None] * len(records), strict=True)]
        start = whole.wholes(starts)
        if start.apart:
            for finding in whole.replica_findings(start):
                self.sheet.add(finding, "between")
            return
        self._set_params(start)
        self._data(records)
        window = self._backward(records)
        seen = gradients.reduced(records)
        contract = records[0].contract
        shapes = {name: param.shape for name, param in self._params.items()}
        gradients.judge_reduction(self.sheet, window, seen, contract, shapes)
        self._windows_length(records)
        if not self.sheet.failed:
            gradients.judge_clip(self.sheet, records, seen, self._recipe.max_norm, contract)
        if not self.sheet.failed:
            self._update(records, start, window, seen)
        self._last = [record.after for record in records if record.after is not None]
        self._previous = window.local

    # -- between, data, forward, backward

    def _between(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            for finding in record.between:
                self.sheet.add(_changed(finding, record.rank), "between")
            if not record.between and self._last:
                self.sheet.bitwise("between", len(self._last[record.rank]))

    def _data(self, records: Sequence[StepRecord]) -> None:
        same = 0
        for record, own in zip(records, self._own_batches, strict=True):
            for batch in record.batches:
                again = next(own, None)
                same += 1 if tensors_equal(batch, again) else 0
        self.sheet.bitwise("data", same)
        if len(records) > 1 and all(tensors_equal(records[0].batches, record.batches) for record in records[1:]):
            self.sheet.add(
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

    def _windows_length(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            often = max(record.steps, default=0)
            if often == 0:
                self.sheet.add(_never_stepped(record), "reduce")
            elif often > 1 and not self.sheet.failed:
                self.sheet.add(_stepped_often(record, often), "reduce")

    def _backward(self, records: Sequence[StepRecord]) -> gradients.Window:
        local: list[list[dict[str, Tensor]]] = []
        coefficients: list[list[float]] = []
        for record, row in zip(records, self.weights, strict=True):
            local.append([])
            coefficients.append([])
            ran = [micro_batch for micro_batch in record.micro_batches if micro_batch.backwards]
            if len(ran) > len(record.batches):
                self.sheet.not_checked("data", f"{len(ran)} backward passes for {len(record.batches)} micro-batches: which is whose is not known")
            for place, (batch, weight) in enumerate(zip(record.batches, row, strict=True)):
                micro_batch = ran[place] if place < len(ran) else None
                before_step = place < record.micro_batches_at_step
                found, coefficient = self._one_backward(record, batch, micro_batch if before_step else None, weight)
                local[-1].append(found)
                coefficients[-1].append(coefficient)
        if self._undeclared():
            coefficients = self._by_contract(records[0].contract, coefficients)
        return gradients.Window(local, coefficients, self._previous)

    def _undeclared(self) -> bool:
        return self._recipe.train_step is not None and self._reduction == "sum" and self._recipe.num_items is None

    def _by_contract(self, contract: Contract, coefficients: list[list[float]]) -> list[list[float]]:
        """Return the coefficients of a sum loss whose denominator is the user's own: those that the vendor's contract gives to all."""
        share = 1.0 if contract.reduction == "sum" else 1.0 / len(coefficients)
        return [[share] * len(row) for row in coefficients]

    def _one_backward(
        self, record: StepRecord, batch: Any, micro_batch: MicroBatch | None, weight: float
    ) -> tuple[dict[str, Tensor], float]:
        """Run one micro-batch as its rank did; return the local gradients and what they count in the window's."""
        if micro_batch is None:  # it never reached the step: what it would have given
            return self._run(batch, None, None)[1], weight
        seen = micro_batch.factor if micro_batch.factors_seen == 1 and _usable(micro_batch.factor) else None
        loss, own = self._run(batch, micro_batch, seen)
        if micro_batch.loss is not None:
            self._forward(record, micro_batch, loss)
        factor = micro_batch.factor if micro_batch.loss is not None else reached_factor(micro_batch.root, loss, self._plan)
        if factor is None or micro_batch.factors_seen > 1:
            self.sheet.not_checked("backward", "the factor that reached the loss was not seen: train_step does not call the recipe's loss")
            ratio = float(micro_batch.root) / float(loss) if micro_batch.root is not None and float(loss) else 1.0
            return micro_batch.gradients, weight / ratio
        if not _usable(factor):  # nothing of this micro-batch can be in the gradient: judged by what it would have given
            return own, weight
        if seen is None and float(factor) != 1.0:
            loss, own = self._run(batch, micro_batch, factor)
        self._compare_backward(record, batch, micro_batch, factor, own)
        return micro_batch.gradients, weight / float(factor)

    def _forward(self, record: StepRecord, micro_batch: MicroBatch, loss: Tensor) -> None:
        if bitwise_equal(loss, micro_batch.loss) or record.contract.operators_replaced:
            self.sheet.bitwise("forward", 0 if record.contract.operators_replaced else 1)
            return
        self.sheet.add(
            Finding(
                "ranks/forward-differs",
                "ranks",
                "error",
                key="param",
                expected=f"a loss of {float(loss):.9g}, from the params that the optimizer holds",
                found=f"{float(micro_batch.loss):.9g}",  # type: ignore[arg-type]
                ranks=(record.rank,),
                cause="the forward read other values than the params that the last step wrote, or was not the recipe's own",
                fix="Look for a copy that was gathered before the step (FSDP2 after a no-grad forward: call reshard()).",
            ),
            "forward",
        )

    def _compare_backward(
        self, record: StepRecord, batch: Any, micro_batch: MicroBatch, factor: Tensor, own: dict[str, Tensor]
    ) -> None:
        found = micro_batch.gradients
        apart = [name for name in self._params if not _alike(own.get(name), found.get(name))]
        self.sheet.bitwise("backward", len(self._params) - len(apart))
        if not apart:
            return
        name = apart[0]
        why = record.contract.operators_replaced
        if why is None and not _all_alike(own, self._run(batch, micro_batch, factor)[1]):
            why = "one process run twice is not bitwise itself"
        away = _distance(own.get(name), found.get(name))
        if why:
            self.sheet.not_checked("backward", f"{why} (gradients up to {away:.2g} of their norm away)", param=name)
            return
        self.sheet.add(
            Finding(
                "gradient/backward-differs",
                "gradient",
                "error",
                param=name,
                key="grad",
                expected="the local gradient of one process, bit for bit",
                found="none" if name not in found else "one where there is none" if name not in own else f"one {away:.3g} of its norm away",
                ranks=(record.rank,),
                cause="the backward of this rank is not that of one process on the same micro-batch",
                fix="Compare what the wrapped model computes with the plain one on this batch.",
            ),
            "backward",
        )

    def _run(self, batch: Any, micro_batch: MicroBatch | None, factor: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward on the reference model, under a rank's RNG states and buffers; gradients are fresh."""
        states = rng_states()
        if micro_batch is not None:
            restore_rng(micro_batch.rng)
            self._set_buffers(micro_batch.buffers)
        try:
            loss = self._recipe.loss(self._model, copy.deepcopy(batch))
            gradient = factor if factor is not None else torch.ones_like(loss)
            names = list(self._params)
            with clean_gradients(self._params.values()):
                loss.backward(gradient.to(loss.dtype))  # type: ignore[no-untyped-call]
                found = {name: self._params[name].grad for name in names if self._params[name].grad is not None}
        finally:
            restore_rng(states)
        return loss.detach(), {name: gradient.detach() for name, gradient in found.items() if gradient is not None}

    def _set_params(self, start: whole.Wholes) -> None:
        with torch.no_grad():
            for name, param in self._all_params.items():
                param.copy_(start.values[name, "param"])

    def _set_buffers(self, buffers: dict[str, Tensor]) -> None:
        modules = [module for _, module in slots.labelled_items(self._model)]
        with torch.no_grad():
            for index, module in enumerate(modules):
                prefix = f"{index}:" if len(modules) > 1 else ""
                for name, buffer in module.named_buffers():
                    if (known := {clean(key): value for key, value in buffers.items()}.get(prefix + name)) is not None:
                        buffer.copy_(known)

    # -- update

    def _update(
        self, records: Sequence[StepRecord], start: whole.Wholes, window: gradients.Window, seen: gradients.Reduced
    ) -> None:
        after = whole.wholes([record.after for record in records if record.after is not None])
        for finding in whole.replica_findings(after):
            self.sheet.add(finding, "update")
        entering = {name: pieces[0][1] if pieces and name in window.made else None for name, pieces in seen.entering.items()}
        update = updates.Update(start, after, entering)
        self._updates.hyper_parameters(self.sheet, update)
        if self.sheet.failed:
            return
        self._updates.judge(self.sheet, update)
        self._copies(after)

    def _copies(self, after: whole.Wholes) -> None:
        """Params are casts of their masters; frozen params stay."""
        for name, param in self._all_params.items():
            found, master = after.values[name, "param"], after.values.get((name, "master"))
            if master is not None and not bitwise_equal(master.to(found.dtype), found):
                self.sheet.add(_stale_copy(name), "update")
            elif name not in self._params and not bitwise_equal(found, param.detach()):
                self.sheet.add(_moved_frozen(name), "update")
            elif master is not None or name not in self._params:
                self.sheet.bitwise("update")

    # -- the free run

    def _run_freely(self, records: Sequence[StepRecord]) -> float:
        states = rng_states()
        total = 0.0
        for record, row in zip(records, self.weights, strict=True):
            for place, (batch, weight) in enumerate(zip(record.batches, row, strict=True)):
                if place < len(record.micro_batches):
                    restore_rng(record.micro_batches[place].rng)
                loss = self._recipe.loss(self._free_model, copy.deepcopy(batch))
                (loss * weight).backward()
                total += float(loss.detach()) * weight
        restore_rng(states)
        if self._recipe.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._free_params.values()), self._recipe.max_norm)
        for _, optimizer in slots.labelled_items(self._free_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        if self._free_scheduler is not None:
            self._free_scheduler.step()
        return total


@contextlib.contextmanager
def clean_gradients(params: Any) -> Iterator[None]:
    """Clear the gradients of params before and after."""
    held: list[nn.Parameter] = list(params)
    for param in held:
        param.grad = None
    try:
        yield
    finally:
        for param in held:
            param.grad = None


def reached_factor(root: Tensor | None, loss: Tensor, plan: CellPlan) -> Tensor | None:
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
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(tensors_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(tensors_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if type(mine) is not type(theirs):
        return False
    if hasattr(mine, "__dict__") and vars(mine):
        return tensors_equal(vars(mine), vars(theirs))
    return bool(mine == theirs)


def _usable(factor: Tensor | None) -> bool:
    return factor is not None and bool(factor.isfinite()) and float(factor) != 0


def _alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return bitwise_equal(mine, theirs)


def _all_alike(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(bitwise_equal(mine[name], theirs[name]) for name in mine)


def _distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return math.inf
    size = float(mine.double().norm())
    return float((mine.double() - theirs.double()).norm()) / size if size else math.inf


def _changed(finding: Finding, rank: int) -> Finding:
    return dataclasses.replace(
        finding,
        code="drift/changed-between-steps",
        ranks=(rank,),
        cause="something other than the optimizer changed it after the last step",
        fix="Load, reset or swap only where it is meant, and then start the run anew from there.",
    )


def _never_stepped(record: StepRecord) -> Finding:
    return Finding(
        "gradient/never-stepped",
        "gradient",
        "error",
        expected="one optimizer step a window",
        found="none",
        ranks=(record.rank,),
        fix="Step once after the window's last backward, at the engine's boundary.",
    )


def _stepped_often(record: StepRecord, often: int) -> Finding:
    return Finding(
        "gradient/stepped-often",
        "gradient",
        "error",
        expected="one optimizer step a window",
        found=f"{often}",
        ranks=(record.rank,),
        cause=f"the optimizer stepped {often} times in a window of {len(record.batches)} micro-batches",
        fix="Step once after the window's last backward.",
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
