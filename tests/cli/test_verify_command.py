"""The command line, against a labelled stand-in for `verify`: what it is asked, what is shown, which status comes back."""

import json
import os
import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

from truestep.cli import COMMANDS, app, demo, display, run
from truestep.verification.report import Cell, Checks, Event, Report, no_checks, not_checked
from truestep.words.errors import TrueStepError, UnsupportedError, VerifyError
from truestep.words.finding import Finding

SUMMED = Finding(
    code="gradient/not-conserved",
    law="gradient",
    severity="error",
    param="layers.0.weight",
    key="grad",
    expected="the mean of the micro-batches",
    found="3 times it",
    fix="Divide once.",
    ranks=(0, 1),
    step=1,
    phase="reduce",
    cause="it was summed over ranks",
)
UNCHECKED = not_checked("backward", "operators were replaced", step=1)


class FakeVerify:
    """Stands in for `truestep.verification.verifying.verify`: notes what it is asked, tells events, returns a made-up report."""

    def __init__(self):
        self.calls = []
        self.findings_by_backend = {}
        self.raises = None

    def __call__(self, recipe, *, progress=None, **asked):
        self.calls.append({"recipe": recipe, **asked})
        if self.raises is not None:
            raise self.raises
        listed = {
            key: asked[key] if isinstance(asked[key], (list, tuple)) else [asked[key]] for key in ("backend", "micro_batches")
        }
        optimizers = asked.get("optimizer") or ["adamw"]
        keys = [(b, o, k) for b in listed["backend"] for o in optimizers for k in listed["micro_batches"]]
        progress(Event("message", text="building an op"))
        return Report([self.cell(index, len(keys), key, asked, progress) for index, key in enumerate(keys)], {"torch": "2.13.0"})

    def cell(self, index, count, key, asked, progress):
        backend, optimizer, micro_batches = key
        about = {"backend": backend, "optimizer": optimizer, "world_size": asked["world_size"], "micro_batches": micro_batches}
        steps = asked["steps"]
        progress(Event("start", index, count, steps=steps, **about))
        progress(Event("step", index, count, step=1, steps=steps, **about))
        checks = {**no_checks(), "backward": Checks(bitwise=12), "reduce": Checks(bounded=7, worst=0.25)}
        findings = self.findings_by_backend.get(backend, [])
        result = Cell.judged(findings, allow=asked.get("allow", ()), steps=steps, seconds=1.5, checks=checks, **about)
        progress(Event("cell", index, count, step=steps, steps=steps, result=result, **about))
        return result


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    made = FakeVerify()
    monkeypatch.setitem(sys.modules, "truestep.verification.verifying", types.SimpleNamespace(verify=made))
    for name in ("WORLD_SIZE", "RANK", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_without_arguments_the_documented_defaults_are_asked(fake, capsys):
    assert run(["verify"]) == 0
    assert fake.calls == [
        {
            "recipe": "bytes-gpt",
            "backend": ["ddp", "fsdp2"],
            "optimizer": None,
            "micro_batches": [1],
            "world_size": 2,
            "steps": 10,
            "faults": (),
            "allow": (),
            "timeout": 120.0,
        }
    ]


def test_every_option_reaches_verify(fake, tmp_path, capsys):
    options = ["--backend", "ddp, zero1,ddp", "--optimizer", "adagrad,adamw", "--micro-batches", "1,4", "--world-size", "3"]
    more = ["--steps", "5", "--fault", "state-dropped", "--fault", "sync-missing", "--allow", "verify/*", "--timeout", "7"]
    assert run(["verify", "mine.py", *options, *more]) == 0
    assert fake.calls[0] == {
        "recipe": "mine.py",
        "backend": ["ddp", "zero1"],
        "optimizer": ["adagrad", "adamw"],
        "micro_batches": [1, 4],
        "world_size": 3,
        "steps": 5,
        "faults": ("state-dropped", "sync-missing"),
        "allow": ("verify/*",),
        "timeout": 7.0,
    }


def test_elsewhere_than_on_a_terminal_there_is_a_plain_line_a_cell(capsys):
    assert run(["verify", "--backend", "ddp,zero2", "--micro-batches", "1,4"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "ddp adamw x1: equal; 12 tensors bitwise, 7 within a bound (worst 0.25 of it), 1.5 s"
    assert [line.split(":")[0] for line in lines[:4]] == ["ddp adamw x1", "ddp adamw x4", "zero2 adamw x1", "zero2 adamw x4"]
    assert lines[-1] == "verdict: equal (cells: 4 equal)"
    assert "\x1b" not in out
    assert err == "truestep: building an op\n"


def test_a_difference_is_told_with_where_why_and_what_to_do(fake, capsys):
    fake.findings_by_backend["fsdp2"] = [SUMMED, SUMMED]
    assert run(["verify", "--micro-batches", "4"]) == 1
    out = capsys.readouterr().out
    for line in (
        "fsdp2 adamw x4: different",
        "  code     gradient/not-conserved",
        "  where    layers.0.weight/grad, rank 0, 1, step 1, reduce",
        "  expected the mean of the micro-batches",
        "  found    3 times it",
        "  cause    it was summed over ranks",
        "  fix      Divide once.",
        "  and 1 more in this cell",
        "verdict: different (cells: 1 equal, 1 different)",
    ):
        assert line in out.splitlines()


def test_what_was_not_checked_is_status_3_until_allowed(fake, capsys):
    fake.findings_by_backend["ddp"] = [UNCHECKED]
    assert run(["verify"]) == 3
    assert "--allow verify/not-checked-backward" in capsys.readouterr().out
    assert run(["verify", "--allow", "verify/not-checked-*"]) == 0


def test_the_report_is_written_as_json(fake, tmp_path, capsys):
    fake.findings_by_backend["ddp"] = [SUMMED]
    path = tmp_path / "report.json"
    assert run(["verify", "--json", str(path)]) == 1
    data = json.loads(path.read_text())
    assert (data["schema_version"], data["verdict"], len(data["cells"])) == (1, "different", 2)
    assert Report.from_json(path).first == SUMMED


# -- under a launcher


def test_under_torchrun_the_given_ranks_are_used_and_rank_0_prints(fake, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert run(["verify"]) == 0
    assert fake.calls[0]["world_size"] == 4
    assert "ddp adamw x1: equal" in capsys.readouterr().out


def test_under_torchrun_the_other_ranks_keep_silent_with_the_same_status(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    fake.findings_by_backend["ddp"] = [SUMMED]
    assert run(["verify", "--json", str(tmp_path / "report.json")]) == 1
    fake.raises = VerifyError("rank 1 died.")
    assert run(["verify"]) == 2
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_another_number_of_ranks_than_torchrun_gives_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(["verify", "--world-size", "4"]) == 0
    capsys.readouterr()
    assert run(["verify", "--world-size", "2"]) == 2
    assert "expected the 4 ranks that the launcher gives (WORLD_SIZE), found 2" in capsys.readouterr().err


# -- what is wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "--micro-batches", "1,x"], "'--micro-batches': expected whole numbers above 0, found '1,x'"),
        (["verify", "--micro-batches", "0"], "'--micro-batches': expected whole numbers above 0, found '0'"),
        (["verify", "--backend", "ddp,,fsdp2"], "'--backend': expected names with commas between them, found 'ddp,,fsdp2'"),
        (["verify", "--optimizer", ""], "'--optimizer': expected names with commas between them, found ''"),
        (["verify", "--steps", "0"], "'--steps'"),
        (["verify", "--world-size", "many"], "'--world-size'"),
        (["verify", "--json", "nowhere/report.json"], "'--json': expected a file in a folder that exists"),
        (["verify", "one", "two"], "two"),
        (["verify", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(fake, arguments, said, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("truestep: error: ")
    assert "--help'." in err
    assert err.count("\n") == 1
    assert (out, fake.calls) == ("", [])


@pytest.mark.parametrize("error", [TrueStepError, UnsupportedError, VerifyError])
def test_our_errors_are_one_message_without_a_traceback(fake, error, capsys):
    fake.raises = error("unknown backend 'dpp': expected one of single ddp. Choose one of these.")
    assert run(["verify"]) == 2
    assert capsys.readouterr().err == "truestep: error: unknown backend 'dpp': expected one of single ddp. Choose one of these.\n"


def test_an_interruption_is_status_130(fake, capsys):
    fake.raises = KeyboardInterrupt()
    assert run(["verify"]) == 130
    assert capsys.readouterr().err == "truestep: interrupted\n"


def test_a_fault_of_ours_is_not_taken_for_a_difference(fake, capsys):
    fake.raises = RuntimeError("broken")
    assert run(["verify"]) == 2
    err = capsys.readouterr().err
    assert "RuntimeError: broken" in err
    assert "this is a fault of truestep" in err


def test_a_reader_that_goes_away_leaves_no_noise():
    code = (
        "import sys, types\n"
        "def verify(*a, **k):\n"
        "    for _ in range(100000): print('x' * 100)\n"
        "sys.modules['truestep.verification.verifying'] = types.SimpleNamespace(verify=verify)\n"
        "from truestep.cli import main\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "verify"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80"},
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


# -- help


def test_help_names_every_command():
    result = CliRunner().invoke(app(), ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_a_sentence(command):
    result = CliRunner().invoke(app(), [command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: root {command}" in result.output
    assert ". " in result.output or ".\n" in result.output


def test_without_a_command_the_help_is_shown_and_nothing_was_done(capsys):
    assert run([]) == 2
    assert "verify" in capsys.readouterr().out


def test_the_version_is_told(capsys):
    import truestep

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"truestep {truestep.__version__}\n"


def test_help_loads_no_torch_and_no_vendor():
    code = (
        "import sys\nfrom truestep.cli import run\nrun(['verify', '--help'])\n"
        "sys.exit([name for name in ('torch', 'numpy', 'deepspeed', 'accelerate') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- the demo


def test_the_demo_asks_for_twenty_cells_and_then_the_live_fault(fake, capsys):
    fake.findings_by_backend["accelerate-zero2"] = [SUMMED]
    assert run(["demo"]) == 0
    healthy, faulty = fake.calls
    assert len(healthy["backend"]) * len(healthy["optimizer"]) * len(healthy["micro_batches"]) == 20
    assert (healthy["recipe"], healthy["world_size"], healthy["steps"]) == ("bytes-gpt", 2, 10)
    assert (faulty["recipe"], faulty["backend"], faulty["micro_batches"]) == ("accumulation-by-hand", "accelerate-zero2", 4)
    out = capsys.readouterr().out
    assert "verdict: equal (cells: 20 equal)" in out
    assert "first seen at step 1: it was summed over ranks." in out.rpartition("verdict: different")[2]


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ({}, "Not as expected: the fault was not seen (equal)"),
        ({"accelerate-zero2": [SUMMED], "zero3": [SUMMED]}, "Not as expected: the healthy cells are different"),
    ],
)
def test_a_demo_that_does_not_go_as_told_says_so(fake, findings, said, capsys):
    fake.findings_by_backend.update(findings)
    assert run(["demo"]) == 1
    assert said in capsys.readouterr().out


def test_the_demo_is_silent_on_other_ranks(fake, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run(["demo"])
    assert capsys.readouterr() == ("", "")


def test_what_the_demo_runs_is_there():
    from truestep.backends.base import BACKENDS
    from truestep.verification.recipes import BUILT_IN

    assert set(demo.BACKENDS) < set(BACKENDS)
    assert demo.FAULTY in BUILT_IN
    assert set(display.STYLES) == {"equal", "different", "not checked"}
