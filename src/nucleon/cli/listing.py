"""`nucleon list`: what there is, one line each."""

import inspect
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table as Grid

from nucleon.cli.console import Debug, console, plain_errors
from nucleon.experiments import CLAIMS
from nucleon.optim import Leon, Muon, Pion

Kind = Literal["claims", "optimizers"]


def list_names(
    kind: Annotated[Kind | None, typer.Argument(help="Only these; default: everything.")] = None,
    debug: Debug = False,
) -> None:
    """List the claims with what they say, and the optimizers with their equations."""
    with plain_errors(debug):
        tables = {
            "claims": {claim.id: claim.statement for claim in CLAIMS.values()},
            "optimizers": {cls.__name__: _first_line(cls) for cls in (Muon, Pion, Leon)},
        }
        out = console()
        for name, rows in tables.items():
            if kind in (None, name):
                grid = Grid(title=name, title_justify="left", show_header=False, box=None)
                for row in rows.items():
                    grid.add_row(*map(escape, row))
                out.print(grid)


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
