"""What every verb shares: where it prints, how it fails, how it shows progress.

Exit codes: 0, all is well; 1, a claim did not hold; 2, the command could not do its work;
130, interrupted.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

PIPE_WIDTH = 120
LINE_EVERY = 5.0
"""Seconds between two lines of progress that do not go to a terminal."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class CommandError(Exception):
    """A sentence on what went wrong and a hint at what to do."""

    def __init__(self, sentence: str, hint: str) -> None:
        super().__init__(sentence)
        self.hint = hint


def console(*, stderr: bool = False) -> Console:
    """A console on what `sys.stdout` is now, wide enough for the tables when it is a pipe."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


@contextmanager
def plain_errors(debug: bool) -> Iterator[None]:
    """Turn exceptions into a sentence, a hint and exit code 2; `debug` lets them through."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        if debug:
            raise
        _say("interrupted; what was not finished is discarded", "run the same command again")
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        if isinstance(error, CommandError):
            _say(str(error), error.hint)
        elif isinstance(error, OSError) and error.strerror:
            place = f"{error.filename}: " if error.filename else ""
            _say(f"{place}{error.strerror}", "choose a folder you may write to, with room on it")
        else:
            _say(f"{type(error).__name__}: {error}", "add --debug to see where it happened")
        raise typer.Exit(2) from None


def _say(sentence: str, hint: str) -> None:
    print(f"nucleon: {sentence}\n  hint: {hint}", file=sys.stderr)


@contextmanager
def progress(what: str) -> Iterator["Bar | Lines"]:
    """A bar with rate and time left on a terminal, a line every few seconds elsewhere."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield Lines(what)
        return
    columns = (
        TextColumn(what),
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(bar_width=32),
        _Rate(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", style="dim"),
    )
    with Progress(*columns, console=out, transient=True) as shown:
        yield Bar(shown)


class Bar:
    """Progress on a terminal."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown

    def begin(self, total: int, unit: str) -> None:
        """Show an empty bar."""
        self.task = self.shown.add_task("", total=total, unit=unit)

    def advance(self, amount: int, stage: str) -> None:
        """Move the bar."""
        self.shown.update(self.task, advance=amount, description=stage)


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
            f"{self.done / max(seconds, 1e-9):.3g} {self.unit}/s  {left:.0f} s left  ({stage})",
            file=sys.stderr,
            flush=True,
        )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        fields: dict[str, Any] = task.fields
        speed = f"{task.speed:.3g}" if task.speed else "–"
        return Text(f"{speed} {fields['unit']}/s", style="cyan")
