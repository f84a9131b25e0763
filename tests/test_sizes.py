"""Sizes: a file up to 400 lines, a function up to 60; a larger one says why beside it, ``# size: REASON``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MOST_LINES_IN_A_FILE = 400
MOST_LINES_IN_A_FUNCTION = 60
REASON = re.compile(r"#\s*size:\s*\S+\s+\S+")  # a word alone is no reason


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method, nested ones too."""
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def too_long(source: str) -> list[str]:
    """Return what is longer than the limits and gives no reason, in words."""
    lines = source.splitlines()
    found = []
    if len(lines) > MOST_LINES_IN_A_FILE and not any(REASON.match(line) for line in lines):
        found.append(f"the file has {len(lines)} lines, up to {MOST_LINES_IN_A_FILE} are allowed")
    for function in functions(ast.parse(source)):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        length = (function.end_lineno or function.lineno) - first + 1
        beside = lines[max(first - 2, 0) : function.body[0].lineno]  # the line above, to the end of the signature
        if length > MOST_LINES_IN_A_FUNCTION and not any(REASON.search(line) for line in beside):
            found.append(f"{function.name} (line {first}) has {length} lines, up to {MOST_LINES_IN_A_FUNCTION} are allowed")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_are_small_or_say_why(path: Path) -> None:
    assert too_long(path.read_text(encoding="utf-8")) == []


def _function(lines: int, before: str = "", beside: str = "") -> str:
    return f"{before}\ndef long():{beside}\n" + "    x = 1\n" * (lines - 1)


def test_a_function_at_the_limit_passes_and_one_line_more_does_not() -> None:
    assert too_long(_function(MOST_LINES_IN_A_FUNCTION)) == []
    assert too_long(_function(MOST_LINES_IN_A_FUNCTION + 1)) == ["long (line 2) has 61 lines, up to 60 are allowed"]


@pytest.mark.parametrize("where", ["before", "beside"])
def test_a_reason_beside_a_long_function_lets_it_pass_and_a_bare_mark_does_not(where: str) -> None:
    assert too_long(_function(61, **{where: "  # size: one table"})) == []
    assert too_long(_function(61, **{where: "  # size: long"})) != []


def test_a_file_over_the_limit_needs_a_reason_of_its_own() -> None:
    source = "x = 1\n" * (MOST_LINES_IN_A_FILE + 1)
    assert too_long(source) == ["the file has 401 lines, up to 400 are allowed"]
    assert too_long("# size: one table\n" + source) == []
