"""Measuring scope: what params share, how far an element reaches, and which cuts leave the updates as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from truestep.optimizers.probe import judge, run
from truestep.optimizers.probe.build import Refusal, Way
from truestep.optimizers.probe.ground import Ground
from truestep.optimizers.probe.plan import FIRST_STEPS, RESHAPED, STEPS, Cut, Member, Plan, Subject, plan_of
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
        whole_by_kind: The runs of whole subjects, with each kind of gradients alone.
        notes: What else is to be said.
    """

    shared: Scope | None = None
    broken_by_subject: dict[int, set[str]] = field(default_factory=dict)
    reach_by_subject: dict[int, Scope] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    draws: bool = False
    whole_by_kind: dict[str, Trace] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def scope(self, number: int, subject: Subject) -> Scope:
        """Return the scope of one subject, from all that was seen."""
        seen = [judge.scope_of_cuts(subject, self.broken_by_subject.get(number, ()))]
        seen += [self.reach_by_subject.get(number, Scope.ELEMENT), *([self.shared] if self.shared else [])]
        return widest(seen)


@dataclass(frozen=True)
class _Trial:
    """A run of whole subjects, of all kinds side by side, which is allowed where they share nothing; and what it started from."""

    ground: Ground
    plan: Plan
    wholes: tuple[Member, ...]
    start: Tensor
    gradients: Field
    calm: Trace


def measure(ground: Ground, seen: Measured, *, kinds: Sequence[str]) -> None:
    """Measure what params share, then, where they share nothing, how far each looks; adds to `seen`."""
    _couple(ground, seen, kinds)
    if seen.shared is not None:
        return
    # What shows at once is left out of the long run.
    for steps in (FIRST_STEPS, STEPS):
        if (trial := _trial(ground, seen, kinds, steps)) is not None:
            _reach(trial, seen)
            _cut(trial, seen, kinds if steps > FIRST_STEPS else kinds[:1])


def _trial(ground: Ground, seen: Measured, kinds: Sequence[str], steps: int) -> _Trial | None:
    """Run the whole subjects of which there is more to learn, if there are any."""
    plan = plan_of(ground.subjects, kinds)
    wholes = tuple(member for member in plan.wholes if _is_open(seen, plan, member.subject, steps))
    if not wholes:
        return None
    start, gradients = run.start(plan), ground.field(plan, STEPS).until(steps)
    return _Trial(ground, plan, wholes, start, gradients, run.run(ground.way, wholes, start, gradients))


def _is_open(seen: Measured, plan: Plan, number: int, steps: int, layout: str | None = None) -> bool:
    """Tell whether a run of so many steps could tell more of a subject, or a cut of it in this layout could."""
    subject = plan.subjects[number]
    broken = seen.broken_by_subject.get(subject.original, ())
    if layout in broken:
        return False
    if seen.scope(subject.original, subject).width < Scope.TENSOR.width:
        return True
    # A reshape of what looks at its whole tensor anyway is judged by the short run, which costs less.
    return steps == FIRST_STEPS and layout in (None, RESHAPED) and RESHAPED not in broken


# -- What params share


def _couple(ground: Ground, seen: Measured, kinds: Sequence[str]) -> None:
    for kind in kinds:
        plan = plan_of(ground.subjects, (kind,))
        gradients, start, wholes = ground.field(plan, STEPS), run.start(plan), plan.wholes
        seed()
        before = randomness()
        whole = run.run(ground.way, wholes, start, gradients)
        seen.draws |= drew(before, randomness()) or has_generator(whole.optimizers)
        seen.whole_by_kind[kind] = whole
        _note_path(seen, kind, whole)
        chosen = judge.disturbed_subjects(wholes)
        # One of each group at once; only if another then moves is it worth knowing which of them moved it.
        together = gradients.disturbed([place for subject in chosen for place in wholes[subject].places])
        if judge.coupling(whole, run.run(ground.way, wholes, start, together), chosen) is not None:
            for subject in chosen:
                disturbed = run.run(ground.way, wholes, start, gradients.disturbed(wholes[subject].places))
                shared = judge.coupling(whole, disturbed, [subject])
                seen.shared = widest([scope for scope in (seen.shared, shared, Scope.GROUP) if scope])
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


def _cut(trial: _Trial, seen: Measured, kinds: Sequence[str]) -> None:
    plan, steps = trial.plan, trial.gradients.steps
    if seen.draws and steps > FIRST_STEPS:
        return  # pieces draw other numbers than wholes, and say nothing but whether they can be stepped

    def is_open(layout: str, number: int) -> bool:
        return plan.subjects[number].kind in kinds and _is_open(seen, plan, number, steps, layout)

    def note(layout: str, number: int) -> None:
        seen.broken_by_subject.setdefault(plan.subjects[number].original, set()).add(layout)

    cuts = [cut for cut in plan.cuts if any(is_open(cut.layout, number) for number in cut.subjects)]
    whole = next(iter(seen.whole_by_kind.values()))
    cuts = [cut for cut in cuts if judge.may_share(whole, {plan.subjects[number].original for number in cut.subjects})]
    held, raised = _pieces(trial.ground.way, cuts, trial.start, trial.gradients)
    if not seen.draws:
        parts = judge.misfits([part for part in held if is_open(part.layout, part.subject)], trial.calm)
        for part in _beyond_rounding(trial, parts):
            note(part.layout, part.subject)
    for cut in raised:
        for number in cut.subjects:
            note(cut.layout, number)


def _beyond_rounding(trial: _Trial, parts: Sequence[judge.Held]) -> list[judge.Held]:
    """Return the parts that differ by more than rounding does, found by running their wholes anew with moved roundings."""
    numbers = {part.subject for part in parts}
    members = [member for member in trial.wholes if member.subject in numbers]
    way = trial.ground.way.with_plain_kernels()
    try:
        return judge.not_rounding(parts, trial.calm, lambda: run.run(way, members, trial.start, trial.gradients))
    except Refusal:  # a rule that cannot be run with moved roundings: what differs, differs
        return list(parts)


def _pieces(way: Way, cuts: Sequence[Cut], start: Tensor, gradients: Field) -> tuple[list[judge.Held], list[Cut]]:
    """Run the pieces; return them, and the cuts that the class refused.

    All pieces of one rank are in one optimizer: they share nothing. Where names tell a class what to do, or it refuses some
    piece, those of one layout are, as they would be on ranks; and where it refuses again, each alone.
    """
    by_layout = [[cut for cut in cuts if cut.layout == layout] for layout in dict.fromkeys(cut.layout for cut in cuts)]
    batches = by_layout if way.form in ("function", "names", "model") else [list(cuts)]
    held, raised = [], []
    while batches:
        batch = batches.pop()
        layouts = {cut.layout for cut in batch}
        try:
            held += _run_pieces(way, batch, start, gradients) if batch else []
        except Refusal:
            if len(batch) == 1:
                raised += batch
            else:
                batches += [[cut] for cut in batch] if len(layouts) == 1 else by_layout
    return held, raised


def _run_pieces(way: Way, cuts: Sequence[Cut], start: Tensor, gradients: Field) -> list[judge.Held]:
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


def _reach(trial: _Trial, seen: Measured) -> None:
    """Disturb one element of each param; its effects stay within it, as params share nothing."""
    gradients = trial.gradients.disturbed([judge.chosen_place(member) for member in trial.wholes])
    disturbed = run.run(trial.ground.way, trial.wholes, trial.start, gradients)
    moved = run.differing(trial.calm.path, disturbed.path).any(0).split([len(member.places) for member in trial.wholes])
    for member, its in zip(trial.wholes, moved, strict=True):
        subject = trial.plan.subjects[member.subject]
        reached = judge.reach(subject, member, its)
        seen.reach_by_subject[subject.original] = widest([seen.reach_by_subject.get(subject.original, Scope.ELEMENT), reached])
