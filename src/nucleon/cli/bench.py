"""`nucleon bench`: the timings that ship with the source, each in a process of its own."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

import nucleon
from nucleon.cli.console import CommandError, console, plain_errors

HERE = Path(nucleon.__file__).parent
PLACES = (HERE / "benchmarks", HERE.parents[1] / "benchmarks")
"""In a package that was built with them, and in a checkout."""


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Which one; default: list them.", show_default=False)
    ] = None,
) -> None:
    """Time nucleon beside torch on this machine; what follows NAME goes to the benchmark.

    All sides of a table are measured in one process, taking turns.

    For example:

        nucleon bench
        nucleon bench step --set 2x768
        nucleon bench linalg --help
    """
    with plain_errors(debug=False):
        scripts = _scripts()
        if name is None:
            grid = Grid(show_header=False, box=None)
            for known, script in scripts.items():
                grid.add_row(known, escape(_summary(script)))
            console().print(grid)
            return
        if name not in scripts:
            raise CommandError(
                f"there is no benchmark {name!r}", f"the benchmarks are {', '.join(scripts)}"
            )
        command = [sys.executable, str(scripts[name]), *context.args]
        raise typer.Exit(subprocess.run(command, check=False).returncode)


def _scripts() -> dict[str, Path]:
    for place in PLACES:
        found = {p.stem: p for p in sorted(place.glob("*.py")) if not p.name.startswith("_")}
        if found:
            return found
    raise CommandError(
        "the benchmarks are not installed with the package",
        "clone the repository and run `nucleon bench` from an editable install",
    )


def _summary(script: Path) -> str:
    words = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return words.partition("\n")[0]
