"""The full product knows what each cell should be, goes on where it was stopped, and says whether all is as expected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from truestep.backends.base import BACKENDS
from truestep.verification import matrix
from truestep.verification.matrix import COULD_NOT_RUN, EQUAL, EXPECTATIONS, MatrixCell, cells, expected, fits, main
from truestep.verification.planted import FAULTS, HARMLESS
from truestep.verification.report import Cell, Report
from truestep.words.errors import VerifyError
from truestep.words.finding import Finding

ALL = cells()


def report_of(wanted):
    """Return a report that is as expected."""
    findings = []
    if wanted.verdict == "different":
        findings = [Finding(f"{wanted.law}/made-up", wanted.law, "error", step=wanted.step, key=wanted.key, cause=wanted.cause)]
    return Report([Cell.judged(findings, backend="ddp", optimizer="adamw", world_size=2, micro_batches=1, steps=4)])


class FakeVerify:
    """Stands in for `verify`: answers what is expected of the cell, but for the numbers of calls that are to go otherwise."""

    def __init__(self):
        self.asked = []
        self.otherwise = {}

    def __call__(self, recipe, **asked):
        self.asked.append({"recipe": recipe, **asked})
        other = self.otherwise.get(len(self.asked))
        if isinstance(other, BaseException):
            raise other
        if other is not None:
            return other
        cell = ALL[len(self.asked) - 1]
        return report_of(expected(cell))


@pytest.fixture
def fake(monkeypatch):
    made = FakeVerify()
    run_one = matrix.outcome
    monkeypatch.setattr(matrix, "outcome", lambda cell: run_one(cell, made))
    return made


@pytest.fixture
def out(tmp_path):
    return tmp_path / "done.jsonl"


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


# --- the cells and what they should be


def test_the_product_is_full():
    healthy = [cell for cell in ALL if not cell.fault]
    factors = len(matrix.OPTIMIZERS) * len(matrix.WINDOWS) * len(matrix.RECIPES)
    assert len(healthy) == factors * (1 + (len(BACKENDS) - 1) * len(matrix.WORLD_SIZES))  # `single` has one rank
    assert len(set(ALL)) == len(ALL)


def test_every_fault_is_planted_in_every_cell_of_its_table():
    planted = {(cell.fault, cell.backend) for cell in ALL if cell.fault}
    assert planted == {(name, backend) for name, row in FAULTS.items() for backend in (*row.backends, *HARMLESS.get(name, ()))}


def test_every_row_of_the_expectations_is_met_by_some_cell():
    met = {next(row.why for row in EXPECTATIONS if row.applies(cell)) for cell in ALL}
    assert met == {row.why for row in EXPECTATIONS}


@pytest.mark.parametrize(
    ("cell", "verdict", "law"),
    [
        (MatrixCell("ddp", "adamw", 4, "embedding-net", 3), "equal", None),
        (MatrixCell("zero0", "adamw", 1, "embedding-net", 2), "different", "update"),
        (MatrixCell("accelerate-zero2", "decayed-sgd", 1, "embedding-net", 2), "different", "update"),
        (MatrixCell("zero3", "adagrad", 1, "embedding-net", 2), "equal", None),
        (MatrixCell("zero3", "adamw", 1, "bytes-gpt", 2), "equal", None),
        (MatrixCell("accelerate-fsdp2", "adagrad", 1, "bytes-gpt", 2), "different", "params"),
        (MatrixCell("zero2", "adamw", 4, "bytes-gpt", 2, "last-micro-batch-only"), "different", "gradient"),
        (MatrixCell("fsdp2", "adamw", 1, "bytes-gpt", 2, "optimizer-before-wrap"), "different", "params"),
        (MatrixCell("ddp", "adamw", 1, "bytes-gpt", 2, "optimizer-before-wrap"), "equal", None),
    ],
    ids=str,
)
def test_what_a_cell_should_be(cell, verdict, law):
    assert (expected(cell).verdict, expected(cell).law) == (verdict, law)


def test_a_report_that_differs_for_another_reason_is_not_as_expected():
    wanted = expected(MatrixCell("zero0", "adamw", 1, "embedding-net", 2))
    assert fits(wanted, "different", report_of(wanted).first.to_json())
    for other in ({"law": "gradient"}, {"step": 2}, {"key": "exp_avg"}, {"cause": "another"}):
        assert not fits(wanted, "different", report_of(replace(wanted, **other)).first.to_json())
    assert not fits(EQUAL, "different", report_of(wanted).first.to_json())


# --- running


def test_each_cell_is_one_line_and_the_totals_are_told(fake, out, capsys):
    assert main(["--out", str(out), "--limit", "4"]) == 0
    done = lines(out)
    assert [MatrixCell(**line["cell"]) for line in done] == ALL[:4]
    assert all(line["as_expected"] and line["verdict"] == line["expected"]["verdict"] for line in done)
    assert f"4 of {len(ALL)} cells done, 4 as expected" in capsys.readouterr().out
    assert fake.asked[0]["backend"] == ALL[0].backend
    assert fake.asked[0]["steps"] == matrix.STEPS >= 3


def test_cells_that_are_done_are_skipped(fake, out, capsys):
    main(["--out", str(out), "--limit", "3"])
    main(["--out", str(out), "--limit", "2"])
    assert [MatrixCell(**line["cell"]) for line in lines(out)] == ALL[:5]
    assert f"3 of {len(ALL)} cells are done already" in capsys.readouterr().out


def test_a_line_that_a_kill_cut_short_is_run_again(fake, out):
    main(["--out", str(out), "--limit", "2"])
    out.write_bytes(out.read_bytes()[:-20])
    fake.asked.clear()
    fake.asked.append({})  # the first cell is still done
    main(["--out", str(out), "--limit", "1"])
    assert [MatrixCell(**line["cell"]) for line in lines(out)] == ALL[:2]


def test_cells_of_other_releases_are_run_again(fake, out, monkeypatch):
    main(["--out", str(out), "--limit", "1"])
    monkeypatch.setattr(matrix.verifying, "versions", lambda: {"torch": "0.0"})
    fake.asked.clear()
    main(["--out", str(out), "--limit", "1"])
    assert [line["versions"] for line in lines(out)][1] == {"torch": "0.0"}
    assert len(lines(out)) == 2


def test_a_cell_that_is_not_as_expected_makes_status_1_and_is_named(fake, out, capsys):
    fake.otherwise[2] = report_of(matrix.Expected("different", law="ranks", step=3))
    assert main(["--out", str(out), "--limit", "3"]) == 1
    told = capsys.readouterr().out
    assert f"not as expected: {ALL[1]}: different: ranks/made-up 3" in told
    assert main(["--out", str(out), "--limit", "0"]) == 1


def test_what_is_done_is_judged_anew_by_todays_table(fake, out, monkeypatch):
    main(["--out", str(out), "--limit", "1"])
    everything_differs = matrix.Expectation("made up", lambda cell: True, matrix.Expected("different"))
    monkeypatch.setattr(matrix, "EXPECTATIONS", (everything_differs,))
    assert main(["--out", str(out), "--limit", "0"]) == 1


def test_a_cell_that_could_not_run_is_not_as_expected(fake, out, capsys):
    fake.otherwise[1] = VerifyError("rank 1 died.\nmore")
    assert main(["--out", str(out), "--limit", "2"]) == 1
    assert [line["verdict"] for line in lines(out)] == [COULD_NOT_RUN, ALL and expected(ALL[1]).verdict]
    assert f"{COULD_NOT_RUN}: rank 1 died." in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_is_done(fake, out, capsys):
    fake.otherwise[3] = KeyboardInterrupt()
    assert main(["--out", str(out), "--limit", "5"]) == 130
    assert len(lines(out)) == 2
    assert "Run it again to go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "line 1"),
        ('{"schema_version": 99}\n', "schema_version 99"),
        ('{"schema_version": 1, "cell": {}}\n', "TypeError"),
    ],
)
def test_a_file_that_is_none_of_these_is_refused(fake, out, capsys, content, message):
    out.write_text(content)
    assert main(["--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Give another --out" in told
    assert out.read_text() == content


def test_a_folder_that_is_not_there_is_refused(fake, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "none" / "done.jsonl"), "--limit", "1"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_it_runs_as_the_module_that_the_chore_calls(out):
    chore = [sys.executable, "-m", "truestep.verification.matrix", "--out", str(out), "--limit", "1"]
    ended = subprocess.run(chore, capture_output=True, text=True, env=os.environ, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert lines(out)[0]["verdict"] == "equal"
    assert lines(out)[0]["bitwise"] > 0
