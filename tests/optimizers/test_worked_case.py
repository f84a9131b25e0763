"""The worked case of the docs: the optimizer is what the page says it is, and its figures are those that are measured."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import truestep as ts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "worked_case.md"
CLAIMS = {"counters": "passed", "moved-state": "passed", "repeatable": "passed", "state-tracks-bf16": "warning"}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = ROOT / "examples" / "moments_on_cpu.py"
    spec = importlib.util.spec_from_file_location("moments_on_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moments_on_cpu"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_report_says_of_each_claim_what_the_page_says(example: ModuleType) -> None:
    report = ts.check_optimizer(example.ParkedAdamW, reference="adamw")
    assert report.passed
    assert {name: report.row(name).outcome for name in CLAIMS} == CLAIMS
    assert any(finding.key == "exp_avg_sq" for finding in report.row("state-tracks-bf16").findings)
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in CLAIMS)


def figures(page: str) -> dict[str, tuple[float, float]]:
    """Return ``gradients -> (second moment, update)`` in bfloat16, as the page has them."""
    rows = re.findall(r"^\| (\S[^|]*) \| ([\d.]+) x \| ([\d.]+) x \| 1.00 x \|$", page, re.MULTILINE)
    return {name: (float(second), float(update)) for name, second, update in rows}


@pytest.mark.parametrize("number", range(5))
def test_the_figures_of_the_page_are_those_that_are_measured(example: ModuleType, number: int) -> None:
    course = example.COURSES[number]
    told = figures(PAGE.read_text(encoding="utf-8"))
    assert set(told) == {one.name for one in example.COURSES}
    low = example.followed(course, torch.bfloat16, None)
    # Two digits are printed. Noise is the same noise; what an other CPU rounds otherwise does not show in a median.
    assert (round(low.second[-1], 2), round(low.update[-1], 2)) == pytest.approx(told[course.name], abs=0.02)
    fine = example.followed(course, torch.bfloat16, torch.float32, steps=1500)
    assert (round(fine.second[-1], 2), round(fine.update[-1], 2)) == (1.0, 1.0)
    assert low.lost >= 0.95


def test_replicas_with_equal_gradients_have_equal_states(example: ModuleType) -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 7).bfloat16()) for _ in range(2)]
    replicas = [example.ParkedAdamW([param]) for param in params]
    for step in range(20):
        for param, replica in zip(params, replicas, strict=True):
            param.grad = torch.full((7,), 0.1 * (step + 1)).bfloat16()
            replica.step()
    states = [replica.state[param] for param, replica in zip(params, replicas, strict=True)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_table_has_a_row_for_each_course_and_setting(example: ModuleType) -> None:
    assert len(example.table(steps=3).splitlines()) == 2 + 3 * len(example.COURSES)
