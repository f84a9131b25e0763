"""What a person sees while a verification runs and after it: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from truestep.cli import leads, say
from truestep.verification.report import COLUMNS, EXIT_STATUS, Cell, Event, Report, row_of, told

Show: TypeAlias = Callable[[Event], None]
RUNNING: Final = "..."
SPARED: Final = ("first", "worst", "bounded", "bitwise", "seconds", "ranks", "steps")  # the findings are told below
STYLES: Final = {"equal": "green", "different": "bold red", "not checked": "yellow"}


def verified(recipe: str, **asked: Any) -> Report:
    """Verify a recipe, showing how far it is; `asked` are the arguments of `truestep.verify`.

    Raises:
        TrueStepError: As `truestep.verify`.
    """
    from truestep.verification.verifying import verify  # Here, not above: --help must not load torch.

    with progress_shown(Console(highlight=False, soft_wrap=True)) as show:
        report: Report = verify(recipe, progress=show, **asked)
    return report


@contextmanager
def progress_shown(console: Console) -> Iterator[Show]:
    """Give the function that shows the events of one verification."""
    if not leads():
        yield lambda event: None
    elif console.is_terminal and not console.is_dumb_terminal:
        # No refresh thread: rank processes are started from this one. Each event redraws.
        table = LiveTable(Live(console=console, auto_refresh=False))
        try:
            yield table
        except BaseException:
            table.stopped()
            raise
        finally:
            table.live.stop()
    else:
        yield lambda event: show_line(console, event)


def show_line(console: Console, event: Event) -> None:
    """Print one line for a finished cell, and messages on stderr."""
    if event.kind == "message":
        say(f"truestep: {event.text}")
    elif event.result is not None:
        console.print(Text(cell_line(event.result)))


def cell_line(cell: Cell) -> str:
    """Return a cell in one line: backend, optimizer, window length, verdict, figures."""
    return f"{cell.backend} {cell.optimizer} x{cell.micro_batches}: {cell.verdict}; {cell.figures}"


class LiveTable:
    """A table of the cells so far, the running one last, over a progress bar."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.rows: dict[int, tuple[str, ...]] = {}
        self.said = ""
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), auto_refresh=False)
        self.task = self.bar.add_task("starting", total=None)

    def __call__(self, event: Event) -> None:
        """Take in an event and redraw."""
        self.live.start()  # Not before there is something to show: what is refused at once is told in one line.
        self.said = event.text
        if event.kind != "message":
            self.rows[event.cell] = row_of(event.result) if event.result else _running(event)
            done = event.cell + (1.0 if event.kind == "cell" else event.step / max(event.steps, 1))
            description = f"cell {event.cell + 1} of {event.cells}"
            self.bar.update(self.task, completed=done, total=event.cells, description=description)
        self._draw()

    def stopped(self) -> None:
        """Show that the cell that was running has come to no verdict."""
        for cell, row in self.rows.items():
            self.rows[cell] = tuple("stopped" if text == RUNNING else text for text in row)
        if self.live.is_started:
            self._draw()

    def _draw(self) -> None:
        self.live.update(Group(self._table(), Text(self.said, style="dim"), self.bar), refresh=True)

    def _table(self) -> Table:
        rows = list(self.rows.values())
        shown = columns_that_fit([COLUMNS, *rows], self.live.console.width)
        table = Table(*(Column(COLUMNS[place], no_wrap=True) for place in shown), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(row[place], style=STYLES.get(row[place], "")) for place in shown))
        return table


def columns_that_fit(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the places of the columns of a table that fit into a terminal: those of `SPARED` go first, in order."""
    shown = list(range(len(COLUMNS)))
    for name in SPARED:
        if sum(max(len(row[place]) for row in rows) + 2 for place in shown) - 2 <= width:
            break
        shown.remove(COLUMNS.index(name))
    return shown


def _running(event: Event) -> tuple[str, ...]:
    known = (event.backend, event.optimizer, str(event.world_size), str(event.micro_batches), f"{event.step}/{event.steps}")
    return (*known, RUNNING) + ("",) * (len(COLUMNS) - len(known) - 1)


def print_report(report: Report) -> None:
    """Print the first finding of every cell that is not equal, and how many cells came to which verdict."""
    if not leads():
        return
    console = Console(highlight=False, soft_wrap=True)
    for cell in report.cells:
        if cell.first is not None:
            print_finding(console, cell)
    warned = dict.fromkeys(str(finding) for cell in report.cells for finding in cell.findings if finding.severity == "warning")
    for text in warned:
        console.print(Text(f"warning: {text}", style="yellow"))
    count_by_verdict = Counter(cell.verdict for cell in report.cells)
    counts = ", ".join(f"{count_by_verdict[verdict]} {verdict}" for verdict in EXIT_STATUS if count_by_verdict[verdict])
    console.print(Text.assemble("verdict: ", (report.verdict, STYLES[report.verdict]), f" (cells: {counts or 'none'})"))


def print_finding(console: Console, cell: Cell) -> None:
    """Print the finding that decided a cell's verdict, one entry a line."""
    if cell.first is None:
        return
    head = f"{cell.backend} {cell.optimizer} x{cell.micro_batches}: {cell.verdict}"
    console.print(Text(f"\n{head}", style=STYLES[cell.verdict]))
    lines = told(cell.first)
    if cell.verdict == "not checked":
        lines.append(("allow", f"--allow {cell.first.code}, if that is well known"))
    for label, text in lines:
        console.print(Text(entry(label, text, console.width if console.is_terminal else None)))
    errors = sum(finding.severity == "error" for finding in cell.findings)
    if errors > 1:
        console.print(Text(f"  and {errors - 1} more in this cell"))
    console.print()


def entry(label: str, text: str, width: int | None) -> str:
    """Return a labelled text, wrapped under itself to a terminal's width; in one line where there is none."""
    head = f"  {label:<9}"
    if width is None:
        return head + text
    return textwrap.fill(text, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
