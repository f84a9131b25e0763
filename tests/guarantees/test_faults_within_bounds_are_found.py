"""What ends within every bound of rounding, and is wrong all the same: a fused or 16-bit step that is not its kernel's."""

from __future__ import annotations

import pytest

FLAT = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *(("nudged:fused", backend) for backend in ("single", "ddp", "fsdp2", "fsdp1", *FLAT)),
        *(("nudged:narrow", backend) for backend in ("single", "ddp", "fsdp2")),
    ],
)
def test_a_step_within_its_bound_that_is_not_the_kernels_is_found(judged, recipe, backend):
    report = judged(recipe, backend=backend, micro_batches=2, steps=3)
    assert report.verdict == "different"
    first = report.first
    assert (first.code, first.law, first.phase, first.step) == ("update/differs-on-shards", "update", "update", 1), str(first)
    assert (
        (first.key == "param of flat piece 0") if backend in FLAT else ((first.param, first.key) == ("embedding.weight", "param"))
    )
    assert report.cells[0].checks["update"].worst < 1
