"""`nucleon list`: learners, potentials, streams, optimizers and claims, a line each."""

import inspect
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

from nucleon._checks import unknown
from nucleon.claims import CLAIMS
from nucleon.cli.console import AsJson, CommandError, Debug, console, plain_errors, print_json
from nucleon.cli.play import PLAYERS
from nucleon.online.potentials import POTENTIALS
from nucleon.online.streams import STREAMS
from nucleon.optim import Leon, Muon, Pion


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="learners, potentials, streams, optimizers or claims; default: all of them.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List learners, potentials, streams, optimizers and claims, each with its equation.

    The other verbs accept these names, and also package.module:Class and file.py:Class.

    For example:

        nucleon list
        nucleon list claims
    """
    with plain_errors(debug):
        every = {
            "learners": {name: _first_line(learner) for name, learner in PLAYERS.items()},
            "potentials": {name: _first_line(cls) for name, cls in POTENTIALS.items()},
            "streams": {name: _first_line(make) for name, make in STREAMS.items()},
            "optimizers": {cls.__name__: _first_line(cls) for cls in (Muon, Pion, Leon)},
            "claims": {claim.id: f"{claim.statement} ({claim.place})" for claim in CLAIMS.values()},
        }
        if kind is not None and kind not in every:
            raise CommandError(*unknown("kind", kind, every))
        tables = {name: rows for name, rows in every.items() if kind in (None, name)}
        if as_json:
            print_json(tables)
            return
        out = console()
        for title, rows in tables.items():
            grid = Grid(show_header=False, box=None, title=f"\n{title}", title_justify="left")
            for name, line in rows.items():
                grid.add_row(escape(name), escape(line))
            out.print(grid)


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
