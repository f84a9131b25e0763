"""The matrix of who runs where: what is measured, what contradicts a prediction, and that a run goes on where it was."""

from __future__ import annotations

import json

import pytest
import torch

from truestep.verification import who
from truestep.verification.report import Cell, Report
from truestep.verification.who import BACKENDS, MEASURED, cells, classes, contradicted, main, raised
from truestep.words.errors import VerifyError
from truestep.words.finding import Finding

PAIR = ["torch.optim:Adagrad", "pytorch_optimizer:Tiger"]


def test_every_class_of_torch_is_there_and_measured_on_every_backend():
    names = list(classes())
    own = {name for name, value in vars(torch.optim).items() if isinstance(value, type) and value is not torch.optim.Optimizer}
    assert {name.partition(":")[2] for name in names if name.startswith("torch.optim:")} == own
    assert len(names) == len(set(names)) > 100
    measured = cells(names)
    assert {backend for name, backend in measured if name == PAIR[0]} == set(BACKENDS)
    assert {backend for name, backend in measured if name == PAIR[1]} == set(MEASURED)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "cell: ranks 0, 1 raised it\nTraceback\nNotImplementedError: Operator aten.linalg_qr.default has none.\n",
            "NotImplementedError: Operator aten.linalg_qr.default has none.",
        ),
        ("a headline\nRuntimeError: shapes do not fit\n  in aten::mm.out here", "RuntimeError: shapes do not fit [aten::mm.out]"),
        (
            'headline\n File "/a/b.py", line 3, in step\n File "/c/d.py", line 5, in f\nAssertionError\n File "e", line 7',
            "AssertionError [d.py, line 5]",
        ),
        ("rank 1 gave no sign of life", "rank 1 gave no sign of life"),
    ],
)
def test_what_was_raised_is_told_with_its_operation(text, what):
    assert raised(text) == what


@pytest.mark.parametrize(
    ("predicted", "outcome", "is_bad"),
    [
        ("exact", "exact", False),
        ("exact", "ends elsewhere", True),
        ("exact", "raises", True),
        ("exact", "not checked", False),
        ("exact or raises", "raises", False),
        ("exact or raises", "ends elsewhere", True),
        ("ends elsewhere", "ends elsewhere", False),
        ("ends elsewhere", "exact", True),
        ("random", "ends elsewhere", False),
        ("not run", "not run", False),
    ],
)
def test_what_contradicts_a_prediction(predicted, outcome, is_bad):
    line = {"predicted": predicted, "outcome": outcome}
    assert contradicted({("a:B", "ddp"): line}) == ([("a:B", "ddp")] if is_bad else [])


class FakeVerify:
    """Stands in for `verify`: Adagrad is equal, but raises on FSDP1; others end elsewhere."""

    def __init__(self):
        self.asked = []

    def __call__(self, recipe, *, backend, optimizer, steps):
        self.asked.append((optimizer, backend))
        if backend == "fsdp1" and optimizer == PAIR[0]:
            raise VerifyError("rank 0 raised it\nValueError: no pieces, please | not these")
        wrong = Finding("update/differs", "update", "error", param="w", key="sum", step=2)
        about = {"backend": backend, "optimizer": optimizer, "world_size": 2, "micro_batches": 1, "steps": steps}
        return Report([Cell.judged([] if optimizer == PAIR[0] else [wrong], **about)])


@pytest.fixture
def fake(monkeypatch):
    made, measure = FakeVerify(), who.measured
    monkeypatch.setattr(who, "classes", lambda: iter(PAIR))
    monkeypatch.setattr(who, "measured", lambda cell: measure(cell, made))
    return made


def test_a_run_goes_on_where_it_was_and_counts_what_is_contradicted(fake, tmp_path, capsys):
    files = ["--out", str(tmp_path / "who.jsonl"), "--page", str(tmp_path / "matrix.md")]
    assert main([*files, "--limit", "2"]) == 0
    with (tmp_path / "who.jsonl").open("a") as file:
        file.write('{"half a li')  # a run that was killed as it wrote
    assert main(files) == 1
    assert fake.asked == cells(PAIR)  # each once
    out = capsys.readouterr().out
    assert "contradicted: torch.optim:Adagrad fsdp1: exact -> raises" in out
    assert "contradicted: pytorch_optimizer:Tiger fsdp1: exact -> ends elsewhere (update/differs at w/sum, step 2)" in out
    assert out.endswith("10 cells, 4 predictions contradicted\n")
    page = (tmp_path / "matrix.md").read_text()
    assert "2 classes; 10 cells: 6 exact, 3 ends elsewhere, 1 raises; 4 predictions contradicted." in page
    assert "| `torch.optim:Adagrad` | fsdp1 | ValueError: no pieces, please / not these |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| `pytorch_optimizer:Tiger` | element")]
    assert row.count("; **ends elsewhere**") == 3


def test_measurements_of_other_versions_are_made_anew(fake, tmp_path, monkeypatch):
    files = ["--out", str(tmp_path / "who.jsonl"), "--page", str(tmp_path / "matrix.md"), "--limit", "1"]
    main(files)
    monkeypatch.setattr(who.verifying, "versions", lambda: {"torch": "0.0"})
    main(files)
    assert fake.asked == [cells(PAIR)[0]] * 2


@pytest.mark.parametrize("line", ["[]", '{"schema_version": 1}', json.dumps({"schema_version": 0}), "rubbish"])
def test_a_file_of_something_else_is_refused(fake, tmp_path, capsys, line):
    (tmp_path / "who.jsonl").write_text(f"{line}\n")
    assert main(["--out", str(tmp_path / "who.jsonl"), "--page", str(tmp_path / "matrix.md")]) == 2
    assert capsys.readouterr().err.startswith(f"who: {tmp_path / 'who.jsonl'}, line 1: expected a cell of the matrix")
    assert fake.asked == []
