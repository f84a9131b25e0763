"""Checks of a single step: what it counts, what it touches, and what it must leave alone."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from truestep.optimizers.conformance.bench import PARAM, Bench, numbered
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.given import Gradients, gradients, start
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem
from truestep.optimizers.conformance.reference import SMALL, demand_agreement, walked
from truestep.optimizers.conformance.subject import Case, Subject
from truestep.optimizers.probe.build import arguments
from truestep.state.digest import bitwise_equal
from truestep.state.view import SlotId
from truestep.words.names import OPTIMIZER_SLOT

STEPS: Final = 3


def construction(case: Case) -> str:
    """Building the optimizer leaves params and gradients as they were."""
    subject = case.subject
    bench = subject.bench()
    before = start(subject.shapes)
    moved = [name for name, param in bench.params.items() if not bitwise_equal(param.detach(), before[name])]
    given = [name for name, param in bench.params.items() if param.grad is not None]
    if moved or given:
        raise Failed(
            *(Problem("the param as it was before the optimizer was built", "other values", name, PARAM) for name in moved),
            *(Problem("no gradient", "one that building the optimizer left", name, "grad") for name in given),
        )
    return f"{len(before)} params as they were"


def no_hidden_step(case: Case) -> str:
    """After the first step, counters read 1."""
    subject = case.subject
    if not subject.counters:
        raise NotApplicable("it keeps no counter")
    bench = subject.bench()
    has_state = any(key != PARAM for _, key in bench.state())
    slots = bench.run(0, 1).slots()
    if not has_state:  # one that reads 2 now says which step comes next: none was taken without leaving state
        return "there is no state before the first step"
    # A counter that counts otherwise than by one is another check's to tell: here is judged where it begins.
    begins = {slot_id: numbered(slots.get(slot_id)) for slot_id in subject.counters}
    late = {slot_id: read for slot_id, read in begins.items() if read not in (None, subject.counters[slot_id])}
    if late:
        raise Failed(
            *(
                _of_slot(
                    slot_id, "1 after the first step", f"{read:g}: steps were taken before it", "Create state without stepping."
                )
                for slot_id, read in late.items()
                if read is not None
            )
        )
    return "counters begin at 1"


def counters(case: Case) -> str:
    """Each step raises each counter by one, whatever the number of params, and not that of a param without gradient."""
    subject = case.subject
    if not subject.counters:
        raise NotApplicable("it keeps no counter")
    if subject.way.closure and subject.evaluations > 1:
        raise NotApplicable("it counts the iterations inside a step")
    number = len(subject.shapes)
    wrong = [
        _of_slot(slot_id, "one more after each step", f"{rise:g} more, with {number} params", "Count once a step.")
        for slot_id, rise in subject.counters.items()
        if rise != 1
    ]
    if wrong:
        raise Failed(*wrong)
    absent = next(iter(subject.shapes))
    bench = subject.bench().run(0, STEPS)
    before = bench.slots()
    bench.step({**gradients(bench.params, STEPS), absent: None})
    after = bench.slots()
    for slot_id in subject.counters:
        rise = (numbered(after.get(slot_id)) or 0) - (numbered(before.get(slot_id)) or 0)
        should = 0 if slot_id[0] == absent else 1
        # One in a container of the optimizer's own may belong to any param.
        if rise != should and not (slot_id[0].startswith(OPTIMIZER_SLOT) and "/" in slot_id[1] and rise == 0):
            why = "of a param without gradient" if slot_id[0] == absent else f"where {absent} had no gradient"
            wrong.append(
                _of_slot(slot_id, f"{should} more after a step {why}", f"{rise:g} more", "Count where the param is updated.")
            )
    if wrong:
        raise Failed(*wrong)
    owners = {"one a param" if name in bench.params else "one a group" if "/" in name else "one" for name, _ in subject.counters}
    return f"{len(subject.counters)} counters, {' and '.join(sorted(owners))}"


def gradients_unaltered(case: Case) -> str:
    """The step leaves gradients as they were handed to it."""
    bench = case.subject.bench()
    for step in range(STEPS):
        bench.run(step, step + 1)
        for name, handed in bench.handed.items():
            left = bench.params[name].grad
            if left is None or not bitwise_equal(_strided(left), _strided(handed)):
                found = "none" if left is None else f"other values, up to {_furthest(left, handed):.3g} away"
                raise Failed(
                    Problem(
                        "the gradient as it entered the step", found, name, "grad", step + 1, "Compute on a copy of the gradient."
                    )
                )
    return f"{len(bench.handed)} gradients, {STEPS} steps"


def absent_gradient(case: Case) -> str:
    """A param without gradient keeps its value and its state."""
    subject = case.subject
    absent = next(iter(subject.shapes))
    for warm in (STEPS, 0):  # with state there, and before there is any
        bench = subject.bench().run(0, warm)
        # What all params share may be kept under any of them.
        its = {slot_id: value for slot_id, value in bench.state().items() if slot_id[0] == absent}
        before = {slot_id: value for slot_id, value in its.items() if slot_id[1] == PARAM or not subject.coupled}
        bench.step({**gradients(bench.params, warm), absent: None})
        after = {slot_id: value for slot_id, value in bench.state().items() if slot_id in before}
        demand_same(
            after, before, "what it was: the param had no gradient", step=warm + 1, fix="Skip params whose .grad is None."
        )
    return "params without gradient are left alone"


def zero_gradient(case: Case) -> str:
    """A zero gradient is a gradient: its step counts."""
    subject = case.subject
    zero = next(iter(subject.shapes))
    own = [slot_id for slot_id in subject.counters if slot_id[0] == zero]
    if not own:
        return _zero_by_rule(case, zero)
    with_zero, without = (subject.bench().run(0, STEPS) for _ in range(2))
    handed = gradients(without.params, STEPS)
    with_zero.step({**handed, zero: torch.zeros_like(without.params[zero])})
    without.step({**handed, zero: None})
    counted, left = with_zero.slots(), without.slots()
    if stuck := [slot_id for slot_id in own if numbered(counted.get(slot_id)) == numbered(left.get(slot_id))]:
        raise Failed(
            *(_of_slot(one, "one more: a zero gradient is one", "the same as without", "Skip on None alone.") for one in stuck)
        )
    return "it counts as a step"


def _zero_by_rule(case: Case, zero: str) -> str:
    """Hold a run with a zero gradient against the reference, where no counter of the param tells that it was seen."""
    if case.reference is None:
        raise NotApplicable("it keeps no counter of a param, and without a reference nothing else tells")
    bench = case.subject.bench(size=SMALL).set(weight_decay=0.0)

    def given(step: int) -> Gradients:
        handed = gradients(bench.params, step)
        return {**handed, zero: torch.zeros_like(handed[zero])} if step else handed

    walk = walked(case.subject, bench, STEPS, given=given)
    return demand_agreement(case.reference, walk, "the updates by zero gradients", "Skip on None alone.")


def repeatable(case: Case) -> str:
    """The same steps from the same generators end in the same bits."""
    runs = [case.subject.bench().run(0, STEPS).slots() for _ in range(2)]
    return demand_same(runs[1], runs[0], "the same bits as in the first run", fix="Draw from torch's generators only.")


def in_place(case: Case) -> str:
    """The step writes into the params that it was given: same objects, same memory, no graph."""
    bench = case.subject.bench()
    at = {name: param.data_ptr() for name, param in bench.params.items()}
    bench.run(0, STEPS)
    held = {id(param) for group in bench.groups for param in group["params"]}
    problems = []
    for name, param in bench.params.items():
        if id(param) not in held:
            problems.append(Problem("the param that it was given", "another one in its groups", name, PARAM))
        if param.data_ptr() != at[name]:
            problems.append(
                Problem(
                    "the same memory",
                    "new memory: views, shards and tied params see nothing of it",
                    name,
                    PARAM,
                    fix="Update with an in-place operation, not by param.data = ...",
                )
            )
        if not param.is_leaf or not param.requires_grad:
            problems.append(Problem("a leaf that requires a gradient", "a part of a graph, or frozen", name, PARAM))
    if problems:
        raise Failed(*problems)
    return f"{len(at)} params written in place"


def closure(case: Case) -> str:
    """`step(closure)` evaluates it with gradients enabled, returns its loss, and updates as without one."""
    subject = case.subject
    bench = subject.bench()
    handed, enabled, loss = gradients(bench.params, 0), [], torch.tensor(0.625)
    run = bench.closure(handed)

    def told() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        if subject.way.closure:
            run()
        else:
            bench.give(handed)
        return loss

    returned = [optimizer.step(told) for optimizer in bench.optimizers]
    problems = []
    if not enabled or not all(enabled):
        found = "never called" if not enabled else "called with gradients disabled"
        problems.append(Problem("the closure called with gradients enabled", found, fix="Call it under torch.enable_grad()."))
    if any(one is None or float(one) != float(loss) for one in returned):
        problems.append(Problem("the closure's loss returned", f"{returned[0]!r}", fix="Return the loss from step."))
    if problems:
        raise Failed(*problems)
    if subject.way.closure:
        return "it returns the loss"
    demand_same(bench.state(), subject.bench().run(0, 1).state(), "the same as step() without a closure")
    return "it returns the loss, and updates as without one"


def zero_grad(case: Case) -> str:
    """`zero_grad` drops gradients, or zeroes them where asked to, and touches nothing else."""
    bench = case.subject.bench().run(0, STEPS)
    before = bench.slots()
    for to_none in (False, True):
        bench.give(gradients(bench.params, STEPS))
        for optimizer in bench.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for name, param in bench.params.items():
            is_zero = param.grad is not None and not bool(_strided(param.grad).any())
            if (param.grad is None) is not to_none or not (to_none or is_zero):
                expected = "no gradient" if to_none else "a zero gradient"
                raise Failed(Problem(f"{expected} after zero_grad(set_to_none={to_none})", "another one", name, "grad"))
    return demand_same(bench.slots(), before, "what it was before zero_grad")


def maximize(case: Case) -> str:
    """Maximizing by a gradient is minimizing by its negative."""
    subject = case.subject
    accepted = arguments(subject.target)
    if not all("maximize" in group for group in subject.usual.groups) and (accepted is None or "maximize" not in accepted):
        raise NotApplicable("it has no maximize, or not in all groups")
    up, down = _turned(subject, True), _turned(subject, False)
    for step in range(STEPS):
        handed = gradients(up.params, step)
        up.step(handed)
        down.step({name: -gradient for name, gradient in handed.items()})
    mine, theirs = ({slot_id: v for slot_id, v in bench.state().items() if slot_id[1] == PARAM} for bench in (up, down))
    return demand_same(mine, theirs, "the update by minus the gradient")


def _turned(subject: Subject, up: bool) -> Bench:
    return subject.bench().set(maximize=up) if subject.has("maximize") else subject.bench(maximize=up)


def hooks(case: Case) -> str:
    """Step hooks fire around each step: schedulers, profilers and the guard live by them."""
    bench = case.subject.bench()
    fired: list[str] = []
    for optimizer in bench.optimizers:
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise Failed(
                Problem("a torch.optim.Optimizer, with step hooks", f"{type(optimizer).__name__} without", fix="Derive from it.")
            )
        optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    bench.run(0, 1)
    # More often than once: torch hooks the `step` of every class that was made, also of a base whose step this one calls.
    times = fired.count("before")
    is_around = times >= len(bench.optimizers) and fired[:1] == ["before"] and fired[-1:] == ["after"]
    if not is_around or fired.count("after") != times:
        found = " ".join(fired) or "no call"
        raise Failed(Problem("a hook called before each step, and one after it", found, fix="Call super().__init__."))
    return f"{len(fired)} calls"


def _of_slot(slot_id: SlotId, expected: str, found: str, fix: str = "") -> Problem:
    name, key = slot_id
    param, told = (None, f"{name}/{key}") if name.startswith("@") else (name, key)
    return Problem(expected, found, param, told, fix=fix)


def _strided(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()


def _furthest(left: Any, handed: Tensor) -> float:
    return float((_strided(left) - _strided(handed)).abs().max())
