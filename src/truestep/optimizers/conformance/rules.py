"""Checks against a reference: is the update the rule that its author says it is?

Each looks where one thing shows and the others do not: steps with young moments and large gradients (the bias corrections), a
million steps on (without them), gradients over twelve decades (eps), params that are large beside their update (weight decay).
"""

from __future__ import annotations

from typing import Final

from truestep.optimizers.conformance.given import gradients
from truestep.optimizers.conformance.problem import NotApplicable
from truestep.optimizers.conformance.reference import SMALL, Reference, demand_agreement, walked
from truestep.optimizers.conformance.subject import Case, Subject

STEPS: Final = 4
DECAY: Final = 0.25
LARGE: Final = 64.0  # moments without corrections begin small: gradients so large that eps does not show beside them


def young_updates(case: Case) -> str:
    """The first updates, from the very first step."""
    subject, held = case.subject, _given(case)
    bench = subject.bench(size=SMALL).set(weight_decay=0.0)
    return demand_agreement(held, walked(subject, bench, STEPS), "the first updates")


def late_updates(case: Case) -> str:
    """Updates a million steps on: the rule without what only young moments have."""
    subject, held = case.subject, _given(case)
    _counted(subject)
    bench = subject.bench(size=SMALL).set(weight_decay=0.0)
    start = bench.values()
    walk = walked(subject, bench, STEPS, aged=True, given=lambda step: gradients(start, step, times=LARGE))
    return demand_agreement(held, walk, "the late updates")


def eps(case: Case) -> str:
    """Where eps stands, and what it is."""
    subject, held = case.subject, _given(case)
    if "eps" not in held.hyper(subject.usual):
        raise NotApplicable(f"{held.name} has no eps")
    bench = subject.bench(size=SMALL).set(weight_decay=0.0)
    start = bench.values()
    walk = walked(subject, bench, STEPS, given=lambda step: gradients(start, step, decades=True))
    return demand_agreement(held, walk, "the updates by tiny gradients")


def decay(case: Case) -> str:
    """Whether weight decay is coupled, and with what it is multiplied."""
    subject, held = case.subject, _given(case)
    if not subject.has("weight_decay") or "weight_decay" not in held.hyper(subject.usual):
        raise NotApplicable("its groups, or the reference, have no weight_decay")
    bench = subject.bench().set(weight_decay=DECAY)
    walk = walked(subject, bench, STEPS, aged=bool(subject.counters))
    return demand_agreement(held, walk, f"the updates with weight_decay={DECAY}")


def _given(case: Case) -> Reference:
    if case.reference is None:
        raise NotApplicable("no reference was given: reference='adamw', or a class")
    held: Reference = case.reference
    return held


def _counted(subject: Subject) -> None:
    if not subject.counters:
        raise NotApplicable("it keeps no counter")
