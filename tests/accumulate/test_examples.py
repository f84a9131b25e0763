"""The loops in examples/: each trains, on ranks that agree, and its step is one process's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from truestep.state import ranks
from truestep.verification.verifying import verify

EXAMPLES = Path(__file__).parents[2] / "examples"
# Example -> a loss that it starts well above, and where it is verified.
LOOPS = {
    "accumulate_fsdp2": (0.4, ["fsdp2"]),
    "accumulate_accelerate": (0.35, ["accelerate-ddp", "accelerate-fsdp2"]),
    "accumulate_deepspeed": (0.4, ["zero1", "zero2", "zero3"]),
    "accumulate_tokens": (4.0, ["ddp"]),
}


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.truestep(world_size=2)
@pytest.mark.filterwarnings("ignore")  # of vendors, at what examples do as their documentation has it
@pytest.mark.parametrize("name", LOOPS)
def test_an_example_trains(name, rank):
    example = loaded(name)
    first = example.loss(example.model(), next(example.batches(0, 1))).item()
    last = example.main()
    below, _ = LOOPS[name]
    assert last < below < first
    assert len(set(ranks.gather(last))) == 1


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, (_, backends) in LOOPS.items() for backend in backends])
def test_the_step_of_an_example_is_one_process_s(name, backend, micro_batches):
    report = verify(EXAMPLES / f"{name}.py", backend=backend, micro_batches=micro_batches, steps=4)
    assert report.verdict == "equal", "\n".join(map(str, report.findings))
    assert report.cells[0].loop == "yours"
