"""Cells on the ranks that a launcher gave: torchrun, accelerate launch, srun with the same variables set.

Each rank trains in this process; rank 0 starts only the reference, and decides. What a rank has to say goes onto a board in the
store, so that no rank waits for one that is gone:

    link      where the reference listens, or why it does not
    RANK      how this rank's loop ended, a `Fate`
    failed    there is such a fate that the others will not get past
    beat      rank 0 is there
    verdict   what all ranks return or raise; left by rank 0, after the reference

and, when they part, ``status``, with which rank 0 leaves, and ``RANK left``.

Note: why the loop has a thread of its own
    A collective that waits for a rank that is gone cannot be interrupted. So the main thread only watches, and every rank ends in
    the same error within the time limit; a thread that hangs is left behind, and its process takes no further cell.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from truestep.state import ranks
from truestep.state.generators import restore_rng, rng_states
from truestep.verification import candidate, launch, link, worker
from truestep.verification.cell import CellPlan
from truestep.verification.failure import Fate, failure, waiting
from truestep.words.errors import TrueStepError, UnsupportedError, VerifyError

JOIN_S: Final = 120.0  # for every rank to come
START_S: Final = 200.0  # for rank 0 to start the reference: a little more than it gives it
TICK_S: Final = 0.05
BEAT_S: Final = 1.0
GONE_S: Final = 15.0  # rank 0, when its beat stops
SLACK_S: Final = 10.0  # the reference may be silent for so much longer: a rank that hangs is to be told of by itself
PARTING_S: Final = 30.0  # for rank 0 to say what there is to say
LEAVING_S: Final = 2.0  # for another to read it

Hear = Callable[[int], None]  # a step was judged; on rank 0 only


@dataclass
class Standing:
    """What of this process outlives a cell.

    Attributes:
        parting: Where the ranks tell each other that they leave; None before they have joined.
        stuck: A loop hangs here, so that no other cell can be taken.
    """

    parting: ranks.Board | None = None
    stuck: bool = False


STANDING: Final = Standing()


def join(timeout: float, world_size: int, default: int) -> int:
    """Join the ranks that the launcher gave, and return how many they are. Collective: every rank.

    Args:
        timeout: Seconds without a sign of life.
        world_size: How many were asked for.
        default: The number that stands for any.

    Raises:
        UnsupportedError: If there are others than asked for, or they are on several machines.
        VerifyError: If not every rank comes, or a loop that failed still hangs here.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if STANDING.stuck:
        raise VerifyError("expected ranks at rest, found a loop of an earlier run that still hangs here. Start the ranks anew.")
    _patiently(lambda: ranks.join_launched(max(JOIN_S, 2 * timeout)))
    STANDING.parting = STANDING.parting or ranks.Board()  # now: when ranks part, a new connection may wait for one that is gone
    count = ranks.count()
    if world_size not in (count, default):
        raise UnsupportedError(
            f"expected the {count} ranks that the launcher gives, found world_size {world_size}. Leave it out."
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
        raise UnsupportedError(
            f"expected all ranks on one machine, found {os.environ['LOCAL_WORLD_SIZE']} of {count} on this one. "
            "Start them with --nnodes 1."
        )
    return count


def _patiently(act: Callable[[], None]) -> None:
    """Run what may block, in a thread, so that this one can be interrupted."""
    work = _Work(act)
    while work.is_alive():
        work.join(TICK_S)
    if work.error is not None:
        raise work.error


class _Work(threading.Thread):
    """A function that runs in a thread of its own; notes what it raised."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="truestep-work")
        self._act = act
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Run the function."""
        try:
            self._act()
        except BaseException as error:
            self.error = error


def run(plan: CellPlan, timeout: float, hear: Hear) -> dict[str, Any]:
    """Run one cell on the ranks that the launcher gave; return the reference's answer. Collective: every rank.

    Args:
        plan: The cell; its world size is the group's.
        timeout: Seconds without a sign of life from this rank's loop after which the run has hung.
        hear: Called with each step that was judged; on rank 0.

    Raises:
        TrueStepError: On all ranks the same, if one raised, died or hung, or the reference did.
    """
    board, rank = ranks.Board(), ranks.here()
    where = _started(board) if rank == 0 else _posted(board)
    if isinstance(where, TrueStepError):
        raise where
    states, threads = rng_states(), torch.get_num_threads()
    torch.set_num_threads(1)  # as the reference: bitwise needs equal thread counts
    try:
        outcome = _watched(_Rank(board, rank, plan, where, timeout), plan, where, timeout, hear)
    finally:
        torch.set_num_threads(threads)
        restore_rng(states)
    if isinstance(outcome, TrueStepError):
        raise outcome
    told: dict[str, Any] = outcome
    return told


def _started(board: ranks.Board) -> link.Address | TrueStepError:
    """Start the reference's process, and tell the others where to connect, or why they cannot."""
    found: link.Address | TrueStepError
    try:
        _patiently(lambda: launch.pool().start(None))
        found = link.address(launch.pool().folder)
    except TrueStepError as error:
        found = error
    board.post("link", pickle.dumps(found))
    return found


def _posted(board: ranks.Board) -> Any:
    note = _in_time(board, "link", START_S)
    if note is None:
        raise VerifyError(f"expected rank 0 to start the reference within {START_S:g} s, found nothing. Look at its output.")
    return pickle.loads(note)


def _watched(me: _Rank, plan: CellPlan, where: link.Address, timeout: float, hear: Hear) -> Any:
    """Return the verdict of a cell: what the reference told, or the error that all ranks raise."""
    if me.rank != 0:
        return me.verdict()
    try:
        with _reference(plan, where, timeout + SLACK_S, hear) as reference:
            return _Judge(me, reference, plan).verdict()
    except BaseException:
        launch.pool().close()  # the reference still waits for records
        raise


class _Rank:
    """One rank: its loop, and what it leaves on the board."""

    def __init__(self, board: ranks.Board, rank: int, plan: CellPlan, where: link.Address, timeout: float) -> None:
        self.board, self.rank, self.plan = board, rank, plan
        self._timeout, self._heard = timeout, time.monotonic()
        self.fate: Fate | None = None
        self._failed = 0.0  # when a failure was first seen
        self._beat, self._beaten = b"", time.monotonic()

        def hear(said: object) -> None:
            self._heard = time.monotonic()

        def loop() -> None:
            with worker.heard_by(hear):
                candidate.run(plan, where)

        self.loop = _Work(loop)

    def verdict(self) -> Any:
        """Wait for the verdict of rank 0; meanwhile tell it what becomes of this rank."""
        try:
            while (note := self.board.read("verdict")) is None:
                self.attend()
                self._need_rank_0()
                time.sleep(TICK_S)
        except BaseException:
            self.interrupted()
            raise
        finally:
            STANDING.stuck = self.loop.is_alive()
        return pickle.loads(note)

    def _need_rank_0(self) -> None:
        beat = self.board.read("beat") or b""
        if beat != self._beat:
            self._beat, self._beaten = beat, time.monotonic()
        if time.monotonic() - self._beaten > GONE_S:
            raise failure(self.plan.title, [Fate(0, "died", f"gave no sign of life for {GONE_S:g} s")])

    def attend(self) -> None:
        """Leave the fate of this rank's loop on the board, once it is known or has to be."""
        if self.fate is not None:
            return
        now = time.monotonic()
        if not self.loop.is_alive():
            self._leave(self._ended())
        elif now - self._heard > self._timeout:
            told = f"gave no sign of life for {self._timeout:g} s: it waits"
            self._leave(self._at_work(Fate(self.rank, "hung", told)))
        elif self.board.read("failed") is not None:
            self._failed = self._failed or now
            if now - self._failed > launch.GRACE_S:
                self._leave(self._at_work(Fate(self.rank, "waited", "was waiting")))

    def interrupted(self) -> None:
        """Say that this rank is well, and was told to end: what the launcher does to all when one has died."""
        if self.fate is None:
            with contextlib.suppress(VerifyError):
                at_work = self.loop.is_alive()
                self._leave(self._at_work(Fate(self.rank, "waited", "was waiting")) if at_work else self._ended())

    def _ended(self) -> Fate:
        if self.loop.error is None:
            return Fate(self.rank, "finished", "finished")
        raised = worker.raised(self.loop.error)
        return Fate(self.rank, raised.kind, raised.told, raised.text, pickled=raised.pickled)

    def _at_work(self, fate: Fate) -> Fate:
        with tempfile.TemporaryFile() as dump:
            faulthandler.dump_traceback(dump, all_threads=True)
            dump.seek(0)
            return waiting(fate, dump.read().decode(errors="replace"), self.loop.ident or 0)

    def _leave(self, fate: Fate) -> None:
        self.fate = fate
        self.board.post(str(self.rank), pickle.dumps((time.time(), fate)))
        if fate.kind != "finished":
            self.board.post("failed", b"")


@contextlib.contextmanager
def _reference(plan: CellPlan, where: link.Address, timeout: float, hear: Hear) -> Iterator[tuple[_Work, list[Any]]]:
    """Give the thread that waits for the reference, and the list that its answer will be in."""
    answers: list[Any] = []

    def heard(progress: launch.Progress) -> None:
        what, step = progress.said
        if what == "judged":
            hear(step)

    def wait() -> None:
        answers.extend(
            launch.pool().run(
                "truestep.verification.reference:serve",
                (plan, where),
                world_size=None,
                timeout=timeout,
                progress=heard,
                what=plan.title,
            )
        )

    yield _Work(wait), answers


class _Judge:
    """Rank 0's part: it hears the reference and reads every rank's fate, and leaves the verdict."""

    def __init__(self, me: _Rank, reference: tuple[_Work, list[Any]], plan: CellPlan) -> None:
        self._me, self._plan = me, plan
        self._waits, self._answers = reference
        self._settled_at: float | None = None
        self._beaten = 0.0

    def verdict(self) -> Any:
        """Wait for what decides the cell, leave it on the board and return it."""
        try:
            while (outcome := self._outcome()) is None:
                time.sleep(TICK_S)
        except BaseException:
            self._me.interrupted()
            if (outcome := self._found_dead()) is None:
                raise
        finally:
            STANDING.stuck = self._me.loop.is_alive()
        self._me.board.post("verdict", pickle.dumps(outcome))
        if isinstance(outcome, TrueStepError):
            launch.pool().close()  # the reference may still wait for records
        return outcome

    def _outcome(self) -> Any:
        self._me.attend()
        self._keep_beating()
        fates = self._fates()
        error = self._waits.error
        if error is not None and (_died(error) or not any(fate.kind != "finished" for _, fate in fates.values())):
            return error if isinstance(error, TrueStepError) else VerifyError(f"{type(error).__name__}: {error}")
        if self._me.board.read("failed") is None:
            return self._answers[0] if self._answers and len(fates) == self._plan.world_size else None
        now = time.monotonic()
        self._settled_at = self._settled_at or now + 2 * launch.GRACE_S
        return self._failure(fates) if len(fates) == self._plan.world_size or now > self._settled_at else None

    def _keep_beating(self) -> None:
        now = time.monotonic()
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._me.board.post("beat", str(now).encode())

    def _fates(self) -> dict[int, tuple[float, Fate]]:
        notes = {rank: self._me.board.read(str(rank)) for rank in range(self._plan.world_size)}
        return {rank: pickle.loads(note) for rank, note in notes.items() if note is not None}

    def _failure(self, fates: dict[int, tuple[float, Fate]]) -> TrueStepError:
        gone = [Fate(rank, "died", "died") for rank in range(self._plan.world_size) if rank not in fates]
        in_order = [fate for _, fate in sorted(fates.values(), key=lambda ended: ended[0])]
        return failure(self._plan.title, [*gone, *in_order])

    def _found_dead(self) -> TrueStepError | None:
        """Return the error for ranks that have died, when this one is told to end; None if the others were told so too."""
        until = time.monotonic() + launch.GRACE_S
        fates = self._fates()
        while len(fates) < self._plan.world_size and time.monotonic() < until:
            time.sleep(TICK_S)
            fates = self._fates()
        return self._failure(fates) if len(fates) < self._plan.world_size else None


def _died(error: BaseException) -> bool:
    return isinstance(error, TrueStepError) and any(finding.code == "run/died" for finding in error.findings)


def part(status: int) -> int:
    """Return the status with which all ranks leave: rank 0's. Collective: every rank, once.

    A launcher ends all ranks as soon as one has ended with an error: so the others wait until rank 0 has said what there is to
    say. And rank 0, whose process may hold the store, waits until they have read it.
    """
    board = STANDING.parting
    if board is None:
        return status
    try:
        if ranks.here() != 0:
            note = _in_time(board, "status", PARTING_S)
            board.post(f"{ranks.here()} left", b"")
            return status if note is None else int(pickle.loads(note))
        board.post("status", pickle.dumps(status))
        for rank in range(1, ranks.count()):
            if _in_time(board, f"{rank} left", LEAVING_S) is None:
                break  # it is gone, or hangs
    except TrueStepError:
        pass  # the store is gone, and rank 0 with it
    return status


def _in_time(board: ranks.Board, key: str, seconds: float) -> bytes | None:
    until = time.monotonic() + seconds
    while (note := board.read(key)) is None and time.monotonic() < until:
        time.sleep(TICK_S)
    return note


def end(status: int) -> NoReturn:
    """End this process and what it started; without exit handlers: those of process groups wait for ranks that may be gone."""
    launch.pool().close()
    os._exit(status)
