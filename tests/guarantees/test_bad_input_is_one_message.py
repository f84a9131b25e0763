"""Whatever is wrong with the input: one clear message, the right exit status, no traceback of ours, nothing left behind.

All cases run in this process, on one pool of ranks; `test_stopped_runs_leave_nothing.py` has those that are about processes.
"""

# size: one table of bad inputs, and the few cases that need a process of their own
from __future__ import annotations

import os
import time

import pytest

from truestep.cli import run
from truestep.verification import launch


@pytest.fixture
def said(capfd):
    """Run a command line here; return its exit status, stdout and stderr."""

    def verify(*args):
        capfd.readouterr()
        status = run(["verify", "--backend", "ddp", "--steps", "3", *map(str, args)])
        return (status, *capfd.readouterr())

    return verify


# -- what is wrong before anything runs


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--backend", "dpp"], "unknown backend 'dpp': expected one of single ddp"),
        (["--optimizer", "adamv"], "there is no optimizer 'adamv'. Did you mean Adam or RAdam or NAdam or AdamW or Adamax?"),
        (["--fault", "state-lost"], "unknown fault 'state-lost': expected one of step-every-micro-batch"),
        (["--fault", "step-every-micro-batch"], "does not act with 1 micro-batch a step. Give --micro-batches 2 or more"),
        (["--fault", "sync-missing", "--backend", "zero1"], "cannot be planted on 'zero1': it acts on ddp, fsdp2, zero0. Choose"),
        (["--steps", "0"], "Invalid value for '--steps': expected a whole number above 0, found '0'"),
        (["--world-size", "0"], "Invalid value for '--world-size': expected a whole number above 0, found '0'"),
        (["--world-size", "two"], "Invalid value for '--world-size': expected a whole number above 0, found 'two'"),
        (["--timeout", "0"], "Invalid value for '--timeout': expected seconds, 1 or more, found '0'"),
        (["--micro-batches", "x"], "Invalid value for '--micro-batches': expected whole numbers above 0, found 'x'"),
        (["--micro-batches", "1,,4"], "expected names with commas between them, found '1,,4'"),
        (
            ["--json", "/no/such/folder/report.json"],
            "expected a file in a folder that exists, found '/no/such/folder/report.json'",
        ),
        (["--json", "/"], "expected a file in a folder that exists, found '/'"),
        (["--no-such-option"], "No such option: --no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused_with_what_was_expected(args, expected, said, recipe):
    status, out, err = said(recipe(), *args)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.startswith("truestep: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({"head": "import torch\ndef broken(:\n"}, "SyntaxError: invalid syntax ("),
        ({"head": "import no_such_module_at_all\n"}, "ModuleNotFoundError: No module named 'no_such_module_at_all' ("),
        ({"head": "import sys\nsys.exit(4)\n"}, "SystemExit: 4 ("),
        ({"loss": ""}, "recipe 'recipe' lacks loss(model, batch). Define it there"),
        ({"loss": "", "model": ""}, "lacks model() and loss(model, batch). Define them there"),
        ({"optimizer": ""}, "has no optimizer(named_params). Add it, or name one: --optimizer adamw"),
        ({"loss": "def loss(model): ..."}, "expected loss(model, batch), found loss(model). Change what it takes"),
        ({"batches": "batches = [1, 2]"}, "expected batches(dp_rank, dp_size), found a list. Make batches a function"),
        ({"tail": "max_norm = -1\n"}, "expected max_norm to be a number above 0, found -1"),
        (
            {"tail": "def train_step(model, optimizer): ..."},
            "expected train_step(model, optimizer, batches), found train_step(model",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_recipe_that_cannot_be_one_is_refused_before_anything_runs(pieces, expected, said, recipe):
    status, out, err = said(recipe(**pieces))
    assert (status, out) == (2, "")
    assert expected in err
    assert err.startswith("truestep: error: ")
    assert err.count("\n") == 1


def test_a_recipe_that_is_not_there_is_told_with_what_may_be_given(said, tmp_path):
    status, out, err = said(tmp_path / "missing.py")
    assert (status, out) == (2, "")
    assert f"there is no file {tmp_path / 'missing.py'}. Expected a built-in recipe (bytes-gpt" in err
    assert "Did you mean bytes-gpt or" in said("byte-gpt")[2]


# -- what is wrong with what its pieces give


ALIKE = {
    "a model that is none": ({"model": "def model():\n    return None"}, "expected model() to return a torch module, or several"),
    "nothing to train": ({"model": "def model():\n    return nn.Tanh()"}, "expected a model with params to train, found none"),
    "other shapes on a rank": (
        {"model": "def model():\n    return nn.Linear(5, 3 + (rank() or 0))"},
        "found that weight is torch.float32[4, 5] on rank 1 and torch.float32[3, 5] on rank 0",
    ),
    "batches of nothing": ({"batches": "def batches(dp_rank, dp_size): ..."}, "to return an iterable, found NoneType"),
    "batches that end": (
        {"batches": "def batches(dp_rank, dp_size):\n    return [torch.ones(4, 5)] * 2"},
        "batches ended in step 3 on rank",
    ),
    "batches that end on one rank": (
        {"batches": "def batches(dp_rank, dp_size):\n    return [torch.ones(4, 5)] * (9 - 8 * dp_rank)"},
        "batches ended in step 2 on rank 1: expected 1 a step on every rank. Give fewer --steps",
    ),
    "a batch that does not travel": (
        {
            "batches": "def batches(dp_rank, dp_size):\n    while True:\n        yield lambda: torch.ones(4, 5)",
            "loss": "def loss(model, batch):\n    return model(batch()).sum()",
        },
        "cannot be sent to the reference",
    ),
    "a loss of many": (
        {"loss": "def loss(model, batch):\n    return model(batch)"},
        "found one of shape (4, 3). Return its mean",
    ),
    "a loss that is a number": ({"in_loss": "return model(batch).sum().item()"}, "found a float. Return the tensor itself"),
    "a detached loss": ({"in_loss": "return model(batch).sum().detach()"}, "found one that no gradient flows through"),
    "an optimizer that needs a closure": (
        {"optimizer": "def optimizer(named_params):\n    return torch.optim.LBFGS([param for _, param in named_params])"},
        "expected an optimizer that steps by itself, found LBFGS",
    ),
    "no optimizer": ({"optimizer": "def optimizer(named_params): ..."}, "expected optimizer(named_params) to return"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_the_pieces_give_is_checked_and_told_in_one_line(case, said, recipe):
    pieces, expected = ALIKE[case]
    status, out, err = said(recipe(**pieces))
    assert (status, out) == (2, "")
    assert expected in err
    assert err.startswith("truestep: error: ")
    assert err.count("\n") == 1


def test_a_named_optimizer_that_does_not_take_the_params_is_told_with_what_to_do(said, recipe):
    status, out, err = said(recipe(), "--optimizer", "muon")
    assert (status, out) == (2, "")
    assert "optimizer 'muon' cannot be made of these params with its default settings: Muon only supports 2D parameters" in err
    assert err.count("\n") == 1


RAISED = {
    "the model": (
        {"in_model": "raise ValueError('no such layer')"},
        "ranks 0, 1 raised ValueError: no such layer",
    ),
    "the loss on one rank": (
        {"in_loss": "if rank() == 1: raise ValueError('a bad batch')", "after": 3},
        "cell ddp x1: rank 1 raised ValueError: a bad batch; rank 0 was waiting in ",
    ),
    "the loss in one process": (
        {"in_loss": "if rank() is None: raise ValueError('only here')", "after": 3},
        "cell ddp x1: the reference raised ValueError: only here",
    ),
    "sys.exit": ({"in_loss": "if rank() == 1: sys.exit(3)", "after": 3}, "rank 1 called sys.exit(3)"),
}


@pytest.mark.parametrize("case", RAISED)
def test_what_a_piece_raises_is_shown_from_the_users_own_line_on(case, said, recipe):
    pieces, expected = RAISED[case]
    path = recipe(**pieces)
    status, out, err = said(path)
    assert (status, out) == (2, "")
    assert expected in err.splitlines()[0]
    assert err.count("truestep: error: ") == 1
    assert f'Traceback (most recent call last):\n  File "{path}", line ' in err
    assert "/truestep/verification/" not in err


GONE = {
    "rank 1 is killed": (
        "if rank() == 1: os.kill(os.getpid(), 9)",
        "rank 1 was killed by SIGKILL; rank 0 lost its connection to it",
    ),
    "the reference is killed": (
        "if rank() is None: os.kill(os.getpid(), 9)",
        "cell ddp x1: the reference was killed by SIGKILL.",
    ),
    "rank 1 sleeps": (
        "if rank() == 1: time.sleep(1000)",
        "rank 1 gave no sign of life for 3 s: it waits in loss (recipe.py, line ",
    ),
    "the reference sleeps": (
        "if rank() is None: time.sleep(1000)",
        "cell ddp x1: the reference gave no sign of life for 3 s: it",
    ),
}


@pytest.mark.parametrize("case", GONE)
def test_a_process_that_is_gone_or_hangs_is_named_within_the_time_limit(case, said, recipe):
    body, expected = GONE[case]
    status, out, err = said(recipe(in_loss=body, after=3), "--timeout", "3")
    assert (status, out) == (2, "")
    assert expected in err.splitlines()[0]
    assert err.count("truestep: error: ") == 1


# -- what is odd, and judged


def test_a_loss_that_is_not_finite_is_not_called_equal(said, recipe):
    status, out, _ = said(recipe(in_loss="return model(batch).sum() * float('nan')"))
    assert status == 3
    assert "a loss is not finite: from here on NaN and infinity are compared with themselves" in out


def test_a_model_that_differs_from_call_to_call_is_told_of(said, recipe):
    status, out, _ = said(recipe(in_model="torch.seed()"))
    assert status == 0
    assert out.count("warning: verify/model-differs 0.weight on rank 0, 1: expected model() to make the same values") == 1


ODD = {
    "it prints a lot": {"in_loss": "print('x' * 100_000); print('\\n' * 5_000, file=sys.stderr)"},
    "it forks": {"in_loss": "os.fork() or os._exit(0)"},
    "a process that it forked stays": {"in_loss": "os.fork() or (time.sleep(1000), os._exit(0))", "after": 3},
    "lengths differ": {
        "batches": """
            def batches(dp_rank, dp_size):
                for count in range(1, 9):
                    yield torch.full((count + dp_rank, 5), count / 10)
        """
    },
    "batches are objects": {
        "batches": """
            import dataclasses
            from collections import UserDict

            @dataclasses.dataclass
            class Pair:
                inputs: object
                name: str

            class Encoding(UserDict):
                pass

            def batches(dp_rank, dp_size):
                for count in range(1, 9):
                    inputs = torch.full((4, 5), count / 10 + dp_rank)
                    kinds = [Pair(inputs, "a"), Encoding(inputs=inputs), {"inputs": inputs, "name": "c"}, [inputs, "d"]]
                    yield kinds[count % 4]
        """,
        "loss": """
            def loss(model, batch):
                if isinstance(batch, list):
                    inputs = batch[0]
                else:
                    inputs = batch.inputs if hasattr(batch, "name") else batch["inputs"]
                return model(inputs).pow(2).mean()
        """,
    },
    "batches are text": {
        "batches": "def batches(dp_rank, dp_size):\n    while True:\n        yield 'some text'",
        "loss": "def loss(model, batch):\n    return model(torch.tensor([float(ord(c)) for c in batch[:5]]) / 99).pow(2).mean()",
    },
}


@pytest.mark.parametrize("case", ODD)
def test_a_recipe_that_is_odd_but_sound_is_equal(case, said, recipe):
    status, out, err = said(recipe(**ODD[case]))
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "verdict: equal (cells: 1 equal)"


def test_modules_beside_a_recipe_are_found_late_and_apart(said, recipe, sound_pieces, tmp_path):
    late = "def loss(model, batch):\n    from beside import scale\n    return model(batch).pow(2).mean() * scale\n"
    for folder, scale in (("one", 2.0), ("two", 3.0)):
        path = recipe(f"{folder}/same.py", head=sound_pieces["head"] + "import beside\n", loss=late, tail="assert beside.scale")
        (tmp_path / folder / "beside.py").write_text(f"scale = {scale}\n")
        assert said(path, "--json", tmp_path / f"{folder}.json")[0] == 0
    first = [
        __import__("json").loads((tmp_path / f"{name}.json").read_text())["cells"][0]["losses"][0] for name in ("one", "two")
    ]
    assert first[1] == pytest.approx(first[0] * 1.5)


def test_a_recipe_may_be_an_instance_in_a_module(said, recipe, tmp_path, monkeypatch):
    tail = """
        class Recipe:
            model, optimizer, batches, loss = map(staticmethod, (model, optimizer, batches, loss))

        mine = Recipe()
    """
    path = recipe("named_recipe.py", tail=tail)
    monkeypatch.chdir(tmp_path)
    assert said("named_recipe:mine")[0] == 0
    assert said(f"{path}:mine")[0] == 0
    assert "named_recipe has no 'nine'. Did you mean mine" in said("named_recipe:nine")[2]


def test_nothing_is_left_behind():
    template = launch.pool()._template
    assert template is not None
    launch.pool().close()
    assert template.process.poll() is not None
    assert wait_until_gone(template.process.pid)


def wait_until_gone(pid, seconds=5.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
