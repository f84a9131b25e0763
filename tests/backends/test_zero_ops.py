"""Building DeepSpeed's op: once, alone, and past makers that died."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from truestep.backends import base, zero_ops
from truestep.backends.base import Settings

pytest.importorskip("deepspeed")

COMMAND = [sys.executable, "-m", "truestep.backends.zero_ops"]
# What the real compiler makes in a minute and a half, its stand-in copies; torch's builder, its lock and ninja are the real ones.
COMPILER = """\
    #!/bin/sh
    case "$*" in *-v|*--version*|*-dumpversion*|*-dumpmachine*) exec g++ "$@";; esac
    while [ $# -gt 0 ]; do
        case "$1" in
            -o) out="$2"; shift;;
            -MF) echo > "$2"; shift;;
        esac
        shift
    done
    sleep "$PAUSE_S" && cp "$BUILT/$(basename "$out")" "$out"
"""


@pytest.fixture
def environment(tmp_path):
    """Return an environment whose extensions folder is empty and whose compiler is a stand-in."""
    zero_ops.prepare(lambda line: None)
    library = next((path for path in zero_ops.folder().rglob(f"{zero_ops.OP}.so")), None)
    if library is None:
        pytest.skip("this DeepSpeed needs no compiled op")
    compiler = tmp_path / "g++"
    compiler.write_text(textwrap.dedent(COMPILER))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "CXX": str(compiler),
        "BUILT": str(library.parent),
        "PAUSE_S": "0",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def lock_of(environment):
    return Path(environment["TORCH_EXTENSIONS_DIR"]) / zero_ops.OP / "lock"


def run(environment, timeout_s=120):
    return subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=timeout_s)


@contextlib.contextmanager
def building(environment, pause_s):
    """Run a build that takes its time, from the moment it holds torch's lock; kill what is left of it."""
    process = subprocess.Popen(
        COMMAND,
        env={**environment, "PAUSE_S": str(pause_s)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while not lock_of(environment).exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1)  # into the compiler's pause
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_build_killed_midway_does_not_stop_the_next(environment):
    with building(environment, pause_s=5) as process:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert lock_of(environment).exists()
    again = run(environment)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"removed {lock_of(environment)}: its maker has died" in again.stdout
    assert again.stdout.endswith("DeepSpeed's CPU op is ready\n")
    assert not lock_of(environment).exists()


def test_a_second_build_waits_for_the_first_and_says_so(environment):
    with building(environment, pause_s=3) as process:
        second = run(environment)
        assert process.wait() == 0
    assert second.returncode == 0
    assert second.stdout.startswith("another process is building DeepSpeed's CPU op: waiting\n")
    assert "compiling" not in second.stdout


def test_a_builder_whose_parent_was_killed_is_waited_for(environment):
    with building(environment, pause_s=3) as process:
        process.kill()  # alone: the builder it had started lives on, and holds torch's lock
        process.wait()
        again = run(environment)
    assert again.returncode == 0
    assert "another process is compiling in" in again.stdout
    assert "has died" not in again.stdout


def test_what_is_built_costs_no_import(environment):
    assert run(environment).returncode == 0
    probe = "import sys; from truestep.backends import zero_ops as ops; ops.prepare(print); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert run(environment).stdout == ""


def test_a_compiler_that_fails_is_one_clear_message(environment):
    failed = run({**environment, "PAUSE_S": "never"})
    assert failed.returncode == 2
    assert failed.stderr.startswith("DeepSpeed's CPU op could not be compiled (exit status 1). Install a C++ compiler and ninja.")
    assert "never" in failed.stderr
    assert failed.stderr.count("\n") <= zero_ops.SHOWN_LINES + 1


def test_a_lock_that_is_open_is_in_use_and_a_closed_one_is_not(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    assert not zero_ops._in_use(lock)
    program = "import sys; open(sys.argv[1]); held = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    maker = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout.readline()
    assert zero_ops._in_use(lock)
    maker.communicate()
    assert not zero_ops._in_use(lock)
    lines = []
    zero_ops._clear(lock, lines.append)
    assert lines == [f"removed {lock}: its maker has died"]


def test_this_interpreter_s_own_programs_are_on_the_search_path(monkeypatch):
    own = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", "/bin")
    assert zero_ops.search_path() == f"{own}{os.pathsep}/bin"
    monkeypatch.setenv("PATH", zero_ops.search_path())
    assert zero_ops.search_path() == f"{own}{os.pathsep}/bin"


def test_a_missing_vendor_is_named_with_the_extra_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(zero_ops.importlib.metadata, "version", _missing)
    with pytest.raises(zero_ops.UnsupportedError, match=r"pip install 'truestep\[deepspeed\]'"):
        zero_ops.prepare(lambda line: None)


def _missing(name):
    raise zero_ops.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.truestep(world_size=2, timeout=60)
@pytest.mark.parametrize("backend", ["zero1", "accelerate-zero2"])
def test_ranks_do_not_wait_for_a_lock_whose_maker_was_killed(backend, rank):
    lock = next(zero_ops.folder().rglob(f"{zero_ops.OP}.so")).parent / "lock"
    if rank == 0:
        lock.touch()
    torch.distributed.barrier()
    linear = torch.nn.Linear(3, 2)
    session = base.wrap(backend, linear, lambda named: torch.optim.SGD([param for _, param in named], lr=0.1), Settings())
    session.close()
    assert not lock.exists()
