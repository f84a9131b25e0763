"""Who runs where: every optimizer class predicted on every backend, and measured by `verify` on some; run by ``./do who``.

It writes docs/matrix.md. A cell that is done is a JSON line of a file: a run that was stopped goes on where it was. Exit status:
0 no prediction is contradicted by a measurement, 1 some are, 2 it cannot run, 130 it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from truestep.optimizers.placement import caveat, predicted
from truestep.optimizers.probe import Probe, probe
from truestep.verification import verifying
from truestep.verification.ledger import Ledger
from truestep.verification.report import Report
from truestep.words.errors import TrueStepError

Cell: TypeAlias = tuple[str, str]  # MODULE:CLASS, backend

BACKENDS: Final = ("single", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
MEASURED: Final = ("fsdp2", "fsdp1", "zero2")  # of the classes that are not torch's own
DISTRIBUTION_BY_MODULE: Final[Mapping[str, str]] = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "schedulefree": "schedulefree",
    "lion_pytorch": "lion-pytorch",
}
STEPS: Final = (6, 24)  # the second where six end exactly against the prediction: some classes hold their updates back
# Predicted -> what may come, `NO_WORD` apart. What ends elsewhere is told by its values; some classes find out, and raise.
HOLDS: Final[Mapping[str, tuple[str, ...]]] = {
    "exact": ("exact",),
    "exact or raises": ("exact", "raises"),
    "ends elsewhere": ("ends elsewhere", "raises"),
    "random": ("exact", "ends elsewhere", "raises"),
    "not run": ("not run",),
}
NO_WORD: Final = "not checked"  # state in objects that cannot be read: no word for or against a prediction
SHOWN_CHARACTERS: Final = 160
_EXCEPTION: Final = re.compile(r"^[A-Za-z_.]*(Error|Exception|Warning)\b")


def classes() -> Iterator[str]:
    """Yield ``MODULE:CLASS`` of every optimizer class of the packages that are installed."""
    for package in DISTRIBUTION_BY_MODULE:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)]
        names = {value.__name__ for value in found if value is not torch.optim.Optimizer and not inspect.isabstract(value)}
        yield from (f"{package}:{name}" for name in sorted(names))


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class that ``MODULE:CLASS`` names."""
    module, _, own = name.partition(":")
    found: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), own)
    return found


def cells(names: Sequence[str]) -> list[Cell]:
    """Return what is measured: torch's own classes on every backend, the others on `MEASURED`."""
    return [(name, backend) for name in names for backend in (BACKENDS if name.startswith("torch.optim") else MEASURED)]


def versions() -> dict[str, str]:
    """Return the versions that the measurements hold for."""
    found = dict(verifying.versions())
    for distribution in DISTRIBUTION_BY_MODULE.values():
        try:
            found.setdefault(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measured(cell: Cell, verify: Callable[..., Report] = verifying.verify) -> dict[str, Any]:
    """Predict one cell, and run it through `verify`; return its line of the ledger.

    Its `outcome` is ``exact``, ``ends elsewhere``, ``raises``, ``not checked`` or ``not run``; `what` says more.
    """
    name, backend = cell
    found = probe(class_of(name))
    prediction = predicted(found, backend)
    line = {"optimizer": name, "backend": backend, "scope": found.scope, "predicted": prediction.outcome}
    if prediction.outcome == "not run":
        return {**line, "outcome": "not run", "what": prediction.why}
    came: dict[str, Any] = {}
    for steps in STEPS:
        came = {**line, **_came(cell, found, steps, verify)}
        if came["outcome"] != "exact" or prediction.outcome != "ends elsewhere":
            break
    return came


def _came(cell: Cell, found: Probe, steps: int, verify: Callable[..., Report]) -> dict[str, Any]:
    name, backend = cell
    recipe = "three-linears:bias=0" if "2d" in found.needs else "three-linears:bias=1"
    try:
        (result,) = verify(recipe, backend=backend, optimizer=name, steps=steps).cells
    except TrueStepError as error:
        return {"outcome": "raises", "what": raised(str(error))}
    if result.verdict == "different" and result.first is not None:
        where = "/".join(part for part in (result.first.param, result.first.key) if part)
        return {"outcome": "ends elsewhere", "what": f"{result.first.code} at {where}, step {result.first.step}"}
    if result.verdict == "equal":
        total = result.total
        said = f"{total.bitwise} bitwise, {total.bounded} within {total.worst:.2g} of a bound"
        return {"outcome": "exact", "what": said}
    return {"outcome": NO_WORD, "what": str(result.first)}


def raised(text: str) -> str:
    """Return from a run's error what the optimizer raised, with the operation, else the line, that it names."""
    lines = text.splitlines() or [""]
    number = max((at for at, line in enumerate(lines) if _EXCEPTION.match(line)), default=None)
    if number is None:
        return lines[0][:SHOWN_CHARACTERS]
    what, before = lines[number][:SHOWN_CHARACTERS], "\n".join(lines[:number])
    if operations := re.findall(r"(?:aten|prims)[.:]+\w[\w.]*\w", text):
        return what if operations[0] in what else f"{what} [{operations[0]}]"
    frames = re.findall(r'File "([^"]+)", line (\d+)', before)
    return f"{what} [{Path(frames[-1][0]).name}, line {frames[-1][1]}]" if frames else what


def contradicted(lines: Mapping[Cell, Mapping[str, Any]]) -> list[Cell]:
    """Return the cells where what was measured is not what was predicted."""
    return [cell for cell, line in lines.items() if line["outcome"] not in (*HOLDS[line["predicted"]], NO_WORD)]


def told(line: Mapping[str, Any]) -> str:
    """Return what was predicted and what came, in one line."""
    return f"{line['predicted']} -> {line['outcome']} ({line['what'][:80]})"


def read(line: dict[str, Any]) -> tuple[Cell, dict[str, Any]]:
    """Return the cell that a line of the ledger is of, and the line by today's prediction."""
    cell = (str(line["optimizer"]), str(line["backend"]))
    return cell, {**line, "predicted": predicted(probe(class_of(cell[0])), cell[1]).outcome, "what": str(line["what"])}


# -- the page


def page(lines: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Return docs/matrix.md."""
    names = list(classes())
    tally = Counter(line["outcome"] for line in lines.values())
    tallied = ", ".join(f"{count} {outcome}" for outcome, count in tally.most_common())
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = [
        "# Who runs where",
        "",
        "Every optimizer class of torch.optim, pytorch-optimizer, schedulefree and lion-pytorch, with its default settings:",
        "*predicted* from its measured scope and traits ([the probe](probe.md)) and from what a backend hands to the optimizer,",
        "by no list of names; and, where a cell has a second word, *measured* by `truestep verify` (2 ranks, fp32,",
        f"{STEPS[0]} steps of a small regression). Made by `./do who` on {datetime.date.today()} with {used}.",
        "",
        f"{len(names)} classes; {len(lines)} cells: {tallied}; {len(contradicted(lines))} predictions contradicted.",
        "",
        "| class | scope | " + " | ".join(BACKENDS) + " | notes |",
        "|---|---|" + "---|" * (len(BACKENDS) + 1),
    ]
    raising = [
        f"| `{name}` | {backend} | {_in_table(line['what'])} |"
        for (name, backend), line in sorted(lines.items())
        if line["outcome"] == "raises"
    ]
    tail = ["", "## What raises, and where", "", "| class | backend | what |", "|---|---|---|", *raising, ""]
    return "\n".join([*head, *(_row(name, lines) for name in names), *tail])


def _row(name: str, lines: Mapping[Cell, Mapping[str, Any]]) -> str:
    found = probe(class_of(name))
    entries = [_entry(found, lines.get((name, backend)), backend) for backend in BACKENDS]
    note = caveat(found, "zero2") if found.checked else found.why
    return (
        f"| `{name}` | {found.scope if found.checked else '-'} | {' | '.join(entries)} | {_in_table(note)[:SHOWN_CHARACTERS]} |"
    )


def _entry(found: Probe, line: Mapping[str, Any] | None, backend: str) -> str:
    outcome = predicted(found, backend).outcome
    return outcome if line is None or line["outcome"] == "not run" else f"{outcome}; **{line['outcome']}**"


def _in_table(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


# -- the chore


def run(ledger: Ledger[Cell], limit: int | None = None) -> None:
    """Measure what the ledger lacks, up to `limit` cells."""
    todo = [cell for cell in cells(list(classes())) if cell not in ledger.lines][:limit]
    for number, cell in enumerate(todo, 1):
        line = measured(cell)
        ledger.add(cell, line)
        print(f"[{number}/{len(todo)}] {' '.join(cell)}: {told(line)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chore; return its exit status."""
    parser = argparse.ArgumentParser(prog="./do who", description="Predict and measure which optimizer class runs where.")
    parser.add_argument("--out", type=Path, default=Path("who.jsonl"), help="one JSON line a cell; cells in it are skipped")
    parser.add_argument("--page", type=Path, default=Path("docs/matrix.md"), help="where to write the table")
    parser.add_argument("--limit", type=int, help="measure at most this many cells")
    asked = parser.parse_args(arguments)
    try:
        ledger = Ledger(asked.out, read, versions())
        run(ledger, asked.limit)
        asked.page.write_text(page(ledger.lines), encoding="utf-8")
    except (TrueStepError, OSError) as error:
        print(f"who: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"who: interrupted. Run it again to go on: what is done is in {asked.out}.", file=sys.stderr)
        return 130
    wrong = contradicted(ledger.lines)
    for cell in wrong:
        print(f"contradicted: {' '.join(cell)}: {told(ledger.lines[cell])}")
    print(f"{len(ledger.lines)} cells, {len(wrong)} predictions contradicted", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
