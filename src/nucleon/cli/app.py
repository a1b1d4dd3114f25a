"""The verbs of the command line."""

from typing import Annotated

import typer

import nucleon
from nucleon.cli.listing import list_names
from nucleon.cli.plan import plan
from nucleon.cli.reproduce import reproduce

app = typer.Typer(
    help="Muon, Pion and Leon, and the claims of the paper they come from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(no_args_is_help=True)(reproduce)
app.command(no_args_is_help=True)(plan)
app.command("list")(list_names)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nucleon {nucleon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Muon, Pion and Leon, and the claims of the paper they come from."""
