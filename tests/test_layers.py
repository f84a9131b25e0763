"""Who may import, and who may print, where import-linter cannot see it (`./do lint` holds the layers themselves)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))

# What may be imported only there: prefixes of paths in src/.
IMPORTERS: Final = {
    "torch.distributed": ("truestep/state/ranks.py", "truestep/backends/"),
    "deepspeed": ("truestep/backends/zero", "truestep/backends/wrappers"),
    "accelerate": ("truestep/backends/wrappers",),
    "transformers": (),
    "lightning": (),
    "typer": ("truestep/cli/",),
    "rich": ("truestep/cli/",),
}
# Who may write to the standard streams, and why if it is not the command line.
PRINTERS: Final = {
    "truestep/cli/": "the command line",
    "truestep/backends/zero_ops.py": "a chore of its own, run by ./do setup: the compiler takes a minute, and says so",
    "truestep/verification/matrix.py": "a chore of its own, run by ./do matrix",
    "truestep/verification/who.py": "a chore of its own, run by ./do who",
}
WRITES: Final = {"print", *(f"sys.{stream}.{verb}" for stream in ("stdout", "stderr") for verb in ("write", "writelines"))}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of all that is imported, anywhere in the file, and of every ``torch.distributed`` in use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def printing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and function of every call that writes to a standard stream."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WRITES:
            yield node.lineno, ast.unparse(node.func)


def strays(source: str, path: str) -> list[str]:
    """Return what the file at `path` (relative to src/) imports and prints but must not, in words."""
    tree = ast.parse(source)
    found = [
        f"line {line} imports {name}"
        for line, name in imported(tree)
        for guarded, importers in IMPORTERS.items()
        if f"{name}.".startswith(f"{guarded}.") and not path.startswith(importers)
    ]
    if not path.startswith(tuple(PRINTERS)):
        found += [f"line {line} calls {name}" for line, name in printing(tree)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_and_prints_only_what_is_its_own(path: Path) -> None:
    assert strays(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()) == []


@pytest.mark.parametrize("entry", sorted({entry for entries in (*IMPORTERS.values(), PRINTERS) for entry in entries}))
def test_every_exception_is_for_something_that_exists(entry: str) -> None:
    assert any(path.relative_to(SOURCE).as_posix().startswith(entry) for path in FILES)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import torch.distributed as dist", "imports torch.distributed"),
        ("from torch import distributed", "imports torch.distributed"),
        ("from torch.distributed.tensor import DTensor", "imports torch.distributed.tensor.DTensor"),
        ("rank = torch.distributed.get_rank()", "imports torch.distributed"),
        ("def late():\n    import deepspeed.runtime", "imports deepspeed.runtime"),
        ("importlib.import_module('accelerate')", "imports accelerate"),
        ("from rich import print", "imports rich.print"),
        ("print(1)", "calls print"),
        ("sys.stderr.write('')", "calls sys.stderr.write"),
    ],
)
def test_a_stray_is_seen_in_every_form(line: str, what: str) -> None:
    assert [found.split(" ", 2)[2] for found in strays(line, "truestep/proof/bounds.py")] == [what]


def test_words_that_only_look_alike_are_not_strays() -> None:
    assert strays("import torch.distributions\nimport richer\nprinted = dist.print\n", "truestep/proof/bounds.py") == []
