"""The conformance suite: a healthy class passes it, each mutant is failed by the row named for it, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import MUTANTS, Bfloat16SecondMoment, BiasOffByOne, GradientScaled, PlainAdamW
from torch import Tensor
from wrong import WRONG

import truestep as ts
from truestep.optimizers.conformance import CHECKS
from truestep.optimizers.conformance.problem import NotApplicable
from truestep.optimizers.conformance.reference import reference_of
from truestep.optimizers.conformance.run import explained, outcome_of
from truestep.optimizers.conformance.subject import Case, subject_of
from truestep.optimizers.probe.quiet import quiet
from truestep.words.errors import TrueStepError, UnsupportedError
from truestep.words.finding import LAWS

# True of the plain class too: pure bfloat16 loses what is below half a spacing.
ALWAYS = {"state-tracks-bf16"}


def case(optimizer: Any, reference: Any = None, params: Any = None, **settings: Any) -> Case:
    subject = subject_of(optimizer, params, settings)
    return Case(subject, reference_of(reference, subject))


def outcome(name: str, optimizer: Any, **asked: Any) -> str:
    with quiet():
        return outcome_of(CHECKS[name], case(optimizer, **asked)).outcome


# -- The table


def test_there_are_at_least_25_checks_and_each_says_its_law_reason_and_source() -> None:
    assert len(CHECKS) >= 25
    for check in CHECKS.values():
        assert check.law in LAWS
        assert check.reason
        assert check.source
        assert check.function.__doc__ or check.name.startswith("kernels")
        assert check.code == f"{check.law}/{check.name}"


def test_what_a_check_follows_is_a_check_and_no_check_follows_itself() -> None:
    def roots(name: str) -> set[str]:
        return {name}.union(*(roots(earlier) for earlier in CHECKS[name].follows))

    for check in CHECKS.values():
        assert set(check.follows) <= set(CHECKS)
        assert all(check.name not in roots(earlier) for earlier in check.follows)


def test_there_is_a_wrong_optimizer_for_each_check() -> None:
    assert set(WRONG) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_fails_the_optimizer_that_is_wrong_in_what_it_checks(name: str) -> None:
    reference = None if WRONG[name].__module__.startswith("torch") else "adamw"
    expected = "failed" if CHECKS[name].severity == "error" else "warning"
    assert outcome(name, WRONG[name], reference=reference if name.endswith(("updates", "place", "strides")) else None) == expected


# -- A healthy class, and ten mutants


def test_adamw_written_out_plainly_passes_every_check() -> None:
    report = ts.check_optimizer(PlainAdamW, reference="adamw")
    assert report.passed
    assert {row.name for row in report.rows if row.outcome in ("failed", "warning")} == ALWAYS
    assert report.reference == "the textbook's adamw"
    assert [place.verdict for place in report.answer.places] == ["exact", "exact", "exact"]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_mutant_is_failed_by_the_row_named_for_it_and_by_its_consequences_alone(mutant: type, name: str) -> None:
    with quiet():
        rows = explained([outcome_of(check, its) for its in [case(mutant, "adamw")] for check in CHECKS.values()])
    bad = {row.name: row for row in rows if row.outcome in ("failed", "warning") and row.name not in ALWAYS}
    roots = {row.name for row in bad.values() if row.because is None}
    assert roots == {name}
    assert {row.because for row in bad.values()} - {None} <= {name}
    if mutant is Bfloat16SecondMoment:
        assert {row.outcome for row in bad.values()} == {"warning"}


def test_consequences_name_the_row_that_they_follow_from() -> None:
    report = ts.check_optimizer(MUTANT_WITH_CONSEQUENCES, reference="adamw", params="1d")
    follows = [row for row in report.rows if row.because]
    assert follows
    assert all(row.findings[0].cause == f"it follows from {CHECKS['counters'].code}" for row in follows)
    assert "follows from counters" in report.table()
    assert report.findings[0].code == "update/counters"


MUTANT_WITH_CONSEQUENCES = next(mutant for mutant, name in MUTANTS.items() if name == "counters")


# -- References


def test_another_class_is_a_reference() -> None:
    with quiet():
        against = case(PlainAdamW, lambda named: torch.optim.AdamW([param for _, param in named]))
        assert outcome_of(CHECKS["young-updates"], against).outcome == "passed"
        assert outcome_of(CHECKS["eps-place"], against).outcome == "passed"


def test_a_class_that_is_not_its_reference_is_told_so() -> None:
    with quiet():
        against = case(BiasOffByOne, lambda named: PlainAdamW([param for _, param in named]))
        assert outcome_of(CHECKS["young-updates"], against).outcome == "failed"
        assert outcome_of(CHECKS["late-updates"], against).outcome == "passed"


class LongerSteps(torch.optim.Muon):
    """Muon whose steps are a fifth longer than its settings say."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1.2
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 1.2
        return loss


def test_muon_has_no_bound_and_is_held_against_torch_by_its_own_sensitivity() -> None:
    class Same(torch.optim.Muon): ...

    with quiet():
        assert outcome_of(CHECKS["young-updates"], case(Same, "muon")).outcome == "passed"
        row = outcome_of(CHECKS["young-updates"], case(LongerSteps, "muon"))
    assert row.outcome == "failed"
    assert "of Muon" in row.findings[0].expected


def test_without_a_reference_the_rule_is_not_judged() -> None:
    assert outcome("young-updates", PlainAdamW) == "not applicable"


# -- The report


@pytest.fixture(scope="module")
def scaled() -> ts.OptimizerReport:
    return ts.check_optimizer(GradientScaled, reference="adamw", params="1d", lr=0.01)


def test_the_findings_have_codes_laws_and_fixes(scaled: ts.OptimizerReport) -> None:
    assert not scaled.passed
    first = scaled.findings[0]
    assert (first.code, first.law, first.severity, first.key) == ("gradient/gradients-unaltered", "gradient", "error", "grad")
    assert first.fix
    assert first.source


def test_the_table_has_a_line_a_check_and_ends_with_where_it_may_run(scaled: ts.OptimizerReport) -> None:
    lines = scaled.table().splitlines()
    assert "GradientScaled(lr=0.01), against the textbook's adamw" in lines[0]
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in CHECKS)
    last = [line.split()[0] for line in lines[-12:] if line.startswith("  ") and not line.startswith("    ")]
    assert [word for word in last if word in ("scope", "FSDP2", "FSDP1", "ZeRO")] == ["scope", "FSDP2", "FSDP1", "ZeRO"]
    assert all(len(line) <= 130 for line in lines)


def test_the_json_form_is_plain_and_complete(scaled: ts.OptimizerReport, tmp_path: Path) -> None:
    data = scaled.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(data))
    assert (data["schema_version"], data["passed"], len(data["rows"])) == (1, False, len(CHECKS))
    assert [place["backend"] for place in data["answer"]["places"]] == ["fsdp2", "fsdp1", "zero"]
    with pytest.raises(TrueStepError, match="cannot write the report"):
        scaled.to_json(tmp_path / "nowhere" / "report.json")


def test_an_unknown_row_is_refused_with_the_known_ones(scaled: ts.OptimizerReport) -> None:
    with pytest.raises(TrueStepError, match="expected the name of a check, found 'nope'. Choose one of construction"):
        scaled.row("nope")


def test_a_check_leaves_generators_and_threads_as_they_were() -> None:
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    ts.check_optimizer(torch.optim.SGD, lr=0.1, params="1d")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()


# -- What cannot be checked


class CannotBeBuilt(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        raise RuntimeError("a licence is missing")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"optimizer": CannotBeBuilt}, "CannotBeBuilt cannot be built and stepped: RuntimeError: a licence is missing"),
        ({"optimizer": torch.optim.AdamW, "rate": 1}, "AdamW takes no setting rate: expected some of lr"),
        ({"optimizer": torch.optim.AdamW, "lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"optimizer": torch.optim.AdamW, "reference": "adamx"}, "found 'adamx'. Choose one of adadelta"),
        ({"optimizer": torch.optim.AdamW, "reference": CannotBeBuilt}, "the reference CannotBeBuilt: .* a licence is missing"),
        ({"optimizer": torch.optim.AdamW, "reference": torch.optim.LBFGS, "params": "x"}, "expected params to be"),
        (
            {"optimizer": PlainAdamW, "reference": LongerSteps},
            "does not take all params that PlainAdamW takes: .* params='2d'",
        ),
        ({"optimizer": 3}, "expected an optimizer class"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_message(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ts.check_optimizer(**asked)


# -- As tests


@pytest.mark.parametrize("check", ts.optimizer_checks(torch.optim.Adagrad, lr_decay=0.1, params="2d")[:8])
def test_checks_are_tests_of_their_own(check: Any) -> None:
    check()


def test_the_checks_are_named_as_pytest_shows_them() -> None:
    assert [check.__name__ for check in ts.optimizer_checks(PlainAdamW)] == list(CHECKS)


def test_a_check_that_fails_raises_its_findings_and_one_that_warns_warns() -> None:
    by_name = {check.__name__: check for check in ts.optimizer_checks(GradientScaled)}
    with pytest.raises(TrueStepError, match="gradient/gradients-unaltered") as caught:
        by_name["gradients-unaltered"]()
    assert caught.value.findings[0].key == "grad"
    low = {check.__name__: check for check in ts.optimizer_checks(Bfloat16SecondMoment)}
    with pytest.warns(UserWarning, match="state/state-tracks .*exp_avg_sq"):
        low["state-tracks"]()


def test_a_check_that_says_nothing_here_skips_its_test() -> None:
    by_name = {check.__name__: check for check in ts.optimizer_checks(PlainAdamW)}
    with pytest.raises(BaseException, match="no reference was given") as caught:
        by_name["young-updates"]()
    assert type(caught.value).__name__ == "SkipTest"


def test_settings_are_refused_before_any_check_is_called() -> None:
    with pytest.raises(UnsupportedError, match="takes no setting rate"):
        ts.optimizer_checks(torch.optim.AdamW, rate=1)


# -- Functions, closures, flags


def two_parts(named: list[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices = [param for _, param in named if param.ndim == 2]
    rest = [param for _, param in named if param.ndim != 2]
    return [
        one for one, held in ((torch.optim.Muon, matrices), (torch.optim.AdamW, rest)) for one in ([one(held)] if held else [])
    ]


def test_a_function_that_makes_two_optimizers_is_checked() -> None:
    with quiet():
        its = case(two_parts)
        failed = {name for name, check in CHECKS.items() if outcome_of(check, its).outcome == "failed"}
    assert failed == set()


def test_a_check_that_does_not_apply_says_why() -> None:
    with quiet():
        row = outcome_of(CHECKS["zero-dim"], case(torch.optim.Muon))
    assert row.outcome == "not applicable"
    assert "Muon only supports 2D parameters" in row.detail
    assert issubclass(NotApplicable, Exception)
