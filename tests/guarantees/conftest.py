"""What the promises about `verify` are tested with: real ranks, and the programs of tests/verification/programs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from truestep.verification.verifying import verify

PROGRAMS = Path(__file__).parents[1] / "verification" / "programs"

# A tiny recipe, piece by piece: for tests that spoil one.
PIECES = {
    "head": """
        import os, sys, time
        import torch
        import torch.distributed as dist
        from torch import nn

        def rank():
            return dist.get_rank() if dist.is_initialized() else None  # None: the reference

        calls = 0
    """,
    "model": """
        def model():
            return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    """,
    "optimizer": """
        def optimizer(named_params):
            return torch.optim.AdamW([param for _, param in named_params], lr=0.01)
    """,
    "batches": """
        def batches(dp_rank, dp_size):
            draw = torch.Generator().manual_seed(7 + dp_rank)
            while True:
                yield torch.randn(4, 5, generator=draw)
    """,
    "loss": """
        def loss(model, batch):
            return model(batch).pow(2).mean()
    """,
    "tail": "",
}


@pytest.fixture
def programs():
    """The folder of the programs."""
    return PROGRAMS


@pytest.fixture
def judged():
    """Run one cell; a recipe ``with_ddp:healthy`` is an object of a program's file, a name without a colon a built-in one."""

    def judge(recipe, **asked):
        program, _, name = recipe.partition(":")
        path = PROGRAMS / f"{program}.py"
        report = verify(f"{path}:{name}" if path.is_file() else recipe, **asked)
        assert len(report.cells) == 1
        return report

    return judge


@pytest.fixture
def equal(judged):
    """Run one cell that must be equal; the failure shows what was found."""

    def judge(recipe, **asked):
        report = judged(recipe, **asked)
        assert report.verdict == "equal", "\n".join(map(str, report.findings))
        (cell,) = report.cells
        assert all(cell.checks[phase].bitwise for phase in ("data", "backward", "update", "between")), cell.checks
        assert cell.checks["reduce"].bounded > 0
        assert all(figures.worst <= 1 for figures in cell.checks.values())
        return cell

    return judge


@pytest.fixture
def sound_pieces():
    """The text of a tiny sound recipe, by piece."""
    return {name: textwrap.dedent(text) for name, text in PIECES.items()}


@pytest.fixture
def recipe(tmp_path, sound_pieces):
    """Write that recipe with other pieces, or with what its `model` or `loss` does first, from some call on."""

    def write(name="recipe.py", *, in_model="", in_loss="", after=0, **others):
        text = {piece: textwrap.dedent(other) for piece, other in {**sound_pieces, **others}.items()}
        for piece, body in (("model", in_model), ("loss", in_loss)):
            if body:
                head, rest = text[piece].strip().split("\n", 1)
                text[piece] = f"{head}\n    global calls\n    calls += 1\n    if calls > {after}:\n        {body}\n{rest}\n"
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(text.values()))
        return path

    return write
