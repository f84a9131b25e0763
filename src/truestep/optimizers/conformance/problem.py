"""How a check says what it found: problems where it does not hold, a reason where it says nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that a check found wrong.

    Attributes:
        expected, found: In a few words.
        param, key: The slot that it concerns.
        step: From 1.
        fix: An imperative sentence.
    """

    expected: str
    found: str
    param: str | None = None
    key: str | None = None
    step: int | None = None
    fix: str = ""


class Failed(Exception):
    """A check does not hold."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"expected {one.expected}, found {one.found}" for one in problems))
        self.problems = problems


class NotApplicable(Exception):
    """A check that has nothing to say about this class; the text says why."""


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line without a full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].removesuffix(".")
