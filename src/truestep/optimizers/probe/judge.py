"""Judging what was run: which cuts hold, how far one element reaches, and what params share.

Runs of the same shapes are compared bit for bit: where only the gradient of one param (or element) was changed, whatever else
moved depends on it. Pieces against wholes are compared bit for bit first; a kernel may round a piece otherwise, so that where
they differ the whole run's own sensitivity says what rounding can do, see `truestep.proof.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from truestep.optimizers.probe.build import groups_of
from truestep.optimizers.probe.plan import BOX, FLAT, FUSED, RESHAPED, Cut, Member, Subject, dim_layout, group_of
from truestep.optimizers.probe.run import Trace, differing, places_of, updates
from truestep.proof.update import Slots, judge, sensitivity
from truestep.words.scope import Scope

WINDOW_STEPS: Final = 8  # what differs is summed over as many steps, as one step of one element says little of rounding


# -- Pieces against wholes


@dataclass(frozen=True)
class Held:
    """One part of a cut as it was run, beside the same elements of the whole; both paths of shape (steps + 1, numel)."""

    layout: str
    subject: int
    places: Tensor
    piece: Tensor


def held_parts(cut: Cut, paths: Sequence[Tensor]) -> list[Held]:
    """Return the parts of a cut, given the path of each member."""
    return [
        Held(
            cut.layout,
            part.subject,
            torch.tensor(cut.members[part.rank].places[part.start : part.stop]),
            paths[part.rank][:, part.start : part.stop],
        )
        for part in cut.parts
    ]


def misfits(parts: Sequence[Held], whole: Trace) -> list[Held]:
    """Return the parts that took another path than in the whole run, in any bit."""
    column = _columns(whole)
    return [part for part in parts if bool(differing(whole.path[:, column[part.places]], part.piece).any())]


def not_rounding(parts: Sequence[Held], whole: Trace, again: Callable[[], Trace]) -> list[Held]:
    """Return those of the parts that differ by more than rounding does; `again` runs the wholes anew."""
    if not parts:
        return []

    def slots(trace: Trace) -> Slots:
        moves, column = trace.updates, _columns(trace)
        return _windows([moves[:, column[part.places]] for part in parts])

    expected, found = slots(whole), _windows([updates(part.piece) for part in parts])
    moves = sensitivity(lambda: slots(again()), unmoved=expected)
    beyond = {judged.slot[0] for judged in judge(found, expected, moves=moves) if judged.verdict == "differs"}
    return [part for number, part in enumerate(parts) if str(number) in beyond]


def _windows(moves: Sequence[Tensor]) -> Slots:
    return {
        (str(number), str(window)): window_moves
        for number, its in enumerate(moves)
        for window, window_moves in enumerate(its.split(WINDOW_STEPS))
    }


def _columns(trace: Trace) -> Tensor:
    """Return where each place is in a trace's path."""
    places = places_of([member for member, _ in trace.params])
    columns = torch.full((int(places.max()) + 1,), -1)
    columns[places] = torch.arange(len(places))
    return columns


def scope_of_cuts(subject: Subject, broken: Collection[str]) -> Scope:
    """Return the scope that the broken layouts of one subject tell."""
    failed = set(broken)
    first, others = dim_layout(0) in failed, any(dim_layout(dim) in failed for dim in range(1, subject.ndim))
    if first and (others or subject.ndim < 2):
        return Scope.TENSOR
    if first:
        return Scope.COLUMN
    if others:
        return Scope.ROW
    # Flat ranges of what a reshape changes say no more than the reshape; else they, and boxes, look beyond rows and columns.
    telling = {BOX} if RESHAPED in failed else {BOX, FLAT, FUSED}
    return Scope.TENSOR if telling & failed else Scope.ELEMENT


def may_share(whole: Trace, subjects: Collection[int]) -> bool:
    """Tell whether subjects may lie in one tensor, as an engine fuses them: those that are stepped with the same settings."""
    settings = []
    for subject in subjects:
        param = _param(whole, subject)
        group = next((one for one in groups_of(whole.optimizers) if any(param is its for its in one["params"])), {})
        settings.append({key: repr(value) for key, value in group.items() if key not in ("params", "param_names")})
    return all(its == settings[0] for its in settings)


# -- One element, one param, against the others


def chosen_place(member: Member) -> int:
    """Return the place of the element that is disturbed: off the middle, the borders and the diagonal where it can be."""
    return member.places[2 * len(member.places) // 3]


def reach(subject: Subject, member: Member, moved: Tensor) -> Scope:
    """Return how far the disturbed element reached.

    Args:
        subject: The whole param.
        member: The same as it was run.
        moved: Bool of shape (numel,): which elements took another path.
    """
    there = moved.view(subject.shape).clone()
    at = torch.tensor(member.places.index(chosen_place(member)))
    index = tuple(int(one) for one in torch.unravel_index(at, subject.shape)) if subject.ndim else ()
    there[index] = False
    if not bool(there.any()):
        return Scope.ELEMENT
    if subject.ndim < 2:
        return Scope.TENSOR
    same_row = there.clone()
    same_row[index[0]] = False
    same_column = there.clone()
    same_column.movedim(0, -1)[index[1:]] = False
    if not bool(same_row.any()):
        return Scope.ROW
    return Scope.TENSOR if bool(same_column.any()) else Scope.COLUMN


def coupling(calm: Trace, disturbed: Trace, subjects: Sequence[int]) -> Scope | None:
    """Return what params share, where disturbing some moved others: ``group`` or ``model``; None where it moved none.

    A set-up with one group only cannot tell them apart: it is ``model``.
    """
    moved = differing(calm.path, disturbed.path).any(0).split([len(member.places) for member, _ in calm.params])
    reached = [
        member for (member, _), its in zip(calm.params, moved, strict=True) if member.subject not in subjects and bool(its.any())
    ]
    if not reached:
        return None
    groups = groups_of(calm.optimizers)
    home = [{id(param) for param in group["params"]} for group in groups]
    own = {other for ids in home if any(id(_param(calm, subject)) in ids for subject in subjects) for other in ids}
    if len([ids for ids in home if ids]) < 2:
        return Scope.MODEL
    return Scope.GROUP if all(id(_param(calm, member.subject)) in own for member in reached) else Scope.MODEL


def _param(trace: Trace, subject: int) -> Tensor:
    return next(param for member, param in trace.params if member.subject == subject)


def disturbed_subjects(members: Sequence[Member]) -> list[int]:
    """Return which subjects to disturb in turn: the largest of each group."""
    largest_first = sorted(members, key=lambda member: len(member.places), reverse=True)
    by_group: dict[int, Member] = {}
    for member in largest_first:
        by_group.setdefault(group_of(member.subject), member)
    return [member.subject for member in by_group.values()]
