"""What else decides where an optimizer may run: absent gradients, what its state is made of, and whether a step can be idle."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from truestep.optimizers.probe import keys, run
from truestep.optimizers.probe.build import Refusal, groups_of
from truestep.optimizers.probe.ground import Ground
from truestep.optimizers.probe.keys import Key
from truestep.optimizers.probe.plan import FIRST_STEPS, STEPS, other_size, plan_of
from truestep.optimizers.probe.run import Stepper, Trace

_STEPS = 2 * FIRST_STEPS


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps.

    Attributes:
        keys: Of params, groups and the optimizer, in this order.
        lazy: Whether the state of params is created by steps, not by the constructor.
    """

    keys: tuple[Key, ...]
    lazy: bool


def kept(ground: Ground, whole: Trace) -> Kept:
    """Return what it keeps, from a run of all subjects and one of others of unlike sizes."""
    twins = replace(ground, subjects=tuple(replace(one, shape=other_size(one.shape)) for one in ground.subjects))
    plan = plan_of(ground.subjects, ("drift",))
    fresh = Stepper(ground.way, plan.wholes, run.start(plan), ground.field(plan, 1)).optimizers
    traces = [whole]
    with contextlib.suppress(Refusal):  # it takes the sizes that were tried, and may not take others
        traces.append(twins.trace("drift", _STEPS))
    found = keys.param_keys(traces)
    found += keys.changed_group_entries(fresh, whole.optimizers) + keys.changed_attributes(fresh, whole.optimizers)
    return Kept(tuple(found), keys.has_state(whole.optimizers) and not keys.has_state(fresh))


def is_none_sensitive(ground: Ground, whole: Trace) -> bool:
    """Tell whether it matters that a gradient is absent and not zero: to any update of any param, then or later.

    Args:
        ground: What is measured.
        whole: Its run with gradients of the first kind.
    """
    if not ground.absents:
        return True
    plan = plan_of(ground.subjects, ("drift",))
    zeros = replace(ground.field(plan, STEPS).until(_STEPS), zeros_for_absent=True)
    try:
        path = run.run(ground.way, plan.wholes, run.start(plan), zeros).path
    except Refusal:  # it bears the one and not the other
        return True
    return bool(run.differing(whole.path[: _STEPS + 1], path).any())


def is_inert(ground: Ground, whole: Trace) -> bool | None:
    """Tell whether a step with zero gradients and learning rates of 0 leaves params and all later updates as they were.

    None where no group has a learning rate. torch's ``get_optimizer_state_dict`` takes such a step to create state.

    Args:
        ground: What is measured.
        whole: Its run with gradients of the first kind.
    """
    plan = plan_of(ground.subjects, ("drift",))
    found: list[bool] = []

    def rest(stepper: Stepper) -> None:
        before = stepper.read()
        found.append(any(group.get("lr") is not None for group in groups_of(stepper.optimizers)))
        stepper.rest()
        found.append(not bool(run.differing(before, stepper.read()).any()))

    gradients = ground.field(plan, STEPS).until(_STEPS)
    try:
        rested = run.run(ground.way, plan.wholes, run.start(plan), gradients, before=rest).path
    except Refusal:  # not even that
        return False
    if not found[0]:
        return None
    return found[1] and not bool(run.differing(rested, whole.path[: _STEPS + 1]).any())
