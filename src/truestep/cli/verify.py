"""`truestep verify`: prove the steps of a recipe equal to one process, cell by cell."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from truestep.cli import leads
from truestep.cli.display import print_report, verified
from truestep.verification.recipes import BUILT_IN
from truestep.verification.report import exit_status

DEFAULT_RANKS: Final = 2


def whole_number(text: str) -> int:
    """Return the whole number above 0 that a text says.

    Raises:
        BadParameter: If it says none.
    """
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected a whole number above 0, found {str(text)!r}.")
    return int(text)


def seconds(text: str) -> float:
    """Return the time that a text says.

    Raises:
        BadParameter: If it is no number of at least 1.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1 <= found < math.inf:
        raise typer.BadParameter(f"expected seconds, 1 or more, found {str(text)!r}.")
    return found


def verify(
    recipe: Annotated[
        str,
        typer.Argument(metavar="[RECIPE]", help=f"A built-in recipe ({', '.join(BUILT_IN)}), FILE.py, MODULE or MODULE:OBJECT."),
    ] = "bytes-gpt",
    backend: Annotated[
        str, typer.Option(metavar="NAMES", help="Backends, with commas between; an unknown one lists all.")
    ] = "ddp,fsdp2",
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Classes of torch.optim in any case, or MODULE:OBJECT, with commas between.",
            show_default="the recipe's",
        ),
    ] = None,
    micro_batches: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Micro-batches of one optimizer step, with commas between.")
    ] = "1",
    world_size: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Ranks.", show_default=f"{DEFAULT_RANKS}, or those of torchrun"),
    ] = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Optimizer steps of a cell.")] = 10,
    fault: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Plant this fault; may be given again.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Let this stay unchecked, CODE[:PARAM], globs too; may be given again."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report here as JSON.")] = None,
    timeout: Annotated[
        float, typer.Option(parser=seconds, metavar="SECONDS", help="That a cell's ranks may keep silent.")
    ] = 120.0,
) -> None:
    """Prove that every optimizer step equals what one process does, or name the first thing that differs.

    The cells are all combinations of the backends, optimizers and numbers of micro-batches. Exit status: 0 all equal, 1 something
    differs, 2 wrong input or a run that could not be finished, 3 something not checked that --allow does not name.
    """
    asked = {
        "backend": names(backend, "--backend"),
        "optimizer": None if optimizer is None else names(optimizer, "--optimizer"),
        "micro_batches": counts(micro_batches, "--micro-batches"),
        "world_size": ranks(world_size),
    }
    if json is not None:
        need_writable(json, "--json")
    report = verified(recipe, **asked, steps=steps, faults=tuple(fault or ()), allow=tuple(allow or ()), timeout=timeout)
    print_report(report)
    if json is not None and leads():
        report.to_json(json)
    raise typer.Exit(exit_status(report))


def need_writable(path: Path, option: str) -> None:
    """Refuse, before hours of work, a path that cannot be written.

    Raises:
        BadParameter: If it is a folder, in a folder that does not exist, or not permitted.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, found {str(path)!r}.", param_hint=f"'{option}'")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"expected a file that may be written, found {str(path)!r}.", param_hint=f"'{option}'")


def names(text: str, option: str) -> list[str]:
    """Return the entries of a list with commas, each once, in order."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise typer.BadParameter(f"expected names with commas between them, found {text!r}.", param_hint=f"'{option}'")
    return found


def counts(text: str, option: str) -> list[int]:
    """Return the whole numbers above 0 of a list with commas, each once, in order."""
    parts = names(text, option)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"expected whole numbers above 0, found {text!r}.", param_hint=f"'{option}'")
    return [int(part) for part in parts]


def ranks(asked: int | None) -> int:
    """Return how many ranks to run on: those that a launcher gives, those asked for, or two.

    Raises:
        BadParameter: If a launcher gives another number than asked for.
    """
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return asked or DEFAULT_RANKS
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected the environment's WORLD_SIZE to be a whole number above 0, found {text!r}.")
    if asked not in (None, int(text)):
        message = f"expected the {text} ranks that the launcher gives (WORLD_SIZE), found {asked}. Leave it out."
        raise typer.BadParameter(message, param_hint="'--world-size'")
    return int(text)
