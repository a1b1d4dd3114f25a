"""`nucleon convert`: the checkpoint of another optimizer as one of Muon, Pion or Leon."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.markup import escape
from torch import nn
from torch.optim import Optimizer

from nucleon._files import replacing
from nucleon._naming import is_address, named
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Config,
    Debug,
    columns,
    console,
    hinting,
    plain_errors,
    print_json,
    setting,
)
from nucleon.optim.migrate import Conversion, Momentum, converted
from nucleon.optim.registry import create, list_optimizers

KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states")
"""Where training scripts and Lightning keep the state of the optimizer in a checkpoint."""


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint of torch.save.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the new one.")],
    model: Annotated[
        str,
        typer.Option(
            help="What builds the model, as package.module:function, or file.py:function; called "
            "without arguments. That module or file is run as Python: name only one you trust."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(help="The new optimizer, see `nucleon list`, or package.module:Class."),
    ] = "leon",
    old: Annotated[
        str | None,
        typer.Option(
            help="What builds the old optimizer from the model, or a list of them in the order of "
            "their states; needed where the states are without names and of several groups."
        ),
    ] = None,
    momentum: Annotated[
        str,
        typer.Option(help="What the momentum_buffer of an old Muon holds: average, sum or auto."),
    ] = "auto",
    key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Entry of IN that holds an optimizer's state, once for each; default: IN itself, "
            f"or the first of {', '.join(KEYS)}."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of the new optimizer, as lr=4e-3, aux_lr=1e-3 or "
            '\'overrides={"*.gate.weight": "adamw"}\'; once for each.',
        ),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn the checkpoint of a `torch.optim.Muon` or AdamW run into one of Leon, Muon or Pion.

    Hyperparameters are inherited, old → new is printed for each group; --option wins over them.
    Momentum keeps its meaning, the Gram matrix is warmed up from the squares or the momentum. OUT
    holds the `state_dict()` of the new optimizer; the `for_model` that builds it is printed.
    `--model file.py:build` and `--old` run that file; IN itself is read as data, never as code.

    For example:

        nucleon convert run.pt leon.pt --model train.py:build --option lr=4e-3

        nucleon convert run.pt leon.pt --model train.py:build --old train.py:optimizers --key muon
        --key adamw
    """
    with plain_errors(debug):
        options = dict(setting("--option", text) for text in option or ())
        states, built = _states(source, key or ()), _built(model)
        saved = _old(old, built, states) if old else states
        known = f"the optimizers are {', '.join(list_optimizers())}"
        hint = f"{known}; see --option, --key, --old and --momentum"
        with hinting(hint, (TypeError, ValueError, AttributeError)):
            make: Any = named(to).for_model if is_address(to) else partial(create, to)
            done = converted(saved, built, make, momentum=cast(Momentum, momentum), **options)
        with replacing(target) as temporary:
            torch.save(done.optimizer.state_dict(), temporary)
        if as_json:
            groups = [asdict(group) for group in done.groups]
            said = {"to": to, "out": str(target), "options": done.options, "groups": groups}
            print_json({**said, "parameters": done.parameters})
            return
        _print(done, target)


def _print(done: Conversion, target: Path) -> None:
    """What became of each parameter, of each hyperparameter, and the call to load it with."""
    out = console()
    out.print(columns(done.parameters.items()))
    for group in done.groups:
        out.print(escape("\n".join(group.lines())))
    words = ", ".join(f"{name}={value!r}" for name, value in done.options.items())
    call = f"{type(done.optimizer).__name__}.for_model(model, {words})"
    out.print(
        escape(f"{target} is the state of {call}; load it with .load_state_dict(torch.load(…))")
    )


def _states(source: Path, keys: Sequence[str]) -> list[Mapping[str, Any]]:
    """The optimizer states of a checkpoint."""
    try:
        saved: Any = torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CommandError(
            f"{source} is no checkpoint that torch.load(weights_only=True) reads: "
            f"{str(error).partition(chr(10))[0]}",
            "save the optimizer's state_dict() alone with torch.save",
        ) from error
    entries = saved if isinstance(saved, Mapping) else {}
    if not keys:
        if "param_groups" in entries:
            return [saved]
        keys = [key for key in KEYS if key in entries][:1]
    missing = [key for key in keys if key not in entries]
    if missing or not keys:
        raise CommandError(
            f"{source} has no {', '.join(missing) or 'optimizer state'}; it has "
            f"{', '.join(map(str, entries)) or 'no entries'}",
            "name the entry that holds the optimizer's state_dict() with --key",
        )
    found = [entries[key] for key in keys]
    return [state for each in found for state in (each if isinstance(each, list) else [each])]


def _built(words: str) -> nn.Module:
    model = _function("--model", words)()
    if not isinstance(model, nn.Module):
        raise CommandError(
            f"--model {words} returned {type(model).__name__}", "return the torch.nn.Module"
        )
    return model


def _old(words: str, model: nn.Module, states: Sequence[Mapping[str, Any]]) -> list[Optimizer]:
    """The old optimizers with their states."""
    made = _function("--old", words)(model)
    olds = [made] if isinstance(made, Optimizer) else list(made)
    if len(olds) != len(states) or not all(isinstance(o, Optimizer) for o in olds):
        raise CommandError(
            f"--old {words} returned {len(olds)} for {len(states)} saved states",
            "return one optimizer for each state, and name the states with --key, in order",
        )
    for optimizer, state in zip(olds, states, strict=True):
        with hinting(
            "build it as the run did, and give the states in the same order",
            (KeyError, TypeError, ValueError),
            before=f"{type(optimizer).__name__} of --old {words} does not take its state: ",
        ):
            optimizer.load_state_dict(dict(state))
    return olds


def _function(option: str, words: str) -> Callable[..., Any]:
    """What `package.module:function` or `file.py:function` names."""
    with hinting("write package.module:function", before=f"{option}: "):
        return named(words)
