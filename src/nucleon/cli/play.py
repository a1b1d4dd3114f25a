"""`nucleon play`: play learners against streams and show regret beside bound, live."""

import ast
import importlib
import inspect
import math
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import torch
import typer
from rich.markup import escape

from nucleon._checks import unknown
from nucleon.claims import Check, Claim, Figure, Panel, Series, Settings, Table
from nucleon.claims.engine import Item, Run
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Debug,
    console,
    grid,
    hinting,
    matrix_shape,
    plain_errors,
    print_json,
    print_result,
    progress,
)
from nucleon.cli.jobs import check
from nucleon.online.game import RecordedRound, Trace
from nucleon.online.game import play as play_game
from nucleon.online.learners import GBPA, LEARNERS, Learner, ScalarGBPA
from nucleon.online.potentials import POTENTIALS
from nucleon.online.streams import STREAMS, Stream

RECORDS = 400
"""Recorded rounds of a game, evenly spaced."""
PLAYERS: Mapping[str, type[Learner]] = {**LEARNERS, GBPA.name: GBPA}
"""Learners by name; GBPA needs a potential."""
VALUES = {"true": True, "false": False, "null": None, "inf": math.inf, "-inf": -math.inf}
"""Values of options that are no Python literals."""
ADDRESS = re.compile(r"([^:=,]+):([^\W\d]\w*)(?::(.*))?")
"""Module or file, class, and its options."""
COLUMNS = ("learner", "round", "regret", "bound", "slack", "‖X_t‖")
T = TypeVar("T")


def play(
    learners: Annotated[
        list[str],
        typer.Argument(
            metavar="LEARNER",
            help="A name of `nucleon list learners`, package.module:Class or file.py:Class, with "
            "options as in ftpl:samples=4,seed=1.",
            autocompletion=lambda: list(PLAYERS),
        ),
    ],
    stream: Annotated[
        list[str] | None,
        typer.Option(
            help="A name of `nucleon list streams`, package.module:Class or file.py:Class, with "
            "options as in low-rank:rank=2; repeat it for several.",
            autocompletion=lambda: list(STREAMS),
            show_default="alternating",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each game.")] = 1000,
    shape: Annotated[str, typer.Option(help="Rows x columns of the matrices.")] = "8x16",
    radius: Annotated[float, typer.Option(help="Radius D of the ball.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of streams and learners' noise.", show_default=False)
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability with which the bound of a learner with noise may fail; "
            "default: the bound is on its mean.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Play learners against streams and show each regret beside its bound, live.

    Exit code 0 if every regret is within its bound, 1 if one is not, 2 if the command failed.

    For example:

        nucleon play faml ftl --stream alternating --rounds 1000
        nucleon play ftpl:samples=1 ftpl:samples=16 --stream gaussian
        nucleon play shampoo faml --stream replay:gradients=mine.pt
        nucleon play gbpa:potential=mine.py:Smooth --stream adversary
    """
    with plain_errors(debug):
        names = stream or ["alternating"]
        with hinting("pass cpu, or a device this torch has", (RuntimeError, AssertionError)):
            torch.empty(0, device=device)
        options = {"rounds": rounds, "shape": shape, "radius": radius, "seed": seed}
        options |= {"delta": delta, "device": device}
        pairs = [
            _pair(one, other, matrix_shape(shape), options)
            for other in dict.fromkeys(names)
            for one in dict.fromkeys(learners)
        ]
        words = ["nucleon", "play", *learners, *(f"--stream={name}" for name in names)]
        words += [f"--{name}={value}" for name, value in options.items() if value is not None]
        games = Claim(
            id="play",
            title=f"{', '.join(learners)} against {', '.join(names)}",
            statement=f"{rounds} rounds on {shape} matrices.",
            place="",
            tolerance="the regret of every learner with a theorem is at most its bound.",
            measure=partial(_measure, pairs=pairs, rounds=rounds, delta=delta),
            seconds=(0, 0),
        )
        facts = {"learners": learners, "streams": names, **options}
        with progress(lambda: map(grid, _tables(pairs))) as bar_of:
            bar, command = bar_of("play"), shlex.join(words)
            outcome = check(games, Settings(), output, bar, debug, command, facts)
        out, result = console(quiet=as_json), outcome.result
        if result is not None:
            print_result(result, out)
        if outcome.trouble is not None:
            raise CommandError(*outcome.trouble)
        out.print(f"run  {escape(str(outcome.folder))}", soft_wrap=True)
        if as_json:
            print_json({"games": [_plain(p) for p in pairs], "folder": str(outcome.folder)})
        raise typer.Exit(int(result is not None and not all(c.passed for c in result.checks)))


@dataclass
class Pair:
    """A learner and a stream, with their texts on the command line, and their game."""

    learner: Learner
    stream: Stream
    names: tuple[str, str]
    bounded: bool
    """True where a theorem bounds the regret."""
    latest: RecordedRound | None = None
    trace: Trace = field(init=False)

    @property
    def title(self) -> str:
        """Return both texts in one."""
        return " on ".join(self.names)


# ------------------------------------------------------------------ construction


def _pair(learner: str, stream: str, shape: tuple[int, int], shared: Mapping[str, Any]) -> Pair:
    """Construct the stream, and the learner with its shape and gradient bound."""
    place: dict[str, Any] = {"dtype": torch.float64, "device": shared["device"]}
    if shared["seed"] is not None:
        place["seed"] = shared["seed"]
    constructor, options = _parse("stream", stream, STREAMS)
    opponent = _constructed("stream", stream, constructor, {"shape": shape, **place}, options)
    constructor, options = _parse("learner", learner, PLAYERS)
    if "potential" in options:
        name = str(options["potential"])
        potentials = {kind.lower(): potential for kind, potential in POTENTIALS.items()}
        kind, _ = _parse("potential", name if ":" in name else name.lower(), potentials)
        options["potential"] = _constructed("potential", name, kind, {}, {})
    bound = opponent.gradient_bound
    if isinstance(constructor, type) and issubclass(constructor, ScalarGBPA):
        bound *= math.sqrt(min(opponent.shape[-2:]))  # on the Frobenius norm
    game = {"shape": opponent.shape, "radius": shared["radius"], "gradient_bound": bound, **place}
    player = _constructed("learner", learner, constructor, game, options)
    if not isinstance(player, Learner):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CommandError(f"{learner} is no learner", "derive its class from Learner or GBPA")
    refusal = player.refusal(oblivious=opponent.oblivious, delta=shared["delta"])
    return Pair(player, opponent, (learner, stream), bounded=refusal is None)


def _parse(
    category: str, words: str, constructors: Mapping[str, Callable[..., T]]
) -> tuple[Callable[..., T], dict[str, Any]]:
    """Read `name:option=value,…`; the name may be `package.module:Class` or `file.py:Class`."""
    name, _, rest = words.partition(":")
    hint = f"the {category}s by name are {', '.join(constructors)}"
    if name in constructors:
        constructor = constructors[name]
    elif address := ADDRESS.fullmatch(words):
        place, attribute, rest = address.groups(default="")
        name = f"{place}:{attribute}"
        kinds = (ImportError, LookupError, AttributeError, SyntaxError, OSError)
        with hinting(hint, kinds, before=f"{name} cannot be imported: "):
            constructor = _imported(place, attribute)
    else:
        sentence, hint = unknown(category, name, constructors)
        raise CommandError(sentence, f"{hint} (or write module:Class)")
    return constructor, dict(setting(name, pair) for pair in rest.split(",") if pair)


def _imported(place: str, name: str) -> Any:
    """Import from a module or a file; modules beside the file are found too."""
    path = Path(place)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str((path.parent if is_file else Path()).resolve()))
    try:
        if not is_file:
            return getattr(importlib.import_module(place), name)
        content = runpy.run_path(place)
        if name not in content:
            raise AttributeError(f"the file has no {name}")
        return content[name]
    finally:
        del sys.path[0]


def setting(name: str, text: str) -> tuple[str, Any]:
    """Return option and value of OPTION=VALUE; dashes in the option become underscores.

    The value is one of `VALUES`, a Python literal, or else a string.
    """
    option, equals, word = text.partition("=")
    option = option.replace("-", "_")
    if not equals or not option.isidentifier():
        raise CommandError(f"an option of {name} is {text!r}", f"write {name}:option=value")
    if word in VALUES:
        return option, VALUES[word]
    try:
        return option, ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return option, word


def _constructed(
    category: str,
    words: str,
    constructor: Callable[..., T],
    shared: Mapping[str, Any],
    options: Mapping[str, Any],
) -> T:
    """Construct with the options, and with the shared ones that the constructor accepts.

    A constructor with untyped keyword arguments receives all shared options except `seed`.
    """
    parameters = inspect.signature(constructor).parameters
    rest = [p.annotation for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    typed = {name for kind in rest for kinds in get_args(kind) for name in kinds.__annotations__}
    untyped = set(shared) - {"seed"} if rest and not typed else set[str]()
    accepted = {*parameters, *typed, *untyped}
    if (typed or not rest) and (strange := sorted(options.keys() - accepted)):
        known = sorted(accepted - {"shape", "options"})
        raise CommandError(f"{words}: no option {strange[0]}", f"options: {', '.join(known)}")
    kinds = (ValueError, TypeError, OSError)
    with hinting(f"see `nucleon list {category}s`", kinds, before=f"{words}: "):
        return constructor(**{**{k: v for k, v in shared.items() if k in accepted}, **options})


# ------------------------------------------------------------------ the games


def _measure(
    run: Run, *, pairs: Sequence[Pair], rounds: int, delta: float | None
) -> Iterator[Item]:
    """Play all games, one after the other."""
    run.progress.begin(rounds * len(pairs))
    for pair in pairs:

        def show(row: RecordedRound, pair: Pair = pair) -> None:
            done = row.round - (pair.latest.round if pair.latest else 0)
            pair.latest = row
            run.progress.advance(done, f"{pair.title}: regret {float(row.regret):.4g}")

        every = max(1, rounds // RECORDS)
        with hinting("see `nucleon list`", before=f"{pair.title}: "):
            game = (pair.learner, pair.stream, rounds)
            pair.trace = play_game(*game, record=every, on_record=show, delta=delta)
        run.records.append(pair.trace.to_dict())
        yield from _outcome(pair)
    yield from _tables(pairs)
    yield _figure(pairs)


def _outcome(pair: Pair) -> Iterator[Item]:
    """Yield the regret beside its bound, and a note on the theorem or why there is none."""
    end = pair.trace.certificate
    if end.refusal is not None:
        yield f"{pair.title}: no bound, since {end.refusal}"
        return
    yield Check(f"{pair.title}: regret", float(end.regret), "≤", float(end.bound))
    note = f"{pair.title}: {end.theorem}"
    if end.lower is not None and float(end.bound) > 0:
        note += f"; the regret is {float(end.share):.2g} of the bound, and flipping signs of "
        note += f"these gradients could force {float(end.lower / end.bound):.2g} of it"
    yield note


def _tables(pairs: Sequence[Pair]) -> list[Table]:
    """Return a table for each stream, with the latest round of every learner."""
    lines = dict[str, list[tuple[str | float, ...]]]()
    for pair in pairs:
        learner, stream = pair.names
        cells: tuple[str | float, ...] = ("",) * 5
        if row := pair.latest:
            regret, bound, slack, norm = map(float, (row.regret, row.bound, row.slack, row.norm))
            bounds = (bound, slack) if pair.bounded and math.isfinite(bound) else ("none", "")
            cells = (str(row.round), regret, *bounds, norm)
        lines.setdefault(stream, []).append((learner, *cells))
    return [Table(f"against {name}", COLUMNS, tuple(rows)) for name, rows in lines.items()]


def _figure(pairs: Sequence[Pair]) -> Figure:
    learners = list(dict.fromkeys(pair.names[0] for pair in pairs))
    panels = dict[str, list[Series]]()
    for pair in pairs:
        (learner, stream), trace = pair.names, pair.trace
        x, style = [float(t) for t in trace.rounds], 2 * learners.index(learner)
        series = panels.setdefault(stream, [])
        series.append(Series(learner, x, trace.regret.tolist(), style=style))
        if pair.bounded:
            series.append(Series(f"{learner}, bound", x, trace.bound.tolist(), style=style + 1))
    caption = "Regret after each round, and its bound where a theorem has one."
    drawn = (Panel(stream, "round t", "regret", tuple(s)) for stream, s in panels.items())
    return Figure("regret", "Regret along the way", caption, tuple(drawn))


def _plain(pair: Pair) -> dict[str, object]:
    end = pair.trace.certificate
    bounds = {"bound": end.bound, "slack": end.slack, "share": end.share}
    return {
        "learner": pair.names[0],
        "stream": pair.names[1],
        "rounds": pair.trace.rounds[-1],
        "regret": float(end.regret),
        **{name: None if end.refusal else float(value) for name, value in bounds.items()},
        "norm": float(pair.trace.norm[-1]),
        "theorem": end.theorem,
        "refusal": end.refusal,
    }
