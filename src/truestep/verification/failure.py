"""What became of a run that failed, in one error: pure, from what each member of the crew last showed."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from truestep.words.errors import TrueStepError, VerifyError
from truestep.words.finding import Finding, listed, merged

Kind: TypeAlias = Literal["died", "raised", "hung", "waited", "finished"]

# In this order they explain a failure: what comes first is the cause, and the rest most often its consequence.
_CAUSES: Final[tuple[Kind, ...]] = ("died", "raised", "hung")
FIXES: Final[dict[str, str]] = {
    "died": "Look at its last output, and with dmesg for a kill by the system when memory ran out.",
    "raised": "Mend what its traceback shows.",
    "left": "Remove that call: a rank process is not the recipe's to end.",
    "hung": "See where each rank waits: most often in a collective that not every rank enters. If it is slow, allow more time.",
}
LEFT: Final = "called sys.exit"
LOG_LINES: Final = 30
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
TOLD_CHARACTERS: Final = 200

# What runs a task: its frames around the task say nothing.
_AROUND: Final = ("runpy>", "/threading.py", "/pytest_truestep.py")
_LINK: Final = "/truestep/verification/link.py"
_CONNECTION_LOST: Final = ("onnection reset by peer", "onnection closed by peer")  # as gloo says it
_AROUND_FOLDERS: Final = ("/_pytest/", "/pluggy/", "/truestep/verification/", "/truestep/backends/")
_RECIPES: Final = "/truestep/verification/recipes/"


@dataclass(frozen=True)
class Fate:
    """How one member ended.

    Attributes:
        rank: None for the reference.
        kind: ``waited``: it was still at work when another one failed.
        told: What happened, to be read after "rank 1".
        text: Its traceback, or its stack.
        log: The end of its output during this run.
        pickled: The error it raised, if it is one of truestep's.
    """

    rank: int | None
    kind: Kind
    told: str
    text: str = ""
    log: str = ""
    pickled: bytes | None = None


_OURS: Final = "/truestep/verification/"


def failure(what: str, fates: Sequence[Fate]) -> TrueStepError:
    """Return the one error for a run that failed.

    Where the first to raise raised an error of truestep, and no other of truestep's was raised, that error is returned, with the
    findings of all: it says by itself what is wrong.

    Args:
        what: The task, or what else was being done.
        fates: Of every member, in the order in which they ended; at least one has died, raised or hung.
    """
    shared = _shared_error(fates)
    if shared is not None:
        return shared
    kind = next(kind for kind in _CAUSES if any(fate.kind == kind for fate in fates))
    known = [_as_consequence(fate) if kind == "died" else fate for fate in fates]
    causes = _without_listeners([fate for fate in known if fate.kind == kind])
    others = _without_listeners([fate for fate in known if fate.kind not in (kind, "finished")], everyone=False)
    fix = FIXES["left"] if all(fate.told.startswith(LEFT) for fate in causes) else FIXES[kind]
    finding = Finding(
        code=f"run/{kind}",
        law=None,
        severity="error",
        expected=f"every rank to finish {what}",
        found=causes[0].told,
        fix=fix,
        ranks=tuple(sorted(fate.rank for fate in causes if fate.rank is not None)),
    )
    told = "; ".join(f"{names} {fate.told}" for names, fate in (*_alike(causes, "told"), *_alike(others, "told")))
    shown = [fate for fate in (*causes, *others, *(fate for fate in known if fate.kind == "finished")) if fate.text or fate.log]
    sections = "".join(f"\n\n{_section(names, fate)}" for names, fate in _alike(shown, "told", "text", "log"))
    return VerifyError(f"{what}: {told}. {fix}{sections}", [finding])


def _as_consequence(fate: Fate) -> Fate:
    """Return the fate of a member that raised only because the process that it was connected to is gone."""
    lost = fate.kind == "raised" and any(sign in fate.told for sign in _CONNECTION_LOST)
    return replace(fate, kind="waited", told="lost its connection to it", text="") if lost else fate


def _without_listeners(fates: list[Fate], everyone: bool = True) -> list[Fate]:
    """Leave out members that only wait for a record to be sent or received; all of them are kept if `everyone` is such a one."""
    told = [fate for fate in fates if fate.kind not in ("hung", "waited") or _LINK not in fate.text]
    return told or (fates if everyone else [])


def _shared_error(fates: Sequence[Fate]) -> TrueStepError | None:
    raised = [fate for fate in fates if fate.kind == "raised"]
    if not raised or raised[0].pickled is None or any(fate.kind in ("died", "hung") for fate in fates):
        return None
    try:
        errors: list[TrueStepError] = [pickle.loads(fate.pickled) for fate in raised if fate.pickled is not None]
    except Exception:
        return None  # of a class that cannot be imported here: its traceback is shown instead
    if len({(type(error), re.sub(r"rank \d+", "rank", error.message)) for error in errors}) > 1:
        return None
    errors[0].findings = tuple(merged(finding for error in errors for finding in error.findings))
    return errors[0]


def _alike(fates: Sequence[Fate], *attributes: str) -> list[tuple[str, Fate]]:
    """Return the fates that differ in these attributes, each with the names of all that share it."""
    groups: dict[tuple[str, ...], list[Fate]] = {}
    for fate in fates:
        groups.setdefault(tuple(getattr(fate, attribute) for attribute in attributes), []).append(fate)
    return [(_names(group), group[0]) for group in groups.values()]


def _names(fates: Sequence[Fate]) -> str:
    ranks = sorted(fate.rank for fate in fates if fate.rank is not None)
    names = [f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, most=len(ranks))}"] if ranks else []
    return " and ".join(names + (["the reference"] if len(ranks) < len(fates) else []))


def _section(names: str, fate: Fate) -> str:
    parts = [f"--- {names} {fate.told}", fate.text.rstrip("\n")] if fate.text else []
    return "\n".join([*parts, *([f"--- {names}, last output", fate.log] if fate.log else [])])


def one_line(error: str) -> str:
    """Return an error's text as one line of bounded length.

    >>> one_line("ValueError: bad   batch")
    'ValueError: bad batch'
    """
    line = " ".join(error.split())
    return line if len(line) <= TOLD_CHARACTERS else line[: TOLD_CHARACTERS - 2] + ".."


def exit_told(status: int | None) -> str:
    """Say how a process ended, from its exit status (negative: a signal), to be read after "rank 1".

    >>> exit_told(-9), exit_told(3), exit_told(None)
    ('was killed by SIGKILL', 'exited with status 3', 'died')
    """
    if status is None:
        return "died"
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"


def last_lines(log: str, most: int = LOG_LINES) -> str:
    """Return the last lines of an output."""
    lines = log.rstrip().splitlines()
    cut = [f"({len(lines) - most} lines before)"] if len(lines) > most else []
    return "\n".join(cut + lines[-most:])


def waiting(fate: Fate, dump: str, thread: int) -> Fate:
    """Return the fate of a member that was still at work, with what a dump of faulthandler shows of it.

    Args:
        fate: As known without the dump.
        dump: Text that faulthandler wrote; the last stack of `thread` in it counts.
        thread: Ident of the thread that ran the task.
    """
    frames = _frames(dump, thread)
    if not frames:
        return replace(fate, text="(it did not show its stack)")
    innermost = frames[-1]
    where = f"{innermost['function']} ({os.path.basename(innermost['file'])}, line {innermost['line']})"
    theirs = [frame for frame in frames if _OURS not in frame["file"]]  # what watches the loop is no part of the user's story
    stack = [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}' for frame in theirs]
    return replace(fate, told=f"{fate.told} in {where}", text="\n".join(["Stack (most recent call last):", *stack]))


def _frames(dump: str, thread: int) -> list[dict[str, str]]:
    """Return the frames of the last stack of a thread, outermost first, without those of the launcher around the task."""
    stacks: dict[int, list[dict[str, str]]] = {}
    current: list[dict[str, str]] = []
    for line in dump.splitlines():
        head = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line)
        frame = _FRAME.match(line)
        if head:
            current = stacks[int(head[1], 16)] = []
        elif frame:
            current.insert(0, frame.groupdict())
    frames = stacks.get(thread, [])
    first = next((index for index, frame in enumerate(frames) if not _is_around(frame["file"])), None)
    return frames if first is None or any(frame["file"].endswith(_LINK) for frame in frames[:first]) else frames[first:]


def _is_around(file: str) -> bool:
    return file.endswith(_AROUND) or (any(folder in file for folder in _AROUND_FOLDERS) and _RECIPES not in file)
