"""What a command says of its progress, in a terminal and in a log."""

import io

import pytest
from rich.console import Console

from crossdock.cli import output


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def opened(terminal):
    out = output.Output(False, io.StringIO())
    out.notes = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    return out


def test_a_log_has_a_line_now_and_then(clock):
    out = opened(terminal=False)
    with out.progress() as tell:
        tell("loading a[b]", 0, None)
        for second in range(35):
            clock[0] = 100.5 + second
            tell("loading a[b]", second, 50)
    lines = out.notes.file.getvalue().splitlines()
    assert lines == ["loading a[b]: 20%", "loading a[b]: 40%", "loading a[b]: 60%"]


def test_what_takes_no_time_leaves_no_line(clock):
    out = opened(terminal=False)
    with out.progress() as tell:
        tell("layouts", 9, 9)
    assert out.notes.file.getvalue() == ""


def test_a_terminal_has_a_bar_that_goes_away(clock):
    out = opened(terminal=True)
    with out.progress() as tell:
        tell("loading a[b]", 0, None)
        tell("loading a[b]", 1, 4)
        tell("layouts", 3, 4)
    shown = out.notes.file.getvalue()
    assert "loading a[b]" in shown and "25%" in shown and "75%" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # its last line is wiped
