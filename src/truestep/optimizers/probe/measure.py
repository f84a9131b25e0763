"""Measuring scope: what params share, how far an element reaches, and which cuts leave the updates as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field
from typing import Any

from torch import Tensor

from truestep.optimizers.probe import judge, run
from truestep.optimizers.probe.build import Way
from truestep.optimizers.probe.ground import Ground
from truestep.optimizers.probe.plan import FIRST_STEPS, KINDS, RESHAPED, STEPS, Cut, Subject, plan_of
from truestep.optimizers.probe.quiet import drew, randomness, seed
from truestep.optimizers.probe.run import Field, Trace
from truestep.words.scope import Scope, widest


@dataclass
class Measured:
    """What was seen so far, by the number of the subject in the ground.

    Attributes:
        shared: What params share: ``group``, ``model``, or None.
        broken_by_subject: The layouts whose updates are not those of the whole.
        reach_by_subject: How far an element was seen to reach.
        moved: The subjects that have moved.
        draws: Whether random numbers were drawn.
        whole: The last run of whole subjects, of one kind of gradients.
        notes: What else is to be said.
    """

    shared: Scope | None = None
    broken_by_subject: dict[int, set[str]] = dataclass_field(default_factory=dict)
    reach_by_subject: dict[int, Scope] = dataclass_field(default_factory=dict)
    moved: set[int] = dataclass_field(default_factory=set)
    draws: bool = False
    whole: Trace | None = None
    notes: list[str] = dataclass_field(default_factory=list)

    def scope(self, number: int, subject: Subject) -> Scope:
        """Return the scope of one subject, from all that was seen."""
        seen = [judge.scope_of_cuts(subject, self.broken_by_subject.get(number, ()))]
        seen += [self.reach_by_subject.get(number, Scope.ELEMENT), *([self.shared] if self.shared else [])]
        return widest(seen)

    def can_tell(self, layout: str, number: int, subject: Subject) -> bool:
        """Tell whether a cut of this layout could add to what is known of a subject."""
        broken = self.broken_by_subject.get(number, ())
        if layout == RESHAPED:
            return layout not in broken
        return layout not in broken and self.scope(number, subject).width < Scope.TENSOR.width


def measure(ground: Ground, seen: Measured, *, kinds: Sequence[str] = KINDS) -> None:
    """Measure what params share, then, where they share nothing, how far each looks; adds to `seen`."""
    _couple(ground, seen, kinds)
    if seen.shared is not None:
        return
    _reach(ground, seen, kinds)
    _cut(ground, seen, kinds[:1], FIRST_STEPS)  # what breaks at once is left out of what follows
    _cut(ground, seen, kinds, STEPS)


# -- What params share


def _couple(ground: Ground, seen: Measured, kinds: Sequence[str]) -> None:
    for kind in kinds:
        plan = plan_of(ground.subjects, (kind,))
        gradients, start, wholes = ground.field(plan, STEPS), run.start(plan), plan.wholes
        seed()
        before = randomness()
        whole = run.run(ground.way, wholes, start, gradients)
        seen.draws |= drew(before, randomness()) or has_generator(whole.optimizers)
        seen.whole = whole
        _note_path(seen, kind, whole)
        for subject in judge.disturbed_subjects(wholes):
            disturbed = run.run(ground.way, wholes, start, gradients.disturbed(wholes[subject].places))
            shared = judge.coupling(whole, disturbed, subject)
            seen.shared = widest([scope for scope in (seen.shared, shared) if scope]) if shared or seen.shared else None
        if seen.shared is Scope.MODEL:
            return


def _note_path(seen: Measured, kind: str, whole: Trace) -> None:
    moved = run.differing(whole.path[:-1], whole.path[1:]).any(0).split([len(member.places) for member, _ in whole.params])
    seen.moved |= {member.subject for (member, _), its in zip(whole.params, moved, strict=True) if bool(its.any())}
    finite = whole.path.isfinite().all(1)
    if not bool(finite.all()):
        seen.notes.append(f"params were not finite from step {int((~finite).nonzero()[0])} on, of gradients of kind {kind}")


def has_generator(optimizers: Sequence[Any]) -> bool:
    """Tell whether a generator of its own is among what the optimizers keep."""
    kept = [value for one in optimizers for value in (*vars(one).values(), *_state_values(one))]
    return any(type(value).__name__ in ("Generator", "Random", "RandomState") for value in kept)


def _state_values(optimizer: Any) -> Iterator[Any]:
    for entry in getattr(optimizer, "state", {}).values():
        yield from entry.values() if isinstance(entry, Mapping) else (entry,)


# -- Cuts


def _cut(ground: Ground, seen: Measured, kinds: Sequence[str], steps: int) -> None:
    plan = plan_of(ground.subjects, kinds)
    originals = [subject.original for subject in plan.subjects]

    def is_open(layout: str, number: int) -> bool:
        one = originals[number]
        # A reshape of what looks at its whole tensor anyway is judged by the short run, which costs less.
        known = steps > FIRST_STEPS and seen.scope(one, ground.subjects[one]).width >= Scope.TENSOR.width
        return not known and seen.can_tell(layout, one, ground.subjects[one])

    cuts = [cut for cut in plan.cuts if any(is_open(cut.layout, number) for number in cut.subjects)]
    if not cuts:
        return
    concerned = {number for cut in cuts for number in cut.subjects}
    wholes = [member for member in plan.wholes if member.subject in concerned]
    start, gradients = run.start(plan), ground.field(plan, steps)
    whole = run.run(ground.way, wholes, start, gradients)
    held, raised = _pieces(ground.way, cuts, start, gradients)
    if not seen.draws:  # pieces draw other numbers than wholes: they differ, and say nothing
        parts = judge.misfits([part for part in held if is_open(part.layout, part.subject)], whole)
        for part in _beyond_rounding(ground, parts, whole, start, gradients):
            seen.broken_by_subject.setdefault(originals[part.subject], set()).add(part.layout)
    for cut in raised:
        for number in cut.subjects:
            seen.broken_by_subject.setdefault(originals[number], set()).add(cut.layout)


def _beyond_rounding(
    ground: Ground, parts: Sequence[judge.Held], whole: Trace, start: Tensor, gradients: Field
) -> list[judge.Held]:
    """Return the parts that differ by more than rounding does, found by running their wholes anew with moved roundings."""
    numbers = {part.subject for part in parts}
    members = [member for member, _ in whole.params if member.subject in numbers]
    try:
        return judge.not_rounding(parts, whole, lambda: run.run(ground.way.with_plain_kernels(), members, start, gradients))
    except Exception:  # a rule that cannot be run with moved roundings: what differs, differs
        return list(parts)


def _pieces(way: Way, cuts: Sequence[Cut], start: Tensor, gradients: Field) -> tuple[list[judge.Held], list[Cut]]:
    """Run the pieces, the members of one layout on one rank in one optimizer; return them, and the cuts that raised."""
    held, raised = [], []
    for layout in dict.fromkeys(cut.layout for cut in cuts):
        together = [cut for cut in cuts if cut.layout == layout]
        try:
            held += _run_layout(way, together, start, gradients)
        except Exception:  # whatever a class says to a shape: then which of them it says it to
            for cut in together:
                try:
                    held += _run_layout(way, [cut], start, gradients)
                except Exception:
                    raised.append(cut)
    return held, raised


def _run_layout(way: Way, cuts: Sequence[Cut], start: Tensor, gradients: Field) -> list[judge.Held]:
    paths: dict[tuple[int, int], Tensor] = {}
    for rank in range(max(len(cut.members) for cut in cuts)):
        here = [(number, cut.members[rank]) for number, cut in enumerate(cuts) if rank < len(cut.members)]
        members = [member for _, member in here]
        path = run.run(way, members, start, gradients).path
        for (number, _), part in zip(here, path.split([len(member.places) for member in members], 1), strict=True):
            paths[number, rank] = part
    return [
        part
        for number, cut in enumerate(cuts)
        for part in judge.held_parts(cut, [paths[number, rank] for rank in range(len(cut.members))])
    ]


# -- Reach


def _reach(ground: Ground, seen: Measured, kinds: Sequence[str]) -> None:
    """Disturb one element of each param; its effects stay within it, as params share nothing."""
    if all(seen.scope(number, one).width >= Scope.TENSOR.width for number, one in enumerate(ground.subjects)):
        return
    plan = plan_of(ground.subjects, kinds)
    members, start, gradients = plan.wholes, run.start(plan), ground.field(plan, STEPS)
    calm = run.run(ground.way, members, start, gradients)
    disturbed = run.run(ground.way, members, start, gradients.disturbed([judge.chosen_place(member) for member in members]))
    moved = run.differing(calm.path, disturbed.path).any(0).split([len(member.places) for member in members])
    for member, its in zip(members, moved, strict=True):
        number = plan.subjects[member.subject].original
        reached = judge.reach(plan.subjects[member.subject], member, its)
        seen.reach_by_subject[number] = widest([seen.reach_by_subject.get(number, Scope.ELEMENT), reached])
