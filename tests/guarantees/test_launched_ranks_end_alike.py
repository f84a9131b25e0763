"""Under a launcher `verify` uses the ranks it is given: all return the same or end in the same error, and only rank 0 speaks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

RECIPE = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn

    MODE, calls = os.environ.get("MODE", ""), 0

    if MODE == "import on one" and os.environ.get("RANK") == "1":
        raise ValueError("only here")

    def rank():
        return dist.get_rank() if dist.is_initialized() else None

    def model():
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def optimizer(named_params):
        return torch.optim.AdamW([param for _, param in named_params], lr=0.01)

    def batches(dp_rank, dp_size):
        draw = torch.Generator().manual_seed(7 + dp_rank)
        while True:
            yield torch.randn(4, 5, generator=draw)

    def loss(model, batch):
        global calls
        calls += 1
        if calls > 3:
            act()
        return model(batch).pow(2).mean()

    def act():
        if MODE == "raises" and rank() == 1:
            raise ValueError("a bad batch")
        if MODE == "killed" and rank() == 1:
            os.kill(os.getpid(), 9)
        if MODE == "sleeps" and rank() == 1:
            time.sleep(1000)
        if MODE == "reference killed" and rank() is None:
            os.kill(os.getpid(), 9)
"""
REPORTED = """
    import truestep as ts
    report = ts.verify("recipe.py", backend="ddp", steps=2, progress=lambda event: print(event.kind))
    print(report.verdict, report.cells[0].total.bitwise)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.py").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "reported.py").write_text(textwrap.dedent(REPORTED))
    return tmp_path


@pytest.fixture
def launched(folder):
    """Start a command line on ranks, as a launcher does; return each one's exit status, stdout and stderr."""

    def launch(*args, mode="", world_size=2, script=None, **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MODE": mode, **settings}
        command = [sys.executable, script] if script else [sys.executable, "-m", "truestep", "verify", "recipe.py", *args]
        ranks = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, said, strict=True)]

    return launch


def test_every_rank_ends_with_the_verdict_and_rank_0_writes_it(launched, folder):
    first, second = launched("--backend", "ddp,fsdp2", "--steps", "3", "--micro-batches", "2", "--json", "report.json")
    assert second == (0, "", "")
    assert (first[0], first[2]) == (0, "")
    assert first[1].splitlines()[-1] == "verdict: equal (cells: 2 equal)"
    report = json.loads((folder / "report.json").read_text())
    assert [(cell["backend"], cell["world_size"], cell["verdict"]) for cell in report["cells"]] == [
        ("ddp", 2, "equal"),
        ("fsdp2", 2, "equal"),
    ]


def test_a_fault_is_found_on_given_ranks_too(launched):
    first, second = launched("--backend", "ddp", "--steps", "3", "--fault", "sync-missing")
    assert (first[0], second) == (1, (1, "", ""))
    assert "cause" in first[1]
    assert first[1].splitlines()[-1] == "verdict: different (cells: 1 different)"


def test_a_script_gets_the_same_report_on_every_rank_and_progress_on_rank_0(launched):
    first, second = launched(script="reported.py")
    assert second[:2] == (0, first[1].splitlines()[-1] + "\n")
    assert first[1].splitlines()[:-1] == ["start", "step", "step", "cell"]
    assert second[1].startswith("equal ")


FAILURES = {
    "import on one": "run/rank-raised on rank 1: expected every rank to plan the cells, found VerifyError: recipe ",
    "raises": "cell ddp x1: rank 1 raised ValueError: a bad batch; rank 0 was waiting in ",
    "sleeps": "rank 1 gave no sign of life for 4 s: it waits in act (recipe.py, line ",
    "reference killed": "cell ddp x1: the reference was killed by SIGKILL.",
}


@pytest.mark.parametrize("mode", FAILURES)
def test_a_failure_on_one_rank_is_one_message_and_status_2_on_all(mode, launched):
    first, second = launched("--backend", "ddp", "--steps", "4", "--timeout", "4", mode=mode)
    assert (first[:2], second) == ((2, ""), (2, "", ""))
    assert FAILURES[mode] in first[2].splitlines()[0]
    assert first[2].count("truestep: error: ") == 1
    assert "/truestep/verification/" not in first[2].partition("--- rank 0")[0]


def test_a_rank_that_is_killed_is_named_by_the_others(launched):
    first, second = launched("--backend", "ddp", "--steps", "4", "--timeout", "4", mode="killed")
    assert (first[:2], second) == ((2, ""), (-9, "", ""))
    assert first[2].startswith("truestep: error: cell ddp x1: rank 1 died; rank 0 lost its connection to it.")


REFUSED = {
    "another number of ranks": (
        ["--world-size", "3"],
        {},
        "Invalid value for '--world-size': expected the 2 ranks that the launcher gives (WORLD_SIZE), found 3",
    ),
    "one process of two": (["--backend", "single"], {}, "backend 'single' runs on 1 rank, and the launcher gives 2. Start 1, or"),
    "several machines": ([], {"LOCAL_WORLD_SIZE": "1"}, "expected all ranks on one machine, found 1 of 2 on this one"),
    "half an environment": ([], {"MASTER_PORT": ""}, "found no MASTER_PORT. Start with torchrun, or unset WORLD_SIZE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_given_ranks_cannot_do_is_refused_on_all(case, launched):
    args, settings, expected = REFUSED[case]
    first, second = launched(*args, **settings)
    assert (first[:2], second) == ((2, ""), (2, "", ""))
    assert expected in first[2]
    assert first[2].count("\n") == 1


def test_one_process_is_verified_on_one_given_rank(launched):
    ((status, out, err),) = launched("--backend", "single", "--steps", "3", world_size=1)
    assert (status, out.splitlines()[-1], err) == (0, "verdict: equal (cells: 1 equal)", "")


def test_torchrun_itself_shows_the_report_and_lets_no_rank_end_before(folder):
    begun = time.monotonic()
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "truestep",
        "verify",
        "recipe.py",
        "--backend",
        "ddp",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--steps", "4", "--timeout", "20"],
        cwd=folder,
        env={**os.environ, "MODE": "killed"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1  # what torchrun makes of 2
    assert "truestep: error: cell ddp x1: rank 1 died; rank 0 " in done.stderr
    assert time.monotonic() - begun < 60
