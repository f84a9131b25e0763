"""Pytest plugin: run a test, by its node id, on the rank processes of a crew.

    @pytest.mark.truestep(world_size=2)
    def test_ranks_agree(rank, world_size): ...

The marked test and all its fixtures run on every rank, in a nested pytest session of one test; here, in the parent, it is
selected, skipped, xfailed and reported as any other. ``tmp_path`` is one folder for all ranks. An exception on any rank fails the
test with the text of every rank, a rank that hangs by the time limit. The crews are those of `truestep.verification.launch`, kept
through the run.

Nothing of torch or truestep is imported before a marked test runs. PYTEST_DONT_REWRITE: rank processes import this module first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from truestep.verification.launch import Pool, Results

Outcome: TypeAlias = Literal["passed", "failed", "skipped", "xfailed"]

MARKER: Final = "truestep(world_size=2, device='cpu', timeout=120): run this test on so many rank processes"
TIMEOUT_S: Final = 120.0
OUTPUT_BYTES: Final = 20_000  # the last ones of a rank's output are shown with its failure
NEEDS_MARK: Final = "the fixture {name!r} exists on rank processes only: mark the test with @pytest.mark.truestep(world_size=2)"

# Options of the nested session that are its own: what the parent's say is done in the parent already, or belongs to its plugins.
OWN_OPTIONS: Final = {
    *("file_or_dir", "pyargs", "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "keepduplicates", "doctestmodules"),
    *("plugins", "inifilename", "rootdir", "confcutdir", "override_ini", "pythonwarnings", "importmode", "help", "version"),
    *("capture", "maxfail", "usepdb", "usepdb_cls", "trace", "collectonly", "setuponly", "setupshow", "setupplan", "debug"),
    *("basetemp", "xmlpath", "durations", "durations_min", "pastebin", "traceconfig", "log_file", "reruns"),
    *("lf", "failedfirst", "newfirst", "last_failed_no_failures", "cacheclear", "cacheshow", "stepwise", "stepwise_skip"),
    *("stepwise_reset", "numprocesses", "maxprocesses", "dist", "distload", "tx", "px", "looponfail", "testrunuid"),
}


@dataclass(frozen=True)
class Place:
    """Where a nested session runs."""

    rank: int
    world_size: int
    device: str
    tmp_path: Path


@dataclass
class Said:
    """What became of the test on one rank: plain data, sent to the parent."""

    outcome: Outcome | None = None
    reason: str = ""  # of a skip or an xfail; of a failure, the error in one line
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What a rank is told to run: plain data, sent to it."""

    args: list[str]
    options: dict[str, Any]
    world_size: int
    device: str
    tmp_path: str


class RanksFailed(Exception):
    """A test failed on a rank; the message is the whole report."""


_PLACE: Final = pytest.StashKey[Place]()


# --- the parent's side


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let a marked test run on ranks instead of here: late, so that marks added while collecting count."""
    marker = item.get_closest_marker("truestep")
    if marker is None or _PLACE in item.config.stash:
        return
    # The item stays, so that skip and xfail marks, -x, reports and other plugins work as ever; its fixtures must not run here.
    for name, method in {"setup": lambda: None, "runtest": lambda: run_on_ranks(item, marker), "teardown": lambda: None}.items():
        setattr(item, name, method)
    item.repr_failure = lambda excinfo, style=None: _failure_text(excinfo)  # type: ignore[method-assign]


def _failure_text(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    ours = isinstance(excinfo.value, (RanksFailed, pytest.fail.Exception))
    return str(excinfo.value) if ours else str(excinfo.getrepr(style="short"))


def run_on_ranks(item: pytest.Item, marker: pytest.Mark) -> None:
    """Run a test on a crew and raise what its outcome calls for."""
    try:
        world_size, device, timeout_s = _given(*marker.args, **marker.kwargs)
    except TypeError as error:
        pytest.fail(f"mark truestep: {error}. It takes {MARKER.partition(':')[0]}", pytrace=False)
    from truestep.verification.launch import pool
    from truestep.words.errors import TrueStepError

    request = Request(_arguments(item), _options(item.config), world_size, device, str(_shared_folder(item)))
    ranks = pool()
    _leave(ranks, item.config.rootpath)
    try:
        results = ranks.run("pytest_truestep:on_rank", (request,), world_size=world_size, timeout=timeout_s, what=item.nodeid)
    except TrueStepError as error:
        raise RanksFailed(str(error)) from None
    _conclude(results)


_root_by_pool: WeakKeyDictionary[Pool, Path] = WeakKeyDictionary()


def _leave(ranks: Pool, root: Path) -> None:
    """Have new crews where tests of another root ran before (pytester's): modules of both may share their names."""
    if _root_by_pool.setdefault(ranks, root) != root:
        ranks.renew()
        _root_by_pool[ranks] = root


def _given(world_size: int = 2, device: str = "cpu", timeout: float = TIMEOUT_S) -> tuple[int, str, float]:
    if not isinstance(world_size, int) or world_size < 1:
        pytest.fail(f"mark truestep: expected a world_size of at least 1, found {world_size!r}", pytrace=False)
    return world_size, device, timeout


def _arguments(item: pytest.Item) -> list[str]:
    """Return the arguments of the nested session: the test alone, with this session's root, ini file, plugins and import mode."""
    config = item.config
    here = config.rootpath
    within = item.nodeid.partition("::")[2]
    plugins = [f"-p{name}" for name in config.getoption("plugins") or [] if name != "no:cacheprovider"]
    return [
        f"{item.path}::{within}",
        "--capture=no",
        "-pno:cacheprovider",
        *plugins,
        f"--rootdir={here}",
        *([f"--config-file={config.inipath}"] if config.inipath else []),
        f"--import-mode={config.getoption('importmode')}",
        *(f"--override-ini={setting}" for setting in config.getoption("override_ini") or []),
        "--override-ini=addopts=",  # they are in the options that are handed on
        *(f"-W{warning}" for warning in config.getoption("pythonwarnings") or []),
    ]


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the options to hand on: those of conftest files and plugins too, if they are plain data."""
    plain = (str, int, float, bool, type(None))
    return {name: value for name, value in vars(config.option).items() if name not in OWN_OPTIONS and isinstance(value, plain)}


def _shared_folder(item: pytest.Item) -> Path:
    # Private, and in place since pytest 3.9; the public fixture of the same name could only be had by running fixtures here.
    factory: pytest.TempPathFactory | None = getattr(item.config, "_tmp_path_factory", None)
    name = "".join(character if character.isalnum() else "_" for character in item.name)[:30]
    return factory.mktemp(name, numbered=True) if factory else Path(tempfile.mkdtemp(prefix=name))


def _conclude(results: Results) -> None:
    """Return if the test passed on every rank, else raise."""
    from truestep.verification.worker import Failed

    said: list[Said] = [result.value if isinstance(result, Failed) else result for result in results]
    outcomes = {one.outcome for one in said}
    reason = next((one.reason for one in said if one.reason), "")
    if outcomes == {"skipped"}:
        raise pytest.skip.Exception(reason, _use_item_location=True)
    if outcomes == {"xfailed"}:
        pytest.xfail(reason)
    if outcomes != {"passed"}:
        heads = [f"--- rank {rank} {one.outcome}: {one.reason}".rstrip(": ") for rank, one in enumerate(said)]
        sections = ["\n".join([head, *one.texts]) for head, one in zip(heads, said, strict=True)]
        raise RanksFailed("\n".join([_headline(said), "", *sections]))


def _headline(said: list[Said]) -> str:
    """Return one line that says which ranks did what; a test that only some ranks skip has failed, too."""
    ranks_by_end: dict[tuple[str | None, str], list[str]] = {}
    for rank, one in enumerate(said):
        ranks_by_end.setdefault((one.outcome, one.reason), []).append(str(rank))
    ends = sorted(ranks_by_end.items(), key=lambda end: end[0][0] != "failed")
    told = (f"{outcome} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {reason}" for (outcome, reason), ranks in ends)
    return "; ".join(end.removesuffix(": ") for end in told)


# --- the ranks' side


def on_rank(request: Request) -> Any:
    """Run one test in a nested session, on one rank."""
    from truestep.verification.worker import Failed

    os.environ.pop("PYTEST_ADDOPTS", None)
    rank = int(os.environ["RANK"])
    session = RankSession(Place(rank, request.world_size, request.device, Path(request.tmp_path)), request.options)
    # A rank runs many sessions, and has imported what a plugin's next session would first rewrite: no fault of the test's.
    again = "-Wignore::pytest.PytestAssertRewriteWarning"
    status = pytest.main([*request.args, again], plugins=[session])
    said = session.said
    if said.outcome is None:
        said.outcome = "failed"
        said.texts.append(f"the test was not run: the nested pytest session ended with {pytest.ExitCode(status)!r}")
    if said.outcome != "failed":
        return said
    output = _output()
    if output:
        said.texts.append(f"--- rank {rank}, output\n{output}")
    return Failed("\n".join(said.texts), said, told=f"failed: {said.reason}" if said.reason else "failed")


def _output() -> str:
    """Return what this rank has written since the test began: its standard output is a file that starts empty."""
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.fstat(1).st_size
    start = max(0, size - OUTPUT_BYTES)
    return os.pread(1, size - start, start).decode(errors="replace").strip()


class RankSession:
    """The plugin of a nested session: tells it where it runs, and hears what becomes of the test."""

    def __init__(self, place: Place, options: dict[str, Any]) -> None:
        self.place = place
        self.options = options
        self.said = Said()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the parent's options, say that this is a rank, and keep the session's own reports out of the rank's output."""
        vars(config.option).update(self.options)
        config.stash[_PLACE] = self.place
        config.pluginmanager.set_blocked("terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why the test could not be collected."""
        if report.failed:
            self.said.texts.append(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown."""
        said = self.said
        if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
            said.outcome = said.outcome or "passed"  # the parent holds the same mark, and judges
        elif report.failed:
            said.outcome = "failed"
            said.reason = said.reason or _error_line(report)
            said.texts += [report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)]
        elif report.skipped and said.outcome != "failed":
            marked: str | None = getattr(report, "wasxfail", None)
            said.outcome = "skipped" if marked is None else "xfailed"
            said.reason = (marked if marked is not None else _skip_reason(report)).removeprefix("reason: ")
        elif report.when == "call":
            said.outcome = said.outcome or "passed"

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for all ranks."""
        return self.place.tmp_path


def _error_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return str(crash.message).partition("\n")[0]
    marked = (line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E "))
    return next(marked, "")


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


# --- fixtures


def _place(request: pytest.FixtureRequest) -> Place:
    place = request.config.stash.get(_PLACE, None)
    if place is None:
        pytest.fail(NEEDS_MARK.format(name=request.fixturename), pytrace=False)
    return place


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """This process's rank."""
    return _place(request).rank


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks there are."""
    return _place(request).world_size


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """The ``torch.device`` of this rank, as the mark says."""
    place = _place(request)
    import torch

    if place.device == "cuda" and torch.cuda.device_count() == 0:
        pytest.skip("no CUDA device")
    return torch.device("cuda", place.rank % torch.cuda.device_count()) if place.device == "cuda" else torch.device(place.device)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """A one-dimensional device mesh over all ranks."""
    place = _place(request)
    from truestep.state import ranks

    return ranks.mesh(place.device)
