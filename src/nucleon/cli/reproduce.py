"""`nucleon reproduce`: check claims of the paper, write a run of each."""

import difflib
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from nucleon.cli.console import CommandError, Debug, console, plain_errors, progress
from nucleon.experiments import CLAIMS, Cell, Claim, Result, Settings, Table
from nucleon.report import REPORT, Run, draft, number, publish

MOST_SEEDS = 1000  # what fits into the memory of a small machine, with room to spare
MARKS = {True: "[bold green]PASS[/]", False: "[bold red]FAIL[/]"}


def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Claims, by id; see `nucleon list`.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all claims.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Repetitions; default: the claim's own.")
    ] = None,
    first_seed: Annotated[int, typer.Option(help="The first of the seeds.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    debug: Debug = False,
) -> None:
    """Check claims of the paper: each against its tolerance, with a figure and a report.

    Exit code 0 when all hold, 1 when one does not, 2 when the command could not run.

    Examples: `nucleon reproduce fig-ripples`, `nucleon reproduce --all --quick`.
    """
    with plain_errors(debug):
        claims = list(CLAIMS.values()) if every else [_find(name) for name in ids or ()]
        if not claims:
            raise CommandError(
                "no claim was named", f"name one of {', '.join(CLAIMS)}, or pass --all"
            )
        if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
            raise CommandError(f"--seeds is {seeds}", f"pass a number from 1 to {MOST_SEEDS}")
        settings = Settings(quick=quick, seeds=seeds, first_seed=first_seed)
        passed = [_check(claim, settings, output) for claim in dict.fromkeys(claims)]
        raise typer.Exit(0 if all(passed) else 1)


def _find(name: str) -> Claim:
    if name in CLAIMS:
        return CLAIMS[name]
    near = difflib.get_close_matches(name, CLAIMS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the claims are {', '.join(CLAIMS)}"
    raise CommandError(f"there is no claim {name!r}", hint)


def _check(claim: Claim, settings: Settings, output: Path) -> bool:
    out = console()
    expected = claim.quick_seconds if settings.quick else claim.seconds
    out.print(f"[bold]{escape(claim.id)}[/]  {escape(claim.title)} [dim](about {expected:g} s)[/]")
    facts = Grid.grid(padding=(0, 2))
    for name in ("statement", "place", "tolerance"):
        facts.add_row(name, escape(getattr(claim, name)))
    out.print(facts)
    with draft(output, claim) as folder:  # first: a folder that cannot be written is no surprise
        started, clock = datetime.now().astimezone(), time.perf_counter()
        with progress(claim.id) as bar:
            result = claim.run(settings, bar)
        run = Run(claim, settings, result, started, time.perf_counter() - clock)
        _show(result, out)  # before saving: a full disk costs the files, not the answer
        final = publish(run, folder)
    out.print(f"{MARKS[result.passed]}  {escape(claim.id)} in {run.seconds:.1f} s")
    for figure in result.figures:
        out.print(f"figure  {escape(str(final / figure.name))}.svg", soft_wrap=True)
    out.print(f"report  {escape(str(final / REPORT))}", soft_wrap=True)
    return result.passed


def _show(result: Result, out: Console) -> None:
    for table in result.tables:
        out.print(_grid(table))
    for note in result.notes:
        out.print(f"[dim]• {escape(note)}[/]")
    grid = Grid("check", box=box.SIMPLE_HEAD)
    for column in ("measured", "tolerance", ""):
        grid.add_column(column, justify="right")
    for check in result.checks:
        tolerance = f"{check.relation} {number(check.threshold)}"
        grid.add_row(escape(check.name), number(check.measured), tolerance, MARKS[check.passed])
    out.print(grid)


def _grid(table: Table) -> Grid:
    grid = Grid(title=escape(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        grid.add_column(escape(column), justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*(_cell(cell) for cell in row))
    return grid


def _cell(cell: Cell) -> str:
    return escape(number(cell))
