"""The parent's hold on rank processes: the template that they are forked from, and each member of a crew."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

from truestep.verification.failure import Fate, exit_told, last_lines, waiting
from truestep.verification.worker import Done, Order, Raised, Ready
from truestep.words.errors import VerifyError

START_S: Final = 180.0  # for the import of torch, or for a process group
END_S: Final = 1.0  # between SIGTERM and SIGKILL


class Template:
    """The process that has imported torch and forks members; one request and answer at a time."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "template.log"
        self._socket, theirs = socket.socketpair()
        package = importlib.util.find_spec("truestep")
        root = str(Path(package.origin).parents[1]) if package and package.origin else os.getcwd()
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, *paths])}
        environ.setdefault("DS_ACCELERATOR", "cpu")
        if sys.platform == "darwin":
            environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
        with theirs, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "truestep.verification.template", str(theirs.fileno()), str(os.getpid()), str(folder)],
                pass_fds=[theirs.fileno()],
                env=environ,
                cwd=folder,  # -m puts the folder it starts in first on sys.path: this one holds no modules
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any], handles: Sequence[int] = (), timeout_s: float = START_S) -> Any:
        """Return the answer to a request.

        Raises:
            VerifyError: If the template is gone, or gives none in time.
        """
        data = b""
        with contextlib.suppress(OSError):
            self._socket.settimeout(timeout_s)
            socket.send_fds(self._socket, [json.dumps(request).encode()], handles)
            data = self._socket.recv(1 << 20)
        if not data:
            self.process.kill()  # an answer that comes too late must not be taken for the next one
            log = last_lines(self.log.read_text(errors="replace"))
            raise VerifyError(f"the process that rank processes are forked from did not start, or is gone. Its output:\n{log}")
        return json.loads(data)

    def close(self) -> None:
        """End it; it ends and reaps what members there are."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Member:
    """One rank of a crew, or the reference."""

    def __init__(self, template: Template, folder: Path, rank: int | None, world_size: int) -> None:
        self.rank = rank
        self.thread: int | None = None
        self.answer: Ready | Done | Raised | Fate | None = None
        self.answered = math.inf
        number = len(list(folder.glob("*.log")))
        self._log, self._stacks = folder / f"{number}.log", folder / f"{number}.stacks"
        self._stacks_before_bytes = 0
        self._template = template
        self.connection, theirs = Pipe()
        request = {"do": "fork", "rank": rank, "world_size": world_size, "log": str(self._log), "stacks": str(self._stacks)}
        self._log.touch()
        self._stacks.touch()
        with theirs:
            self.pid: int = template.ask(request, [theirs.fileno()])

    @property
    def failed(self) -> bool:
        """Whether it will take part in nothing more of this run."""
        return isinstance(self.answer, (Raised, Fate)) or (isinstance(self.answer, Done) and self.answer.failed is not None)

    def send(self, message: object) -> None:
        """Send a message; that the member is gone shows when it is heard."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def order(self, order: Order) -> None:
        """Start a run, with an empty log."""
        self.answer, self.answered = None, math.inf
        os.truncate(self._log, 0)
        self.send(order)

    def hear(self) -> list[Any]:
        """Return what it said since the last call; sets `answer` when it answers or is gone."""
        heard = []
        try:
            while self.answer is None and self.connection.poll():
                message = pickle.loads(self.connection.recv_bytes())
                heard.append(message)
                if isinstance(message, (Ready, Done, Raised)):
                    self._take(message)
                if isinstance(message, Ready):
                    self.thread = message.thread
        except (EOFError, OSError):
            self._take(self._death(grace_s=END_S))
        return heard

    def check(self) -> None:
        """Set `answer` if the process is gone, where a child that it left holds the connection open."""
        if self.answer is None and self._status() is not None:
            self.hear()
            if self.answer is None:
                self._take(self._death(grace_s=0.0))

    def _take(self, answer: Ready | Done | Raised | Fate) -> None:
        self.answer, self.answered = answer, time.monotonic()

    def _status(self) -> int | None:
        statuses: list[int | None] = self._template.ask({"do": "ask", "pids": [self.pid]})
        return statuses[0]

    def _death(self, grace_s: float) -> Fate:
        until = time.monotonic() + grace_s
        while (status := self._status()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return Fate(self.rank, "died", exit_told(status), log=self.log())

    def log(self) -> str:
        """Return the end of its output during this run."""
        return last_lines(self._log.read_text(errors="replace"))

    def ask_stack(self) -> None:
        """Ask a member that is at work for its stack; `fate` reads it."""
        self._stacks_before_bytes = self._stacks.stat().st_size
        if self.answer is None and self.thread is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def fate(self, silent_s: float | None) -> Fate:
        """Return how it ended, now that the run has failed.

        Args:
            silent_s: For how long there was no sign of life, if that is the failure.
        """
        answer = self.answer
        if isinstance(answer, Fate):
            return answer
        if isinstance(answer, Raised):
            return Fate(self.rank, answer.kind, answer.told, answer.text, self.log(), answer.pickled)
        if isinstance(answer, Done) and answer.failed is not None:
            return Fate(self.rank, "raised", answer.failed.told, answer.failed.text, self.log())
        if answer is not None:
            return Fate(self.rank, "finished", "finished", log=self.log())
        fate = Fate(self.rank, "waited", "was waiting", log=self.log())
        if silent_s is not None:
            fate = replace(fate, kind="hung", told=f"gave no sign of life for {silent_s:g} s: it waits")
        return waiting(fate, self._stack(), self.thread or 0)

    def _stack(self) -> str:
        """Return the dump that was asked for: read when it has stopped growing."""
        start, seen, until = self._stacks_before_bytes, -1, time.monotonic() + END_S
        while self.thread is not None and time.monotonic() < until:
            size = self._stacks.stat().st_size
            if size == seen > start:
                break
            seen = size
            time.sleep(0.03)
        return self._stacks.read_bytes()[start:].decode(errors="replace")
