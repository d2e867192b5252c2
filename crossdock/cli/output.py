"""Where a command's words go: one JSON document on stdout under --json, the rest on stderr."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

_BETWEEN_S = 2.0
_STEADY_S = 10.0
FILE_COLUMNS = 120
"""Of tables in a file or a pipe, which have no width of their own."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")
]


class Output:
    """`notes` (stderr) is for progress and remarks, `result` for what the command is run for."""

    def __init__(self, as_json: bool, stdout: TextIO):
        self.as_json = as_json
        self.stdout = stdout
        self.notes = Console(stderr=True, highlight=False)
        self._told = False

    def result(self, document: Any, human: RenderableType | None = None) -> None:
        if not self.as_json:
            if human is not None:
                width = None if self.stdout.isatty() else FILE_COLUMNS
                # A command is longer than a narrow terminal, and is to be copied whole.
                Console(file=self.stdout, highlight=False, width=width).print(human, crop=False)
            return
        self._told = True
        print(json.dumps(document), file=self.stdout, flush=True)

    @contextmanager
    def stages(self) -> Iterator[Callable[[str], None]]:
        """Says what goes on now: in one changing line of a terminal, else in a line each, of those
        that come too fast the first."""
        if not self.notes.is_terminal:
            yield self._line_every(_BETWEEN_S, -_BETWEEN_S)
            return
        with self.notes.status("") as status:
            yield lambda what: status.update(escape(what))

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, float, float | None], None]]:
        """Takes what goes on, how far it is and of how much: a bar each in a terminal, else a line
        now and then, so that the log of a long start shows that it goes on."""
        if not self.notes.is_terminal:
            say = self._line_every(_STEADY_S, time.monotonic())
            yield lambda what, done, total: say(f"{what}: {done / total:.0%}") if total else None
            return
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn

        tasks: dict[str, TaskID] = {}
        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress("{task.description}", *columns, console=self.notes, transient=True) as bar:

            def draw(what: str, done: float, total: float | None) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(escape(what), total=total)
                bar.update(tasks[what], completed=done, total=total)

            yield draw

    def _line_every(self, seconds: float, said: float) -> Callable[[str], None]:
        """`said`: when the line before was."""

        def say(what: str) -> None:
            nonlocal said
            if (now := time.monotonic()) >= said + seconds:
                said = now
                self.notes.print(what, markup=False)

        return say

    def error(self, message: str, code: int) -> None:
        print(f"crossdock: error: {message}", file=sys.stderr, flush=True)
        if self.as_json and not self._told:
            self.result({"error": {"message": message, "exit_code": code}})


def open_output(argv: Sequence[str]) -> Output:
    """Under --json, whatever else is printed to stdout, by libraries too, goes to stderr."""
    if "--json" not in argv:
        return Output(False, sys.stdout)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return Output(True, stdout)


def output_of(ctx: typer.Context) -> Output:
    output = ctx.obj
    assert isinstance(output, Output)
    return output
