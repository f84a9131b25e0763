"""K micro-batches make the step of one large batch: judged by `verify`, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from truestep.backends.base import BACKENDS
from truestep.verification.pairwise import covering
from truestep.verification.verifying import verify

RECIPES = Path(__file__).parent / "recipes.py"
FACTORS = {
    "backend": list(BACKENDS),
    "optimizer": ["adamw", "adagrad", "momentum"],
    "micro_batches": [1, 3, 4],
    "weights": ["equal", "ahead", "late"],
    "reduction": ["mean", "sum"],
    "tail": ["full", "tail"],
    "clip": ["free", "clipped"],
    "world_size": [2, 3],
}
STEPS = 4


def healthy(row):
    return (row["backend"], row["optimizer"]) != ("accelerate-fsdp2", "adagrad")  # accelerate itself loses its state


def judged(row):
    name = "_".join(row[factor] for factor in ("optimizer", "weights", "reduction", "tail", "clip"))
    asked = {factor: row[factor] for factor in ("backend", "micro_batches", "world_size")}
    return verify(f"{RECIPES}:{name}", steps=STEPS, **asked)


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
