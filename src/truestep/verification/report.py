"""What a verification found: cells with their figures and findings, and the verdict over them. Torch-free plain data.

A *cell* is one combination of backend, optimizer and window length that was run. Its *checks* count, phase by phase, how many
tensors were compared bitwise and how many within a bound, with the worst ratio to that bound; what could not be checked is a note
whose code starts with ``verify/not-checked``. Harmless notes do not touch a verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from truestep.words.errors import VerifyError
from truestep.words.finding import Finding, errors, listed

Verdict: TypeAlias = Literal["equal", "different", "not checked"]
Loop: TypeAlias = Literal["yours", "truestep's"]

SCHEMA_VERSION: Final = 1
PHASES: Final = ("data", "forward", "backward", "reduce", "clip", "update", "between")
NOT_CHECKED: Final = "verify/not-checked"
EXIT_STATUS: Final[Mapping[Verdict, int]] = {"equal": 0, "not checked": 3, "different": 1}  # from best to worst
_FROM_BEST: Final = tuple(EXIT_STATUS)


@dataclass
class Checks:
    """What was compared in one phase; figures add up over steps, tensors and ranks.

    Attributes:
        bitwise: Tensors compared bit for bit.
        bounded: Tensors compared within a bound.
        worst: The largest ratio of a difference to its bound; 1 is the bound itself.
        not_checked: What was not checked and why, each reason once.
    """

    bitwise: int = 0
    bounded: int = 0
    worst: float = 0.0
    not_checked: list[str] = field(default_factory=list)

    def __add__(self, other: Checks) -> Checks:
        worst = math.nan if math.isnan(self.worst + other.worst) else max(self.worst, other.worst)
        reasons = list(dict.fromkeys([*self.not_checked, *other.not_checked]))
        return Checks(self.bitwise + other.bitwise, self.bounded + other.bounded, worst, reasons)


def no_checks() -> dict[str, Checks]:
    """Return empty checks for every phase, in order."""
    return {phase: Checks() for phase in PHASES}


@dataclass(frozen=True)
class Cell:
    """The outcome of one combination.

    Attributes:
        verdict: ``equal``, ``different`` or ``not checked``.
        backend: A row of the table of backends.
        optimizer: Its name as asked for, or of its class.
        world_size: Ranks.
        micro_batches: Of one optimizer step.
        steps: Optimizer steps that were checked.
        loop: ``yours`` where the recipe's own `train_step` was judged, else ``truestep's``.
        first: The finding that decided the verdict; None if ``equal``.
        findings: All of them, notes too.
        losses: The free-running losses of the candidate, one a step.
        reference_losses: Those of one process.
        seconds: Wall time.
        checks: ``phase -> figures``, in the order of `PHASES`.
        faults: Names of the faults planted in it.
        recipe: Its name.
        allowed: How many findings `allow` took out of the verdict.
    """

    verdict: Verdict
    backend: str
    optimizer: str
    world_size: int
    micro_batches: int
    steps: int
    loop: Loop = "truestep's"
    first: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    checks: dict[str, Checks] = field(default_factory=no_checks)
    faults: list[str] = field(default_factory=list)
    recipe: str = ""
    allowed: int = 0

    @classmethod
    def judged(cls, findings: Iterable[Finding], *, allow: Sequence[str] = (), **known: Any) -> Cell:
        """Return the cell whose verdict, first finding and count of allowed ones follow from its findings.

        Args:
            findings: All of the cell, in order of appearance.
            allow: ``CODE[:PARAM]`` globs of what may stay unchecked.
            known: The other fields.
        """
        found = list(findings)
        verdict, first = judgement(found, allow)
        allowed = sum(allowed_by(finding, allow) for finding in found if is_not_checked(finding))
        return cls(verdict=verdict, first=first, findings=found, allowed=allowed, **known)

    @property
    def total(self) -> Checks:
        """The figures of all phases together."""
        return sum(self.checks.values(), Checks())

    @property
    def figures(self) -> str:
        """What stands behind the verdict, in words."""
        total = self.total
        bounded = f", {total.bounded} within a bound (worst {total.worst:.2g} of it)" if total.bounded else ""
        return f"{total.bitwise} tensors bitwise{bounded}, {self.seconds:.1f} s"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """Rebuild a cell from its JSON form; unknown entries of a newer schema are passed by."""
        kept = _known(cls, data)
        kept["first"] = Finding.from_json(kept["first"]) if kept.get("first") else None
        kept["findings"] = [Finding.from_json(finding) for finding in kept.get("findings", ())]
        kept["checks"] = {
            phase: Checks(**{**_known(Checks, figures), "worst": float(figures["worst"])})
            for phase, figures in kept.get("checks", {}).items()
        }
        for key in ("losses", "reference_losses"):
            kept[key] = [float(value) for value in kept.get(key, ())]
        return cls(**kept)


@dataclass(frozen=True)
class Event:
    """One thing that a verification tells while it runs.

    Attributes:
        kind: ``start`` of a cell, a ``step`` done, a ``cell`` done, or a ``message`` for people.
        cell: Index of the cell, from 0.
        cells: How many there will be.
        backend, optimizer, world_size, micro_batches: Of the cell.
        step: Steps done, from 1.
        steps: Steps that the cell will take.
        result: The finished cell, with kind ``cell``.
        text: With kind ``message``.
    """

    kind: Literal["start", "step", "cell", "message"]
    cell: int = 0
    cells: int = 0
    backend: str = ""
    optimizer: str = ""
    world_size: int = 0
    micro_batches: int = 0
    step: int = 0
    steps: int = 0
    result: Cell | None = None
    text: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of a verification.

    Attributes:
        cells: In the order they ran.
        versions: ``package -> version`` of what was judged.
    """

    cells: list[Cell]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the cells; ``not checked`` if there are none."""
        return max((cell.verdict for cell in self.cells), key=_FROM_BEST.index, default="not checked")

    @property
    def first(self) -> Finding | None:
        """The finding that decided the verdict, of the first cell that has this verdict."""
        return next((cell.first for cell in self.cells if cell.verdict == self.verdict), None)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all cells, in their order."""
        return [finding for cell in self.cells for finding in cell.findings]

    def table(self) -> str:
        """Return a plain text table, one line a cell."""
        rows = [COLUMNS, *(row_of(cell) for cell in self.cells)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return plain data with a ``schema_version``, written to `path` too.

        It is strict JSON: numbers that are not finite are strings.

        Raises:
            VerifyError: If the file cannot be written.
        """
        data: dict[str, Any] = _plain(
            {
                "schema_version": SCHEMA_VERSION,
                "verdict": self.verdict,
                "cells": [
                    {
                        **asdict(cell),
                        "first": cell.first.to_json() if cell.first else None,
                        "findings": [finding.to_json() for finding in cell.findings],
                    }
                    for cell in self.cells
                ],
                "versions": self.versions,
            }
        )
        if path is not None:
            try:
                Path(path).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            except OSError as error:
                raise VerifyError(
                    f"cannot write the report to {path}: {error.strerror}. Give a file in a folder that exists."
                ) from error
        return data

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> Report:
        """Rebuild a report from `to_json`, its data or its file.

        Raises:
            VerifyError: If it is no report, or of a newer schema.
        """
        try:
            data = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise VerifyError(f"cannot read a report from {source}: {error}. Give a file that --json wrote.") from error
        found = data.get("schema_version") if isinstance(data, Mapping) else None
        if found != SCHEMA_VERSION:
            raise VerifyError(
                f"expected a report with schema_version {SCHEMA_VERSION}, found {found}. Give a file that --json wrote."
            )
        return cls([Cell.from_json(cell) for cell in data["cells"]], dict(data["versions"]))


COLUMNS: Final = (
    "backend",
    "optimizer",
    "ranks",
    "micro-batches",
    "steps",
    "verdict",
    "bitwise",
    "bounded",
    "worst",
    "seconds",
    "first",
)


def row_of(cell: Cell) -> tuple[str, ...]:
    """Return a cell's entries of the table, in the order of `COLUMNS`."""
    total = cell.total
    return (
        cell.backend,
        cell.optimizer,
        str(cell.world_size),
        str(cell.micro_batches),
        str(cell.steps),
        cell.verdict,
        str(total.bitwise),
        str(total.bounded),
        f"{total.worst:.2g}" if total.bounded else "-",
        f"{cell.seconds:.1f}",
        cell.first.code if cell.first else "-",
    )


def told(finding: Finding) -> list[tuple[str, str]]:
    """Return ``(label, text)`` lines of a finding for people; entries that it lacks are left out."""
    ranks = f"rank {listed(finding.ranks)}" if finding.ranks else ""
    step = f"step {finding.step}" if finding.step is not None else ""
    slot = "/".join(part for part in (finding.param, finding.key) if part)
    lines = [
        ("code", finding.code),
        ("where", ", ".join(part for part in (slot, ranks, step, finding.phase) if part)),
        ("expected", finding.expected),
        ("found", finding.found),
        ("cause", finding.cause or ""),
        ("fix", finding.fix),
        ("source", finding.source or ""),
    ]
    return [(label, text) for label, text in lines if text]


def not_checked(phase: str, why: str, **where: Any) -> Finding:
    """Return the note that a phase was not checked, and why; `where` are further fields of the finding."""
    return Finding(f"{NOT_CHECKED}-{phase}", None, "note", phase=phase, found=why, **where)


def is_not_checked(finding: Finding) -> bool:
    """Say whether a finding tells of something that was not checked."""
    return finding.severity == "note" and finding.code.startswith(NOT_CHECKED)


def allowed_by(finding: Finding, allow: Iterable[str]) -> bool:
    """Say whether one of the ``CODE[:PARAM]`` globs names this finding."""
    for glob in allow:
        code, _, param = glob.partition(":")
        if fnmatchcase(finding.code, code) and (not param or fnmatchcase(finding.param or "", param)):
            return True
    return False


def judgement(findings: Iterable[Finding], allow: Iterable[str] = ()) -> tuple[Verdict, Finding | None]:
    """Return the verdict that these findings give, and the finding that decided it: the first by step, then by phase.

    Errors make ``different``. A note that something was not checked makes ``not checked`` unless `allow` names its code. Warnings
    and other notes change nothing.
    """
    found, globs = list(findings), tuple(allow)
    undecided = [finding for finding in found if is_not_checked(finding) and not allowed_by(finding, globs)]
    by_verdict: tuple[tuple[Verdict, list[Finding]], ...] = (("different", errors(found)), ("not checked", undecided))
    for verdict, deciding in by_verdict:
        if deciding:
            return verdict, min(deciding, key=_when)
    return "equal", None


def exit_status(report: Report) -> int:
    """Return 0 if all holds, 1 if something differs, 3 if nothing differs but something was not checked."""
    return EXIT_STATUS[report.verdict]


def _when(finding: Finding) -> tuple[int, int]:
    phase = PHASES.index(finding.phase) if finding.phase in PHASES else -1
    return (finding.step or 0, phase)


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
