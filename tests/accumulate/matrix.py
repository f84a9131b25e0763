"""The full product of the accumulator's factors through `verify`: resumable, one JSON line a cell; part of ``./do matrix``.

    python tests/accumulate/matrix.py [FILE] [--only BACKEND,..]

What is in the file already is not run again. Exit status: 0 all cells are as expected, 1 some are not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path

from truestep.backends.base import BACKENDS
from truestep.verification.verifying import verify

RECIPES = Path(__file__).with_name("accumulate_recipes.py")
STEPS = 4
FACTORS = {
    "backend": list(BACKENDS),
    "optimizer": ["adamw", "adagrad", "momentum"],
    "micro_batches": [1, 3, 4],
    "weights": ["equal", "ahead", "late"],
    "reduction": ["mean", "sum"],
    "tail": ["full", "tail"],
    "clip": ["free", "clipped"],
    "world_size": [2, 3],
}


def healthy(row):
    return (row["backend"], row["optimizer"]) != ("accelerate-fsdp2", "adagrad")  # accelerate itself loses its state


def judged(row):
    """Return the report of one combination."""
    name = "_".join(row[factor] for factor in ("optimizer", "weights", "reduction", "tail", "clip"))
    asked = {factor: row[factor] for factor in ("backend", "micro_batches", "world_size")}
    return verify(f"{RECIPES}:{name}", steps=STEPS, **asked)


def cell(row):
    """Return one combination's line."""
    began = time.monotonic()
    report = judged(row)
    laws = sorted({finding.law for finding in report.findings if finding.severity == "error"})
    right = report.verdict == "equal" if healthy(row) else laws == ["params"]
    return {**row, "verdict": report.verdict, "laws": laws, "right": right, "seconds": round(time.monotonic() - began, 2)}


def key(row):
    return tuple(row[factor] for factor in FACTORS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", default=".cache/matrix-accumulate.jsonl", type=Path)
    parser.add_argument("--only", help="backends, by commas")
    asked = parser.parse_args()
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    done = {key(line) for line in lines}
    rows = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    wanted = [row for row in rows if asked.only is None or row["backend"] in asked.only.split(",")]
    with asked.file.open("a") as out:
        for row in sorted((row for row in wanted if key(row) not in done), key=lambda row: row["world_size"]):
            line = cell(row)
            lines.append(line)
            print(json.dumps(line), file=out, flush=True)
            if not line["right"]:
                print(f"not as expected: {line}", flush=True)
    print(f"{len(lines)} of {len(rows)} cells: {dict(Counter(line['verdict'] for line in lines))}")
    return 0 if all(line["right"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
