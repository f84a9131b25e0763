"""K micro-batches make the step of one large batch: judged by `verify`, on every backend."""

from __future__ import annotations

import pytest
from matrix import FACTORS, STEPS, healthy, judged

from truestep.verification.pairwise import covering


@pytest.mark.parametrize("row", covering(FACTORS, allowed=healthy, seed=6), ids=lambda row: "-".join(map(str, row.values())))
def test_a_window_is_one_large_batch(row):
    report = judged(row)
    assert report.verdict == "equal", "\n".join(map(str, report.findings))
    (cell,) = report.cells
    assert cell.loop == "yours"
    assert cell.checks["backward"].bitwise > 0
    assert cell.checks["reduce"].bounded > 0
    assert all(figures.worst <= 1 for figures in cell.checks.values())
    if row["clip"] == "clipped":
        assert cell.checks["clip"].bounded >= STEPS


def test_where_accelerate_loses_the_state_of_adagrad_it_is_the_params_that_differ():
    row = {factor: values[0] for factor, values in FACTORS.items()}
    report = judged({**row, "backend": "accelerate-fsdp2", "optimizer": "adagrad", "micro_batches": 3})
    assert report.verdict == "different"
    assert {finding.law for finding in report.findings if finding.severity == "error"} == {"params"}
