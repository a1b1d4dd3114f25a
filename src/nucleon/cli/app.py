"""The verbs of the command line, each loaded when it is called: `--help` waits for no torch."""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

import nucleon

MARKUP = "markdown"


# Without arguments a verb says how it is called; one that needs none takes settings={}.
ASKED = {"no_args_is_help": True}


class Verb(NamedTuple):
    """What `nucleon --help` says of a verb, and settings for typer."""

    summary: str
    settings: dict[str, Any] = ASKED
    place: str | None = None
    """Module:function; None where both have the name of the verb."""


VERBS = {
    "reproduce": Verb(
        "Check claims of the paper: each against its tolerance, with a figure and a report."
    ),
    "play": Verb("Play every learner against every stream: round, regret, bound and slack, live."),
    "plan": Verb(
        "Discount, radius and rounds with which a theorem promises a (ρ, ε)-stationary point."
    ),
    "report": Verb(
        "Write one self-contained page over runs: claims, marks, charts, tables, commands.",
        settings={},
    ),
    "list": Verb(
        "List learners, potentials, streams and optimizers with their equations, and the claims.",
        settings={},
        place="listing:list_names",
    ),
}


def command(name: str) -> Any:
    """The verb itself, with its options."""
    verb = VERBS[name]
    module, _, function = (verb.place or f"{name}:{name}").partition(":")
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=MARKUP
    )
    found = getattr(import_module(f"nucleon.cli.{module}"), function)
    alone.command(name, **verb.settings)(found)
    return typer.main.get_command(alone)


class Verbs(TyperGroup):
    """Lists the verbs by their summaries, and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself in the place of its summary."""
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
for name, verb in VERBS.items():
    app.command(name, help=verb.summary)(lambda: None)


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
