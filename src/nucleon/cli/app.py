"""The verbs of the command line, each loaded when it is called, so `--help` imports no torch."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import nucleon

MARKUP = "markdown"
VERBS = {
    "reproduce": "Check claims of the paper, each against its tolerance, and write a page.",
    "play": "Play learners against streams and show each regret beside its bound, live.",
    "plan": "Compute the discount, radius and rounds that reach a (ρ, ε)-stationary point.",
    "list": "List learners, potentials, streams, optimizers and claims, each with its equation.",
    "report": "Write one HTML page over saved runs: figures, checks, tables and commands.",
}
"""The first sentence of each verb's help."""
ALONE = ("list", "report")
"""Verbs that run without an argument; the others show their help."""


def command(name: str) -> Any:
    """Return the command of a verb, with its options."""
    module = import_module(f"nucleon.cli.{name}")
    function = module.list_names if name == "list" else getattr(module, name)
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=MARKUP
    )
    alone.command(name, no_args_is_help=name not in ALONE)(function)
    return typer.main.get_command(alone)


class Verbs(TyperGroup):
    """Group that lists the verbs by their summaries and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the verb that is called."""
        name, summary, rest = super().resolve_command(ctx, args)
        return name, summary and command(str(name)), rest


app = typer.Typer(
    cls=Verbs,
    help="Muon, Pion and Leon, and the claims of the paper they come from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, summary in VERBS.items():
    app.command(name, help=summary)(lambda: None)


def _print_version(requested: bool) -> None:
    if requested:
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
