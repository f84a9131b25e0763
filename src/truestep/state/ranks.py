"""Who else takes part, and how ranks come to one verdict: all raise, or none.

*Agreement* needs no collective of the process group, which hangs when a rank does not come. A *round* is one call of `agree` or
`agreeing` on every rank, told by what is in the group's default store:

    truestep/round/RANK     how many rounds this rank has begun; not kept in the process: a new group counts from its own start
    truestep/ROUND/RANK     what it brings: its findings, or what it raised
    truestep/ROUND/come     how many have brought theirs
    truestep/ROUND/verdict  what all of them go by; written once, by the last that came or the first that would wait no longer
    truestep/ROUND/left     how many have read it; then rank 0, whose process often holds the store, may go on and clean up

The verdict is written by compare-and-set, so that ranks never act on two: a rank that comes after the others gave it up reads
that they did. Rounds stay in step when one ends in an error: every rank that begins one goes by its verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from truestep.words.errors import TrueStepError, UnsupportedError, VerifyError
from truestep.words.finding import Finding, errors, listed, merged

Brought: TypeAlias = dict[str, Any]  # JSON: what one rank brings to a round

TIMEOUT_S: Final = 60.0
_SLICE_S: Final = 0.5
_LINGER_S: Final = 10.0  # how long rank 0 waits for the others to read a verdict; reading takes them one request
_AGREED: Final = "_truestep_agreed"  # set on an exception that every rank is already raising
_control: dict[str, Any] = {}  # the control group and the default group it was made for


def here() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if grouped() else 0


def count() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if grouped() else 1


def gather(obj: Any) -> list[Any]:
    """Return the `obj` of every rank, in the order of the ranks. Collective: every rank.

    Objects travel pickled, on the CPU: over gloo, by a group made for it where the default one is another. ``[obj]`` when alone.
    """
    if count() == 1:
        return [obj]
    everyone: list[Any] = [None] * count()
    dist.all_gather_object(everyone, obj, group=_control_group())
    return everyone


def rows(values: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank, as many of each: float64, sent on the CPU without a device. Collective: every rank."""
    everyone = [torch.tensor(values, dtype=torch.float64) for _ in range(count())]
    if count() > 1:
        dist.all_gather(everyone, everyone[here()].clone(), group=_control_group())
    return [row.tolist() for row in everyone]


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks, in place, on its own device. Collective: every rank."""
    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def agree(
    findings: Iterable[Finding],
    *,
    error: type[TrueStepError] = VerifyError,
    timeout: float = TIMEOUT_S,
    what: str = "agree",
) -> list[Finding]:
    """Return the findings of all ranks, merged, the same list on every rank. Collective: every rank.

    Args:
        findings: This rank's; those without ranks get this one.
        error: What to raise.
        timeout: Seconds to wait for a rank that does not come.
        what: What the ranks are at, for the message; ranks at different things are told so.

    Raises:
        TrueStepError: Of class `error`, on all ranks with the same findings, if any is of severity error: brought here, or
            ``run/rank-missing``, ``run/rank-raised`` (inside `agreeing`), ``run/ranks-apart``, ``run/store-gone``.
    """
    mine = [finding if finding.ranks else dataclasses.replace(finding, ranks=(here(),)) for finding in findings]
    brought = {"what": what, "raised": None, "findings": [finding.to_json() for finding in mine]}
    everyones = merged(_verdict(brought, timeout))
    if stopping := errors(everyones):
        raise _agreed(error(listed(stopping), everyones))
    return everyones


@contextlib.contextmanager
def agreeing(what: str, *, error: type[TrueStepError] = VerifyError, timeout: float = TIMEOUT_S) -> Iterator[None]:
    """Make an exception of the block on one rank one on every rank. Collective: every rank.

    The rank that raised goes on raising its own; the others raise `error`, naming it and its message, at the end of their block
    or at an `agree` in it. Blocks may be nested.

    Args:
        what: What the block does, for the message: ``"load the recipe"``.
        error: What the other ranks raise.
        timeout: Seconds to wait, from the end of this rank's block, for the end of another's.

    Raises:
        TrueStepError: Of class `error`, as `agree`.
    """
    try:
        yield
    except BaseException as exception:
        if not getattr(exception, _AGREED, False):
            _bring_exception(exception, what, timeout)
        raise
    agree((), error=error, timeout=timeout, what=what)


def _bring_exception(exception: BaseException, what: str, timeout: float) -> None:
    """Tell the other ranks what this one raised; waits until they know, unless it was interrupted."""
    findings = exception.findings if isinstance(exception, TrueStepError) else ()
    brought = {
        "what": what,
        "raised": f"{type(exception).__name__}: {exception}",
        "findings": [finding.to_json() for finding in findings],
    }
    _verdict(brought, timeout, waits=isinstance(exception, Exception))
    _agreed(exception)


def _agreed(exception: Any) -> Any:
    setattr(exception, _AGREED, True)
    return exception


def grouped() -> bool:
    """Say whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def _control_group() -> Any:
    """Return a gloo group of all ranks; None, the default group, where that is one. Collective where one has to be made."""
    default = dist.group.WORLD
    if dist.get_backend() == dist.Backend.GLOO:
        return None
    if _control.get("made for") is not default:
        _control.update({"made for": default, "group": dist.new_group(backend=dist.Backend.GLOO)})
    return _control["group"]


# -- Notes, for ranks at work


class Board:
    """Where ranks leave each other notes while they are at work: nobody waits, and no collective is needed.

    The first that each rank makes is the same board, and so is the second; so ranks have to make them in step.

    Raises:
        VerifyError: ``run/store-gone``, from every method too.
    """

    def __init__(self) -> None:
        with _store_needed("open a board"):
            # A connection of its own: one that waits keeps every other call on it waiting.
            self._store: Any = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._base = f"truestep/board/{self._store.add(f'truestep/boards/{here()}', 1)}"

    def post(self, key: str, note: bytes) -> None:
        """Leave a note, in the place of an older one."""
        with _store_needed("leave a note"):
            self._store.set(f"{self._base}/{key}", note)

    def read(self, key: str) -> bytes | None:
        """Return the note that is there now, or None."""
        with _store_needed("read a note"):
            path = f"{self._base}/{key}"
            return bytes(self._store.get(path)) if self._store.check([path]) else None


@contextlib.contextmanager
def _store_needed(what: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as reason:
        finding = _store_gone(what, reason)
        raise VerifyError(str(finding), [finding]) from reason


# -- One round


def _verdict(brought: Brought, timeout: float, waits: bool = True) -> list[Finding]:
    """Bring this rank's part to the next round and return what all ranks go by."""
    if count() == 1:
        return _findings_of({here(): brought}, 1, timeout)
    try:
        return _round(dist.distributed_c10d._get_default_store(), brought, timeout, waits)
    except dist.DistError as reason:
        if isinstance(reason, dist.DistBackendError):
            raise
        return [_store_gone(brought["what"], reason)]


def _round(store: Store, brought: Brought, timeout: float, waits: bool) -> list[Finding]:
    """Take part in a round; without `waits` leave it at once, unless the others wait for this rank alone."""
    rank, world = here(), count()
    base = f"truestep/{store.add(f'truestep/round/{rank}', 1)}"
    store.set(f"{base}/{rank}", json.dumps(brought))
    if store.add(f"{base}/come", 1) < world:
        if not waits:
            store.add(f"{base}/left", 1)
            return []
        _wait(store, f"{base}/verdict", timeout)
    if not store.check([f"{base}/verdict"]):
        come = {other: json.loads(store.get(f"{base}/{other}")) for other in range(world) if store.check([f"{base}/{other}"])}
        found = [finding.to_json() for finding in _findings_of(come, world, timeout)]
        store.compare_set(f"{base}/verdict", "", json.dumps({"come": len(come), "findings": found}))
    verdict = json.loads(store.get(f"{base}/verdict"))
    _leave(store, base, verdict["come"], timeout)
    return [Finding.from_json(data) for data in verdict["findings"]]


def _leave(store: Store, base: str, come: int, timeout: float) -> None:
    """Say that this rank has read the verdict. Rank 0 goes last and cleans up; the verdict stays if one is still to read it."""
    if store.add(f"{base}/left", 1) == come:
        store.set(f"{base}/done", "")
    if here() == 0 and _wait(store, f"{base}/done", min(timeout, _LINGER_S)):
        kept = () if come == count() else ("verdict",)
        for part in (*map(str, range(count())), "come", "left", "done", "verdict"):
            if part not in kept:
                store.delete_key(f"{base}/{part}")


def _wait(store: Store, key: str, timeout: float) -> bool:
    """Return whether the key was set in time."""
    until = time.monotonic() + timeout
    while True:
        left_s = until - time.monotonic()
        with contextlib.suppress(dist.DistStoreError):
            # In slices: a signal waits until the store answers. And to a store, 0 is for ever.
            store.wait([key], timedelta(seconds=min(max(left_s, 0.001), _SLICE_S)))
            return True
        if left_s <= _SLICE_S:
            return False


# -- What a round found


def _findings_of(brought_by_rank: dict[int, Brought], world: int, timeout: float) -> list[Finding]:
    """Return what the ranks brought, and what is wrong with the round itself."""
    found = [Finding.from_json(data) for brought in brought_by_rank.values() for data in brought["findings"]]
    whats = {rank: brought["what"] for rank, brought in brought_by_rank.items()}
    raised = {rank: brought["raised"] for rank, brought in brought_by_rank.items() if brought["raised"] is not None}
    missing = tuple(rank for rank in range(world) if rank not in brought_by_rank)
    wrong = [_raised(rank, whats[rank], text) for rank, text in raised.items()]
    if missing:
        wrong.append(_missing(missing, " or ".join(sorted(set(whats.values()))), timeout))
    if len(set(whats.values())) > 1 and not raised:  # a rank that raised has left for the end of an outer block
        wrong.append(_apart(whats))
    return merged([*wrong, *found])


def _raised(rank: int, what: str, text: str) -> Finding:
    found = text.removesuffix(".")
    return Finding("run/rank-raised", None, "error", expected=f"every rank to {what}", found=found, ranks=(rank,))


def _missing(ranks: tuple[int, ...], what: str, timeout: float) -> Finding:
    return Finding(
        "run/rank-missing",
        None,
        "error",
        expected=f"every rank to {what} within {timeout:g} s",
        found="no sign of it",
        fix="Look for a rank that died, hangs, or left the common path of the script: py-spy dump --pid PID shows where it is.",
        ranks=ranks,
    )


def _apart(what_by_rank: dict[int, str]) -> Finding:
    return Finding(
        "run/ranks-apart",
        None,
        "error",
        expected="all ranks at the same call",
        found=listed(f"rank {rank} at {what!r}" for rank, what in what_by_rank.items()),
        fix="Make every rank take the same path through the script.",
        ranks=tuple(what_by_rank),
    )


def _store_gone(what: str, reason: Exception) -> Finding:
    return Finding(
        "run/store-gone",
        None,
        "error",
        expected=f"every rank to {what}",
        found=f"no answer of the store that the process group keeps ({str(reason).splitlines()[0][:120]})",
        fix="Look for the output of rank 0, whose process usually holds it: it has probably ended.",
        ranks=(here(),),
    )


# -- The process group that a launcher means

_LAUNCHED_BY: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Say whether this process is one rank of several, or of one, that a launcher such as torchrun has started."""
    return grouped() or "WORLD_SIZE" in os.environ


def join_launched(timeout: float) -> None:
    """Make the default gloo process group from what the launcher left in the environment, unless there is a group. Collective.

    Args:
        timeout: Seconds for every rank to come, and then for each of its collectives.

    Raises:
        UnsupportedError: If the group that is there cannot reduce on the CPU, or the environment names none.
        VerifyError: If not every rank comes.
    """
    if grouped():
        if "gloo" not in (found := str(dist.get_backend_config())):
            raise UnsupportedError(
                f"expected a process group that reduces on the CPU, found {found}. "
                "Give init_process_group the backend 'cpu:gloo,cuda:nccl', or leave it to truestep."
            )
        return
    if missing := [name for name in _LAUNCHED_BY if not os.environ.get(name)]:
        raise UnsupportedError(
            f"expected what a launcher sets, {', '.join(_LAUNCHED_BY)}; found no {' and no '.join(missing)}. "
            "Start with torchrun, or unset WORLD_SIZE to let truestep start the ranks."
        )
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError, ValueError) as reason:
        expected = f"{os.environ['WORLD_SIZE']} ranks at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise VerifyError(
            f"expected {expected} to form a group, found: {str(reason).splitlines()[0][:200]}. Look at the output of every rank."
        ) from reason


# -- The process group of a crew on this machine


STORE_HOST: Final = "127.0.0.1"
_JOIN_TIMEOUT: Final = timedelta(minutes=5)


def serve_store(world_size: int) -> Any:
    """Return a ``TCPStore`` kept by this process, rank 0, at a port of the system's choice, its ``port``."""
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # from C++, not in torch's stubs
    return tcp_store(STORE_HOST, 0, world_size, True, _JOIN_TIMEOUT, wait_for_workers=False, multi_tenant=True)


def join_group(store: Any, port: int, rank: int, world_size: int) -> None:
    """Make the default gloo process group. Collective: every rank.

    Args:
        store: Of rank 0; None on the others, which connect to `port`.
        port: Where rank 0 keeps the store.
        rank: This process's.
        world_size: How many there are.
    """
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    joined = store or tcp_store(STORE_HOST, port, world_size, False, _JOIN_TIMEOUT)
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=world_size)


def default_group() -> Any:
    """Return the default process group, or None where there is none."""
    return dist.group.WORLD if grouped() else None


def collectives_started() -> int:
    """Return how many collectives the default process group has started here; 0 where there is none."""
    group: Any = default_group()
    return 0 if group is None else int(group._get_sequence_number_for_group())


def mesh(device: str) -> Any:
    """Return the one-dimensional device mesh over the default process group."""
    return dist.device_mesh.init_device_mesh(device, (count(),))
