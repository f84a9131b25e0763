"""Findings: their text, their JSON, their merging, and the errors that carry them."""

from __future__ import annotations

import json
import pickle

import pytest

from truestep.words import errors as error_tree
from truestep.words.errors import TrueStepError
from truestep.words.finding import LAWS, SCHEMA_VERSION, SEVERITIES, Finding, errors, listed, merged

STALE = Finding(
    "params/stale",
    "params",
    "error",
    "layers.3.weight",
    expected="a live parameter of the model",
    found="the one from before fully_shard",
    fix="Build the optimizer after wrapping.",
    ranks=(1,),
)
CLASSES = [
    value for value in vars(error_tree).values() if isinstance(value, type) and issubclass(value, TrueStepError)
]  # every error of the tree


def test_a_finding_reads_as_one_line():
    assert str(STALE) == (
        "params/stale layers.3.weight on rank 1: expected a live parameter of the model, found the one from before fully_shard. "
        "Build the optimizer after wrapping."
    )


def test_every_part_has_its_place_in_the_line():
    finding = Finding(
        "update/rule", "update", "error", "w", "exp_avg", "a", "b", "Fix it.", (0, 1, 2, 3, 4), 7, "update", "the cause"
    )
    assert str(finding) == (
        "update/rule w/exp_avg on rank 0, 1, 2 and 2 more at step 7 (update): expected a, found b. Cause: the cause. Fix it."
    )
    assert str(Finding("run/ended", None, "note")) == "run/ended."


def test_json_holds_everything_and_gives_it_back():
    data = json.loads(json.dumps(STALE.to_json()))
    assert data["schema_version"] == SCHEMA_VERSION
    assert Finding.from_json(data) == STALE


def test_entries_of_a_newer_schema_are_passed_by():
    assert Finding.from_json({**STALE.to_json(), "schema_version": 99, "mood": "calm"}) == STALE


def test_merging_joins_ranks_of_one_claim_and_keeps_the_order():
    other = Finding("state/shape", "state", "warning", ranks=(3,))
    assert merged([STALE, other, _with_ranks(STALE, (0, 1)), _with_ranks(STALE, (5,))]) == [_with_ranks(STALE, (0, 1, 5)), other]
    assert merged([]) == []


def _with_ranks(finding: Finding, ranks: tuple[int, ...]) -> Finding:
    return Finding.from_json({**finding.to_json(), "ranks": ranks})


def test_only_errors_stop_a_run():
    found = [Finding("a/b", None, severity) for severity in SEVERITIES]
    assert [finding.severity for finding in errors(found)] == ["error"]


def test_at_most_three_are_listed_and_the_others_counted():
    assert listed([]) == ""
    assert listed([1, 2, 3]) == "1, 2, 3"
    assert listed(range(20)) == "0, 1, 2 and 17 more"


def test_there_are_six_laws():
    assert list(LAWS) == ["params", "state", "gradient", "update", "ranks", "drift"]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_pickles_with_its_findings(kind):
    error = pickle.loads(pickle.dumps(kind("it broke", [STALE])))
    assert type(error) is kind
    assert (str(error), error.findings) == ("it broke", (STALE,))
    assert str(kind("", [STALE])) == str(STALE)
    assert issubclass(kind, TrueStepError)
