"""DeepSpeed's compiled ops, built once and before ranks start.

DeepSpeed compiles its CPU communication op at first use, through torch's extension builder, which guards the folder by a file
``lock`` that its maker removes. A maker that dies leaves it, and every later process waits for it for ever. Here the op is built
in one process, guarded by a lock of the kernel's (``flock``: released at death, however it came), and a ``lock`` whose maker is
gone is removed: no process has it open, or works in its folder as the compilers do.

``python -m truestep.backends.zero_ops`` builds what is missing. Where all is built, that takes milliseconds: a stamp beside the
op says for which versions, and neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from truestep.words.errors import UnsupportedError

Say: TypeAlias = Callable[[str], None]

OP: Final = "deepspeed_shm_comm"
POLL_S: Final = 0.2
SAY_FIRST_S: Final = 1.0
SAY_EVERY_S: Final = 10.0
SHOWN_LINES: Final = 15
_BUILDER: Final = "ShareMemCommBuilder"


def prepare(say: Say) -> None:
    """Build DeepSpeed's CPU op, if it is not there, in ``TORCH_EXTENSIONS_DIR`` (by default torch's own folder).

    Args:
        say: Given a line whenever there is something to tell; nothing where all is built.

    Raises:
        UnsupportedError: If DeepSpeed is not installed, or the build fails (with its last lines).
    """
    root = folder()
    if _is_built(root) and not any(_locks(root)):
        return
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root, say):
        for lock in _locks(root):
            _clear(lock, say)
        if not _is_built(root):
            _build(root, say)


def ready() -> None:
    """Make sure of the op on a rank, before it loads it: a lock that a killed process has left would keep it waiting for ever."""
    prepare(logging.getLogger("truestep").warning)


def folder() -> Path:
    """Return the folder under which torch keeps compiled extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "torch_extensions"


def search_path() -> str:
    """Return PATH with this interpreter's own programs first: ninja is there, whether or not the environment is active."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else os.pathsep.join((own, path))


# -- what is there


def _stamp(root: Path) -> Path:
    versions = {"python": sys.version, **{name: _version(name) for name in ("torch", "deepspeed")}}
    mark = hashlib.blake2b(json.dumps(versions).encode(), digest_size=8).hexdigest()
    return root / f"truestep-{OP}-{mark}.json"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"{name} is not installed. Run: pip install 'truestep[deepspeed]'.") from None


def _is_built(root: Path) -> bool:
    try:
        library = json.loads(_stamp(root).read_text())["library"]
    except (OSError, ValueError, KeyError):
        return False
    return library is None or (Path(library).is_file() and Path(library).is_relative_to(root.resolve()))  # not of a copied folder


def _locks(root: Path) -> Iterator[Path]:
    """Yield the locks of torch's builder: directly under `root`, or under the folder that torch names by its version."""
    yield from root.glob(f"{OP}/lock")
    yield from root.glob(f"*/{OP}/lock")


# -- one at a time


@contextlib.contextmanager
def _alone(root: Path, say: Say) -> Iterator[None]:
    """Hold the kernel's lock on the folder: no two builds at a time, and nothing left behind at death."""
    with open(root / "truestep-ops.lock", "w") as held:
        for _ in _waiting(say, "another process is building DeepSpeed's CPU op"):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        yield


def _clear(lock: Path, say: Say) -> None:
    """Wait for the maker of one of torch's locks; remove it if there is none.

    One look is not enough: the maker closes the file and then removes it, and looking at all processes takes its time.
    """
    idle = 0
    for _ in _waiting(say, f"another process is compiling in {lock.parent}"):
        if not lock.exists():
            return
        idle = 0 if _in_use(lock) else idle + 1
        if idle == 2 and lock.exists():
            lock.unlink(missing_ok=True)
            say(f"removed {lock}: its maker has died")
            return


def _in_use(lock: Path) -> bool:
    """Tell whether a process has the file open or works in its folder; without /proc only our own lock speaks, and it is ours."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's, who cannot have made a file of ours
            if Path(os.readlink(process / "cwd")) == lock.parent.resolve():
                return True
            if any(_opened(entry) == lock.resolve() for entry in (process / "fd").iterdir()):
                return True
    return False


def _opened(entry: Path) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(os.readlink(entry))
    return None


def _waiting(say: Say, what: str) -> Iterator[None]:
    """Yield at once and then at every poll; say what is waited for where it takes longer than loading does, and for how long."""
    start, said = time.monotonic(), 0.0
    yield
    while True:
        waited = time.monotonic() - start
        if waited - said >= (SAY_EVERY_S if said else SAY_FIRST_S):
            say(f"{what}: waiting" + (f", {waited:.0f} s so far" if said else ""))
            said = waited
        time.sleep(POLL_S)
        yield


# -- building


def _build(root: Path, say: Say) -> None:
    say("compiling DeepSpeed's CPU op, once per machine; this takes a minute or three")
    with tempfile.TemporaryFile("w+") as output:
        library = _run(output, say)
    _write(_stamp(root), json.dumps({"library": library}))
    say("DeepSpeed's CPU op is ready" if library else "this DeepSpeed needs no compiled CPU op")


def _run(output: IO[str], say: Say) -> str | None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": search_path()}
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "build"]
    builder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
    start = time.monotonic()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = builder.wait(SAY_EVERY_S)
                break
            say(f"still compiling, {time.monotonic() - start:.0f} s so far")
    except BaseException:
        builder.send_signal(signal.SIGINT)  # torch then takes its lock away
        builder.wait()
        raise
    output.seek(0)
    lines = output.read().splitlines()
    if status:
        raise UnsupportedError(
            f"DeepSpeed's CPU op could not be compiled (exit status {status}). Install a C++ compiler and ninja. It said:\n"
            + "\n".join(lines[-SHOWN_LINES:])
        )
    library: str | None = json.loads(lines[-1])
    return library


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def _compile() -> str | None:
    """Build the op here, in the builder's process; return its library, or None where DeepSpeed does without."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder: Any = get_accelerator().create_op_builder(_BUILDER)
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return None
    return str(builder.load(verbose=False).__file__)


def main(arguments: list[str]) -> int:
    """Run ``python -m truestep.backends.zero_ops``: plain lines of progress, exit status 0 once the op is there."""
    if arguments == ["build"]:
        print(json.dumps(_compile()))  # noqa: T201 - the answer to `_run`
        return 0
    try:
        prepare(lambda line: print(line, flush=True))  # noqa: T201 - a chore's own output
    except UnsupportedError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
