"""Verdicts, figures and the JSON form of a report."""

import json
import math
import subprocess
import sys

import pytest

from truestep.verification.report import (
    COLUMNS,
    PHASES,
    Cell,
    Checks,
    Report,
    allowed_by,
    exit_status,
    judgement,
    no_checks,
    not_checked,
    row_of,
    told,
)
from truestep.words.errors import VerifyError
from truestep.words.finding import Finding

ERROR = Finding("update/rule", "update", "error", "a", "exp_avg", "1.0", "2.0", "Do it.", (1,), 2, "update", "a cause")
EARLIER = Finding("gradient/summed", "gradient", "error", "b", "grad", step=1, phase="reduce")
WARNING = Finding("state/dtype", "state", "warning", "c")
HARMLESS = Finding("update/zero-gradient", "update", "note", "d")
UNCHECKED = not_checked("backward", "operators were replaced", step=1)


def cell(findings=(), allow=(), backend="ddp", **known):
    about = {"backend": backend, "optimizer": "adamw", "world_size": 2, "micro_batches": 4, "steps": 3}
    return Cell.judged(findings, allow=allow, **{**about, **known})


@pytest.mark.parametrize(
    ("findings", "allow", "verdict", "first"),
    [
        ([], [], "equal", None),
        ([WARNING, HARMLESS], [], "equal", None),
        ([HARMLESS, UNCHECKED], [], "not checked", UNCHECKED),
        ([UNCHECKED], ["verify/not-checked-backward"], "equal", None),
        ([UNCHECKED], ["verify/*"], "equal", None),
        ([UNCHECKED], ["verify/not-checked-reduce"], "not checked", UNCHECKED),
        ([UNCHECKED, ERROR], [], "different", ERROR),
        ([ERROR], ["update/*"], "different", ERROR),
        ([ERROR, EARLIER], [], "different", EARLIER),
    ],
)
def test_a_verdict_follows_from_the_findings_and_what_is_allowed(findings, allow, verdict, first):
    assert judgement(findings, allow) == (verdict, first)


def test_within_a_step_the_earlier_phase_comes_first():
    late, early = (
        Finding("a/late", None, "error", step=2, phase="between"),
        Finding("a/early", None, "error", step=2, phase="data"),
    )
    assert judgement([late, early]) == ("different", early)


def test_allow_may_name_the_param():
    finding = not_checked("reduce", "why", param="layers.0.weight")
    assert allowed_by(finding, ["verify/*:layers.0.*"])
    assert not allowed_by(finding, ["verify/*:layers.1.*"])


def test_what_was_allowed_is_counted():
    assert cell([UNCHECKED, HARMLESS], allow=["verify/*"]).allowed == 1


@pytest.mark.parametrize(
    ("verdicts", "worst", "status"),
    [
        (["equal", "equal"], "equal", 0),
        (["equal", "not checked"], "not checked", 3),
        (["not checked", "different", "equal"], "different", 1),
        ([], "not checked", 3),
    ],
)
def test_a_report_is_as_bad_as_its_worst_cell(verdicts, worst, status):
    findings = {"equal": [], "not checked": [UNCHECKED], "different": [ERROR]}
    report = Report([cell(findings[verdict]) for verdict in verdicts])
    assert (report.verdict, exit_status(report)) == (worst, status)


def test_the_first_finding_of_a_report_is_that_of_the_first_cell_with_its_verdict():
    report = Report([cell([UNCHECKED]), cell([ERROR, EARLIER]), cell([ERROR])])
    assert report.first is EARLIER
    assert report.findings == [UNCHECKED, ERROR, EARLIER, ERROR]


def test_checks_add_up_and_keep_the_worst_ratio():
    total = Checks(3, 2, 0.25, ["a"]) + Checks(5, 7, 0.125, ["b", "a"])
    assert total == Checks(8, 9, 0.25, ["a", "b"])


def test_a_ratio_that_is_not_a_number_is_not_lost():
    assert math.isnan((Checks(worst=math.nan) + Checks(worst=0.5)).worst)
    assert math.isnan((Checks(worst=0.5) + Checks(worst=math.nan)).worst)


def test_a_cell_has_checks_for_every_phase_in_order():
    assert tuple(cell().checks) == PHASES
    assert cell().total == Checks()


def test_the_json_form_comes_back_the_same(tmp_path):
    checks = {**no_checks(), "reduce": Checks(3, 5, math.inf, ["why"])}
    report = Report(
        [
            cell(
                [ERROR],
                checks=checks,
                losses=[1.5, math.inf],
                reference_losses=[1.5, 2.5],
                seconds=1.25,
                faults=["state-dropped"],
            ),
            cell([UNCHECKED], backend="fsdp2", loop="yours", recipe="bytes-gpt"),
        ],
        {"torch": "2.13.0"},
    )
    path = tmp_path / "report.json"
    data = report.to_json(path)
    assert Report.from_json(data) == report
    assert Report.from_json(path) == report
    assert json.loads(path.read_text()) == data


def test_the_json_form_has_the_documented_names():
    data = Report([cell([ERROR])], {"torch": "2.13.0"}).to_json()
    assert list(data) == ["schema_version", "verdict", "cells", "versions"]
    names = "verdict backend optimizer world_size micro_batches steps loop first findings losses reference_losses seconds checks"
    assert set(names.split()) <= set(data["cells"][0])
    assert data["cells"][0]["first"]["code"] == "update/rule"


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"schema_version": 2}'])
def test_what_is_no_report_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "no-report.json"
    path.write_text(text)
    with pytest.raises(VerifyError, match="--json"):
        Report.from_json(path)


def test_a_report_that_cannot_be_written_says_where(tmp_path):
    with pytest.raises(VerifyError, match=r"cannot write the report to .*nowhere.*No such file"):
        Report([]).to_json(tmp_path / "nowhere" / "report.json")


def test_the_table_has_a_line_a_cell_under_its_heads():
    lines = Report([cell(), cell([ERROR], backend="zero1")]).table().splitlines()
    assert lines[0].split() == " ".join(COLUMNS).split()
    assert [line.split()[0] for line in lines[1:]] == ["ddp", "zero1"]
    assert lines[2].endswith("update/rule")
    assert len(row_of(cell())) == len(COLUMNS)


def test_a_finding_is_told_without_what_it_lacks():
    assert told(EARLIER) == [("code", "gradient/summed"), ("where", "b/grad, step 1, reduce")]
    assert [label for label, _ in told(ERROR)] == ["code", "where", "expected", "found", "cause", "fix"]


def test_reports_need_no_torch():
    code = "import sys, truestep.verification.report, truestep.verification.recipe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
