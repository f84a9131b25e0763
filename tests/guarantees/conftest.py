"""What the promises about `verify` are tested with: real ranks, and the programs of tests/verification/programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from truestep.verification.verifying import verify

PROGRAMS = Path(__file__).parents[1] / "verification" / "programs"


@pytest.fixture
def programs():
    """The folder of the programs."""
    return PROGRAMS


@pytest.fixture
def judged():
    """Run one cell; a recipe ``with_ddp:healthy`` is an object of a program's file, a name without a colon a built-in one."""

    def judge(recipe, **asked):
        program, _, name = recipe.partition(":")
        path = PROGRAMS / f"{program}.py"
        report = verify(f"{path}:{name}" if path.is_file() else recipe, **asked)
        assert len(report.cells) == 1
        return report

    return judge


@pytest.fixture
def equal(judged):
    """Run one cell that must be equal; the failure shows what was found."""

    def judge(recipe, **asked):
        report = judged(recipe, **asked)
        assert report.verdict == "equal", "\n".join(map(str, report.findings))
        (cell,) = report.cells
        assert all(cell.checks[phase].bitwise for phase in ("data", "backward", "update", "between")), cell.checks
        assert cell.checks["reduce"].bounded > 0
        assert all(figures.worst <= 1 for figures in cell.checks.values())
        return cell

    return judge
