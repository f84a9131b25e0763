"""The errors that truestep raises.

Exception
└── TrueStepError            carries .findings
    ├── GuardError           a law of the step does not hold
    ├── UnsupportedError     a setting that cannot work, told before anything runs
    ├── WindowError          a wrong event in an accumulation window
    ├── CheckpointError      a checkpoint that cannot be written or read
    └── VerifyError          a verification that could not be set up or finished
"""

from __future__ import annotations

from collections.abc import Iterable

from truestep.words.finding import Finding, listed


class TrueStepError(Exception):
    """Base of every error of truestep.

    Args:
        message: One sentence or more: what was expected, what was found, what to do. Empty: made from the findings.
        findings: The findings behind it.
    """

    def __init__(self, message: str = "", findings: Iterable[Finding] = ()) -> None:
        self.findings = tuple(findings)
        self.message = message or listed(self.findings)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[TrueStepError], tuple[str, tuple[Finding, ...]]]:
        return type(self), (self.message, self.findings)


class GuardError(TrueStepError):
    """A law of the optimizer step does not hold."""


class UnsupportedError(TrueStepError):
    """A setting that cannot work, or a vendor that is not installed; nothing has run yet."""


class WindowError(TrueStepError):
    """An event that may not come now in an accumulation window."""


class CheckpointError(TrueStepError):
    """A checkpoint that cannot be written, read or trusted."""


class VerifyError(TrueStepError):
    """A verification that could not be set up or finished: a bad recipe, a rank that raised, died or hung."""
