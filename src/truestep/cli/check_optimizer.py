"""`truestep check-optimizer`: put an optimizer class to the conformance suite, and say where it may run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from truestep.cli import leads

EXPECTED: Final = "a class of torch.optim in any case, MODULE:OBJECT or FILE.py:OBJECT"


def check_optimizer(
    optimizer: Annotated[str, typer.Argument(metavar="MODULE:OBJECT", help=f"The class or function: {EXPECTED}.")],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MODULE:OBJECT",
            help="What its updates should be: a rule of the textbook (adamw), or another class.",
            show_default="its own rule, for a class of torch.optim",
        ),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the class; may be given again.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="2d", help="Only params of that many dims.", show_default="0, 1, 2 and 4 dims")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report here as JSON.")] = None,
) -> None:
    """Check an optimizer class against what every optimizer must do, and say on which backends it may run.

    Exit status: 0 nothing failed (warnings are no failures), 1 something failed, 2 it cannot be built, or the input is wrong.
    """
    settings = dict(setting(text) for text in set or ())
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise typer.BadParameter(f"expected a file in a folder that exists, found {str(json)!r}.", param_hint="'--json'")
    # Here, not above: --help must not load torch.
    from truestep.optimizers.conformance.run import check_optimizer as check

    found = resolved(optimizer, "optimizer")
    report = check(found, reference=referred(reference), params=params, **settings)
    if leads():
        typer.echo(report.table())
        if json is not None:
            report.to_json(json)
    raise typer.Exit(0 if report.passed else 1)


def setting(text: str) -> tuple[str, Any]:
    """Return ``(name, value)`` of ``NAME=VALUE``; a value that is no Python literal is a string.

    >>> setting("betas=(0.9, 0.95)"), setting("adjust_lr_fn=match_rms_adamw")
    (('betas', (0.9, 0.95)), ('adjust_lr_fn', 'match_rms_adamw'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not value:
        raise typer.BadParameter(f"expected NAME=VALUE, found {text!r}. Write lr=0.01.", param_hint="'--set'")
    if name in ("reference", "params"):
        raise typer.BadParameter(f"expected a setting of the class, found {name!r}: it is --{name}.", param_hint="'--set'")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def resolved(text: str, what: str) -> Any:
    """Return the class or function that a text names.

    Raises:
        UnsupportedError: If there is none, or its module does not import.
    """
    import torch

    from truestep.verification.importing import resolve
    from truestep.words.errors import UnsupportedError

    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__ if _is_class(name)}
    if text.lower() in classes:
        return classes[text.lower()]
    names = [value.__name__ for value in classes.values()]
    module, found, _ = resolve(text, what, EXPECTED, names, UnsupportedError)
    if found is module:
        raise UnsupportedError(f"{what} {text!r}: expected {EXPECTED}, found a module. Name what is in it: {text}:MyOptimizer.")
    return found


def _is_class(name: str) -> bool:
    import torch

    value = getattr(torch.optim, name)
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def referred(text: str | None) -> Any:
    """Return a reference: a name of the textbook as it is, a class or function where MODULE:OBJECT names one."""
    return resolved(text, "reference") if text is not None and (":" in text or text.endswith(".py")) else text
