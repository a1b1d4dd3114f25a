"""`nucleon bench`: the timings that come with the package, each in a process of its own."""

import ast
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Annotated

import typer

import nucleon
from nucleon._naming import unknown
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Config,
    Debug,
    columns,
    complain,
    console,
    plain_errors,
    print_json,
    waiting,
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
            raise CommandError(*unknown("benchmark", name, scripts))
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
    console().print(columns(lines.items()))


def _summary(script: Path) -> str:
    words = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return words.partition("\n")[0]


def _run(name: str, words: list[str], as_json: bool, debug: bool) -> int:
    """Run a benchmark, and return its exit code; a traceback of it becomes a sentence."""
    clock, rows, trace = time.perf_counter(), list[str](), list[str]()
    with waiting(name) as say, _started(words, debug) as process:
        for line, is_error in _lines(process):
            if is_error and (trace or line.startswith(TRACEBACK)):
                trace.append(line)
            elif is_error:
                say(line, sys.stderr)
            elif as_json:
                rows.append(line)
            else:
                say(line, sys.stdout)
    code = process.returncode
    if code and trace:
        complain(trace[-1].strip(), "add --debug to see where it happened")
        code = 2
    if as_json:
        print_json(
            {
                "benchmark": name,
                "arguments": words[1:],
                "exit_code": code,
                "seconds": round(time.perf_counter() - clock, 3),
                "rows": [_cells(line) for line in rows if line.strip()],
            }
        )
    return code


@contextmanager
def _started(words: list[str], debug: bool) -> Iterator["subprocess.Popen[str]"]:
    """The process of a benchmark, ended with this one; its lines come as they are printed."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=None if debug else subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
        process.wait()
    finally:
        process.kill()
        process.wait()


def _lines(process: "subprocess.Popen[str]") -> Iterator[tuple[str, bool]]:
    """The lines of a process as they come, each with whether it is of its stderr."""
    lines: queue.SimpleQueue[tuple[str, bool] | None] = queue.SimpleQueue()

    def read(pipe: IO[str], is_error: bool) -> None:
        for line in pipe:
            lines.put((line, is_error))
        lines.put(None)

    pipes = [(pipe, pipe is process.stderr) for pipe in (process.stdout, process.stderr) if pipe]
    for found in pipes:
        Thread(target=read, args=found, daemon=True).start()
    left = len(pipes)
    while left:
        line = lines.get()
        if line is None:
            left -= 1
        else:
            yield line


def _cells(line: str) -> list[str | float]:
    """The columns of a line, which two spaces part; numbers as such."""
    return [_number(word) for word in re.split(r"\s{2,}", line.strip())]


def _number(word: str) -> str | float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return word
