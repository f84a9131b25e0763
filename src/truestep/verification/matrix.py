"""The full product: every backend, optimizer, window, recipe and world size, and every planted fault; run by ``./do matrix``.

A cell that is done is a JSON line of a file, appended as it ends: a run that was stopped goes on where it was. What each cell
should be is known beforehand, from a table. Exit status: 0 all cells are as expected, 1 some are not, 2 it cannot run, 130 it was
stopped.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from truestep.backends.base import BACKENDS
from truestep.proof.update import ZERO_GRADIENT
from truestep.verification import verifying
from truestep.verification.ledger import Ledger
from truestep.verification.planted import DROP_AFTER_STEP, FAULTS, HARMLESS
from truestep.verification.report import Report
from truestep.words.errors import TrueStepError

STEPS: Final = 4
COULD_NOT_RUN: Final = "could not run"
VERDICTS: Final = ("equal", "different", "not checked", COULD_NOT_RUN)

# Name in the matrix -> what `verify` takes.
OPTIMIZERS: Final[Mapping[str, str]] = {
    "adagrad": "adagrad",
    "adamw": "adamw",
    "rmsprop": "rmsprop",
    "decayed-sgd": f"{__spec__.name if __spec__ else __name__}:decayed_sgd",
}
RECIPES: Final[Mapping[str, str]] = {
    "bytes-gpt": "bytes-gpt:width=16,layers=1,context=16,batch=2",
    "bf16-gpt": "bf16-gpt:width=16,layers=1,context=16,batch=2",
    "embedding-net": "embedding-net",
}
WINDOWS: Final = (1, 2, 4)
WORLD_SIZES: Final = (2, 3)
FAULTY_OPTIMIZERS: Final = ("adagrad", "adamw")  # a fault that needs Adagrad's `sum` is planted in the first alone


def decayed_sgd(named_params: Iterable[tuple[str, Any]]) -> Any:
    """Return SGD with momentum and weight decay."""
    import torch  # Here, not above: reading the command line does not need it.

    return torch.optim.SGD([param for _, param in named_params], lr=1e-2, momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True)
class MatrixCell:
    """One combination of the factors; `fault` is empty where none is planted."""

    backend: str
    optimizer: str
    micro_batches: int
    recipe: str
    world_size: int
    fault: str = ""

    def __str__(self) -> str:
        about = f"{self.backend} {self.optimizer} K={self.micro_batches} {self.recipe} W={self.world_size}"
        return f"{about} {self.fault}" if self.fault else about


@dataclass(frozen=True)
class Expected:
    """What a cell should be; of its first finding what is not None.

    Attributes:
        verdict: ``equal`` or ``different``.
        law: That is broken.
        step: At which it is found.
        key: Of the slot.
        cause: In words.
    """

    verdict: str
    law: str | None = None
    step: int | None = None
    key: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Expectation:
    """One row of the table: to which cells it applies, and why they are so."""

    why: str
    applies: Callable[[MatrixCell], bool]
    expected: Expected


EQUAL: Final = Expected("equal")
# Read from the top; the first that applies counts.
EXPECTATIONS: Final[tuple[Expectation, ...]] = (
    Expectation(
        "accelerate, and in bf16 ZeRO 0, swap the params under Adagrad, whose state stays with the old ones",
        lambda cell: (
            cell.optimizer == "adagrad"
            and (cell.backend == "accelerate-fsdp2" or (cell.backend == "zero0" and cell.recipe == "bf16-gpt"))
        ),
        Expected("different", law="params", step=1),
    ),
    Expectation(
        "ZeRO and FSDP1 give a param without gradient a zero one, and what decays moves it",
        lambda cell: (
            ("zero" in cell.backend or cell.backend == "fsdp1")
            and cell.recipe == "embedding-net"
            and cell.optimizer in ("adamw", "decayed-sgd")
            and not cell.fault
        ),
        Expected("different", law="update", step=1, key="param", cause=ZERO_GRADIENT),
    ),
    Expectation(
        "the fault is none there",
        lambda cell: cell.backend in HARMLESS.get(cell.fault, ()),
        EQUAL,
    ),
    *(
        Expectation(
            fault.about,
            lambda cell, name=name: cell.fault == name,  # type: ignore[misc]
            Expected("different", law=fault.law, step=DROP_AFTER_STEP + 1 if fault.between else 1, key=fault.needs_key),
        )
        for name, fault in FAULTS.items()
    ),
    Expectation("a right step is equal", lambda cell: True, EQUAL),
)


def expected(cell: MatrixCell) -> Expected:
    """Return what a cell should be."""
    return next(row.expected for row in EXPECTATIONS if row.applies(cell))


def cells() -> list[MatrixCell]:
    """Return all cells: first the healthy ones, then every fault on every backend of its row."""
    healthy = [
        MatrixCell(backend, optimizer, window, recipe, world_size)
        for backend in BACKENDS
        for world_size in ((1,) if backend == "single" else WORLD_SIZES)
        for optimizer, window, recipe in itertools.product(OPTIMIZERS, WINDOWS, RECIPES)
    ]
    faulty = [
        replace(twin, fault=name)
        for name, fault in FAULTS.items()
        for twin in healthy
        if twin.backend in (*fault.backends, *HARMLESS.get(name, ()))
        and twin.world_size in (1, WORLD_SIZES[0])
        and twin.optimizer in (FAULTY_OPTIMIZERS[:1] if fault.needs_key else FAULTY_OPTIMIZERS)
        and twin.micro_batches >= fault.min_micro_batches
        and expected(twin) == EQUAL
    ]
    return healthy + faulty


# -- running


def outcome(cell: MatrixCell, verify: Callable[..., Report] = verifying.verify) -> dict[str, Any]:
    """Run one cell; return its JSON line."""
    began = time.monotonic()
    report, error = None, None
    try:
        report = verify(
            RECIPES[cell.recipe],
            backend=cell.backend,
            optimizer=OPTIMIZERS[cell.optimizer],
            micro_batches=cell.micro_batches,
            world_size=cell.world_size,
            steps=STEPS,
            faults=[cell.fault] if cell.fault else [],
        )
    except TrueStepError as raised:
        error = str(raised)
    first = report.first if report else None
    total = report.cells[0].total if report else None
    line = {
        "cell": asdict(cell),
        "verdict": report.verdict if report else COULD_NOT_RUN,
        "first": first.to_json() if first else None,
        "error": error,
        "bitwise": total.bitwise if total else 0,
        "bounded": total.bounded if total else 0,
        "worst": str(total.worst) if total else "0",
        "seconds": round(time.monotonic() - began, 2),
    }
    return judged(cell, line)


def judged(cell: MatrixCell, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line with what was expected of its cell, and whether it is so."""
    wanted = expected(cell)
    return {**line, "expected": asdict(wanted), "as_expected": fits(wanted, line["verdict"], line["first"])}


def fits(wanted: Expected, verdict: str, first: Mapping[str, Any] | None) -> bool:
    """Tell whether a verdict and its first finding, as JSON, are as expected."""
    told = {name: value for name, value in asdict(wanted).items() if name != "verdict" and value is not None}
    return verdict == wanted.verdict and all((first or {}).get(name) == value for name, value in told.items())


def read(line: dict[str, Any]) -> tuple[MatrixCell, dict[str, Any]]:
    """Return the cell that a line of the ledger is of, and the line judged by today's table."""
    cell = MatrixCell(**line["cell"])
    return cell, judged(cell, line)


def summary(done: Sequence[Mapping[str, Any]], count: int) -> str:
    """Return the totals by verdict and expectation, and the first cells that are not as expected."""
    totals = Counter((line["expected"]["verdict"], line["verdict"]) for line in done)
    right = sum(line["as_expected"] for line in done)
    table = [["expected \\ found", *VERDICTS]]
    table += [[wanted, *(str(totals[wanted, found]) for found in VERDICTS)] for wanted in ("equal", "different")]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    rows = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table]
    wrong = [line for line in done if not line["as_expected"]]
    told = [f"not as expected: {MatrixCell(**line['cell'])}: {_found(line)}" for line in wrong[:10]]
    more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
    return "\n".join([f"{len(done)} of {count} cells done, {right} as expected", *rows, *told, *more])


def _found(line: Mapping[str, Any]) -> str:
    first = line["first"] or {}
    why = line["error"] or " ".join(str(first[key]) for key in ("code", "param", "step", "cause") if first.get(key))
    return f"{line['verdict']}: {why}".removesuffix(": ").partition("\n")[0]


def run(ledger: Ledger[MatrixCell], wanted: Sequence[MatrixCell], limit: int | None = None) -> bool:
    """Run the cells that the ledger lacks, up to `limit` of them; return whether all that are done are as expected."""
    missing = [cell for cell in wanted if cell not in ledger.lines][:limit]
    if skipped := len(wanted) - len([cell for cell in wanted if cell not in ledger.lines]):
        print(f"{skipped} of {len(wanted)} cells are done already", flush=True)
    for number, cell in enumerate(missing, 1):
        line = outcome(cell)
        ledger.add(cell, line)
        verdict = line["verdict"] if line["as_expected"] else f"NOT AS EXPECTED: {_found(line)}"
        print(f"[{number}/{len(missing)}] {cell}: {verdict}, {line['seconds']:.1f} s", flush=True)
    done = [ledger.lines[cell] for cell in wanted if cell in ledger.lines]
    print(summary(done, len(wanted)), flush=True)
    return all(line["as_expected"] for line in done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chore; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="./do matrix", description="Verify the full product of factors, and every planted fault."
    )
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"), help="one JSON line a cell; cells in it are skipped")
    parser.add_argument("--limit", type=int, help="run at most this many cells")
    asked = parser.parse_args(arguments)
    try:
        return 0 if run(Ledger(asked.out, read, verifying.versions()), cells(), asked.limit) else 1
    except TrueStepError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"matrix: interrupted. Run it again to go on: what is done is in {asked.out}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
