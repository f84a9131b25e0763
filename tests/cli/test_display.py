"""What a terminal shows while a verification runs: a live table, or plain lines where it cannot redraw."""

import io

import pytest
from rich.console import Console

from truestep.cli import display
from truestep.cli.display import progress_shown
from truestep.verification.report import Cell, Event
from truestep.words.errors import VerifyError
from truestep.words.finding import Finding

SUMMED = Finding(
    code="gradient/not-conserved",
    law="gradient",
    severity="error",
    param="layers.0.weight",
    key="grad",
    expected="the mean of the micro-batches",
    found="3 times it",
    fix="Divide once.",
    ranks=(0, 1),
    step=1,
    phase="reduce",
    cause="it was summed over ranks",
)


@pytest.fixture
def capable(monkeypatch):
    """A terminal on which rich can redraw, whatever terminal the tests run on."""
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    about = {"backend": "zero3", "optimizer": "adagrad", "world_size": 2, "micro_batches": 4}
    with progress_shown(Console(file=stream, force_terminal=True, width=150, color_system=None)) as show:
        show(Event("cell", 0, 2, step=10, steps=10, result=Cell.judged([SUMMED], steps=10, **about), **about))
    assert stream.getvalue().startswith("zero3 adagrad x4: different")


@pytest.mark.usefixtures("capable")
def test_a_terminal_gets_a_table_and_a_bar():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150, color_system=None)
    about = {"backend": "zero3", "optimizer": "adagrad", "world_size": 2, "micro_batches": 4}
    with progress_shown(console) as show:
        show(Event("start", 0, 2, steps=10, **about))
        show(Event("step", 0, 2, step=3, steps=10, **about))
        assert "3/10" in stream.getvalue()
        show(Event("cell", 0, 2, step=10, steps=10, result=Cell.judged([SUMMED], steps=10, **about), **about))
        show(Event("message", text="one moment"))
    shown = stream.getvalue()
    assert "cell 1 of 2" in shown
    assert "50%" in shown
    assert "one moment" in shown
    assert "different" in shown.rpartition("zero3")[2]


def test_long_texts_wrap_under_themselves_on_a_terminal_and_nowhere_else():
    text = "nine words of this sentence go into the second line"
    assert display.entry("found", text, None) == f"  found    {text}"
    first, second = display.entry("found", text, 48).splitlines()
    assert (first[:11], second[:11].strip()) == ("  found    ", "")
    assert f"{first[11:]} {second.strip()}" == text


@pytest.mark.usefixtures("capable")
def test_a_narrow_terminal_gets_whole_columns_the_verdict_among_them():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    about = {"backend": "accelerate-fsdp2", "optimizer": "adagrad", "world_size": 2, "micro_batches": 4}
    with progress_shown(console) as show:
        show(Event("cell", 0, 1, step=10, steps=10, result=Cell.judged([SUMMED], steps=10, **about), **about))
    assert "…" not in stream.getvalue()
    assert "different" in stream.getvalue()
    assert "gradient/not-conserved" not in stream.getvalue()  # it is told in full below


@pytest.mark.usefixtures("capable")
def test_a_run_that_fails_shows_its_cell_as_stopped_and_one_that_never_began_shows_nothing():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with pytest.raises(VerifyError), progress_shown(console):
        raise VerifyError("no such recipe")
    assert stream.getvalue() == ""

    def fail_when_begun():
        with progress_shown(console) as show:
            show(Event("start", 0, 2, steps=10, backend="ddp", world_size=2, micro_batches=1))
            raise VerifyError("rank 1 died")

    pytest.raises(VerifyError, fail_when_begun)
    assert "stopped" in stream.getvalue()
