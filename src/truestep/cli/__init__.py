"""The command line: `truestep COMMAND`. One file a command.

Exit status: 0 all holds; 1 errors found; 2 the command line or the input is wrong, or the run could not be finished; 3 nothing
wrong but something not checked that `--allow` does not name; 130 interrupted; 141 the reader of the output went away; 143 told to
end. Under a launcher all ranks end with the status of rank 0, which is the one that prints.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import truestep
from truestep.words.errors import TrueStepError

if TYPE_CHECKING:
    from typer import Typer

# Each has a module of this package with a function, both of its name with underscores. None loads torch before it runs.
COMMANDS: Final = ("verify", "check-optimizer", "demo")
WRONG, INTERRUPTED, READER_GONE, ENDED = 2, 130, 141, 143
LINGER_S: Final = 2.0


class _ReaderGone(Exception):
    """Carries a broken pipe past typer, which would make it exit status 1: what stands for a difference here."""


class _Ended(BaseException):
    """Carries SIGTERM through the clean-up of what has been started."""


def main() -> None:
    """Run the command line of this process; the console entry."""
    signal.signal(signal.SIGTERM, _end)
    status = run(sys.argv[1:])
    if "WORLD_SIZE" in os.environ:
        _leave_together(status)
    sys.exit(status)


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # The second one ends the clean-up too.
    raise _Ended


def _leave_together(status: int) -> None:
    """End this rank, once rank 0 has said all there is to say: a launcher ends all when one ends with an error."""
    given = sys.modules.get("truestep.verification.given")
    if given is not None and status not in (INTERRUPTED, ENDED):
        status = given.part(status)
    elif status and not leads():
        time.sleep(LINGER_S)
    sys.stdout.flush()
    sys.stderr.flush()
    if given is not None:
        given.end(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; what is wrong is said in one message on stderr."""
    try:
        status = app()(args=list(arguments), prog_name="truestep", standalone_mode=False)
        sys.stdout.flush()
    except (_ReaderGone, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Else Python complains at exit, when it flushes.
        return READER_GONE
    except KeyboardInterrupt:
        status = INTERRUPTED
    except _Ended:
        say("truestep: told to end")
        return ENDED
    except TrueStepError as error:
        return _wrong(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # Nobody's input: a fault of ours, told in full.
            traceback.print_exc()
            return _wrong(f"this is a fault of truestep, {type(error).__name__}. Please report it with the lines above.")
        path = getattr(getattr(error, "ctx", None), "command_path", "truestep")
        text = error.format_message()
        return _wrong(f"{text}{'' if text.endswith(('.', '?')) else '.'} Try '{path} --help'.")
    if status == INTERRUPTED:
        say("truestep: interrupted")
    return int(status or 0)


def app() -> Typer:
    """Return the typer application, all commands in it."""
    import typer

    made = typer.Typer(
        help="Prove the steps of a distributed training loop equal to one process, or name the first thing that differs.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @made.callback(invoke_without_command=True)
    def start(
        context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
    ) -> None:
        if version:
            typer.echo(f"truestep {truestep.__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(WRONG)

    # typer reads this annotation from the module's globals, where typer is not: it is imported here only.
    start.__annotations__["context"] = typer.Context
    for command in COMMANDS:
        name = command.replace("-", "_")
        function = getattr(importlib.import_module(f"truestep.cli.{name}"), name)
        made.command(command)(_without_reader(function))
    return made


def leads() -> bool:
    """Say whether this process is the one that prints: rank 0 under torchrun, or the only one."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print a line on stderr, on the process that prints."""
    if leads():
        print(text, file=sys.stderr, flush=True)


def _wrong(message: str) -> int:
    say(f"truestep: error: {message}")
    return WRONG


def _without_reader(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError as error:
            raise _ReaderGone from error

    return run_command
