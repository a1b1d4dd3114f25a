"""`nucleon report`: write one page over saved runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from nucleon._files import write_whole
from nucleon.claims import CLAIMS
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Debug,
    complain,
    console,
    plain_errors,
    print_json,
)
from nucleon.report.page import render
from nucleon.report.runs import MANIFEST, DamagedRunError, Saved, find, load_all

REPORT = "report.html"


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, or folders, of which the newest run of each id is shown; default: runs.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"The page to write; default: {REPORT} in the first folder, where "
            f"`nucleon reproduce` writes it too.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page over saved runs: figures, checks, tables and commands.

    Exit code 0 if all runs are in it, 1 if damaged runs were left out, 2 if there are none.

    For example:

        nucleon report
        nucleon report runs/play/*
        nucleon report runs/thm-leon runs/thm-pion --output theorems.html
    """
    with plain_errors(debug):
        paths = runs or [Path("runs")]
        beside = paths[0].parent if (paths[0] / MANIFEST).exists() else paths[0]
        page = output or beside / REPORT
        saved, damaged = make_page(paths, page)
        console(quiet=as_json).print(f"report  {escape(str(page))}", soft_wrap=True)
        if as_json:
            folders = [str(run.folder) for run in saved]
            print_json({"report": str(page), "runs": folders, "damaged": list(map(str, damaged))})
        raise typer.Exit(1 if damaged else 0)


def make_page(paths: Sequence[Path], page: Path) -> tuple[list[Saved], list[DamagedRunError]]:
    """Write `page` over the runs under `paths`; report damaged ones on stderr."""
    folders = dict[Path, None]()
    for path in paths:
        at_path = find(path)
        if not at_path:
            hint = "run `nucleon reproduce` first, or name their folder"
            raise CommandError(f"there are no runs in {path}", hint)
        folders |= dict.fromkeys(at_path)
    order = {name: place for place, name in enumerate(CLAIMS)}  # claims first, then other runs
    by_claim = sorted(folders, key=lambda folder: order.get(folder.parent.name, len(order)))
    saved, damaged = load_all(by_claim)
    for error in damaged:
        complain(f"{error}; that run is left out", "delete it and run its command again")
    if not saved:
        raise CommandError(
            "there is no undamaged run to report",
            "delete the damaged runs and run `nucleon reproduce` again",
        )
    write_whole(page, render(saved, damaged))
    return saved, damaged
