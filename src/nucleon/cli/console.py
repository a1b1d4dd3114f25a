"""Options, printing, errors and progress that all verbs share.

Exit codes: 0, success; 1, a claim or a bound did not hold; 2, the command failed; 130, interrupted.

The body of a verb runs inside `with plain_errors(debug)`. With `--json` it prints one value by
`print_json` and writes text to a quiet console.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from nucleon import claims
from nucleon._files import to_json
from nucleon.claims import Result, Table
from nucleon.report.page import number

PIPE_WIDTH = 120
MARKS = {"PASS": "[bold green]PASS[/]", "FAIL": "[bold red]FAIL[/]"}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class CommandError(Exception):
    """An error of a command: a sentence, and a hint at the remedy."""

    def __init__(self, sentence: str, hint: str) -> None:
        super().__init__(sentence)
        self.hint = hint


@contextmanager
def hinting(
    hint: str, kinds: tuple[type[Exception], ...] = (ValueError,), *, before: str = ""
) -> Iterator[None]:
    """Turn errors of these kinds into a `CommandError` with a hint."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{before}{error}", hint) from error


# ------------------------------------------------------------------ options


def matrix_shape(words: str) -> tuple[int, int]:
    """Return rows and columns of `--shape`, as 8x16."""
    sides = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", words)
    if sides is None:
        raise CommandError(f"--shape is {words!r}", "write rows x columns, as 8x16")
    return int(sides[1]), int(sides[2])


# ------------------------------------------------------------------ printing and failing


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on the present `sys.stdout`, or on stderr; pipes are `PIPE_WIDTH` wide."""
    out = Console(stderr=stderr, highlight=False, quiet=quiet)
    if not out.is_terminal:
        out.width = PIPE_WIDTH
    return out


def grid(table: Table) -> Grid:
    """Return a table for the terminal; where it is too wide, words are folded and none is cut."""
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    drawn = Grid(title=escape(table.title) or None, title_justify="left", **looks)
    for i, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="right" if i else "left", overflow="fold")
    for row in table.rows:
        cells = map(number, row)
        drawn.add_row(*(MARKS.get(cell, escape(cell)) for cell in cells))
    return drawn


def print_result(result: Result, out: Console) -> None:
    """Print tables and notes."""
    for table in result.tables:
        out.print(grid(table))
    for note in result.notes:
        out.print(f"[dim]• {escape(note)}[/]")


def print_json(value: object) -> None:
    """Print `value` as JSON; numbers that JSON lacks become the words "nan", "inf" and "-inf"."""
    typer.echo(to_json(value, indent=1))


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Turn exceptions into a sentence, a hint and exit code 2; with `debug`, re-raise them."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):  # typer handles these
        raise
    except KeyboardInterrupt:
        if debug:
            raise
        complain(
            "interrupted; unfinished runs are discarded",
            "run the same command again; `nucleon reproduce --resume` keeps finished claims",
        )
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        complain(*explain(error))
        raise typer.Exit(2) from None


def explain(error: BaseException) -> tuple[str, str]:
    """Return a sentence on an error, and a hint."""
    if isinstance(error, CommandError):
        return str(error), error.hint
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}", "check the path, and that there is room on the disk"
    return f"{type(error).__name__}: {error}", "add --debug to see where it happened"


def complain(sentence: str, hint: str) -> None:
    """Print an error and its remedy on stderr."""
    print(f"nucleon: {sentence}\n  hint: {hint}", file=sys.stderr)


# ------------------------------------------------------------------ progress


class Bar(claims.Progress):
    """A progress bar that claims and games advance; a full bar is hidden."""

    def __init__(self, bars: Progress, name: str) -> None:
        self.bars, self.name, self.task = bars, name, TaskID(0)

    def begin(self, total: int) -> None:
        """Show an empty bar."""
        self.task = self.bars.add_task("", total=total, name=self.name)

    def advance(self, amount: int, stage: str) -> None:
        """Move the bar."""
        self.bars.update(self.task, advance=amount, description=stage)
        self.bars.update(self.task, visible=not self.bars.tasks[self.task].finished)


class _Bars(Progress):
    above: Callable[[], Iterable[RenderableType]] = tuple

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from self.above()
        yield from super().get_renderables()


@contextmanager
def progress(
    above: Callable[[], Iterable[RenderableType]] = tuple,
) -> Iterator[Callable[[str], Bar]]:
    """Yield a function from names to bars; bars are drawn on a terminal only.

    Args:
        above: returns tables to show live above the bars (none).
    """
    out = console(stderr=True)
    parts = (
        TextColumn("{task.fields[name]}"),
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(bar_width=32),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", style="dim"),
    )
    # On a terminal, text printed meanwhile is placed above the bars.
    both, hidden = sys.stdout.isatty(), not out.is_terminal
    with _Bars(*parts, console=out, transient=True, redirect_stdout=both, disable=hidden) as bars:
        bars.above = above
        yield partial(Bar, bars)
