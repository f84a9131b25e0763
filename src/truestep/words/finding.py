"""What truestep says when a claim does not hold: the guard yields it, errors carry it, reports print it.

A finding is plain data. Its text form is one line: the code, where it was seen, what was expected and found, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias

Law: TypeAlias = Literal["params", "state", "gradient", "update", "ranks", "drift"]
Severity: TypeAlias = Literal["error", "warning", "note"]

LAWS: Final[Mapping[str, str]] = {
    "params": "identity: the optimizers hold every live trainable param, once, and nothing else steps",
    "state": "structure: every slot has the shape, layout and dtype that its param's shard demands",
    "gradient": "conservation: what enters the step is what this window's backward passes produced, reduced once",
    "update": "rule: new param and state are the optimizer's rule applied to the old ones, counters one higher",
    "ranks": "agreement: ranks agree wherever they must, and copies of a param are casts of one value",
    "drift": "continuity: between two steps nothing changes params or state but declared events",
}
SEVERITIES: Final[Mapping[str, str]] = {
    "error": "the step is not the one intended, provable from this run",
    "warning": "legal and often chosen, known to do harm",
    "note": "not checked, and why, or judged and harmless",
}
SCHEMA_VERSION: Final = 1
SHOWN_AT_MOST: Final = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim that does not hold, or could not be checked.

    Attributes:
        code: A slug, ``LAW/WHAT`` for the six laws (``params/stale``), else ``verify/..``, ``run/..``, ``window/..`` or
            ``checkpoint/..``.
        law: One of the six laws, or None.
        severity: ``error``, ``warning`` or ``note``; only errors stop anything.
        param: Name of the param in the unwrapped model, if one is concerned.
        key: State key, ``param``, ``master`` or ``grad``, if one is concerned.
        expected: What should have been, in a few words.
        found: What was, in a few words.
        fix: An imperative sentence naming a call, option or file.
        ranks: The ranks that saw it, ascending.
        step: The optimizer step, counted from 1.
        phase: Of a verified step: data, forward, backward, reduce, clip, update or between.
        cause: The fault in words, where it is known.
        source: The public report of this fault, where there is one.
    """

    code: str
    law: Law | None
    severity: Severity
    param: str | None = None
    key: str | None = None
    expected: str = ""
    found: str = ""
    fix: str = ""
    ranks: tuple[int, ...] = ()
    step: int | None = None
    phase: str | None = None
    cause: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        where = "/".join(part for part in (self.param, self.key) if part)
        on = f"on rank {listed(self.ranks)}" if self.ranks else ""
        at = f"at step {self.step}" if self.step is not None else ""
        phase = f"({self.phase})" if self.phase else ""
        head = " ".join(part for part in (self.code, where, on, at, phase) if part)
        claim = ", ".join(
            part for part in (self.expected and f"expected {self.expected}", self.found and f"found {self.found}") if part
        )
        text = f"{head}: {claim}." if claim else f"{head}."
        if self.cause:
            text += f" Cause: {self.cause}."
        if self.fix:
            text += f" {self.fix}"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return plain data with a ``schema_version``, ready for ``json.dumps``."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Rebuild a finding from `to_json`; unknown entries of a newer schema are passed by."""
        known = {field.name for field in fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        return cls(**{**kept, "ranks": tuple(kept.get("ranks", ()))})


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with those that differ only in their ranks made one, in order of first appearance."""
    ranks_by_claim: dict[Finding, set[int]] = {}
    for finding in findings:
        ranks_by_claim.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    return [replace(claim, ranks=tuple(sorted(ranks))) for claim, ranks in ranks_by_claim.items()]


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that stop a run: those of severity ``error``."""
    return [finding for finding in findings if finding.severity == "error"]


def listed(items: Iterable[object], most: int = SHOWN_AT_MOST) -> str:
    """Return the items joined by commas, at most `most` of them, the others counted.

    >>> listed([1, 2, 3, 4, 5])
    '1, 2, 3 and 2 more'
    """
    shown = [str(item) for item in items]
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")
