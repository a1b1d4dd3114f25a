"""A training run among the other runs: its manifest, its curves, the command that repeats it."""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from nucleon import training
from nucleon._files import to_json
from nucleon.claims import Figure, Panel, Result, Series, Table
from nucleon.cli.console import complain, word_of
from nucleon.report import (
    MANIFEST,
    DamagedRunError,
    Run,
    State,
    announce,
    load,
    run_name,
    seal,
)
from nucleon.report.overview import CURVES, HELD_OUT, TRAINING
from nucleon.report.runs import About
from nucleon.report.saved import TRAIN
from nucleon.training import Options
from nucleon.training.run import LOG, read_log

_ALWAYS = ("task", "optimizer")
_FIGURES = {"loss": "training loss", "test_loss": "held-out loss", "accuracy": "held-out accuracy"}


class Diary:
    """Keeps the manifest of a training run: announced when it begins or goes on, sealed at its end.

    Args:
        run: that is kept.
        repeat: the command that repeats it.
        again: the command that goes on with it.
        place: how it is computed, among its options in the manifest.
    """

    def __init__(
        self, run: training.Run, repeat: str, again: str, place: Mapping[str, object]
    ) -> None:
        self.run, self.repeat, self.again, self.place = run, repeat, again, place

    def begin(self) -> None:
        """Say that the run goes on."""
        self.started, self.before = _earlier(self.run.folder)
        self.clock = time.perf_counter()
        announce(self._entry("running", self.run.start, Result(checks=())), self.run.folder)

    def end(self, done: int, *notes: str) -> None:
        """Seal the run after so many steps."""
        log = read_log(self.run.folder / LOG)
        state = "finished" if done == self.run.options.recipe.steps else "stopped"
        result = Result(
            checks=(), tables=(self._table(done, log),), figures=tuple(_figures(log)), notes=notes
        )
        seal(self._entry(state, done, result), self.run.folder)

    def _entry(self, state: State, done: int, result: Result) -> Run:
        options = self.run.options
        rate = self.run.optimizer.defaults.get("lr") if options.lr is None else options.lr
        return Run(
            _about(options, state, done),
            self.repeat if state == "finished" else self.again,
            {**flat(options), "lr": rate, **self.place},
            result,
            self.started,
            self.before + time.perf_counter() - self.clock,
            state,
        )

    def _table(self, done: int, log: Sequence[Mapping[str, float]]) -> Table:
        steps, numbers = self.run.options.recipe.steps, self.run.model.parameters()
        last = {name: value for line in log for name, value in line.items()}
        rows = (
            ("steps", f"{done} of {steps}"),
            ("parameters", f"{sum(p.numel() for p in numbers):,}"),
            *((words, last[name]) for name, words in _FIGURES.items() if name in last),
        )
        title = "At the end" if done == steps else f"After step {done}"
        return Table(title, ("figure", "value"), rows)


def _about(options: Options, state: State, done: int) -> About:
    data = f", {Path(options.data).name}" if options.data else ""
    steps = options.recipe.steps
    statement = {
        "running": f"Running towards step {steps}, or killed: then the command goes on with it "
        f"from its last checkpoint.",
        "stopped": f"Stopped after step {done} of {steps}; the command goes on with it.",
        "finished": f"{steps} steps of {options.batch * options.recipe.accumulate} examples.",
    }
    return About(TRAIN, f"{options.optimizer} on {options.task}{data}", statement[state])


def _earlier(folder: Path) -> tuple[datetime, float]:
    """When the run of a folder was begun, and how long it took so far."""
    try:
        manifest = load(folder).manifest
    except DamagedRunError as error:
        if (folder / MANIFEST).exists():  # else it begins, or was killed as it began
            complain(str(error), "the weights are those of its last checkpoint; look at its log")
        return datetime.now().astimezone(), 0.0
    return datetime.fromisoformat(manifest["started"]), float(manifest["seconds"])


def _figures(log: Sequence[Mapping[str, float]]) -> Iterable[Figure]:
    """The losses over the steps and, beside them, the accuracy; nothing from an empty log."""

    def series(name: str, figure: str, style: int) -> Iterable[Series]:
        points = [(line["step"], line[figure]) for line in log if figure in line]
        if points:
            yield Series(name, *map(list, zip(*points, strict=True)), style=style)

    losses = (*series(TRAINING, "loss", 0), *series(HELD_OUT, "test_loss", 4))
    rates = tuple(series(HELD_OUT, "accuracy", 4))
    panels = [Panel("loss", "step", "cross-entropy, nats", losses)] if losses else []
    panels += [Panel("accuracy", "step", "share of right answers", rates)] if rates else []
    if panels:
        caption = "The training loss is that of the step's own examples, before the step."
        yield Figure(CURVES, "Loss and accuracy over the steps", caption, tuple(panels))


# ------------------------------------------------------------------ names and words


def new_folder(options: Options) -> Path:
    """`runs/train/<time>-<hash>`, the hash that of the options."""
    return Path("runs", TRAIN, run_name(datetime.now(), to_json(asdict(options))))


def flat(options: Options) -> dict[str, Any]:
    """The options of a run and of its recipe, in one mapping; None where there are none."""
    values = {**asdict(options), **asdict(options.recipe)}
    del values["recipe"]
    return {**values, "set": values["set"] or None}


def field_of(parameter: str) -> str:
    """How `Options` calls a parameter of the command."""
    return {"set_": "set", "context_length": "context"}.get(parameter, parameter)


def command(context: typer.Context, options: Options, place: dict[str, Any]) -> str:
    """What repeats a run: what is not as it is by default, the task and the optimizer."""
    words, values = ["nucleon", "train"], flat(options) | place
    for parameter in context.command.params:
        name = field_of(str(parameter.name))
        value = values.get(name)
        if value is None or (value == parameter.default and name not in _ALWAYS):
            continue
        if name == "set":
            pairs = (f"{option}={word_of(chosen)}" for option, chosen in value.items())
            words += [word for pair in pairs for word in (parameter.opts[0], pair)]
        elif isinstance(value, bool):
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)
