"""The table of phases and events: every pair is legal, or refused with what may come now."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from truestep.accumulate.phases import CALLS, TABLE, Event, Phase, allowed, following, refusal

# Every pair that is legal, written out once more: event -> from which phases to which.
LEGAL = {
    Event.OPEN: {Phase.IDLE: Phase.ACCUMULATING},
    Event.NEXT: {Phase.ACCUMULATING: Phase.ACCUMULATING},
    Event.BACKWARD: {Phase.ACCUMULATING: Phase.ACCUMULATING},
    Event.LAST_BACKWARD: {Phase.ACCUMULATING: Phase.REDUCED},
    Event.CLIP: {Phase.REDUCED: Phase.CLIPPED},
    Event.STEP: {Phase.CLIPPED: Phase.STEPPED},
    Event.SKIP: dict.fromkeys((Phase.ACCUMULATING, Phase.REDUCED, Phase.CLIPPED, Phase.BROKEN), Phase.SKIPPED),
    Event.FAIL: dict.fromkeys((Phase.ACCUMULATING, Phase.REDUCED, Phase.CLIPPED, Phase.BROKEN), Phase.BROKEN),
    Event.LEAVE: dict.fromkeys((Phase.STEPPED, Phase.SKIPPED), Phase.IDLE),
}
PAIRS = list(itertools.product(Phase, Event))


@pytest.mark.parametrize(("phase", "event"), PAIRS, ids=lambda one: one.value)
def test_a_pair_is_legal_or_refused_with_what_may_come_now(phase, event):
    expected = LEGAL[event].get(phase)
    assert following(phase, event) is expected
    assert (event in allowed(phase)) == (expected is not None)
    if expected is not None:
        return
    finding = refusal(phase, event)
    assert (finding.code, finding.severity, finding.law) == (f"window/{phase.value}", "error", None)
    assert phase.value in finding.expected
    assert finding.fix.endswith(".")
    may_come = [CALLS[each] for each in allowed(phase) if each in CALLS]
    assert may_come or phase is Phase.REDUCED  # where step is clip, then step
    assert all(call in finding.expected for call in may_come)


def test_a_window_left_neither_stepped_nor_skipped_is_refused_with_both_ways_out():
    finding = refusal(Phase.REDUCED, Event.LEAVE)
    assert "window.step()" in finding.expected
    assert "window.skip()" in finding.expected
    assert finding.found == "leave it"


def test_every_phase_can_be_reached_and_left():
    reached, new = {Phase.IDLE}, {Phase.IDLE}
    while new:
        new = {after for (before, _), after in TABLE.items() if before in new} - reached
        reached |= new
    assert reached == set(Phase)
    assert {before for before, _ in TABLE} == set(Phase)


def test_the_table_needs_no_torch():
    program = "import truestep.accumulate.phases, truestep.accumulate.weights, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
