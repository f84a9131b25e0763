"""What a check of an optimizer found: its rows, its findings, and the answer to its author's question."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from truestep.optimizers.conformance.answer import Answer
from truestep.optimizers.probe.result import Probe
from truestep.words.errors import TrueStepError
from truestep.words.finding import Finding, Law, errors

Outcome: TypeAlias = Literal["passed", "failed", "warning", "not applicable"]

SCHEMA_VERSION: Final = 1
WIDTH: Final = 130
_MARKS: Final[Mapping[Outcome, str]] = {"passed": "passed", "failed": "FAILED", "warning": "warning", "not applicable": "n/a"}


@dataclass(frozen=True)
class Row:
    """One check, as it came out.

    Attributes:
        name: Of the check.
        outcome: ``passed``; ``failed``; ``warning``: known to do harm, and often chosen; ``not applicable``.
        law: Of the six.
        detail: How it was seen, what is wrong, or why it says nothing here.
        reason: What goes wrong where it does not hold.
        source: Who says that it must.
        because: The row that this one follows from, where that failed too.
        findings: The first few of what is wrong.
    """

    name: str
    outcome: Outcome
    law: Law
    detail: str
    reason: str
    source: str
    because: str | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class OptimizerReport:
    """What `check_optimizer` found.

    Attributes:
        optimizer: Qualified name of the class or function.
        reference: What its updates were held against; empty if nothing.
        rows: One a check, in the order of the table.
        answer: Where it may run.
        probe: What was measured of it.
        settings: Those given, as text.
        versions: ``package -> version``.
        seconds: Wall time.
    """

    optimizer: str
    reference: str
    rows: tuple[Row, ...]
    answer: Answer
    probe: Probe
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """The findings of all rows: those that others follow from come first."""
        roots = [finding for row in self.rows if row.because is None for finding in row.findings]
        return roots + [finding for row in self.rows if row.because is not None for finding in row.findings]

    @property
    def passed(self) -> bool:
        """Whether no row failed; warnings are no failures."""
        return not errors(self.findings)

    def row(self, name: str) -> Row:
        """Return the row of a check.

        Raises:
            TrueStepError: If there is none of that name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows)
        raise TrueStepError(f"expected the name of a check, found {name!r}. Choose one of {known}.")

    @property
    def counts(self) -> str:
        """How many rows came out how, in words."""
        number = Counter(row.outcome for row in self.rows)
        return ", ".join(f"{number[outcome]} {outcome}" for outcome in _MARKS if number[outcome])

    def table(self) -> str:
        """Return a plain text: a line a check, then the answer to the question where it may run."""
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        against = f", against {self.reference}" if self.reference else ""
        lines = [f"{self.optimizer}({given}){against}: {self.counts}", ""]
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            follows = f"follows from {row.because}: " if row.because else ""
            lines.append(_entry(f"{row.name:<{width}}  {_MARKS[row.outcome]:<7}  ", follows + row.detail))
        lines += ["", "Where it may run (measured in one process; truestep verify proves it on real ranks):"]
        lines += [_entry(f"  {label:<6} ", text) for label, text in self.answer.lines()]
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return plain data with a ``schema_version``, written to `path` too.

        Raises:
            TrueStepError: If the file cannot be written.
        """
        rows = [{**dataclasses.asdict(row), "findings": [one.to_json() for one in row.findings]} for row in self.rows]
        data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "optimizer": self.optimizer,
            "reference": self.reference,
            "passed": self.passed,
            "settings": dict(self.settings),
            "rows": rows,
            "answer": {
                "scope": self.answer.scope,
                "places": [dataclasses.asdict(place) for place in self.answer.places],
            },
            "probe": self.probe.to_json(),
            "versions": dict(self.versions),
            "seconds": self.seconds,
        }
        if path is not None:
            try:
                Path(path).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            except OSError as error:
                raise TrueStepError(
                    f"cannot write the report to {path}: {error.strerror}. Give a file in a folder that exists."
                ) from error
        return data


def _entry(head: str, text: str) -> str:
    """Return a labelled text, wrapped under itself."""
    return textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
    )
