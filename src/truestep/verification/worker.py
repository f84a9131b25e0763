"""One process of a crew: a rank, or the reference. And what a task that runs in one may use: `report`, `retire`, `Failed`.

A member lives on between runs; before each one it takes the parent's folder, environment and ``sys.path`` as they are then, and
the random numbers of a new process, so that a kept process behaves like a new one.

Note: why nothing is left behind
    A member dies with the process that it was forked from: by the kernel (``PR_SET_PDEATHSIG``) on Linux, and elsewhere by a
    thread that watches ``getppid`` and ends the whole session. An idle one also ends when its connection closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

from truestep.verification.failure import LEFT, one_line
from truestep.words.errors import TrueStepError

RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WATCH_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_PATHS: Final = sysconfig.get_paths()
_NOT_THE_USERS: Final = (str(Path(__file__).parents[1]), _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<")


# --- what members and parent tell each other


@dataclass(frozen=True)
class Port:
    """Rank 0 keeps the store of the process group here."""

    number: int


@dataclass(frozen=True)
class Ready:
    """The member waits for orders; `thread` is the ident of its main thread."""

    thread: int


@dataclass(frozen=True)
class Report:
    """A sign of life, with whatever the task said."""

    said: Any


@dataclass(frozen=True)
class Order:
    """What to do, and the parent's surroundings to do it in."""

    task: str
    args: bytes
    path: tuple[str, ...]
    folder: str
    environ: dict[str, str]


@dataclass(frozen=True)
class Done:
    """The task returned.

    Attributes:
        value: The pickled result.
        taints: What it left changed in the process.
        collectives: How many the default process group has started: ranks that differ are out of step.
        failed: The result, without its value, if it is a `Failed`.
    """

    value: bytes
    taints: tuple[str, ...]
    collectives: int
    failed: Failed | None = None


@dataclass(frozen=True)
class Raised:
    """The task raised, called ``sys.exit``, or returned what cannot be sent.

    Attributes:
        kind: ``died`` for ``sys.exit``: it, too, ends a process that others wait for.
        told: What it did, to be read after "rank 1".
        text: The traceback, from the task's own frame on.
        pickled: The error itself, if it is one of truestep's.
    """

    kind: Literal["raised", "died"]
    told: str
    text: str
    pickled: bytes | None = None


# --- what tasks may use


@dataclass(frozen=True)
class Failed:
    """A result that means: what was to be done failed on this rank, but the process is sound.

    The other members get a short grace to answer too; then they are taken to wait for this one.

    Attributes:
        text: What is shown of this rank if others do wait for it: a traceback.
        value: What else the caller is to get.
        told: What happened, to be read after "rank 1".
    """

    text: str
    value: Any = None
    told: str = "failed"


_link: Connection | None = None
_hear: Callable[[object], None] | None = None  # where this process runs a task by itself
_link_lock = threading.Lock()
_reasons: list[str] = []


def report(said: object) -> None:
    """Tell the parent, and who else hears, how far the task is; also the sign of life that the time limit counts from.

    Args:
        said: Anything that pickles.
    """
    if _hear is not None:
        _hear(said)
    if _link is not None:
        _tell(Report(said))


@contextlib.contextmanager
def heard_by(hear: Callable[[object], None]) -> Iterator[None]:
    """Give `hear` what tasks `report` in this process, whether it is a member or not."""
    global _hear
    before, _hear = _hear, hear
    try:
        yield
    finally:
        _hear = before


def retire(reason: str) -> None:
    """Ask that this member's crew is not used again after the running task. Does nothing outside a member."""
    if _link is not None:
        _reasons.append(reason)


def _tell(message: object) -> None:
    data = pickle.dumps(message)
    if _link is not None:
        with _link_lock:
            _link.send_bytes(data)


# --- a member


def live(handle: int, request: dict[str, Any]) -> NoReturn:
    """Be a member for the rest of this process's life; called right after the fork.

    Args:
        handle: Of the connection to the parent.
        request: ``rank`` (None: the reference), ``world_size``, and the paths ``log`` and ``stacks``.
    """
    global _link
    status = 1
    try:
        _settle(request)
        _link = Connection(handle)
        os.set_inheritable(handle, False)
        _serve(_link, request["rank"], request["world_size"])
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = 0  # the parent is gone, or wants us gone
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without exit handlers: those of process groups wait for ranks that may be gone.
        os._exit(status)


def _settle(request: dict[str, Any]) -> None:
    template = os.getppid()
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(template,), daemon=True, name="truestep-watch").start()
    log = os.open(request["log"], os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    stacks = os.open(request["stacks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)


def _watch(template: int) -> None:
    while os.getppid() == template:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)


def _serve(link: Connection, rank: int | None, world_size: int) -> None:
    own: dict[str, str] = {}
    if rank is not None:
        own = _join(link, rank, world_size)
    gc.freeze()
    _tell(Ready(threading.main_thread().ident or 0))
    from truestep.verification import taint

    files = taint.open_files()
    while True:
        order: Order = pickle.loads(link.recv_bytes())
        _reasons.clear()
        modules = len(sys.modules)
        answer = _carry_out(order, own, files)
        sys.stdout.flush()
        sys.stderr.flush()
        _tell(answer)
        if len(sys.modules) > modules:
            gc.freeze()  # what was imported stays: the collection after every task need not walk it again


def _join(link: Connection, rank: int, world_size: int) -> dict[str, str]:
    """Make the default process group; return the variables that torchrun would set.

    Rank 0 lets the system choose the store's port and tells it, so no port can be taken between its choice and its use.
    """
    from truestep.state import ranks

    store = ranks.serve_store(world_size) if rank == 0 else None
    if store is not None:
        _tell(Port(store.port))
    port: int = pickle.loads(link.recv_bytes())
    values = (str(rank), str(rank), str(world_size), str(world_size), ranks.STORE_HOST, str(port))
    own = dict(zip(RANK_VARIABLES, values, strict=True))
    os.environ.update(own)
    ranks.join_group(store, port, rank, world_size)
    return own


def _carry_out(order: Order, own: dict[str, str], files: int) -> Done | Raised:
    from truestep.state import ranks
    from truestep.verification import taint

    _become_new(order, own)
    before = taint.snapshot()
    try:
        value = _resolve(order.task)(*pickle.loads(order.args))
    except BaseException as error:
        return raised(error)
    failed = replace(value, value=None) if isinstance(value, Failed) else None
    try:
        data = pickle.dumps(value)
    except Exception as error:
        told = f"returned a {type(value).__name__} that cannot be pickled"
        return Raised("raised", told, f"{type(error).__name__}: {error}\nReturn plain data.\n")
    del value
    gc.collect()
    return Done(data, (*taint.taints(before, files), *_reasons), ranks.collectives_started(), failed)


def _become_new(order: Order, own: dict[str, str]) -> None:
    """Take the parent's surroundings, and the random numbers of a new process."""
    import torch

    defaults = {"DS_ACCELERATOR": "cpu"}
    wanted = defaults | {k: v for k, v in order.environ.items() if k not in RANK_VARIABLES} | {"OMP_NUM_THREADS": "1"} | own
    for key in os.environ.keys() - wanted.keys():
        del os.environ[key]
    os.environ.update({key: value for key, value in wanted.items() if os.environ.get(key) != value})
    sys.path[:] = order.path
    importlib.invalidate_caches()
    os.chdir(order.folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _resolve(task: str) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]  # whatever the parent named is called


def raised(error: BaseException) -> Raised:
    """Return what a task raised, caught by the function that called it."""
    own_frame_cut = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, _users_part(own_frame_cut)))
    if isinstance(error, SystemExit):
        return Raised("died", f"{LEFT}({'' if error.code is None else repr(error.code)})", text)
    pickled = None
    if isinstance(error, TrueStepError):
        with contextlib.suppress(Exception):  # its traceback is told instead
            pickled = pickle.dumps(error)
    return Raised("raised", f"raised {one_line(traceback.format_exception_only(error)[-1])}", text, pickled)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first line on; all of it where none is the user's: then the fault is ours."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        part = part.tb_next
    return part or trace
