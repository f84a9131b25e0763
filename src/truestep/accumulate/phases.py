"""The life of an accumulation window, as a table: which event may come in which phase, and which phase follows.

    idle ──open──> accumulating ──last backward──> reduced ──clip──> clipped ──step──> stepped
                    │  ▲                              │                 │                  │
                    └──┘ backward                     └── skip ────> skipped <── skip      └─ leave ─> idle

A *window* is the micro-batches of one optimizer step. What is not in the table is refused. An exception inside a window breaks
it: what was accumulated is then of nobody knows which micro-batches, and can only be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from truestep.words.finding import Finding


class Phase(Enum):
    """Where a window is."""

    IDLE = "idle"
    ACCUMULATING = "accumulating"
    REDUCED = "reduced"  # every backward is over, and the gradient is that of all ranks
    CLIPPED = "clipped"  # weighted and clipped: what enters the step
    BROKEN = "broken"
    STEPPED = "stepped"
    SKIPPED = "skipped"


class Event(Enum):
    """What happens to it."""

    OPEN = "open"
    NEXT = "next micro-batch"
    BACKWARD = "backward"
    LAST_BACKWARD = "last backward"
    CLIP = "clip"
    STEP = "step"
    SKIP = "skip"
    FAIL = "fail"
    LEAVE = "leave"


TABLE: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.IDLE, Event.OPEN): Phase.ACCUMULATING,
    (Phase.ACCUMULATING, Event.NEXT): Phase.ACCUMULATING,
    (Phase.ACCUMULATING, Event.BACKWARD): Phase.ACCUMULATING,
    (Phase.ACCUMULATING, Event.LAST_BACKWARD): Phase.REDUCED,
    (Phase.ACCUMULATING, Event.SKIP): Phase.SKIPPED,
    (Phase.ACCUMULATING, Event.FAIL): Phase.BROKEN,
    (Phase.REDUCED, Event.CLIP): Phase.CLIPPED,
    (Phase.REDUCED, Event.SKIP): Phase.SKIPPED,
    (Phase.REDUCED, Event.FAIL): Phase.BROKEN,
    (Phase.CLIPPED, Event.STEP): Phase.STEPPED,
    (Phase.CLIPPED, Event.SKIP): Phase.SKIPPED,
    (Phase.CLIPPED, Event.FAIL): Phase.BROKEN,
    (Phase.BROKEN, Event.SKIP): Phase.SKIPPED,
    (Phase.BROKEN, Event.FAIL): Phase.BROKEN,
    (Phase.STEPPED, Event.LEAVE): Phase.IDLE,
    (Phase.SKIPPED, Event.LEAVE): Phase.IDLE,
}

# What a user calls for an event; the others are the window's own.
CALLS: Final[Mapping[Event, str]] = {
    Event.OPEN: "open a window",
    Event.BACKWARD: "window.backward(loss)",
    Event.STEP: "window.step()",
    Event.SKIP: "window.skip()",
    Event.LEAVE: "leave it",
}
# Events of which a user knows another one, for the messages.
_SHOWN_AS: Final[Mapping[Event, Event]] = {Event.LAST_BACKWARD: Event.BACKWARD, Event.CLIP: Event.STEP}


def following(phase: Phase, event: Event) -> Phase | None:
    """Return the phase after an event, or None where the event may not come now."""
    return TABLE.get((phase, event))


def allowed(phase: Phase) -> list[Event]:
    """Return the events that may come now.

    >>> [event.value for event in allowed(Phase.ACCUMULATING)]
    ['next micro-batch', 'backward', 'last backward', 'skip', 'fail']
    """
    return [event for (at, event) in TABLE if at is phase]


def refusal(phase: Phase, event: Event, about: str = "") -> Finding:
    """Return what is said of an event that may not come now: what may.

    Args:
        phase: Where the window is.
        event: What was tried.
        about: What else tells why, such as how many micro-batches are still to come.
    """
    shown = list(dict.fromkeys(_SHOWN_AS.get(each, each) for each in allowed(phase)))
    now = [CALLS[each] for each in shown if each in CALLS]
    told = CALLS.get(_SHOWN_AS.get(event, event), event.value)
    return Finding(
        f"window/{phase.value}",
        None,
        "error",
        expected=f"{' or '.join(now)}: the window is {phase.value}",
        found=told + (f", {about}" if about else ""),
        fix=_FIXES[phase],
    )


_FIXES: Final[Mapping[Phase, str]] = {
    Phase.IDLE: "Open a window first: for window in acc.windows(loader), or acc.open(micro_batches).",
    Phase.ACCUMULATING: "Call window.backward(loss) once for every micro-batch, or window.skip() to drop the window.",
    Phase.REDUCED: "Call window.step(), or window.skip() to drop the window.",
    Phase.CLIPPED: "Call window.skip() to drop the window.",
    Phase.BROKEN: "Call window.skip(): what was accumulated before the exception can only be dropped.",
    Phase.STEPPED: "Go on to the next window: each is stepped once.",
    Phase.SKIPPED: "Go on to the next window: this one is dropped.",
}
