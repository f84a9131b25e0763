"""Every planted fault, on every backend of its row, is found at the first step it acts, and named; its clean twin is equal."""

from __future__ import annotations

import pytest

from truestep.backends.base import BACKENDS
from truestep.verification.planted import DROP_AFTER_STEP, FAULTS, HARMLESS
from truestep.verification.recipe import load
from truestep.verification.report import exit_status

STEPS, RANKS = 4, 2
CELLS = [(fault, backend) for fault, row in FAULTS.items() for backend in row.backends]
RAN: set[tuple[str, str]] = set()

# Fault -> the phase and step of its first finding, the key that it names, and words of its cause.
FOUND = {
    "step-every-micro-batch": ("reduce", 1, {"grad"}, "the first micro-batch of 4 alone was used"),
    "last-micro-batch-only": ("reduce", 1, {"grad"}, "the last micro-batch alone was used: the 3 before it are lost"),
    "state-dropped": ("between", DROP_AFTER_STEP + 1, {"sum", "exp_avg", "exp_avg_sq"}, "something other than the optimizer"),
    "sync-missing": ("reduce", 1, {"grad"}, "never reduced"),
    "sum-with-a-mean-loss": ("reduce", 1, {"grad"}, "summed over the 2 ranks instead of averaged"),
    "moment-from-global-gradient": ("update", 1, {"sum"}, None),
    "optimizer-before-wrap": ("update", 1, {"param"}, "the optimizer was built before the model was wrapped"),
}


def cell(fault, backend):
    """Return what a fault is planted in: the net of all edges with Adagrad, but where accelerate itself loses Adagrad's state."""
    known = {"recipe": "embedding-net", "optimizer": "adagrad"}
    if backend == "accelerate-fsdp2":
        known = {"recipe": "bytes-gpt:width=16,layers=1,context=16,batch=2", "optimizer": "adamw"}
    return {**known, "backend": backend, "world_size": RANKS, "steps": STEPS, "micro_batches": max(2, micro_batches(fault))}


def micro_batches(fault):
    return 4 if FAULTS[fault].min_micro_batches > 1 else 1


@pytest.mark.parametrize(("fault", "backend"), CELLS)
def test_a_planted_fault_is_found_where_it_first_acts(judged, fault, backend):
    asked = cell(fault, backend)
    report = judged(**asked, faults=[fault])
    RAN.add((fault, report.cells[0].backend))
    phase, step, keys, words = FOUND[fault]
    assert (report.verdict, exit_status(report)) == ("different", 1)
    first = report.first
    assert (first.law, first.phase, first.step, first.severity) == (FAULTS[fault].law, phase, step, "error"), str(first)
    assert first.param in dict(load(asked["recipe"]).model().named_parameters())
    assert first.key in keys
    assert words is None or words in first.cause
    assert not [finding for finding in report.findings if finding.severity == "error" and finding.step < step]


def test_every_cell_of_the_table_really_ran(request):
    chosen = {item.callspec.id for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")}
    if not {f"{fault}-{backend}" for fault, backend in CELLS} <= chosen:
        pytest.skip("only some of the cells were asked for")
    assert set(CELLS) == RAN
    assert len(RAN) == len(CELLS) >= 44
    assert {fault for fault, _ in RAN} == set(FAULTS)
    assert {backend for _, backend in RAN} == set(BACKENDS)


@pytest.mark.parametrize(("fault", "backend"), [(fault, backend) for fault, names in HARMLESS.items() for backend in names])
def test_what_is_no_fault_there_is_equal(equal, fault, backend):
    equal(**cell(fault, backend), faults=[fault])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_clean_twin_is_equal(equal, backend, count):
    equal(**{**cell("state-dropped", backend), "micro_batches": count})
