"""The tables of `docs/evidence.md` and its picture, from the lines of `evidence.py`."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from evidence import FRACTIONS, OPTION, Choice, Log, Need, arms, tune
from evidence_cells import CELLS

BEGIN, END = "<!-- tables of evidence.py report -->", "<!-- end of the tables -->"
NAMES = {"wsd": "warmup–stable–decay"}
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 %, two-sided, with 1, 2, … degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    half = T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def verdict(mean: float, half: float, margin: float) -> str:
    """Return the protocol's word for a paired difference."""
    if abs(mean) <= margin and half <= margin:
        return "equal"
    if abs(mean) > max(margin, half):
        return "lower" if mean < 0 else "higher"
    return "open"


class Part:
    """The settings and losses of one method in one cell.

    Args:
        name: of the cell.
        method: one of its grid.
        log: the finished runs.
    """

    def __init__(self, name: str, method: str, log: Log) -> None:
        self.name, self.method, self.log, self.cell = name, method, log, CELLS[name]
        tuned = {arm: tune(name, method, *arm, log) for arm in arms(self.cell)}
        self.choices = {arm: found for arm, found in tuned.items() if isinstance(found, Choice)}
        falls = [self.choices.get((fall, self.cell.horizons)) for fall in self.cell.falls]
        known = [choice for choice in falls if choice is not None]
        self.average = min(known, key=lambda c: c.score) if len(known) == len(falls) else None

    def losses(self, choice: Choice | None, horizon: int, reading: str = "") -> list[float]:
        """Return a loss for each seed, or nothing as long as one is missing."""
        if choice is None:
            return []
        start = (self.name, self.method, choice.arm, choice.rate)
        found = [self.log.losses.get(Need(*start, s, horizon)) for s in range(self.cell.seeds)]
        values = [one.get(reading or choice.reading) if one else None for one in found]
        return [v for v in values if v is not None] if None not in values else []

    @property
    def kinds(self) -> list[str]:
        """Return the decayed schedules."""
        return list(dict.fromkeys(kind for kind, _ in self.cell.decays))

    @property
    def judged(self) -> list[tuple[str, Choice | None, str]]:
        """Return title, setting and f of the arm that is compared with the decayed runs.

        Beside the average it is the setting that README and docs recommend, where that differs.
        """
        advised = self.choices.get(("sqrt", self.cell.horizons))
        same = advised is self.average and advised and advised.reading == f"{OPTION:g}"
        rest = [] if same or not advised else [(f"sqrt, f = {OPTION:g},", advised, f"{OPTION:g}")]
        return [("the average", self.average, ""), *rest]

    def peer(self, kind: str, horizon: int) -> Choice | None:
        """Return the setting of a decayed run at its horizon."""
        return self.choices.get((kind, (horizon,)))

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of the table."""
        cell = self.cell
        yield [f"{self.name}, {self.method}: loss at", *map(str, cell.horizons)]
        yield ["---"] * (1 + len(cell.horizons))
        for fall in cell.falls:
            if choice := self.choices.get((fall, cell.horizons)):
                chosen = choice is self.average
                for reading in [*(f"{f:g}" for f in FRACTIONS), "last"] if chosen else [""]:
                    f = reading or choice.reading
                    title = "last iterate" if f == "last" else f"average, f = {f}"
                    mark = ", **the average**" if chosen and f == choice.reading else ""
                    title = f"{fall} {setting(choice)}: {title}{mark}"
                    losses = [self.losses(choice, h, f) for h in cell.horizons]
                    yield [title, *map(self.number, losses)]
        for kind in self.kinds:
            peers = [(self.peer(kind, h), h) for h in cell.horizons]
            shown = [(c, self.number(self.losses(c, h))) for c, h in peers]
            yield [kind, *(f"{n} at {setting(c)}" if c and n else "" for c, n in shown)]
            for title, fall, reading in self.judged:
                gaps = [less(self.losses(fall, h, reading), self.losses(c, h)) for c, h in peers]
                numbers = (self.number(gap, judged=True) for gap in gaps)
                yield [f"**{title} less {kind}**", *numbers]
        if cell.device == "cuda" and self.average:
            train = f"{self.average.reading} train"
            losses = (self.losses(self.average, h, train) for h in cell.horizons)
            yield ["the average, on the text trained on", *map(self.number, losses)]
            losses = (self.losses(self.peer("linear", h), h, "last train") for h in cell.horizons)
            yield ["linear, on the text trained on", *map(self.number, losses)]
        if self.name == "A2":  # whose seeds and batches are those of A1
            yield from self.beside("Muon", Part("A1", "muon", self.log))
        if self.method == "leon .1":
            yield from self.beside("leon", Part(self.name, "leon", self.log))

    def beside(self, name: str, other: "Part") -> Iterator[list[str]]:
        """Yield the differences to another method, by average and by linear decay."""
        averages = [(self.average, other.average)] * len(self.cell.horizons)
        linear = [(self.peer("linear", h), other.peer("linear", h)) for h in self.cell.horizons]
        for title, choices in (("average", averages), ("linear", linear)):
            pairs = zip(choices, self.cell.horizons, strict=True)
            gaps = [less(self.losses(a, h), other.losses(b, h)) for (a, b), h in pairs]
            yield [f"its {title} less that of {name}", *(self.number(g, judged=True) for g in gaps)]

    def number(self, values: Sequence[float], judged: bool = False) -> str:
        """Return a mean with its interval, and for a difference the verdict."""
        if len(values) < 2:
            return ""
        mean, half = interval(values)
        digits = ".3f" if self.cell.margin else ".2e"
        word = f", {verdict(mean, half, self.cell.margin)}" if judged else ""
        return f"{mean:{digits}} ± {half:{digits}}{word}"


def less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the differences by seed, none where a seed is missing."""
    return [x - y for x, y in zip(a, b, strict=True)] if a and b else []


def setting(choice: Choice) -> str:
    """Return a rate, marked where it is at the end of its grid."""
    return f"{choice.rate:g}{'' if choice.inside else ' (end of the grid)'}"


def draw(parts: Sequence[Part], picture: Path) -> None:
    """Draw loss against steps, above the paired differences."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = {"figsize": (4.2 * len(parts), 6), "height_ratios": (3, 2)}
    figure, axes = pyplot.subplots(2, len(parts), squeeze=False, sharex="col", **size)
    for (top, bottom), part in zip(axes.T, parts, strict=True):
        cell = part.cell
        for reading, color, title in (
            ("last", "0.7", "last iterate of that run"),
            ("", "C0", "one run, read by its average"),
        ):
            steps = sorted({*cell.horizons, *cell.between})
            curve = [(step, part.losses(part.average, step, reading)) for step in steps]
            points = [(step, *interval(losses)) for step, losses in curve if losses]
            x, mean, half = (torch.tensor(column) for column in zip(*points, strict=True))
            top.plot(x, mean, color=color, label=title)
            top.fill_between(x, mean - half, mean + half, color=color, alpha=0.25, linewidth=0)
        for index, kind in enumerate(part.kinds):
            ends = [(h, part.losses(part.peer(kind, h), h)) for h in cell.horizons]
            gaps = [(h, less(part.losses(part.average, h), losses)) for h, losses in ends]
            style = {"fmt": "osD"[index], "color": f"C{index + 1}", "capsize": 3, "ms": 4}
            for axis, some in ((top, ends), (bottom, gaps)):
                bars = [(1.02**index * h, *interval(losses)) for h, losses in some if losses]
                if bars:
                    label = f"{NAMES.get(kind, kind)}, decayed to this step"
                    axis.errorbar(*zip(*bars, strict=True), label=label, **style)
        bottom.axhspan(-cell.margin, cell.margin, color="0.9")
        bottom.axhline(0, color="0.5", linewidth=0.8)
        chosen = part.average
        setting = f"average: {chosen.arm}, f = {chosen.reading}" if chosen else ""
        top.set(title=f"{cell.title or part.name}\n{setting}", xscale="log")
        bottom.set(xlabel="step", xticks=cell.horizons, xticklabels=cell.horizons)
        bottom.minorticks_off()
    ends = [limit for bottom in axes[1] for limit in bottom.get_ylim()]
    for bottom in axes[1]:
        bottom.set_ylim(min(ends), max(ends))
    axes[0, 0].set_ylabel("held-out loss, nats")
    axes[1, 0].set_ylabel("average less decayed")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def report(log: Log, page: Path, picture: Path) -> None:
    """Write the tables between the marks of `page`, and the picture."""
    parts = [Part(name, method, log) for name in CELLS for method in CELLS[name].grids]
    parts = [part for part in parts if part.losses(part.average, part.cell.steps)]
    tables = "\n".join(
        "\n".join(f"| {' | '.join(row)} |" for row in part.rows()) + "\n" for part in parts
    )
    text = page.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{tables}\n{END}{rest.partition(END)[2]}", "utf-8")
    if shown := [part for part in parts if part.cell.margin and part.name != "A2"]:
        draw(shown, picture)
    print(tables)
