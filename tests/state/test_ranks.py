"""Agreement on real ranks: all raise or none, and nothing hangs."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from truestep.state import ranks
from truestep.words.errors import GuardError, UnsupportedError, VerifyError
from truestep.words.finding import Finding

WARNING = Finding("state/precision", "state", "warning", "w", "exp_avg_sq", found="bfloat16")
ERROR = Finding("params/stale", "params", "error", "w", fix="Build the optimizer after wrapping.")


def store_keys(world_size: int) -> list[str]:
    """What is left in the store of the rounds so far, of all keys that a round writes."""
    store = dist.distributed_c10d._get_default_store()
    begun = max(store.add(f"truestep/round/{rank}", 0) for rank in range(world_size))
    parts = (*map(str, range(world_size)), "come", "left", "done", "verdict")
    keys = [f"truestep/{number}/{part}" for number in range(1, begun + 1) for part in parts]
    return [key for key in keys if store.check([key])]


def raise_on(raising: int, rank: int, error: BaseException) -> None:
    if rank == raising:
        raise error


# -- Alone


def test_without_a_process_group_there_is_one_rank():
    assert (ranks.here(), ranks.count(), ranks.gather({"a": 1})) == (0, 1, [{"a": 1}])


def test_alone_numbers_and_sums_are_ones_own():
    assert ranks.rows([1.5, -2]) == [[1.5, -2.0]]
    assert ranks.total(torch.tensor([3.0])).tolist() == [3.0]


@pytest.mark.truestep(world_size=3)
def test_numbers_of_all_ranks_come_in_their_order_and_exactly(rank, world_size):
    exact = 2.0**53 - 1
    assert ranks.rows([rank, exact]) == [[float(each), exact] for each in range(world_size)]
    assert ranks.rows([math.nan])[2][0] != ranks.rows([math.nan])[2][0]
    tensor = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    assert ranks.total(tensor) is tensor
    assert tensor.tolist() == [3.0, 3.0]


def test_alone_agree_merges_and_fills_in_the_rank():
    found = ranks.agree([WARNING, WARNING, Finding("update/zero-gradient", "update", "note", ranks=(0,))])
    assert [(one.code, one.ranks) for one in found] == [("state/precision", (0,)), ("update/zero-gradient", (0,))]


def test_alone_an_error_is_raised_with_every_finding_and_said_by_the_errors_alone():
    with pytest.raises(GuardError) as caught:
        ranks.agree([WARNING, ERROR], error=GuardError)
    assert [found.code for found in caught.value.findings] == ["state/precision", "params/stale"]
    assert str(caught.value) == "params/stale w on rank 0. Build the optimizer after wrapping."


def test_alone_agreeing_lets_the_exception_through():
    with pytest.raises(ZeroDivisionError), ranks.agreeing("divide"):
        1 / 0  # noqa: B018
    with ranks.agreeing("nothing"):
        pass


# -- Together


@pytest.mark.truestep(world_size=3)
def test_gather_returns_every_object_in_order(rank, world_size):
    assert (ranks.here(), ranks.count()) == (rank, world_size)
    assert ranks.gather({"rank": rank, "long": "x" * (rank * 1000)}) == [
        {"rank": other, "long": "x" * (other * 1000)} for other in range(world_size)
    ]


@pytest.mark.truestep(world_size=3)
def test_all_ranks_get_the_same_findings_and_the_store_stays_clean(rank, world_size):
    mine = [WARNING] if rank != 1 else [Finding("run/late", None, "note", ranks=(0, 2))]
    expected = [
        Finding("state/precision", "state", "warning", "w", "exp_avg_sq", found="bfloat16", ranks=(0, 2)),
        Finding("run/late", None, "note", ranks=(0, 2)),
    ]
    for _ in range(3):
        assert ranks.agree(mine) == expected
    dist.barrier()
    if rank == 0:
        assert store_keys(world_size) == []
    dist.barrier()


@pytest.mark.truestep(world_size=3)
def test_an_error_of_one_rank_is_raised_on_all_and_the_next_round_is_a_new_one(rank):
    for number in range(3):
        with pytest.raises(GuardError) as caught:
            ranks.agree([ERROR] if rank == number else [WARNING], error=GuardError)
        by_code = {found.code: found.ranks for found in caught.value.findings}
        assert by_code == {"params/stale": (number,), "state/precision": tuple(other for other in range(3) if other != number)}
        assert f"params/stale w on rank {number}" in str(caught.value)
        assert ranks.agree([]) == []


@pytest.mark.truestep(world_size=2)
def test_an_exception_on_one_rank_raises_on_all(rank):
    def open_the_data() -> None:
        with ranks.agreeing("open the data", error=UnsupportedError):
            raise_on(1, rank, FileNotFoundError("no train.txt here"))

    for _ in range(2):
        with pytest.raises(FileNotFoundError if rank == 1 else UnsupportedError) as caught:
            open_the_data()
        if rank == 0:
            assert str(caught.value) == (
                "run/rank-raised on rank 1: expected every rank to open the data, found FileNotFoundError: no train.txt here."
            )
    with ranks.agreeing("go on"):
        pass


@pytest.mark.truestep(world_size=2)
def test_findings_of_an_error_in_the_block_reach_every_rank(rank):
    with pytest.raises(VerifyError) as caught, ranks.agreeing("look"):
        raise_on(0, rank, VerifyError("", [ERROR]))
    assert ERROR.code in [found.code for found in caught.value.findings]


@pytest.mark.truestep(world_size=2)
def test_an_exception_before_an_inner_agreement_stops_the_ranks_that_wait_there(rank):
    def blocks() -> None:
        with ranks.agreeing("the outer block"), ranks.agreeing("the middle block"):
            raise_on(1, rank, KeyError("lost"))
            ranks.agree([], what="the inner call")

    started = time.monotonic()
    with pytest.raises(KeyError if rank == 1 else VerifyError) as caught:
        blocks()
    assert time.monotonic() - started < 30
    assert rank == 1 or "KeyError: 'lost'" in str(caught.value)
    assert ranks.agree([]) == []


@pytest.mark.truestep(world_size=2)
def test_blocks_may_be_nested(rank):
    with ranks.agreeing("the outer block"):
        with ranks.agreeing("the inner block"):
            assert ranks.agree([], what="a call") == []
        with pytest.raises(ValueError if rank == 0 else VerifyError), ranks.agreeing("the second inner block"):
            raise_on(0, rank, ValueError("handled on every rank"))


@pytest.mark.truestep(world_size=3)
def test_a_rank_that_does_not_come_in_time_is_named_on_all_and_told_when_it_comes(rank, world_size):
    dist.barrier()
    started = time.monotonic()
    if rank == 1:
        time.sleep(2.0)
    with pytest.raises(VerifyError) as caught:
        ranks.agree([WARNING], timeout=0.5, what="agree on the recipe")
    (missing,) = [found for found in caught.value.findings if found.code == "run/rank-missing"]
    assert missing.ranks == (1,)
    assert missing.expected == "every rank to agree on the recipe within 0.5 s"
    assert time.monotonic() - started < (2.0 if rank != 1 else 20.0)
    dist.barrier()
    assert ranks.agree([]) == []


@pytest.mark.truestep(world_size=2)
def test_ranks_at_different_calls_are_told_so(rank):
    with pytest.raises(VerifyError, match=r"run/ranks-apart on rank 0, 1: .*rank 0 at 'save', rank 1 at 'load'"):
        ranks.agree([], what="save" if rank == 0 else "load")


@pytest.mark.truestep(world_size=2)
def test_an_interrupted_rank_tells_the_others_and_waits_for_nobody(rank):
    with pytest.raises(KeyboardInterrupt if rank == 1 else VerifyError) as caught, ranks.agreeing("train"):
        raise_on(1, rank, KeyboardInterrupt())
    if rank == 0:
        assert [(found.code, found.ranks) for found in caught.value.findings] == [("run/rank-raised", (1,))]
    dist.barrier()
    assert ranks.agree([]) == []


# -- Ranks that end

SCRIPT = """
import os, signal, sys, time, datetime
import torch.distributed as dist
from truestep.state import ranks
from truestep.words.errors import VerifyError
from truestep.words.finding import Finding
rank, folder, act = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if act.startswith("file"):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
else:
    port = 0 if rank == 0 else int(open(f"{folder}/port").read())
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    if rank == 0:
        with open(f"{folder}/port.new", "w") as file:
            file.write(str(store.port))
        os.rename(f"{folder}/port.new", f"{folder}/port")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ranks.agree([])
try:
    if act == "rank 0 ends":
        if rank == 0:
            ranks.agree([])
            os._exit(0)
        ranks.agree([])
        time.sleep(1)
        ranks.agree([], timeout=5)
    elif act == "rank 1 is killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.agree([], timeout=1)
    elif act == "file":
        print([found.ranks for found in ranks.agree([Finding("run/x", None, "note")])])
        ranks.agree([Finding("run/y", None, "error")] if rank else [])
    elif act == "rank 0 raises and ends at once":
        with ranks.agreeing("start"):
            if rank == 0:
                raise RuntimeError("a bad start")
            time.sleep(0.5)
except (VerifyError, RuntimeError) as error:
    print(error, flush=True)
os._exit(0)
"""


def run_both(tmp_path: Path, act: str) -> list[str]:
    (tmp_path / "ranks.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "ranks.py")]
    processes = []
    for rank in range(2):
        processes.append(
            subprocess.Popen([*command, str(rank), str(tmp_path), act], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        deadline = time.monotonic() + 60
        while act[:4] != "file" and not (tmp_path / "port").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("Traceback" not in errors for _, errors in outputs), outputs
    return [output for output, _ in outputs]


def test_rank_0_that_ends_with_the_store_is_told_to_the_others(tmp_path):
    first, second = run_both(tmp_path, "rank 0 ends")
    assert first == ""
    assert second.startswith("run/store-gone on rank 1: ")
    assert "Look for the output of rank 0" in second


def test_a_killed_rank_is_missed_within_the_timeout(tmp_path):
    first, _ = run_both(tmp_path, "rank 1 is killed")
    assert first.startswith("run/rank-missing on rank 1: expected every rank to agree within 1 s, found no sign of it.")


def test_rank_0_that_raises_and_ends_at_once_is_heard_before_its_store_goes(tmp_path):
    first, second = run_both(tmp_path, "rank 0 raises and ends at once")
    assert first == "a bad start\n"
    assert second == "run/rank-raised on rank 0: expected every rank to start, found RuntimeError: a bad start.\n"


def test_a_store_in_a_file_serves_as_well(tmp_path):
    outputs = run_both(tmp_path, "file")
    assert outputs == ["[(0, 1)]\nrun/y on rank 1.\n"] * 2
