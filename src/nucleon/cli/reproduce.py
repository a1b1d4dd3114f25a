"""`nucleon reproduce`: check claims of the paper, write a run of each and a page over all."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from nucleon._naming import unknown
from nucleon.claims import CLAIMS, Claim, Result, Settings, Table
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Debug,
    complain,
    console,
    plain_errors,
    print_json,
    progress,
    usable_device,
)
from nucleon.cli.jobs import Outcome, check, check_in_parallel
from nucleon.cli.report import REPORT, make_page
from nucleon.report import completed, number

MOST_JOBS = 4  # unless asked: each holds its own torch
MOST_SEEDS = 1000  # what fits into the memory of a small machine, with room to spare
MARKS = {True: "[bold green]PASS[/]", False: "[bold red]FAIL[/]"}


def reproduce(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="Claims, by id; see `nucleon list claims`.",
            autocompletion=lambda: list(CLAIMS),
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all claims.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes.")] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Repetitions; default: the claim's own. A confidence interval needs two.",
            show_default=False,
        ),
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Claims to check at the same time; default: one per core with --all, up to 4.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what this code already checked with these options."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check claims of the paper: each against its tolerance, with a figure and a report.

    Exit code 0 when all hold, 1 when one does not, 2 when the command could not do its work.

    For example:

        nucleon reproduce fig-ripples
        nucleon reproduce --all --quick
        nucleon reproduce --all --resume --output results
    """
    with plain_errors(debug):
        claims = list(CLAIMS.values()) if every else [_find(name) for name in ids or ()]
        if not claims:
            raise CommandError(
                "no claim was named", f"name one of {', '.join(CLAIMS)}, or pass --all"
            )
        if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
            raise CommandError(f"--seeds is {seeds}", f"pass a number from 1 to {MOST_SEEDS}")
        settings = Settings(
            quick=quick, seeds=seeds, first_seed=first_seed, device=usable_device(device)
        )
        claims, out = list(dict.fromkeys(claims)), console(quiet=as_json)
        jobs = jobs or (min(MOST_JOBS, os.cpu_count() or 1) if every else 1)
        outcomes = _found(claims, settings, output) if resume else []
        for outcome in outcomes:
            _conclude(outcome, out)
        known = {outcome.claim.id for outcome in outcomes}
        pending = [claim for claim in claims if claim.id not in known]
        out.print(_forecast(pending, quick, jobs), style="dim")
        for outcome in _check_all(pending, settings, output, jobs, debug, out):
            outcomes.append(outcome)
            _conclude(outcome, out)
            if outcome.result is not None and outcome.trouble is not None:
                sentence, hint = outcome.trouble
                raise CommandError(sentence, f"{hint}; then the same command with --resume goes on")
            if outcome.trouble is not None:
                complain(f"{outcome.claim.id}: {outcome.trouble[0]}", outcome.trouble[1])
        page = output / REPORT
        if any(outcome.folder for outcome in outcomes):
            make_page([output], page)
            out.print(f"report  {escape(str(page))}", soft_wrap=True)
        if as_json:
            print_json({"report": str(page), "runs": [_plain(outcome) for outcome in outcomes]})
        raise typer.Exit(max(map(_exit_code, outcomes)))


def _find(name: str) -> Claim:
    if name not in CLAIMS:
        raise CommandError(*unknown("claim", name, CLAIMS))
    return CLAIMS[name]


def _found(claims: Sequence[Claim], settings: Settings, output: Path) -> list[Outcome]:
    """Claims that need not be checked again."""
    saved = ((claim, completed(output, claim.id, asdict(settings))) for claim in claims)
    return [
        Outcome(claim, run.result, run.manifest["seconds"], run.folder, resumed=True)
        for claim, run in saved
        if run is not None
    ]


def _check_all(
    claims: Sequence[Claim],
    settings: Settings,
    output: Path,
    jobs: int,
    debug: bool,
    out: Console,
) -> Iterator[Outcome]:
    """Outcomes as they come, each with its claim printed before it."""

    def starting(claim: Claim) -> None:
        expected = _duration(claim.expected(settings.quick))
        out.print(f"[dim]{escape(claim.id)} starts, about {expected}[/]")

    together, alone = _split(claims, jobs)
    if together:
        for outcome in check_in_parallel(together, settings, output, jobs, debug, starting):
            _introduce(outcome.claim, settings, out)
            yield outcome
    for claim in alone:
        _introduce(claim, settings, out)
        with progress(claim.id) as bar:
            outcome = check(claim, settings, output, bar, debug)
        yield outcome


def _split(claims: Sequence[Claim], jobs: int) -> tuple[list[Claim], list[Claim]]:
    """Those to check beside each other, and those to check one after the other."""
    together = [claim for claim in claims if not claim.alone]
    if jobs == 1 or len(together) < 2:
        return [], list(claims)
    return together, [claim for claim in claims if claim.alone]


def _forecast(claims: Sequence[Claim], quick: bool, jobs: int) -> str:
    if not claims:
        return "nothing is left to check"
    together, alone = ([c.expected(quick) for c in part] for part in _split(claims, jobs))
    total = max((sum(together) / jobs, *together)) + sum(alone)
    named = f"{len(claims)} claims" if len(claims) > 1 else "1 claim"
    return f"{named} to check, about {_duration(total)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _exit_code(outcome: Outcome) -> int:
    if outcome.result is None:
        return 2
    return 0 if outcome.result.passed else 1


def _plain(outcome: Outcome) -> dict[str, object]:
    result = outcome.result
    checks = () if result is None else result.checks
    return {
        "id": outcome.claim.id,
        "passed": None if result is None else result.passed,
        "checks": [{**asdict(c), "passed": c.passed} for c in checks],
        "seconds": round(outcome.seconds, 3),
        "folder": None if outcome.folder is None else str(outcome.folder),
        "resumed": outcome.resumed,
        "error": None if outcome.trouble is None else outcome.trouble[0],
    }


# ------------------------------------------------------------------ what is printed


def _introduce(claim: Claim, settings: Settings, out: Console) -> None:
    expected = _duration(claim.expected(settings.quick))
    out.print(f"\n[bold]{escape(claim.id)}[/]  {escape(claim.title)} [dim](about {expected})[/]")
    facts = Grid.grid(padding=(0, 2))
    for name in ("statement", "place", "tolerance"):
        facts.add_row(name, escape(getattr(claim, name)))
    out.print(facts)


def _conclude(outcome: Outcome, out: Console) -> None:
    if outcome.result is None:
        return
    if not outcome.resumed:
        _show(outcome.result, out)
    mark, name = MARKS[outcome.result.passed], escape(outcome.claim.id)
    when = "as checked before, " if outcome.resumed else ""
    out.print(f"{mark}  {name}, {when}in {outcome.seconds:.1f} s")
    if outcome.folder is not None and not outcome.resumed:
        out.print(f"run  {escape(str(outcome.folder))}", soft_wrap=True)


def _show(result: Result, out: Console) -> None:
    for table in result.tables:
        out.print(grid_of(table))
    for note in result.notes:
        out.print(f"[dim]• {escape(note)}[/]")
    grid = Grid("check", box=box.SIMPLE_HEAD)
    for column in ("measured", "tolerance", ""):
        grid.add_column(column, justify="right")
    for one in result.checks:
        tolerance = f"{one.relation} {number(one.threshold)}"
        grid.add_row(escape(one.name), number(one.measured), tolerance, MARKS[one.passed])
    out.print(grid)


def grid_of(table: Table) -> Grid:
    """A table for the terminal."""
    grid = Grid(title=escape(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        grid.add_column(escape(column), justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*(escape(number(cell)) for cell in row))
    return grid
