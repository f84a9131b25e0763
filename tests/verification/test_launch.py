"""The launcher on real processes: results, every way in which a rank can fail, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from truestep.verification.launch import Pool, Progress, pool
from truestep.words.errors import CheckpointError, TrueStepError, VerifyError

SOURCE = Path(__file__).parents[2] / "src"
TASKS = """
import os, random, subprocess, sys, time

import torch
import torch.distributed as dist

from truestep.verification import worker
from truestep.words.errors import CheckpointError
from truestep.words.finding import Finding


def total(number):
    tensor = torch.arange(5.0) * (dist.get_rank() + number)
    dist.all_reduce(tensor)
    return tensor.tolist(), torch.get_num_threads(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def alone(*args):
    return dist.is_initialized(), "RANK" in os.environ, args

def pid():
    return os.getpid()

def pids():
    return os.getpid(), os.getppid()

def work(naps):
    for nap in range(naps):
        time.sleep(0.5)
        worker.report((dist.get_rank(), nap))
    return "done"

def raise_on_one():
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    print("about to reduce")
    dist.all_reduce(torch.ones(3))

def refuse(error_ranks):
    if dist.get_rank() in error_ranks:
        raise CheckpointError("nothing to read", [Finding("checkpoint/gone", None, "error", ranks=(dist.get_rank(),))])

def kill_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(3))

def exit_on_one():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(3))

def fail_on_one():
    if dist.get_rank() == 1:
        return worker.Failed("its own words", told="found a fault")
    dist.all_reduce(torch.ones(3))

def sleep_for_ever(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(f"{path}/{dist.get_rank()}", "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)

def unpicklable():
    return (number for number in range(3))

def surroundings():
    return os.getcwd(), os.environ.get("A_WISH"), torch.rand(2).tolist(), random.random()

def disturb():
    os.chdir("/")
    os.environ["A_WISH"] = "left over"
    torch.manual_seed(17), random.seed(17)

# --- what leaves the process changed

def patch_linear():
    linear = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *args, **kwargs: linear(*args, **kwargs)

def patch_method():
    torch.nn.Module.zero_grad = lambda module, set_to_none=True: None

def hook_all_modules():
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)

def set_dtype():
    torch.set_default_dtype(torch.float64)

def destroy_group():
    dist.destroy_process_group()

def fall_out_of_step():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(3), 0, async_op=True)

def ask_to_retire():
    worker.retire("a vendor keeps globals")

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "launched_tasks.py").write_text(TASKS)
    return folder


@pytest.fixture(scope="module")
def crews(tasks_folder: Path) -> Iterator[Pool]:
    sys.path.insert(0, str(tasks_folder))
    with Pool() as crews:
        yield crews
    sys.path.remove(str(tasks_folder))


def run(crews: Pool, name: str, *args: object, world_size: int = 2, timeout: float = 60.0) -> list[object]:
    return crews.run(f"launched_tasks:{name}", args, world_size=world_size, timeout=timeout)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_takes_part_with_one_thread_and_the_variables_of_torchrun(crews: Pool, world_size: int) -> None:
    factor = sum(rank + 7 for rank in range(world_size))
    expected = [([factor * number for number in range(5)], 1, rank, world_size) for rank in range(world_size)]
    assert run(crews, "total", 7, world_size=world_size) == expected


def test_the_reference_is_one_process_without_a_process_group(crews: Pool) -> None:
    results = crews.run(
        "launched_tasks:total",
        args_by_rank=[(3,), (4,)],
        world_size=2,
        reference_task="launched_tasks:alone",
        reference_args=("a", 1),
    )
    assert results[0][0] == [8.0 * number for number in range(5)]
    assert results.reference == (False, False, ("a", 1))


def test_a_job_that_reports_may_take_longer_than_the_time_limit(crews: Pool) -> None:
    heard: list[Progress] = []
    assert crews.run("launched_tasks:work", (6,), world_size=2, timeout=2.0, progress=heard.append) == ["done", "done"]
    assert sorted((progress.rank, progress.said) for progress in heard) == [
        (rank, (rank, nap)) for rank in (0, 1) for nap in range(6)
    ]


def test_a_rank_that_raises_ends_the_run_with_its_traceback_and_where_the_others_waited(crews: Pool) -> None:
    run(crews, "total", 1)
    begun = time.monotonic()
    with pytest.raises(VerifyError) as caught:
        run(crews, "raise_on_one")
    assert time.monotonic() - begun < 10
    (finding,) = caught.value.findings
    assert (finding.code, finding.law, finding.ranks) == ("run/raised", None, (1,))
    text = str(caught.value)
    assert "rank 1 raised ValueError: a bad batch; rank 0 was waiting in all_reduce (distributed_c10d.py" in text.splitlines()[0]
    assert 'raise ValueError("a bad batch")' in text
    assert "about to reduce" in text
    assert "worker.py" not in text


def test_a_failed_result_ends_the_run_only_if_others_wait_for_it(crews: Pool) -> None:
    with pytest.raises(VerifyError, match="rank 1 found a fault; rank 0 was waiting in all_reduce") as caught:
        run(crews, "fail_on_one")
    assert "its own words" in str(caught.value)


def test_a_rank_that_is_killed_is_named_with_its_signal(crews: Pool) -> None:
    with pytest.raises(VerifyError, match="rank 1 was killed by SIGKILL") as caught:
        run(crews, "kill_one")
    assert [(finding.code, finding.ranks) for finding in caught.value.findings] == [("run/died", (1,))]


def test_a_rank_that_calls_sys_exit_is_named_with_its_status(crews: Pool) -> None:
    with pytest.raises(VerifyError, match=r"rank 1 called sys.exit\(3\)") as caught:
        run(crews, "exit_on_one")
    assert [finding.code for finding in caught.value.findings] == ["run/died"]


def test_a_hang_ends_within_its_time_limit_with_every_stack_and_no_grandchild_left(crews: Pool, tmp_path: Path) -> None:
    run(crews, "total", 1)
    begun = time.monotonic()
    with pytest.raises(VerifyError, match="ranks 0, 1 gave no sign of life for 3 s: it waits in sleep_for_ever") as caught:
        run(crews, "sleep_for_ever", str(tmp_path), timeout=3)
    assert time.monotonic() - begun < 8
    assert [(finding.code, finding.ranks) for finding in caught.value.findings] == [("run/hung", (0, 1))]
    assert wait_until_gone([int(file.read_text()) for file in tmp_path.iterdir()])


def test_a_result_that_cannot_be_pickled_is_said_to_be_one(crews: Pool) -> None:
    with pytest.raises(VerifyError, match="ranks 0, 1 returned a generator that cannot be pickled"):
        run(crews, "unpicklable")


def test_arguments_that_cannot_be_pickled_are_refused_before_anything_runs(crews: Pool) -> None:
    with pytest.raises(VerifyError, match="the arguments of launched_tasks:total cannot be pickled"):
        run(crews, "total", lambda: None)


@pytest.mark.parametrize("error_ranks", [(0, 1), (1,)])
def test_an_error_of_truestep_comes_back_as_itself_with_all_findings(crews: Pool, error_ranks: tuple[int, ...]) -> None:
    with pytest.raises(TrueStepError) as caught:
        run(crews, "refuse", error_ranks)
    assert type(caught.value) is CheckpointError
    assert str(caught.value) == "nothing to read"
    assert [finding.ranks for finding in caught.value.findings] == [error_ranks]


def test_a_kept_process_has_the_surroundings_of_a_new_one(crews: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(crews, "pid")
    first = run(crews, "surroundings")
    run(crews, "disturb")
    assert run(crews, "surroundings") == first
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_WISH", "the parent's")
    assert [(folder, wish) for folder, wish, *_ in run(crews, "surroundings")] == [(str(tmp_path), "the parent's")] * 2
    assert run(crews, "pid") == before


def test_a_crew_that_trained_is_kept(crews: Pool) -> None:
    before = run(crews, "pid")
    assert crews.run("launched_tasks:train", world_size=2).taints == ()
    assert run(crews, "pid") == before


@pytest.mark.parametrize(
    ("task", "taint"),
    [
        ("patch_linear", "torch.nn.functional.linear"),
        ("patch_method", "torch.nn.Module.zero_grad"),
        ("hook_all_modules", "torch.nn.modules.module._global_forward_hooks"),
        ("set_dtype", "torch.get_default_dtype()"),
        ("destroy_group", "the default process group"),
        ("fall_out_of_step", "collectives that not every rank entered"),
        ("ask_to_retire", "a vendor keeps globals"),
    ],
)
def test_a_crew_that_was_left_changed_is_replaced_before_the_next_run(crews: Pool, task: str, taint: str) -> None:
    before = run(crews, "pid")
    assert taint in crews.run(f"launched_tasks:{task}", world_size=2).taints
    assert not set(run(crews, "pid")) & set(before)  # type: ignore[call-overload]
    assert wait_until_gone(before)  # type: ignore[arg-type]


def test_a_crew_that_died_while_idle_is_replaced(crews: Pool) -> None:
    before = run(crews, "pid")
    os.kill(before[0], signal.SIGKILL)  # type: ignore[arg-type]
    time.sleep(0.2)
    assert not set(run(crews, "pid")) & set(before)


def test_the_shared_pool_is_one_object() -> None:
    assert pool() is pool()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"world_size": 0}, "found world_size 0"), ({"world_size": 2, "args_by_rank": [()]}, "args for 1 ranks")],
)
def test_a_wrong_number_of_ranks_is_refused(crews: Pool, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        crews.run("launched_tasks:pid", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_parent_that_is_interrupted_or_killed(tasks_folder: Path, tmp_path: Path, number: int) -> None:
    # Without a guard for __main__, as people write scripts; with temporary folders of its own, to see what stays in them.
    script = """
        import sys
        from truestep.verification.launch import Pool
        pool = Pool()
        pids = pool.run("launched_tasks:pids", world_size=2)
        print(*{pid for pair in pids for pid in pair}, "torch" in sys.modules, flush=True)
        pool.run("launched_tasks:work", (1000,), world_size=2)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(tasks_folder)]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        *pids, torch_is_imported = process.stdout.readline().split()
        time.sleep(0.7)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == -number
    assert torch_is_imported == "False"
    assert len(pids) == 3
    assert wait_until_gone([int(pid) for pid in pids])
    assert stderr.count("Traceback") == (1 if number == signal.SIGINT else 0)
    until = time.monotonic() + 5
    while list(tmp_path.glob("truestep-*")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(tmp_path.glob("truestep-*"))
