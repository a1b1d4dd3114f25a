"""`nucleon bench`: the timings that come with the package, each in a process of its own."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

import nucleon
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Config,
    Debug,
    complain,
    console,
    plain_errors,
    print_json,
)

HERE = Path(nucleon.__file__).parent
PLACES = (HERE / "_benchmarks", HERE.parents[1] / "benchmarks")
"""In a package that was installed, and in a checkout."""
TRACEBACK = "Traceback (most recent call last):"


def bench(
    name: Annotated[
        str | None, typer.Argument(help="Which one; default: list them.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What it is given: options of its own.", show_default=False),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time nucleon beside torch on this machine; what follows NAME goes to the benchmark.

    All sides of a table are measured in one process, taking turns. With --json the tables come as
    rows of numbers and words. The exit code is the benchmark's: 1 when it missed what it is held
    to, 2 when it could not do its work.

    For example:

        nucleon bench
        nucleon bench step --set 2x768
        nucleon bench --json linalg --quick
        nucleon bench linalg --help
    """
    with plain_errors(debug):
        scripts = _scripts()
        if name is None:
            _list(scripts, as_json)
            return
        if name not in scripts:
            raise CommandError(
                f"there is no benchmark {name!r}", f"the benchmarks are {', '.join(scripts)}"
            )
        words = [str(scripts[name]), *(arguments or ())]
        raise typer.Exit(_run(name, words, as_json, debug))


def _scripts() -> dict[str, Path]:
    for place in PLACES:
        found = {
            p.stem: p for p in sorted(place.glob("*.py")) if "__main__" in p.read_text("utf-8")
        }
        if found:
            return found
    raise CommandError(
        "the benchmarks are not installed with the package", "install it again, from a wheel"
    )


def _list(scripts: dict[str, Path], as_json: bool) -> None:
    lines = {name: _summary(script) for name, script in scripts.items()}
    if as_json:
        print_json({"benchmarks": lines})
        return
    grid = Grid(show_header=False, box=None)
    for name, summary in lines.items():
        grid.add_row(name, escape(summary))
    console().print(grid)


def _summary(script: Path) -> str:
    words = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return words.partition("\n")[0]


def _run(name: str, words: list[str], as_json: bool, debug: bool) -> int:
    """Run a benchmark, and return its exit code; a traceback of it becomes a sentence."""
    clock = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE if as_json else None,
        stderr=None if debug else subprocess.PIPE,
        text=True,
        check=False,
    )
    said, _, trace = (done.stderr or "").partition(TRACEBACK)
    print(said, end="", file=sys.stderr)
    code = done.returncode
    if code and trace:
        complain(trace.strip().splitlines()[-1], "add --debug to see where it happened")
        code = 2
    if as_json:
        print_json(
            {
                "benchmark": name,
                "arguments": words[1:],
                "exit_code": code,
                "seconds": round(time.perf_counter() - clock, 3),
                "rows": [_cells(line) for line in (done.stdout or "").splitlines() if line.strip()],
            }
        )
    return code


def _cells(line: str) -> list[str | float]:
    """The columns of a line, which two spaces part; numbers as such."""
    return [_number(word) for word in re.split(r"\s{2,}", line.strip())]


def _number(word: str) -> str | float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return word
