"""Checks of what params and groups an optimizer is given, and of settings that change as it trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from truestep.optimizers.conformance.bench import PARAM, Bench, Slots
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.given import start
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem, first_line
from truestep.optimizers.conformance.subject import Case, Subject
from truestep.words.names import OPTIMIZER_SLOT

STEPS: Final = 3
_MANY: Final = ("groups", "list")  # the forms in which params can be put into groups


def lr_acts(case: Case) -> str:
    """A learning rate set in the groups acts from the next step, as a schedule means it to."""
    subject = case.subject
    _rate(subject)
    benches = [subject.bench().run(0, STEPS) for _ in range(2)]
    for group in benches[1].groups:
        group["lr"] = 2 * group["lr"]
    return _told_apart(benches, "group['lr'] was doubled")


def lr_tensor(case: Case) -> str:
    """A learning rate in a tensor gives what a number gives, and acts when it is written to."""
    subject = case.subject
    rate = 2.0 ** round(math.log2(_rate(subject)))  # so that float32 has it exactly
    try:
        mine = _with_rate(subject, torch.tensor(rate)).run(0, STEPS)
    except Exception as error:  # whatever a class says to it
        if any(word in str(error).lower() for word in ("tensor", "learning rate", "lr")):
            raise NotApplicable(f"it refuses a tensor: {first_line(error)}") from error
        raise
    demand_same(
        _params(mine),
        _params(_with_rate(subject, rate).run(0, STEPS)),
        f"the update with the number lr={rate:g}",
        again=lambda: _params(_with_rate(subject, rate).run(0, STEPS)),
    )
    benches = [_with_rate(subject, torch.tensor(rate)).run(0, STEPS) for _ in range(2)]
    held = [group["lr"] for group in benches[1].groups if isinstance(group["lr"], torch.Tensor)]
    if not held:
        raise Failed(Problem("the tensor in the group", f"{benches[1].groups[0]['lr']!r}: a copy, that no schedule can write to"))
    for one in {id(one): one for one in held}.values():
        one.mul_(2)
    return _told_apart(benches, "the tensor lr was doubled in place")


def _told_apart(benches: list[Bench], what: str) -> str:
    """Demand that the next step of two benches, alike but for a setting, differs for every param that moves."""
    before = benches[0].values()
    for bench in benches:
        bench.run(STEPS, STEPS + 1)
    moved = [name for name, value in before.items() if not torch.equal(benches[0].params[name], value)]
    same = [name for name in moved if torch.equal(benches[0].params[name], benches[1].params[name])]
    if same:
        raise Failed(
            *(
                Problem(f"another update once {what}", "the same one", name, PARAM, STEPS + 1, "Read group['lr'] in each step.")
                for name in same
            )
        )
    return f"the next step of {len(moved)} params differs"


def _rate(subject: Subject) -> float:
    rate = subject.usual.groups[0].get("lr")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate:
        raise NotApplicable("its groups have no number under lr")
    return float(rate)


def _with_rate(subject: Subject, rate: Any) -> Bench:
    return subject.bench(lr=rate) if isinstance(subject.target, type) else subject.bench().set(lr=rate)


def added_group(case: Case) -> str:
    """A group added between steps trains from the next step on, as if it were new."""
    subject = case.subject.without_draws()
    first = subject.bench().optimizers[0]
    held = {id(param) for group in subject.usual.optimizers[0].param_groups for param in group["params"]}
    own = [name for name, param in subject.usual.params.items() if id(param) in held]
    if len(own) < 2 or not callable(getattr(first, "add_param_group", None)):
        raise NotApplicable("its first optimizer cannot be given a group")
    late = own[-1]
    values = start(subject.shapes)
    bench = subject.bench({name: value for name, value in values.items() if name != late}).run(0, STEPS)
    param = nn.Parameter(values[late].clone())
    template = next(group for group in subject.usual.groups if any(one is subject.usual.params[late] for one in group["params"]))
    its = {key: copy.deepcopy(value) for key, value in template.items() if key not in ("params", "param_names")}
    bench.optimizers[0].add_param_group({**its, "params": [(late, param)] if subject.way.form == "names" else [param]})
    bench.params[late] = param
    try:
        bench.run(STEPS, 2 * STEPS)
    except Exception as error:
        if "group" not in str(error):
            raise
        raise NotApplicable(f"it refuses a second group: {first_line(error)}") from error
    if torch.equal(param, values[late]):
        raise Failed(
            Problem(
                "a param that trains from the next step on",
                "one that never moves: its group is held, and not stepped",
                late,
                PARAM,
                fix="Refuse it in add_param_group, or step every group.",
            )
        )
    if subject.coupled or any(owner.startswith(OPTIMIZER_SLOT) for owner, _ in subject.counters):
        return "it trains; what it shares with the others is not judged"
    alone = subject.bench({late: values[late]}).run(STEPS, 2 * STEPS)
    return demand_same(_of(bench, late), _of(alone, late), "what a new optimizer makes of it")


def order(case: Case) -> str:
    """The order of params does not matter."""
    subject = case.subject.without_draws()
    values = start(subject.shapes)

    def usual() -> Slots:
        return _told(subject.bench(values).run(0, subject.short(STEPS)))

    def _told(bench: Bench) -> Slots:
        return _params(bench) if subject.coupled else bench.state()  # what they share may be kept under the first of them

    turned = _told(subject.bench(dict(reversed(values.items()))).run(0, subject.short(STEPS)))
    again = usual if subject.coupled else None  # and is summed in another order
    return demand_same(turned, usual(), "the same as with the params in another order", again=again)


def grouping(case: Case) -> str:
    """Into how many groups of equal settings params are put does not matter."""
    subject = case.subject.without_draws()
    if subject.way.form not in _MANY:
        raise NotApplicable("its params cannot be put into groups")
    if subject.coupled:
        raise NotApplicable("its params share something: a group is part of its rule")
    try:
        grouped = subject.bench(groups=2)
    except ValueError as error:
        raise NotApplicable(f"it refuses a second group: {first_line(error)}") from error
    # Its counters may be one a group: only what belongs to params is compared.
    return demand_same(grouped.run(0, STEPS).state(), subject.bench().run(0, STEPS).state(), "the same as in one group")


def equal_shapes(case: Case) -> str:
    """The state of params of equal shape is kept apart."""
    subject = case.subject.without_draws()
    if subject.coupled:
        raise NotApplicable("its params share something: two of one shape are told apart by the check `order`")
    shape = max(subject.shapes.values(), key=lambda shape: len(shape) == 2)
    values = start({"twins.0.weight": shape, "twins.1.weight": shape})
    both = subject.bench(values).run(0, STEPS)
    for name, value in values.items():
        alone = subject.bench({name: value}).run(0, STEPS)
        demand_same(
            _of(both, name),
            _of(alone, name),
            "what it is without another param of its shape",
            fix="Key state by the param itself.",
        )
    return f"two params of shape {shape}"


def rebuilt(case: Case) -> str:
    """An optimizer can be made again from its own `defaults`, as DeepSpeed does."""
    subject = case.subject
    if not isinstance(subject.target, type) or subject.way.form not in _MANY:
        raise NotApplicable("it is made by a function, or of more than params")
    defaults: Mapping[str, Any] = getattr(subject.usual.optimizers[0], "defaults", {})
    try:
        again = subject.bench(**defaults)
    except TypeError as error:
        raise Failed(
            Problem(
                "its constructor to take its own defaults", str(error), fix="Keep only arguments of the constructor in defaults."
            )
        ) from error
    return demand_same(again.run(0, STEPS).state(), subject.bench().run(0, STEPS).state(), "the same as the first one")


def _params(bench: Bench) -> Slots:
    return {slot_id: value for slot_id, value in bench.state().items() if slot_id[1] == PARAM}


def _of(bench: Bench, name: str) -> Slots:
    return {slot_id: value for slot_id, value in bench.state().items() if slot_id[0] == name}
