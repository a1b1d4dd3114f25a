"""Training runs beside each other: one chart and one table over all of them."""

import math
from collections.abc import Sequence
from typing import Any

from nucleon.claims.shown import Cell, Figure, Panel, Series, Table
from nucleon.report.saved import TRAIN, Saved

CURVES, TRAINING, HELD_OUT = "loss", "training", "held out"
"""How a training run calls the figure of its losses, and the two series in it."""
LARGEST = 1e30
"""A loss above it is drawn as a gap: it would be the whole scale."""
_COLUMNS = (
    *("run", "steps", "held-out loss", "best", "at step", "training loss", "learning rate"),
    *("steps/s", "seconds"),
)


def overview(runs: Sequence[Saved]) -> tuple[Figure, Table] | None:
    """The losses of all training runs over the steps, and how they ended; None of less than two."""
    trained = [run for run in runs if run.manifest["id"] == TRAIN and _curves(run)]
    if len(trained) < 2:
        return None
    names = told_apart(trained)
    rows = tuple(_row(run, name) for run, name in zip(trained, names, strict=True))
    panels = (
        _panel("held-out loss", HELD_OUT, trained, names),
        _panel("training loss", TRAINING, trained, names),
    )
    figure = Figure(
        "training-runs",
        "Losses of the training runs",
        "The training loss is that of the step's own examples, before the step.",
        tuple(panel for panel in panels if panel.series),
    )
    return figure, Table("How the training runs ended", _COLUMNS, rows)


def _curves(run: Saved) -> dict[str, Series]:
    """The losses of a run over its steps, by the name of the series."""
    panels = [p for f in run.result.figures if f.name == CURVES for p in f.panels[:1]]
    known = (TRAINING, HELD_OUT)  # a forged run may have others
    return {s.name: s for p in panels for s in p.series if s.name in known and len(s.x)}


def _panel(title: str, which: str, runs: Sequence[Saved], names: Sequence[str]) -> Panel:
    curves = (_curves(run).get(which) for run in runs)
    series = tuple(
        Series(name, _drawable(found.x), _drawable(found.y), style=style)
        for style, (found, name) in enumerate(zip(curves, names, strict=True))
        if found is not None
    )
    return Panel(title, "step", "cross-entropy, nats", series)


def _drawable(values: Sequence[float]) -> list[float]:
    return [value if abs(value) < LARGEST else math.nan for value in values]


def _row(run: Saved, name: str) -> tuple[Cell, ...]:
    curves, seconds = _curves(run), float(run.manifest["seconds"])
    steps = max(series.x[-1] for series in curves.values())
    final, best, place = _end(curves.get(HELD_OUT))
    rate = run.manifest["options"].get("lr")
    return (
        *(name, steps, final, best, place, _end(curves.get(TRAINING))[0]),
        float(rate) if isinstance(rate, int | float) and abs(rate) < LARGEST else "–",
        *(steps / seconds if seconds else "–", seconds),
    )


def _end(series: Series | None) -> tuple[Cell, Cell, Cell]:
    """The last value of a series, the least one and where that is."""
    finite = [] if series is None else [p for p in zip(series.y, series.x) if math.isfinite(p[0])]  # noqa: B905
    if series is None or not finite:
        return "–", "–", "–"
    return series.y[-1], *min(finite)


def told_apart(runs: Sequence[Saved]) -> list[str]:
    """What tells each run from the others: its optimizer, and the options that are not all alike.

    Runs with the same options have the names of their folders too.
    """
    options = [run.manifest["options"] for run in runs]
    keys = [key for found in options for key in found if key != "optimizer"]
    differing = [
        key for key in dict.fromkeys(keys) if len({repr(found.get(key)) for found in options}) > 1
    ]
    names = [_name(found, differing) for found in options]
    return [
        name if names.count(name) == 1 else f"{name} ({run.folder.name})"
        for name, run in zip(names, runs, strict=True)
    ]


def _name(options: dict[str, Any], differing: Sequence[str]) -> str:
    words = [f"{key} {options[key]}" for key in differing if options.get(key) is not None]
    return ", ".join([str(options.get("optimizer", "")), *words])[:80]
