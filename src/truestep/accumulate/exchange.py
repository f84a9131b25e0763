"""How ranks come to one verdict about an event of a window: all go on, or all raise.

Before an event that communicates, each rank brings a row of a few numbers: the event, whether something is wrong here, and what
the others have to know. Rows are sent over the CPU; no device is read, and nothing more is sent while all is well. A rank that
finds misuse where others communicate nothing yet brings it at once and waits: they meet it at their next event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from truestep.accumulate.phases import CALLS, Event
from truestep.state import ranks
from truestep.words.errors import WindowError
from truestep.words.finding import Finding, listed

_EVENTS = list(Event)


@dataclass(frozen=True)
class Row:
    """What one rank brings: numbers, each sent as a float64.

    Attributes:
        event: Index of the event.
        wrong: 1 if something is wrong on this rank.
        micro_batches: The window's length as this rank means it.
        drawn: Micro-batches that this rank has for it.
        counted: 1 if it counts items.
        items: How many it has, or those that it knows by now.
        ever: 1 if it has, or had, a batch to replay.
    """

    event: float
    wrong: float = 0
    micro_batches: float = 0
    drawn: float = 0
    counted: float = 0
    items: float = 0
    ever: float = 0


def row(event: Event, **values: float) -> Row:
    """Return a row."""
    return Row(float(_EVENTS.index(event)), **values)


def exchanged(alone: bool, mine: Row, findings: Sequence[Finding], reason: BaseException | None = None) -> list[Row]:
    """Return the rows of all ranks. Collective: every rank, unless `alone`.

    Args:
        alone: This process is the only one.
        mine: This rank's.
        findings: What is wrong on this rank.
        reason: An exception of the user's own code: this rank raises it, the others an error that names it.

    Raises:
        WindowError: On all ranks, if something is wrong on any, or if they are at different events.
    """
    if alone:
        if reason is not None:
            raise reason
        if findings:
            raise WindowError("", findings)
        return [mine]
    brought = Row(mine.event, float(bool(findings) or reason is not None), *astuple(mine)[2:])
    rows = [Row(*values) for values in ranks.rows(astuple(brought))]
    what = "agree on a window"
    if any(each.wrong for each in rows):
        with ranks.agreeing(what, error=WindowError):
            if reason is not None:
                raise reason
            ranks.agree(findings, error=WindowError, what=what)
    if len({each.event for each in rows}) > 1:
        raise WindowError("", [_apart(rows)])
    return rows


def _apart(rows: Sequence[Row]) -> Finding:
    at = [_EVENTS[int(each.event)] for each in rows]
    told = [f"rank {rank} at {CALLS.get(event, event.value)}" for rank, event in enumerate(at)]
    return Finding(
        "window/ranks-apart",
        None,
        "error",
        expected="every rank at the same event of the window",
        found=listed(told),
        fix="Make every rank take the same path through the loop; a rank that is out of batches is replayed for you.",
        ranks=tuple(range(len(rows))),
    )
