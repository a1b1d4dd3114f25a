"""The verbs of the command line."""

from typing import Annotated

import typer

import nucleon
from nucleon.cli.bench import bench
from nucleon.cli.convert import convert
from nucleon.cli.listing import list_names
from nucleon.cli.plan import plan
from nucleon.cli.play import play
from nucleon.cli.report import report
from nucleon.cli.reproduce import reproduce
from nucleon.cli.search import search
from nucleon.cli.train import train

PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What stands behind the first argument goes on to another command, its options too."""

app = typer.Typer(
    help="Muon, Pion and Leon, and the claims of the paper they come from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("reproduce", no_args_is_help=True)(reproduce)
app.command("play", no_args_is_help=True)(play)
app.command("search", no_args_is_help=True)(search)
app.command("plan", no_args_is_help=True)(plan)
app.command("train", no_args_is_help=True)(train)
app.command("bench", context_settings=PASS_ON)(bench)
app.command("convert", no_args_is_help=True)(convert)
app.command("report")(report)
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
