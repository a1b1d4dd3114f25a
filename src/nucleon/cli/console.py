"""What every verb shares: its common options, where it prints, how it fails, how it shows progress.

Exit codes: 0, all is well; 1, a claim did not hold; 2, the command could not do its work;
130, interrupted.

A verb is a plain function whose body stands under `with plain_errors(debug)`. It takes the options
it wants of `AsJson` and `Debug`, prints words through `console(quiet=as_json)` and, with
`--json`, one value through `print_json`.
"""

import ast
import errno
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from nucleon._files import to_json

PIPE_WIDTH = 120
LINE_EVERY = 5.0
"""Seconds between two lines of progress that do not go to a terminal."""
VALUES = {"true": True, "false": False, "null": None, "inf": math.inf, "nan": math.nan}
"""Words for what Python has others, or none."""
HINTS = {
    errno.ENOSPC: "free some room there, or choose another folder with --output",
    errno.EDQUOT: "free some of your quota, or choose another folder with --output",
    errno.ENOENT: "check the path",
}


class CommandError(Exception):
    """A sentence on what went wrong and a hint at what to do."""

    def __init__(self, sentence: str, hint: str) -> None:
        super().__init__(sentence)
        self.hint = hint


@contextmanager
def hinting(
    hint: str, kinds: tuple[type[Exception], ...] = (ValueError,), *, before: str = ""
) -> Iterator[None]:
    """Errors of these kinds as sentences with a hint."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{before}{error}", hint) from error


# ------------------------------------------------------------------ options that verbs share


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


def usable_device(name: str) -> str:
    """The device `name`, if torch can make a tensor there."""
    import torch  # takes seconds, which commands without it need not wait for

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(
            f"--device {name} cannot be used: {reason}", "pass cpu, or a device this torch has"
        ) from error
    return name


def matrix_shape(words: str) -> tuple[int, int]:
    """Rows and columns of `--shape`, as 8x16."""
    sides = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", words)
    if sides is None:
        raise CommandError(f"--shape is {words!r}", "write rows x columns, as 8x16")
    return int(sides[1]), int(sides[2])


# ------------------------------------------------------------------ NAME=VALUE


def setting(option: str, text: str, form: str = "NAME=VALUE, as momentum=0.9") -> tuple[str, Any]:
    """The name and the value of `text`; a dash of the name is an underscore."""
    name, equals, word = text.partition("=")
    name = name.replace("-", "_")
    if not equals or not name.isidentifier():
        raise CommandError(f"{option} is {text!r}", f"write {form}")
    return name, value_of(word)


def value_of(word: str) -> Any:
    """A Python literal that JSON can hold, where `VALUES` may stand too; any other word is text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a backslash
            tree = ast.parse(word.strip(), mode="eval")
        value = ast.literal_eval(_Values().visit(tree))
        return value if _is_plain(value) else word
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return word


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(x) for key, x in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class _Values(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(VALUES[node.id]) if node.id in VALUES else node


# ------------------------------------------------------------------ printing and failing


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console on what `sys.stdout` is now, wide enough for the tables when it is a pipe."""
    found = Console(stderr=stderr, highlight=False, quiet=quiet)
    if not found.is_terminal:
        found.width = PIPE_WIDTH
    return found


def columns(rows: Iterable[Iterable[str]], **looks: Any) -> Table:
    """Rows of words in columns, without headings or lines."""
    table = Table(show_header=False, box=None, **looks)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_json(value: object) -> None:
    """Print `value` as JSON; numbers that JSON lacks become the words "nan", "inf" and "-inf"."""
    typer.echo(to_json(value, indent=1))


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Turn exceptions into a sentence, a hint and exit code 2; `debug` lets them through."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):  # a closed pipe is the reader's business
        raise
    except KeyboardInterrupt:
        if debug:
            raise
        complain(
            "interrupted; what was not finished is discarded",
            "run the same command again; --resume, where it has one, goes on",
        )
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        complain(*explain(error))
        raise typer.Exit(2) from None


def explain(error: BaseException) -> tuple[str, str]:
    """A sentence on an error, and a hint."""
    if isinstance(error, CommandError):
        return str(error), error.hint
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        hint = HINTS.get(error.errno or 0, "choose a folder you may write to, with room on it")
        return f"{place}{error.strerror}", hint
    return f"{type(error).__name__}: {error}", "add --debug to see where it happened"


def complain(sentence: str, hint: str) -> None:
    """Say on stderr what went wrong and what to do."""
    print(f"nucleon: {sentence}\n  hint: {hint}", file=sys.stderr)


# ------------------------------------------------------------------ progress


@contextmanager
def progress(
    what: str, above: Callable[[], RenderableType] | None = None
) -> Iterator["Bar | Lines"]:
    """A bar with rate and time left on a terminal, a line every few seconds elsewhere.

    Args:
        what: is going on.
        above: what to show live above the bar, on a terminal (default: nothing).
    """
    with several_progresses(above) as named:
        yield named(what)


@contextmanager
def several_progresses(
    above: Callable[[], RenderableType] | None = None,
) -> Iterator[Callable[[str], "Bar | Lines"]]:
    """The same for what goes on at once: name → its bar or its lines."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield Lines
        return
    columns = (
        TextColumn("{task.fields[what]}"),
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(bar_width=32),
        _Rate(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", style="dim"),
    )
    # What is printed meanwhile goes above the bars, unless it goes to a pipe.
    both = sys.stdout.isatty()
    with _Shown(*columns, console=out, transient=True, redirect_stdout=both) as shown:
        shown.above = above
        yield lambda what: Bar(what, shown)


class Bar:
    """Progress on a terminal."""

    def __init__(self, what: str, shown: Progress) -> None:
        self.what, self.shown = what, shown

    def begin(self, total: int, unit: str) -> None:
        """Show an empty bar."""
        self.left = total
        self.task = self.shown.add_task("", total=total, unit=unit, what=self.what)

    def advance(self, amount: int, stage: str) -> None:
        """Move the bar; a full one goes away."""
        self.left -= amount
        self.shown.update(self.task, advance=amount, description=stage, visible=self.left > 0)


class Lines:
    """Progress in a log."""

    def __init__(self, what: str) -> None:
        self.what = what

    def begin(self, total: int, unit: str) -> None:
        """Start the clock."""
        self.total, self.unit, self.done = total, unit, 0
        self.started = self.said = time.monotonic()

    def advance(self, amount: int, stage: str) -> None:
        """Print a line if the last one is some seconds old."""
        self.done += amount
        now = time.monotonic()
        if now - self.said < LINE_EVERY and self.done < self.total:
            return
        self.said, seconds = now, now - self.started
        left = seconds * (self.total - self.done) / self.done
        print(
            f"{self.what}  {100 * self.done / self.total:3.0f} %  "
            f"{_rate(self.done / max(seconds, 1e-9))} {self.unit}/s  {left:.0f} s left  ({stage})",
            file=sys.stderr,
            flush=True,
        )


class _Shown(Progress):
    above: Callable[[], RenderableType] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None:
            yield self.above()
        yield from super().get_renderables()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        fields: dict[str, Any] = task.fields
        speed = _rate(task.speed) if task.speed else "–"
        return Text(f"{speed} {fields['unit']}/s", style="cyan")


def _rate(value: float) -> str:
    """Three digits, and never a power of ten: 0.0312, 4.56, 1,230."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
