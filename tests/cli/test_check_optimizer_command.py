"""`truestep check-optimizer`: what is asked, what is shown, which status comes back; and one clear message for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from truestep.cli import run

MINE = """
import torch

class Doubled(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(2)
        return super().step(closure)

class Unbuildable(torch.optim.Optimizer):
    def __init__(self, params):
        raise RuntimeError("a licence is missing")

def two_parts(named):
    return torch.optim.AdamW([param for _, param in named])

NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE), encoding="utf-8")
    (tmp_path / "two_lines.py").write_text('raise ValueError("one\\ntwo")\n', encoding="utf-8")
    (tmp_path / "broken.py").write_text("import what_is_not_there\n", encoding="utf-8")
    return path


def test_a_class_of_torch_in_any_case_passes_with_settings_and_a_reference(mine: Path, capsys: Any) -> None:
    options = ["--reference", "adamax", "--set", "lr=0.01", "--set", "betas=(0.8, 0.95)", "--params", "1d"]
    assert run(["check-optimizer", "ADAMAX", *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("torch.optim.adamax.Adamax(lr=0.01, betas=(0.8, 0.95)), against the textbook's adamax: ")
    assert "young-updates        passed" in out
    assert "Where it may run" in out
    assert err == ""


def test_what_fails_is_exit_status_1_and_is_in_the_json_file(mine: Path, capsys: Any) -> None:
    assert run(["check-optimizer", f"{mine}:Doubled", "--json", "report.json", "--params", "1d"]) == 1
    assert "gradients-unaltered  FAILED" in capsys.readouterr().out
    data = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert not data["passed"]
    assert "gradients-unaltered" in [row["name"] for row in data["rows"] if row["outcome"] == "failed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine:Unbuildable"], "Unbuildable cannot be built and stepped: RuntimeError: a licence is missing."),
        (["broken:X"], "optimizer broken cannot be imported: ModuleNotFoundError: No module named 'what_is_not_there'"),
        (["nowhere:X"], "there is no optimizer 'nowhere:X'. Expected a class of torch.optim in any case, MODULE:OBJECT"),
        (["mine:Nothing"], "mine has no 'Nothing'"),
        (["mine"], "found a module. Name what is in it: mine:MyOptimizer."),
        (["mine:NUMBER"], "expected an optimizer class, or a function named_params -> optimizer, found 3"),
        (["adanw"], "there is no optimizer 'adanw'. Did you mean Adam"),
        (["adamw", "--set", "rate=1"], "AdamW takes no setting rate: expected some of lr, betas"),
        (["adamw", "--set", "lr"], "Invalid value for '--set': expected NAME=VALUE, found 'lr'. Write lr=0.01"),
        (["adamw", "--set", "params=2d"], "expected a setting of the class, found 'params': it is --params"),
        (["adamw", "--set", "lr=-1"], "ValueError: Invalid learning rate: -1"),
        (["adamw", "--reference", "adamx"], "expected a reference of the textbook, a class or a function, found 'adamx'"),
        (["adamw", "--reference", "nowhere:X"], "there is no reference 'nowhere:X'"),
        (["adamw", "--params", "wide"], "expected params to be \"2d\", or shapes by name, found 'wide'"),
        (["adamw", "--json", "no/such/folder/report.json"], "expected a file in a folder that exists"),
        (["adamw", "--json", "."], "expected a file in a folder that exists, found '.'"),
        (["two_lines:X"], "cannot be imported: ValueError: one two ("),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_is_one_message_and_exit_status_2(mine: Path, capsys: Any, arguments: list[str], message: str) -> None:
    assert run(["check-optimizer", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("truestep: error: ")
    assert err.count("\n") == 1


def test_a_function_of_a_file_is_checked(mine: Path, capsys: Any) -> None:
    arguments = ["check-optimizer", "mine:two_parts", "--reference", "adamw", "--params", "1d"]
    assert run(arguments) == 0
    assert "two_parts(), against the textbook's adamw" in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    code = "import sys; from truestep.cli import run; run(['check-optimizer', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "MODULE:OBJECT" in done.stdout
