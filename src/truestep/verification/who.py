"""The matrix of who runs where: every optimizer class predicted on every backend, and measured by `verify` on some.

``python -m truestep.verification.who`` writes docs/matrix.md from ``who.jsonl``, which has one line a cell and is added to: a
run that was interrupted goes on. A prediction that a measurement contradicts is counted, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from truestep.optimizers.placement import caveat, predicted
from truestep.optimizers.probe import Probe, probe
from truestep.verification.verifying import verify, versions
from truestep.words.errors import TrueStepError

BACKENDS: Final = ("single", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
MEASURED: Final = ("fsdp2", "fsdp1", "zero2")  # of the classes that are not torch's own
PACKAGES: Final = ("torch.optim", "pytorch_optimizer", "schedulefree", "lion_pytorch")
DISTRIBUTIONS: Final = ("pytorch-optimizer", "schedulefree", "lion-pytorch")
STEPS: Final = 6
HOLDS: Final[Mapping[str, tuple[str, ...]]] = {
    "exact": ("exact",),
    "exact or raises": ("exact", "raises"),
    "ends elsewhere": ("ends elsewhere", "raises"),
    "random": ("exact", "ends elsewhere", "raises"),
    "not run": (),
}


def classes() -> Iterator[str]:
    """Yield ``MODULE:CLASS`` of every optimizer class of the packages that are installed."""
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)]
        names = {value.__name__ for value in found if value is not torch.optim.Optimizer and not inspect.isabstract(value)}
        yield from (f"{package}:{name}" for name in sorted(names))


def class_of(name: str) -> type:
    """Return the class that ``MODULE:CLASS`` names."""
    module, _, own = name.partition(":")
    found: type = getattr(importlib.import_module(module), own)
    return found


def cells(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return what is measured: torch's own classes on every backend, the others on `MEASURED`."""
    return [(name, backend) for name in names for backend in (BACKENDS if name.startswith("torch.optim") else MEASURED)]


def measured(name: str, backend: str, found: Probe) -> dict[str, Any]:
    """Run one class on one backend through `verify`; return what came of it: ``exact``, ``ends elsewhere`` or ``raises``."""
    recipe = "three-linears:bias=0" if "2d" in found.needs else "three-linears:bias=1"
    try:
        report = verify(recipe, backend=backend, optimizer=name, steps=STEPS)
    except TrueStepError as error:
        return {"outcome": "raises", "what": raised(str(error))}
    cell = report.cells[0]
    if cell.verdict == "equal":
        total = cell.total
        return {"outcome": "exact", "what": f"{total.bitwise} bitwise, {total.bounded} within {total.worst:.2g} of a bound"}
    if cell.verdict == "different" and cell.first is not None:
        where = "/".join(part for part in (cell.first.param, cell.first.key) if part)
        return {"outcome": "ends elsewhere", "what": f"{cell.first.code} at {where}, step {cell.first.step}"}
    return {"outcome": "not checked", "what": str(cell.first)}


def raised(text: str) -> str:
    """Return from a run's error what the optimizer raised, with the operation where it names one."""
    lines = [line for line in text.splitlines() if re.match(r"^[A-Za-z_.]*(Error|Exception|Warning)\b", line)]
    line = lines[-1] if lines else text.splitlines()[0]
    ops = re.findall(r"(?:aten|prims)[.:]+[\w.]+", text)
    return line[:160] + (f" [{ops[0]}]" if ops and ops[0] not in line[:160] else "")


def contradicts(outcome: str, prediction: str) -> bool:
    """Tell whether what was measured is not what was predicted."""
    return outcome != "not checked" and prediction in HOLDS and bool(HOLDS[prediction]) and outcome not in HOLDS[prediction]


def run(out: Path, limit: int | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Measure what the file does not have yet, a line a cell; return all that it has then."""
    known = {}
    if out.exists():
        for line in out.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[row["optimizer"], row["backend"]] = row
    names = list(classes())
    todo = [cell for cell in cells(names) if cell not in known][:limit]
    for place, (name, backend) in enumerate(todo):
        found = probe(class_of(name))
        prediction = predicted(found, backend)
        came = (
            {"outcome": "not run", "what": prediction.why} if prediction.outcome == "not run" else measured(name, backend, found)
        )
        cell = {"optimizer": name, "backend": backend, "scope": found.scope, "predicted": prediction.outcome, **came}
        known[name, backend] = cell
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        say(f"{place + 1}/{len(todo)} {name} {backend}: {told(cell)}")
    return known


def say(line: str) -> None:
    """Write a line at once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def told(row: Mapping[str, Any]) -> str:
    """Return what was predicted and what came, in one line."""
    return f"{row['predicted']} -> {row['outcome']} ({row['what'][:80]})"


def page(known: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """Return docs/matrix.md."""
    names = list(classes())
    used = {**versions(), **{name: importlib.metadata.version(name) for name in DISTRIBUTIONS if _installed(name)}}
    bad = [row for row in known.values() if contradicts(row["outcome"], row["predicted"])]
    lines = [
        "# Who runs where",
        "",
        "Every optimizer class of `torch.optim`, pytorch-optimizer, schedulefree and lion-pytorch: *predicted* from its measured",
        "scope and traits and from what a backend hands to the optimizer, and *measured* through `truestep verify` where a cell",
        f"has a second entry (2 ranks, {STEPS} steps, three Linears). Made on {datetime.date.today()} by `./do who` with "
        + ", ".join(f"{name} {version}" for name, version in used.items())
        + ".",
        "",
        f"{len(names)} classes; {len(known)} cells measured; {len(bad)} predictions contradicted.",
        "",
        "| class | scope | " + " | ".join(BACKENDS) + " | notes |",
        "|---|---|" + "---|" * (len(BACKENDS) + 1),
    ]
    raised_by: list[str] = []
    for name in names:
        found = probe(class_of(name))
        entries = [_entry(found, known.get((name, backend)), backend) for backend in BACKENDS]
        scope = found.scope if found.checked else "-"
        note = caveat(found, "zero2") if found.checked else found.why
        lines.append(f"| `{name}` | {scope} | " + " | ".join(entries) + f" | {note.replace('|', '/')[:140]} |")
        raised_by += [
            f"| `{name}` | {backend} | {known[name, backend]['what'].replace('|', '/')} |"
            for backend in BACKENDS
            if known.get((name, backend), {}).get("outcome") == "raises"
        ]
    lines += ["", "## What raises, and where", "", "| class | backend | what |", "|---|---|---|", *raised_by, ""]
    return "\n".join(lines)


def _entry(found: Probe, row: Mapping[str, Any] | None, backend: str) -> str:
    outcome = predicted(found, backend).outcome
    return outcome if row is None or row["outcome"] == "not run" else f"{outcome}; **{row['outcome']}**"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the page; return 1 if a prediction is contradicted."""
    parser = argparse.ArgumentParser(prog="python -m truestep.verification.who", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("who.jsonl"), help="one JSON line a cell; added to")
    parser.add_argument("--page", type=Path, default=Path("docs/matrix.md"))
    parser.add_argument("--limit", type=int, default=None, help="measure at most so many cells")
    chosen = parser.parse_args(argv)
    known = run(chosen.out, chosen.limit)
    chosen.page.write_text(page(known), encoding="utf-8")
    bad = [row for row in known.values() if contradicts(row["outcome"], row["predicted"])]
    for row in bad:
        say(f"contradicted: {row['optimizer']} on {row['backend']}: {told(row)}")
    say(f"{len(known)} cells, {len(bad)} predictions contradicted")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
