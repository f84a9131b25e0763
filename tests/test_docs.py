"""Every Python example in README.md and docs/ runs, page by page in reading order.

A block is a session with ``>>>`` prompts, or plain code; one that cannot run here (it needs a cluster) has the line
``<!-- not run: REASON -->`` above its fence.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S+ .*-->\s*\Z")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(page: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, code, and whether it is to be run, of every Python block."""
    for block in FENCE.finditer(page):
        if block["language"] in {"python", "pycon", "py"}:
            runs = not NOT_RUN.search(page[: block.start()])
            yield page.count("\n", 0, block.start()) + 2, block["code"], runs


def run(page: str, name: str) -> list[str]:
    """Run the examples of a page in one namespace; return what failed, in words."""
    names: dict[str, Any] = {"__name__": "__page__"}
    failures: list[str] = []
    for line, code, runs in examples(page):
        if not runs:
            ast.parse(code)
        elif ">>> " in code:
            test = doctest.DocTestParser().get_doctest(code, names, f"{name}:{line}", name, line - 1)
            runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
            runner.run(test, out=failures.append, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile("\n" * (line - 1) + code, name, "exec"), names)
    return failures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(page.read_text(encoding="utf-8"), page.name) == []


def test_a_wrong_example_is_seen_with_its_line() -> None:
    failures = run("# Title\n\n```python\n>>> 1 + 1\n3\n```\n", "page.md")
    assert len(failures) == 1
    assert 'File "page.md", line 4' in failures[0]
    assert "Got:\n    2" in failures[0]


def test_blocks_share_names_and_a_fence_is_no_output() -> None:
    assert run("```python\nx = 2\n```\ntext\n```pycon\n>>> x * 3\n6\n```\n", "page.md") == []


def test_a_plain_block_that_raises_fails_the_page() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "page.md")


def test_a_block_that_cannot_run_here_says_why_and_must_still_parse() -> None:
    page = "<!-- not run: needs 8 GPUs -->\n```python\n{code}\n```\n"
    assert run(page.format(code="launch_it()"), "page.md") == []
    with pytest.raises(SyntaxError):
        run(page.format(code="launch it"), "page.md")
