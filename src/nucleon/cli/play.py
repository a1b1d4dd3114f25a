"""`nucleon play`: learners against streams, regret beside bound, live."""

import inspect
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import torch
import typer
from rich import box
from rich.markup import escape
from rich.table import Table as Grid

from nucleon._naming import is_address, named, unknown
from nucleon.certificate import Certificate
from nucleon.claims import Check, Figure, Panel, Progress, Result, Series, Table
from nucleon.claims.base import one_thread
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Debug,
    console,
    hinting,
    matrix_shape,
    plain_errors,
    print_json,
    progress,
    setting,
    usable_device,
)
from nucleon.online.game import Row, Trace
from nucleon.online.game import play as play_game
from nucleon.online.learners import GBPA, LEARNERS, Learner, ScalarGBPA
from nucleon.online.potentials import POTENTIALS
from nucleon.online.streams import STREAMS, Stream
from nucleon.report import Run, draft, number, publish
from nucleon.report.runs import About

RECORDS = 400
"""Rounds recorded of a game, evenly spaced."""
PLAYERS: Mapping[str, type[Learner]] = {**LEARNERS, GBPA.name: GBPA}
"""What plays by name; GBPA needs a potential."""
Made = TypeVar("Made")
COLUMNS = ("learner", "stream", "round", "regret", "bound", "slack", "‖X_t‖")
_STREAM = ("name", "shape", "gradient_bound", "oblivious", "rounds", "gradient")


def play(
    learners: Annotated[
        list[str],
        typer.Argument(
            metavar="LEARNER",
            help="By name, or package.module:Class or file.py:Class, with options as in "
            "ftpl:samples=4,seed=1; see `nucleon list learners`.",
            autocompletion=lambda: list(PLAYERS),
        ),
    ],
    stream: Annotated[
        list[str] | None,
        typer.Option(
            help="By name, or package.module:Class or file.py:Class, with options as in "
            "low-rank:rank=2; repeatable.",
            autocompletion=lambda: list(STREAMS),
            show_default="alternating",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each game.")] = 1000,
    shape: Annotated[str, typer.Option(help="Of the matrices, as 8x16.")] = "8x16",
    radius: Annotated[float, typer.Option(help="D, of the ball.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Of streams and learners' noise.", show_default=False)
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability with which the bound of a learner that draws noise may fail; "
            "without it, the bound is on its mean.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Play every learner against every stream: round, regret, bound and slack, live.

    Exit code 0 when every regret is within its bound, 1 when one is not, 2 when the command could
    not do its work.

    For example:

        nucleon play faml ftl --stream alternating --rounds 1000
        nucleon play ftpl:samples=1 ftpl:samples=16 --stream gaussian --stream adversary
        nucleon play shampoo faml --shape 16x64 --stream replay:gradients=recorded.pt
        nucleon play gbpa:potential=mine.py:Smooth --stream mine.py:Spiral:turns=3
    """
    with plain_errors(debug):
        names = stream or ["alternating"]
        options = {
            "seed": seed,
            "radius": radius,
            "delta": delta,
            "device": usable_device(device),
        }
        games = [
            _game(one, other, matrix_shape(shape), options)
            for other in dict.fromkeys(names)
            for one in dict.fromkeys(learners)
        ]
        out = console(quiet=as_json)
        given = {"rounds": rounds, "shape": shape, "radius": radius, "seed": seed, "delta": delta}
        repeat = _command(learners, names, {**given, "device": device if device != "cpu" else None})
        with draft(output, "play") as folder:
            started, clock = datetime.now().astimezone(), time.perf_counter()
            traces = _play(games, rounds, delta)
            result = _result(games, traces)
            seconds = time.perf_counter() - clock
            out.print(_grid(games, [_last(trace) for trace in traces]))
            for note in result.notes:
                out.print(f"[dim]• {escape(note)}[/]")
            kept = {"learners": learners, "streams": names, "rounds": rounds, "shape": shape}
            about = _about(learners, names, rounds, shape)
            run = Run(about, repeat, {**kept, **options}, result, started, seconds)
            final = publish(run, folder)
        out.print(f"run  {escape(str(final))}", soft_wrap=True)
        if as_json:
            plain = [_plain(game, trace) for game, trace in zip(games, traces, strict=True)]
            print_json({"games": plain, "folder": str(final)})
        raise typer.Exit(0 if all(check.passed for check in result.checks) else 1)


def _command(learners: list[str], streams: list[str], given: dict[str, object]) -> str:
    """The command that plays the same games; what is None was not given."""
    words = ["nucleon", "play", *learners]
    words += [word for name in streams for word in ("--stream", name)]
    for option, value in given.items():
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words)


@dataclass(frozen=True)
class Game:
    """A learner and a stream, each with the words that named it."""

    learner: Learner
    stream: Stream
    names: tuple[str, str]
    refusal: str | None
    """Why no theorem bounds the regret, if none does."""


def _about(learners: Sequence[str], streams: Sequence[str], rounds: int, shape: str) -> About:
    return About(
        id="play",
        title=f"{', '.join(learners)} against {', '.join(streams)}",
        statement=f"{rounds} rounds on {shape} matrices.",
        tolerance="the regret of every learner with a theorem is at most its bound.",
    )


# ------------------------------------------------------------------ from words to games


def _game(learner: str, stream: str, shape: tuple[int, int], shared: Mapping[str, Any]) -> Game:
    """The game between two that are given by their words."""
    place = {"dtype": torch.float64, "device": shared["device"]}
    seeded = {} if shared["seed"] is None else {"seed": shared["seed"]}
    constructors = {name: entry.constructor for name, entry in STREAMS.items()}
    constructor, chosen = _parse("stream", stream, constructors)
    given = _accepted(constructor, {"shape": shape, **place, **seeded})
    opponent = _made("stream", stream, constructor, {**given, **chosen})
    missing = [name for name in _STREAM if not hasattr(opponent, name)]
    if missing:
        raise CommandError(
            f"{stream} is no stream, it has no {', '.join(missing)}",
            "see nucleon.online.streams.Stream",
        )
    given = {"shape": opponent.shape, "radius": shared["radius"], **place, **seeded}
    player = learner_of(learner, {**given, "gradient_bound": opponent.gradient_bound})
    refusal = player.refusal(oblivious=opponent.oblivious, delta=shared["delta"])
    return Game(player, opponent, (learner, stream), refusal)


def learner_of(words: str, given: Mapping[str, Any]) -> Learner:
    """The learner that the words name, with what it takes of what is given beside them."""
    kind, own = _parse("learner", words, PLAYERS)
    if "potential" in own:
        own["potential"] = _potential(str(own["potential"]))
    if isinstance(kind, type) and issubclass(kind, ScalarGBPA):  # whose norm is Frobenius'
        factor = math.sqrt(min(given["shape"][-2:]))
        given = {**given, "gradient_bound": factor * given["gradient_bound"]}
    player = _made("learner", words, kind, {**_accepted(kind, given), **own})
    if not isinstance(player, Learner):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CommandError(f"{words} is no learner", "derive its class from Learner or GBPA")
    return player


def _accepted(constructor: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a constructor takes; one with untyped ones takes all but a seed."""
    parameters = inspect.signature(constructor).parameters
    rest = [p.annotation for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    typed = {name for kind in rest for kinds in get_args(kind) for name in kinds.__annotations__}
    untyped = set(options) - {"seed"} if rest and not typed else set[str]()
    taken = {*parameters, *typed, *untyped}
    return {name: value for name, value in options.items() if name in taken}


def _potential(words: str) -> Any:
    """The potential of that name, with its own defaults."""
    known = {name.lower(): kind for name, kind in POTENTIALS.items()}
    kind, _ = _parse("potential", words if is_address(words) else words.lower(), known)
    return _made("potential", words, kind, {})


def _parse(
    what: str, words: str, known: Mapping[str, Callable[..., Made]]
) -> tuple[Callable[..., Made], dict[str, Any]]:
    """`name:option=value,…`, options as by `setting`; the name may be an address."""
    name, _, rest = words.partition(":")
    if name not in known and is_address(":".join(words.split(":")[:2])):
        place, attribute, *options = words.split(":", 2)
        name, rest = f"{place}:{attribute}", "".join(options)
    if name not in known and not is_address(name):
        sentence, hint = unknown(what, name, known)
        raise CommandError(sentence, f"{hint} (or write module:Class)")
    pairs = [pair for pair in rest.split(",") if pair]
    own = dict(setting(f"an option of {name}", p, f"{name}:option=value") for p in pairs)
    with hinting(f"the {what}s by name are {', '.join(known)}"):
        return known[name] if name in known else named(name), own


def _made(
    what: str, words: str, constructor: Callable[..., Made], options: Mapping[str, Any]
) -> Made:
    kinds = (ValueError, TypeError, OSError)
    with hinting(f"see `nucleon list {what}s`", kinds, before=f"{words}: "):
        return constructor(**options)


# ------------------------------------------------------------------ the games


def _play(games: Sequence[Game], rounds: int, delta: float | None) -> list[Trace]:
    """All games, one after the other, on a table that moves."""
    rows: list[Row | None] = [None] * len(games)
    with progress("play", above=lambda: _grid(games, rows)) as bar:
        bar.begin(rounds * len(games), "rounds")
        with one_thread():
            return [_play_one(i, game, rounds, delta, rows, bar) for i, game in enumerate(games)]


def _play_one(
    i: int, game: Game, rounds: int, delta: float | None, rows: list[Row | None], bar: Progress
) -> Trace:
    def show(row: Row) -> None:
        before = rows[i]
        rows[i] = row
        stage = f"{' on '.join(game.names)}: regret {float(row.regret):.4g}"
        bar.advance(row.round - (before.round if before else 0), stage)

    every = max(1, rounds // RECORDS)
    with hinting("see `nucleon list`", before=f"{' on '.join(game.names)}: "):
        return play_game(
            game.learner, game.stream, rounds, record=every, on_record=show, delta=delta
        )


def _last(trace: Trace) -> Row:
    return Row(trace.rounds[-1], trace.regret[-1], trace.bound[-1], trace.norm[-1])


def _cells(game: Game, row: Row | None) -> tuple[str | float, ...]:
    if row is None:
        return (*game.names, "", "", "", "", "")
    regret, bound, slack, norm = map(float, (row.regret, row.bound, row.slack, row.norm))
    known = (bound, slack) if game.refusal is None and math.isfinite(bound) else ("none", "")
    return (*game.names, str(row.round), regret, *known, norm)


def _grid(games: Sequence[Game], rows: Sequence[Row | None]) -> Grid:
    grid = Grid(*COLUMNS[:2], box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS[2:]:  # of a width that does not jump with the numbers
        grid.add_column(column, justify="right", min_width=8, no_wrap=True)
    for game, row in zip(games, rows, strict=True):
        grid.add_row(*(escape(number(cell)) for cell in _cells(game, row)))
    return grid


# ------------------------------------------------------------------ what comes out


def _result(games: Sequence[Game], traces: Sequence[Trace]) -> Result:
    pairs = list(zip(games, traces, strict=True))
    checks, notes = list[Check](), list[str]()
    for game, trace in pairs:
        name, end = " on ".join(game.names), trace.certificate
        if end.refusal is not None:
            notes.append(f"{name}: no bound, since {end.refusal}")
            continue
        checks.append(Check(f"{name}: regret", float(end.regret), "≤", float(end.bound)))
        notes.append(f"{name}: {end.theorem}{_share(end)}")
    rows = tuple(_cells(game, _last(trace)) for game, trace in pairs)
    return Result(
        checks=tuple(checks),
        tables=(Table("At the end", COLUMNS, rows),),
        figures=(_figure(pairs),),
        records=tuple(trace.to_dict() for trace in traces),
        notes=tuple(dict.fromkeys(notes)),
    )


def _share(certificate: Certificate) -> str:
    """Return which share of the bound the regret is, and what an adversary could force of it."""
    bound = float(certificate.bound)
    if certificate.lower is None or not bound > 0:
        return ""
    return (
        f"; the regret is {float(certificate.share):.2g} of the bound, and flipping signs of these "
        f"gradients could force {float(certificate.lower) / bound:.2g} of it"
    )


def _figure(pairs: Sequence[tuple[Game, Trace]]) -> Figure:
    learners = list(dict.fromkeys(game.names[0] for game, _ in pairs))
    panels = list[Panel]()
    for stream in dict.fromkeys(game.names[1] for game, _ in pairs):
        series = list[Series]()
        for game, trace in pairs:
            if game.names[1] == stream:
                x, style = [float(t) for t in trace.rounds], 2 * learners.index(game.names[0])
                series.append(Series(game.names[0], x, trace.regret.tolist(), style=style))
                if game.refusal is None:
                    name = f"{game.names[0]}, bound"
                    series.append(Series(name, x, trace.bound.tolist(), style=style + 1))
        panels.append(Panel(stream, "round t", "regret", tuple(series)))
    caption = "Regret after each round, and its bound where a theorem has one."
    return Figure("regret", "Regret along the way", caption, tuple(panels))


def _plain(game: Game, trace: Trace) -> dict[str, object]:
    end = trace.certificate
    return {
        "learner": game.names[0],
        "stream": game.names[1],
        "rounds": trace.rounds[-1],
        "regret": float(end.regret),
        "bound": float(end.bound) if end.refusal is None else None,
        "slack": float(end.slack) if end.refusal is None else None,
        "share": float(end.share) if end.refusal is None else None,
        "norm": float(trace.norm[-1]),
        "theorem": end.theorem,
        "refusal": end.refusal,
    }
