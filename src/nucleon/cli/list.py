"""`nucleon list`: learners, potentials, streams, optimizers and claims, a line each."""

import inspect
from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from nucleon.claims import CLAIMS
from nucleon.cli.console import AsJson, Debug, columns, console, plain_errors, print_json
from nucleon.cli.play import PLAYERS
from nucleon.online.potentials import POTENTIALS
from nucleon.online.streams import STREAMS
from nucleon.optim import Leon, Muon, Pion

Kind = Literal["learners", "potentials", "streams", "optimizers", "claims"]


def list_names(
    kind: Annotated[
        Kind | None, typer.Argument(help="Only these; default: everything.", show_default=False)
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
        tables = {name: rows for name, rows in _tables().items() if kind in (None, name)}
        if as_json:
            print_json(tables)
            return
        out = console()
        for name, rows in tables.items():
            out.print(columns(rows.items(), title=f"\n{name}", title_justify="left"))


def _tables() -> Mapping[Kind, Mapping[str, str]]:
    return {
        "learners": {name: _first_line(learner) for name, learner in PLAYERS.items()},
        "potentials": {name: _first_line(cls) for name, cls in POTENTIALS.items()},
        "streams": {name: entry.summary for name, entry in STREAMS.items()},
        "optimizers": {cls.__name__: _first_line(cls) for cls in (Muon, Pion, Leon)},
        "claims": {claim.id: f"{claim.statement} ({claim.place})" for claim in CLAIMS.values()},
    }


def _first_line(thing: type) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
