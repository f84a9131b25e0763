"""Every class of torch.optim in the conformance suite: it passes, or what it fails is true, and the docs explain it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from truestep.optimizers.conformance import CHECKS
from truestep.optimizers.conformance.reference import reference_of
from truestep.optimizers.conformance.run import outcome_of
from truestep.optimizers.conformance.subject import Case, subject_of
from truestep.optimizers.probe.quiet import quiet

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
# What each class fails with torch 2.13 on the CPU.
FAILS = {
    "Adadelta": set(),
    "Adafactor": {"zero-size", "empty-shard"},
    "Adagrad": {"fused-strides"},
    "Adam": {"fused-strides"},
    "AdamW": {"fused-strides"},
    "Adamax": set(),
    "ASGD": {"lr-acts", "lr-tensor", "keeps-dtype-16"},
    "LBFGS": {"absent-gradient", "empty-shard", "non-contiguous", "copied"},
    "Muon": set(),
    "NAdam": {"keeps-dtype-16"},
    "RAdam": set(),
    "RMSprop": set(),
    "Rprop": {"lr-acts", "lr-tensor"},
    "SGD": {"fused-strides", "kernels-bfloat16", "kernels-float16"},
    "SparseAdam": set(),
}
WARNS = {"AdamW": {"rebuilt"}, "LBFGS": {"state-size"}}
PURE_16_BITS = "state-tracks-bf16"  # every class whose state, or whose params, lose small updates then


def test_every_class_of_torch_is_here() -> None:
    classes = {
        name
        for name in torch.optim.__all__
        if isinstance(value := getattr(torch.optim, name), type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == set(FAILS)


@pytest.mark.parametrize("name", FAILS)
def test_a_class_of_torch_passes_or_its_finding_is_true_and_explained(name: str) -> None:
    with quiet():
        subject = subject_of(getattr(torch.optim, name), None, {})
        case = Case(subject, reference_of(None, subject))
        rows = [outcome_of(check, case) for check in CHECKS.values()]
    failed = {row.name: row.detail for row in rows if row.outcome == "failed"}
    warned = {row.name for row in rows if row.outcome == "warning"} - {PURE_16_BITS}
    assert set(failed) == FAILS[name], failed
    assert warned == WARNS.get(name, set())
    page = PAGE.read_text(encoding="utf-8")
    for row in (*failed, *warned):
        assert f"`{row}`" in page
