"""Run a function on every rank of a crew: the parent side of the launcher.

A *crew* is W processes with a live default gloo process group of that world size, one thread a rank; its *members* are its ranks.
Crews are kept and used again by runs of the same world size; one that a run left changed, or in which a member failed, is ended.
The *reference* is one process without a process group, for what one process would do. All are forked from one template, which has
imported torch (see `truestep.verification.template`); the parent itself never imports it.

A run ends with every member's result, or in one error that names the ranks and shows each one's traceback, stack or last output.
It cannot hang: a run in which no member gives a sign of life (a report, a result) for the time limit is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

from truestep.verification.failure import Fate, failure
from truestep.verification.members import END_S, START_S, Member, Template
from truestep.verification.worker import Done, Order, Port, Raised, Report
from truestep.words.errors import TrueStepError, VerifyError

TIMEOUT_S: Final = 300.0  # without a sign of life
GRACE_S: Final = 2.0  # for the others, when one has failed
TICK_S: Final = 0.5
KEPT_RANKS: Final = 8  # idle processes hold memory: beyond this the crew that was idle longest is ended


@dataclass(frozen=True)
class Progress:
    """What a task told by `truestep.verification.worker.report`.

    Attributes:
        rank: None for the reference.
        said: The object that was told.
    """

    rank: int | None
    said: Any


Hear: TypeAlias = Callable[[Progress], None]


class Results(list[Any]):
    """The results by rank.

    Attributes:
        reference: The reference task's result, or None.
        taints: What the tasks left changed; the crew is not used again if there is any.
    """

    def __init__(self, by_rank: Iterable[Any], reference: Any, taints: tuple[str, ...]) -> None:
        super().__init__(by_rank)
        self.reference = reference
        self.taints = taints


class Crew:
    """Members that start, run and end together: W ranks, or the reference alone."""

    def __init__(self, template: Template, folder: Path, world_size: int | None) -> None:
        self._template = template
        self.members: list[Member] = []
        self.used = 0.0
        try:
            for rank in [None] if world_size is None else range(world_size):
                self.members.append(Member(template, folder, rank, world_size or 1))
            attend(self.members, START_S, "start of the ranks", self._pass_port)
        except BaseException:
            self.end(0.0)
            raise

    def _pass_port(self, _: Member, message: object) -> None:
        if isinstance(message, Port):
            for member in self.members:
                member.send(message.number)

    def alive(self) -> bool:
        """Whether every process is still there."""
        statuses = self._template.ask({"do": "ask", "pids": [member.pid for member in self.members]})
        return all(status is None for status in statuses)

    def end(self, grace_s: float = END_S) -> None:
        """End every process and reap it."""
        for member in self.members:
            member.connection.close()
        with contextlib.suppress(VerifyError):  # the template is gone, and they with it
            self._template.ask({"do": "end", "pids": [member.pid for member in self.members], "grace_s": grace_s})


def attend(members: Sequence[Member], timeout_s: float, what: str, heard: Callable[[Member, Any], None]) -> None:
    """Wait until every member has answered.

    Args:
        members: That have been told what to do.
        timeout_s: Without a sign of life.
        what: They do, for the error.
        heard: Called with each message.

    Raises:
        TrueStepError: If a member failed and the others did not answer within the grace, or if none gives a sign of life.
    """
    until, settling = time.monotonic() + timeout_s, False
    while at_work := [member for member in members if member.answer is None]:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        if not wait([member.connection for member in at_work], min(left_s, TICK_S)):
            for member in at_work:
                member.check()
        for member in at_work:
            for message in member.hear():
                heard(member, message)
                until = until if settling else time.monotonic() + timeout_s
        if not settling and any(member.failed for member in members):
            until, settling = time.monotonic() + GRACE_S, True
    broken = any(isinstance(member.answer, (Raised, Fate)) for member in members)
    if broken or any(member.answer is None for member in members):
        for member in members:
            member.ask_stack()
        fates = [member.fate(None if settling else timeout_s) for member in sorted(members, key=lambda member: member.answered)]
        raise failure(what, fates)


class Pool:
    """Crews of rank processes, kept between runs. A context manager; one run at a time."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._template: Template | None = None
        self._crews_by_world_size: dict[int | None, Crew] = {}
        self._lock = threading.RLock()
        self._owner = os.getpid()

    @property
    def folder(self) -> Path:
        """A private folder, removed with the pool, or by the template where this process was killed."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="truestep-"))
        return self._folder

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(
        self,
        task: str,
        args: Sequence[Any] = (),
        *,
        world_size: int | None,
        args_by_rank: Sequence[Sequence[Any]] | None = None,
        reference_task: str | None = None,
        reference_args: Sequence[Any] = (),
        timeout: float = TIMEOUT_S,
        progress: Hear | None = None,
        what: str | None = None,
    ) -> Results:
        """Call a function on every rank at once and return the results by rank.

        Args:
            task: ``MODULE:FUNCTION``, importable by a new process with this one's ``sys.path``.
            args: What it is called with on every rank; pickled.
            world_size: How many ranks; None: the one process without a process group, alone.
            args_by_rank: Instead of `args`: what it is called with on each rank.
            reference_task: Called meanwhile in one process without a process group.
            reference_args: What that is called with.
            timeout: Seconds without a sign of life from any member after which the run has hung.
            progress: Called here with what tasks `report`.
            what: What errors call this run; otherwise the task.

        Raises:
            VerifyError: With one finding, ``run/raised``, ``run/died`` or ``run/hung``.
            TrueStepError: As a task raised it, if all raising ranks raised the same.
        """
        count = 1 if world_size is None else world_size
        if count < 1 or (args_by_rank is not None and len(args_by_rank) != count):
            found = f"world_size {world_size}" + (f" and args for {len(args_by_rank)} ranks" if args_by_rank is not None else "")
            raise VerifyError(f"expected a world size of at least 1, and args for every rank; found {found}. Give both alike.")
        orders = [_order(task, each) for each in args_by_rank or [args] * count]
        sizes = [world_size]
        if reference_task is not None:
            orders.append(_order(reference_task, reference_args))
            sizes.append(None)
        with self._lock:
            try:
                return self._run([self._crew(size) for size in sizes], orders, timeout, progress, what or task)
            except Exception:
                self._discard(*sizes)
                raise
            except BaseException:  # an interrupt
                self.close()
                raise

    def _run(self, crews: list[Crew], orders: list[Order], timeout: float, progress: Hear | None, what: str) -> Results:
        members = [member for crew in crews for member in crew.members]
        for member, order in zip(members, orders, strict=True):
            member.order(order)

        def heard(member: Member, message: object) -> None:
            if progress is not None and isinstance(message, Report):
                progress(Progress(member.rank, message.said))

        attend(members, timeout, what, heard)
        answers = [member.answer for member in members if isinstance(member.answer, Done)]
        world_size = len(crews[0].members)
        taints = dict.fromkeys(taint for answer in answers for taint in answer.taints)
        if len({answer.collectives for answer in answers[:world_size]}) > 1:
            taints["collectives that not every rank entered"] = None
        if taints:
            self._discard(world_size, *([] if len(crews) == 1 else [None]))
        values = [pickle.loads(answer.value) for answer in answers]
        return Results(values[:world_size], values[world_size] if len(crews) > 1 else None, tuple(taints))

    def _crew(self, world_size: int | None) -> Crew:
        if self._owner != os.getpid():
            raise VerifyError("a pool of rank processes cannot be used after a fork. Make a new launch.Pool in the new process.")
        if self._template is not None and self._template.process.poll() is not None:
            self.close()
        if self._template is None:
            self._template = Template(self.folder)
        crew = self._crews_by_world_size.get(world_size)
        if crew is None or not crew.alive():
            self._discard(world_size)
            self._make_room(world_size)
            crew = self._crews_by_world_size[world_size] = Crew(self._template, self.folder, world_size)
        crew.used = time.monotonic()
        return crew

    def _make_room(self, world_size: int | None) -> None:
        idle = sorted((crew.used, size) for size, crew in self._crews_by_world_size.items() if size is not None)
        ranks = (world_size or 0) + sum(size for _, size in idle)
        for _, size in idle:
            if ranks > KEPT_RANKS and world_size is not None:
                self._discard(size)
                ranks -= size

    def _discard(self, *world_sizes: int | None) -> None:
        for size in tuple(world_sizes):
            crew = self._crews_by_world_size.pop(size, None)
            if crew is not None:
                crew.end()

    def start(self, world_size: int | None) -> None:
        """Start a crew ahead of the run that needs it, whose time limit does not count from here then; None: the reference."""
        with self._lock:
            self._crew(world_size)

    def renew(self) -> None:
        """End every crew; the next run starts new ones. For when what they have imported is no longer right."""
        with self._lock:
            self._discard(*self._crews_by_world_size)

    def close(self) -> None:
        """End every process and remove their logs; a later run starts new ones."""
        if self._owner != os.getpid():
            return
        template, folder, self._template, self._folder = self._template, self._folder, None, None
        self._crews_by_world_size.clear()
        if template is not None:
            template.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _order(task: str, args: Sequence[Any]) -> Order:
    try:
        data = pickle.dumps(tuple(args))
    except TrueStepError:
        raise  # it says what is wrong
    except Exception as error:
        raise VerifyError(f"the arguments of {task} cannot be pickled: {error}. Pass plain data.") from error
    path = tuple(os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path)
    return Order(task, data, path, os.getcwd(), dict(os.environ))


_shared: Pool | None = None


def pool() -> Pool:
    """Return the pool of this process, closed at its exit."""
    global _shared
    if _shared is None or _shared._owner != os.getpid():
        _shared = Pool()
        atexit.register(_shared.close)
    return _shared
