"""`truestep demo`: twenty healthy cells, then a live fault of today's releases and the finding that names it."""

from __future__ import annotations

from typing import Final

import typer

from truestep.cli import leads
from truestep.cli.display import print_report, verified
from truestep.verification.report import Report

BACKENDS: Final = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
OPTIMIZERS: Final = ("adamw", "adagrad")
WINDOWS: Final = (1, 4)
FAULTY: Final = "accumulation-by-hand"
HEALTHY_STEPS, FAULTY_STEPS, RANKS = 10, 3, 2


def demo() -> None:
    """Verify a small GPT on five backends, then show a live fault of today's releases, found and named."""
    _tell(
        f"1. A byte-level GPT on real text, {RANKS} ranks, {HEALTHY_STEPS} steps, {len(BACKENDS)} backends, two optimizers,\n"
        "   with and without accumulation. Every step is compared with one process: gradient, params, all optimizer state.\n"
    )
    healthy = verified(
        "bytes-gpt", backend=BACKENDS, optimizer=OPTIMIZERS, micro_batches=WINDOWS, world_size=RANKS, steps=HEALTHY_STEPS
    )
    print_report(healthy)
    _tell(
        "\n2. A live fault: accelerate over DeepSpeed ZeRO 2, four micro-batches accumulated by hand, while DeepSpeed's\n"
        "   gradient_accumulation_steps is left at 1. No error, no warning; the loss goes down.\n"
    )
    faulty = verified(FAULTY, backend="accelerate-zero2", micro_batches=4, world_size=RANKS, steps=FAULTY_STEPS)
    print_report(faulty)
    as_expected = healthy.verdict == "equal" and faulty.verdict == "different"
    _tell("\n" + "\n".join(explained(healthy, faulty)))
    raise typer.Exit(0 if as_expected else 1)


def explained(healthy: Report, faulty: Report) -> list[str]:
    """Return in plain words what the two runs showed."""
    lines = []
    if healthy.verdict != "equal":
        lines.append(f"Not as expected: the healthy cells are {healthy.verdict}.")
    if faulty.verdict != "different" or faulty.first is None:
        lines.append(
            f"Not as expected: the fault was not seen ({faulty.verdict}). Other releases of its packages may not have it."
        )
        return lines
    cause = faulty.first.cause or faulty.first.found
    lines += [
        f"The loop means one step a window; what happened, first seen at step {faulty.first.step}: {cause}.",
        "DeepSpeed steps inside accelerator.backward; accelerator.accumulate(model) around each micro-batch tells it when.",
    ]
    return lines


def _tell(text: str) -> None:
    if leads():
        typer.echo(text)
