"""Running the table of checks on one optimizer: all at once as a report, or each as a test."""

from __future__ import annotations

import functools
import time
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from truestep.optimizers.conformance.answer import answered, line_of
from truestep.optimizers.conformance.checks import CHECKS, Check
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem, first_line
from truestep.optimizers.conformance.reference import reference_of
from truestep.optimizers.conformance.report import OptimizerReport, Outcome, Row
from truestep.optimizers.conformance.subject import Case, subject_of
from truestep.optimizers.probe.build import name_of, target_of
from truestep.optimizers.probe.probing import probe
from truestep.optimizers.probe.quiet import quiet
from truestep.words.errors import TrueStepError
from truestep.words.finding import SHOWN_AT_MOST, Finding, listed

Params = Mapping[str, Sequence[int]] | str | None
_RAISED: Final = "no error"


def check_optimizer(
    optimizer: Callable[..., Any], *, reference: Any = None, params: Params = None, **settings: Any
) -> OptimizerReport:
    """Check an optimizer class against what every optimizer must do, and say where it may run; in seconds, on the CPU.

    It steps params of its own; nothing of the caller's is touched. A report is evidence, not proof.

    Args:
        optimizer: A class, or a function ``named_params -> Optimizer`` (or a list of them).
        reference: What its updates should be: a name of `truestep.references`, another class, or a function. None: its own rule
            for a class of torch.optim; nothing else has one.
        params: Shapes by name, ``"2d"`` for those of 2 dims only, or None: of 0, 1, 2 and 4 dims.
        settings: Keyword arguments of the class, and of a reference class that takes them too.

    Returns:
        A row for each check, the findings, and the answer.

    Raises:
        UnsupportedError: If the class cannot be built or stepped, takes no such setting, or there is no such reference.

    >>> import torch
    >>> report = check_optimizer(torch.optim.Adamax)
    >>> report.passed, report.row("young-updates").outcome
    (True, 'passed')
    """
    began = time.monotonic()
    target, given = target_of(optimizer, settings)
    with quiet():
        case = _case(optimizer, reference, params, settings)
        rows = explained([outcome_of(check, case) for check in CHECKS.values()])
    # The probe is remembered by class and settings: the second report of a class does without its seconds.
    known = probe(optimizer, params=params, **settings)
    with quiet():
        answer = answered(case.subject, known)
    return OptimizerReport(
        optimizer=f"{getattr(target, '__module__', '')}.{name_of(target)}",
        reference="" if case.reference is None else case.reference.name,
        rows=tuple(rows),
        answer=answer,
        probe=known,
        settings={name: repr(value) for name, value in given.items()},
        versions=known.versions,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True)
class OptimizerCheck:
    """One check of one optimizer, to be called by a test; its name is what pytest shows."""

    check: Check
    case: Callable[[], Case]

    @property
    def __name__(self) -> str:
        """Name of the check: pytest makes the test's id of it."""
        return self.check.name

    def __call__(self) -> Row:
        """Run it.

        Raises:
            TrueStepError: With its findings, if it does not hold.
            unittest.SkipTest: If it has nothing to say about this class; pytest skips the test.
        """
        with quiet():
            row = outcome_of(self.check, self.case())
        if row.outcome == "not applicable":
            raise unittest.SkipTest(row.detail)
        if row.outcome == "failed":
            raise TrueStepError(listed(row.findings), row.findings)
        if row.outcome == "warning":
            warnings.warn(listed(row.findings), UserWarning, stacklevel=2)
        return row


def optimizer_checks(
    optimizer: Callable[..., Any], *, reference: Any = None, params: Params = None, **settings: Any
) -> list[OptimizerCheck]:
    """Return every check of an optimizer as a function without arguments, for ``pytest.mark.parametrize``.

    Nothing is built before the first one is called. One that does not hold raises, a warning is warned of, and one that says
    nothing about this class skips its test. Arguments as those of `check_optimizer`.

    Raises:
        UnsupportedError: If it is no class or function, or takes no such setting.

    >>> import torch
    >>> checks = optimizer_checks(torch.optim.SGD, momentum=0.9)
    >>> checks[0].__name__, checks[0]().outcome
    ('construction', 'passed')
    """
    target_of(optimizer, settings)
    case = functools.cache(lambda: _case(optimizer, reference, params, settings))
    return [OptimizerCheck(check, case) for check in CHECKS.values()]


def _case(optimizer: Any, reference: Any, params: Params, settings: Mapping[str, Any]) -> Case:
    subject = subject_of(optimizer, params, settings)
    return Case(subject, reference_of(reference, subject))


def outcome_of(check: Check, case: Case) -> Row:
    """Run one check; an error that the class raises in it is what it found."""
    try:
        return _row(check, "passed", check.function(case))
    except NotApplicable as why:
        return _row(check, "not applicable", str(why))
    except Failed as failed:
        problems = failed.problems
    except Exception as error:  # whatever the class says to what it must bear
        found = f"{type(error).__name__}: {first_line(error)} ({line_of(error)})"
        problems = (Problem(_RAISED, found, fix="Bear it, or refuse it by name."),)
    findings = tuple(_finding(check, problem) for problem in problems[:SHOWN_AT_MOST])
    rest = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
    outcome: Outcome = "failed" if check.severity == "error" else "warning"
    return _row(check, outcome, f"{_told(problems[0])}{rest}", findings)


def _row(check: Check, outcome: Outcome, detail: str, findings: tuple[Finding, ...] = ()) -> Row:
    return Row(check.name, outcome, check.law, detail, check.reason, check.source, findings=findings)


def _finding(check: Check, problem: Problem) -> Finding:
    return Finding(
        check.code,
        check.law,
        check.severity,
        param=problem.param,
        key=problem.key,
        expected=problem.expected,
        found=problem.found,
        fix=problem.fix,
        step=problem.step,
        source=check.source,
    )


def _told(problem: Problem) -> str:
    where = "/".join(part for part in (problem.param, problem.key) if part)
    return f"{where + ': ' if where else ''}expected {problem.expected}, found {problem.found}."


def explained(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with those that follow from a failed one saying so: from the one that it all begins with."""
    failed = {row.name for row in rows if row.outcome == "failed"}
    because = {row.name: _root(row.name, failed) for row in rows if row.outcome in ("failed", "warning")}
    return [
        replace(
            row,
            because=root,
            findings=tuple(replace(one, cause=f"it follows from {CHECKS[root].code}") for one in row.findings),
        )
        if (root := because.get(row.name, row.name)) != row.name
        else row
        for row in rows
    ]


def _root(name: str, failed: set[str]) -> str:
    """Return the failed check that a failed one follows from, through others; itself if from none."""
    for earlier in CHECKS[name].follows:
        if earlier in failed:
            return _root(earlier, failed)
    return name
