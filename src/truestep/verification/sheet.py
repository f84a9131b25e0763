"""What is found while a cell is judged: findings, and figures by phase."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from truestep.verification.report import NOT_CHECKED, Checks, no_checks
from truestep.words.finding import SHOWN_AT_MOST, Finding


@dataclass
class Sheet:
    """Findings and figures of one cell; at most `SHOWN_AT_MOST` findings a code and step are kept.

    Attributes:
        step: The step that is being judged.
    """

    step: int = 0
    findings: list[Finding] = field(default_factory=list)
    checks: dict[str, Checks] = field(default_factory=no_checks)

    def bitwise(self, phase: str, tensors: int = 1) -> None:
        """Count tensors that were compared bit for bit, and are equal."""
        self.checks[phase].bitwise += tensors

    def bounded(self, phase: str, ratio: float) -> None:
        """Count one tensor that was compared within a bound."""
        figures = self.checks[phase]
        figures.bounded += 1
        figures.worst = max(figures.worst, ratio)

    def add(self, finding: Finding, phase: str | None = None) -> None:
        """Keep a finding, at this step and phase."""
        placed = replace(finding, step=finding.step or self.step or None, phase=finding.phase or phase)
        alike = [old for old in self.findings if old.code == placed.code and old.step == placed.step]
        if len(alike) < SHOWN_AT_MOST:
            self.findings.append(placed)

    def not_checked(self, phase: str, why: str, **about: Any) -> None:
        """Note, once a cell, that something of a phase was not checked, and why."""
        if why not in self.checks[phase].not_checked:
            self.checks[phase].not_checked.append(why)
            self.findings.append(Finding(f"{NOT_CHECKED}-{phase}", None, "note", found=why, step=self.step, phase=phase, **about))

    @property
    def failed(self) -> bool:
        """Whether some finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)
