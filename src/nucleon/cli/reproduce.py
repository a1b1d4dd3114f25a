"""`nucleon reproduce`: check claims of the paper, write a run of each and a page over all runs."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from nucleon._checks import unknown
from nucleon.claims import CLAIMS, Check, Claim, Settings, Table
from nucleon.cli.console import (
    MARKS,
    AsJson,
    CommandError,
    Debug,
    complain,
    console,
    grid,
    plain_errors,
    print_json,
    print_result,
    progress,
)
from nucleon.cli.jobs import Outcome, check, check_in_parallel
from nucleon.cli.report import REPORT, make_page
from nucleon.report.page import number
from nucleon.report.runs import completed

MOST_JOBS = 4  # by default, since each process loads torch


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
    quick: Annotated[
        bool, typer.Option("--quick", help="Check fewer cases, in seconds instead of minutes.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,  # fits into the memory of a small machine
            help="Repetitions, at least 2 for an interval; default: the claim's number.",
            show_default=False,
        ),
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Claims to check at once; default: 1, with --all one per core, at most 4.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Skip claims with a result of the same code and options."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check claims of the paper, each against its tolerance, and write a page.

    Exit code 0 if all hold, 1 if one does not, 2 if the command failed.

    For example:

        nucleon reproduce fig-ripples
        nucleon reproduce --all --quick
        nucleon reproduce --all --resume --output results
    """
    with plain_errors(debug):
        claims = list(CLAIMS.values()) if every else _named(ids or ())
        settings = Settings(quick, seeds, first_seed)
        out = console(quiet=as_json)
        jobs = jobs or (min(MOST_JOBS, os.cpu_count() or 1) if every else 1)
        outcomes = _earlier(claims, settings, output) if resume else []
        for outcome in outcomes:
            _show(outcome, out)
        resumed = {outcome.claim.id for outcome in outcomes}
        claims = [claim for claim in claims if claim.id not in resumed]
        for outcome in _check_all(claims, settings, output, jobs, debug, out):
            outcomes.append(outcome)
            _show(outcome, out)
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
        passed = [None if o.result is None else o.result.passed for o in outcomes]
        raise typer.Exit(2 if None in passed else int(False in passed))


def _named(ids: Sequence[str]) -> list[Claim]:
    """Return the claims with these ids, each once."""
    if not ids:
        raise CommandError("no claim was named", f"name one of {', '.join(CLAIMS)}, or pass --all")
    for name in ids:
        if name not in CLAIMS:
            raise CommandError(*unknown("claim", name, CLAIMS))
    return [CLAIMS[name] for name in dict.fromkeys(ids)]


def _earlier(claims: Sequence[Claim], settings: Settings, output: Path) -> list[Outcome]:
    """Return the outcomes of claims with a saved run of the same code and options."""
    runs = [(claim, completed(output, claim.id, asdict(settings))) for claim in claims]
    return [
        Outcome(claim, run.result, run.manifest["seconds"], run.folder, resumed=True)
        for claim, run in runs
        if run is not None
    ]


def _check_all(
    claims: Sequence[Claim], settings: Settings, output: Path, jobs: int, debug: bool, out: Console
) -> Iterator[Outcome]:
    """Check claims beside each other where there are several jobs, then those on times alone."""
    together = [claim for claim in claims if not claim.alone]
    if jobs == 1 or len(together) < 2:
        together = []
    alone = [claim for claim in claims if claim not in together]
    beside = [claim.seconds[settings.quick] for claim in together]
    total = max((sum(beside) / jobs, *beside)) + sum(c.seconds[settings.quick] for c in alone)
    words = f"{len(claims)} claim{'s' * (len(claims) != 1)} to check, about {_duration(total)}"
    out.print(words if claims else "all claims are checked already", style="dim")

    if together:
        yield from check_in_parallel(together, settings, output, jobs, debug)
    for claim in alone:
        expected = _duration(claim.seconds[settings.quick])
        out.print(f"[dim]{escape(claim.id)} starts, about {expected}[/]")
        with progress() as named:
            outcome = check(claim, settings, output, named(claim.id), debug)
        yield outcome


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _plain(outcome: Outcome) -> dict[str, object]:
    result = outcome.result
    return {
        "id": outcome.claim.id,
        "passed": None if result is None else result.passed,
        "checks": [{**asdict(c), "passed": c.passed} for c in result.checks] if result else [],
        "seconds": round(outcome.seconds, 3),
        "folder": None if outcome.folder is None else str(outcome.folder),
        "resumed": outcome.resumed,
        "error": None if outcome.trouble is None else outcome.trouble[0],
    }


# ------------------------------------------------------------------ printing


def _show(outcome: Outcome, out: Console) -> None:
    """Print the texts, tables, notes and checks of a claim, and its verdict."""
    claim, result = outcome.claim, outcome.result
    if result is None:
        return
    if not outcome.resumed:
        out.print(f"\n[bold]{escape(claim.id)}[/]  {escape(claim.title)}")
        facts = Grid.grid(padding=(0, 2))
        for name in ("statement", "place", "tolerance"):
            facts.add_row(name, escape(getattr(claim, name)))
        out.print(facts)
        print_result(result, out)
        columns = ("check", "measured", "tolerance", "")
        out.print(grid(Table("", columns, tuple(map(_row, result.checks)))))
    when = "as checked before, " if outcome.resumed else ""
    mark = MARKS["PASS" if result.passed else "FAIL"]
    out.print(f"{mark}  {escape(claim.id)}, {when}in {outcome.seconds:.1f} s")
    if outcome.folder is not None and not outcome.resumed:
        out.print(f"run  {escape(str(outcome.folder))}", soft_wrap=True)


def _row(check: Check) -> tuple[str | float, ...]:
    tolerance = f"{check.relation} {number(check.threshold)}"
    return check.name, check.measured, tolerance, "PASS" if check.passed else "FAIL"
