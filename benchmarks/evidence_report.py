"""What the logs of `evidence.py` say, as tables in Markdown and a picture.

Every figure is computed from the lines of the logs, every line is counted. Differences are paired:
the same seed gives the same first weights and the same windows of text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import evidence_stages as stages
from evidence_queue import Log, Record, trial_of
from evidence_stages import (
    ADAMW,
    LEON,
    LEON3,
    LEON_NESTEROV,
    MUON,
    VARIANTS,
    Cell,
    Stage,
    Trial,
)
from nucleon._files import write_whole
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.report.plots import draw
from step_report import table

CONFIDENCE = 0.95
COMPARED = (
    ("Muon, aux_lr 1e-3", "Muon, aux_lr 3e-4"),
    ("Leon, aux_lr 1e-3", "Muon, aux_lr 1e-3"),
    ("Leon, anew", "Muon, anew"),
    ("Muon, aux_lr 1e-3", "Muon, anew"),
    ("Leon, aux_lr 1e-3", "Leon, anew"),
)
"""Variants that are compared with each other too."""
NEAR = 0.15
"""Nats above the best of a cell up to which its picture goes."""
TITLES = {
    "A": "A GPT of 29 M parameters on novels",
    "B": "A GPT of 126 M parameters on program text, at rates of the smaller one",
    "C": "Fine-tuning a GPT of 29 M parameters on plays",
}
STYLES = {ADAMW: 6, MUON: 0, LEON: 4, LEON3: 2, LEON_NESTEROV: 5}


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and how far from it the true one may be."""

    mean: float
    margin: float
    count: int

    def __str__(self) -> str:
        """With four digits after the point."""
        if not self.count:
            return "—"
        margin = f" ± {self.margin:.4f}" if math.isfinite(self.margin) else ""
        return f"{self.mean:.4f}{margin}"


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of a mean, at `CONFIDENCE`."""
    from scipy.stats import t

    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Interval(fmean(values) if values else math.nan, math.inf, n)
    margin = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(values) / math.sqrt(n)
    return Interval(fmean(values), margin, n)


class Results:
    """The results of one cell of a stage.

    Args:
        stage: which.
        cell: which.
        log: of the stage, with those beside it.
    """

    def __init__(self, stage: Stage, cell: Cell, log: Log) -> None:
        self.stage, self.cell, self.log = stage, cell, log
        self.aux, _ = stages.aux_lr(stage, log.loss)
        self.best = stages.best_rates(stage, cell, log.loss)
        self.methods = [m for m in (*stage.methods, *cell.added) if self.losses_by_rate(m)]

    def at(self, method: str, rate: float, seed: int, share: float = 1.0) -> Trial:
        """A run of this cell."""
        made = stages.trial(self.stage, self.cell, method, rate, self.aux, seed, "")
        return replace(made, steps=int(share * made.steps))

    def losses(self, method: str, rate: float, share: float = 1.0) -> dict[int, float]:
        """The final loss of each seed that is done."""
        found = {s: self.log.loss(self.at(method, rate, s, share)) for s in range(self.stage.seeds)}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    def losses_by_rate(self, method: str) -> dict[float, list[float]]:
        """Those of all full runs of a method, by their rate."""
        rates = {t.rate for t in self.log.finals if t == self.at(method, t.rate, t.seed)}
        return {rate: [*self.losses(method, rate).values()] for rate in sorted(rates)}

    def difference(
        self, method: str, rate: float, other: str, other_rate: float, share: float = 1.0
    ) -> Interval:
        """The loss of a method less that of another one, over the seeds that both have."""
        ours, theirs = self.losses(method, rate, share), self.losses(other, other_rate)
        return interval([ours[s] - theirs[s] for s in ours if s in theirs])

    def interior(self, method: str) -> str:
        """The best rate, marked where it is at an end of the grid."""
        rate = self.best.get(method)
        if rate is None:
            return "not known yet"
        rates = [r for r in self.losses_by_rate(method) if 0 in self.losses(method, r)]
        lowest = min(rates, key=lambda r: self.losses(method, r)[0], default=rate)
        inside = lowest == rate and rates[0] < rate < rates[-1]
        return f"{rate:.3g}" + ("" if self.stage.frozen or inside else ", at the end of the grid")

    def steps_to_reach(self, method: str) -> list[float]:
        """The share of Muon's steps after which a method's curve is at Muon's final loss.

        Per seed, both at their best rates, linear between two evaluations; infinite where it never
        is. The rate of the curve is not decayed yet at that step: a run made for fewer steps is
        lower there.
        """
        if not {method, MUON} <= self.best.keys():
            return []
        shares: list[float] = []
        for seed, target in self.losses(MUON, self.best[MUON]).items():
            curve = self._curve(self.at(method, self.best[method], seed))
            if curve:
                shares.append(reached(curve, target) / self.stage.steps(self.cell))
        return shares

    def mean_of(self, quantity: str, method: str) -> str:
        """A diagnostic at the best rate, over the seeds."""
        rate = self.best.get(method)
        values = [
            r[quantity]
            for r in self.log.records
            if quantity in r
            and self.log.counts(r)
            and trial_of(r) == self.at(method, rate or 0.0, r["seed"])
        ]
        return f"{fmean(values):.3f}" if values else "—"

    def _curve(self, trial: Trial) -> list[tuple[float, float]]:
        for record in self.log.records:
            if trial_of(record) == trial and "losses" in record and self.log.counts(record):
                return [(float(step), float(loss)) for step, loss in record["losses"]]
        return []


def reached(curve: Sequence[tuple[float, float]], target: float) -> float:
    """The step at which a curve first is at `target` or below; infinite where it never is."""
    for (a, before), (b, after) in pairwise(curve):
        if before <= target:
            return a
        if after <= target:
            return a + (b - a) * (before - target) / (before - after)
    return math.inf


def report(folder: Path, known: Mapping[str, Stage]) -> None:
    """Write tables and a picture of every stage that has a log in a folder, into that folder."""
    log = Log(folder)
    for name, stage in known.items():
        if not log.path(name).exists():
            continue
        cells = [Results(stage, cell, log) for cell in stage.cells]
        cells = [found for found in cells if found.methods]
        page = folder / f"stage-{name.lower()}.md"
        write_whole(page, text(stage, cells, log))
        print(page)
        if cells and not stage.varies:
            for drawn in draw(figure(stage, cells), folder):
                print(drawn)
    print(f"all logs: {counted(log.records)}")


def text(stage: Stage, cells: Sequence[Results], log: Log) -> str:
    """The page of a stage."""
    own = [r for r in log.records if r["stage"] == stage.name]
    parts = [
        f"# Stage {stage.name}: tables",
        f"Drawn by `nucleon bench evidence --report` from `{log.path(stage.name).name}`, "
        f"{counted(own)}.",
    ]
    if stage.aux_rates:
        parts += ["## `aux_lr`, tuned for Muon", aux_table(stage, log)]
    for found in cells:
        parts += [f"## {found.cell.name}", rates_table(found)]
        if MUON in found.methods:
            parts += [against_muon(found)]
        parts += [shorter_table(found)] if found.cell.shorter else []
        parts += [variants_table(found)] if stage.varies else []
    return "\n\n".join(part for part in parts if part) + "\n"


def counted(records: Iterable[Record]) -> str:
    """How many runs there are, how they ended, and on what."""
    listed = list(records)
    ended = {s: sum(r["status"] == s for r in listed) for s in ("ok", "diverged", "failed")}
    seconds = occupied((ended_at(r) - r["seconds"], ended_at(r)) for r in listed if "seconds" in r)
    where = ", ".join(sorted({f"{r['device']}, torch {r['torch']}" for r in listed}))
    return (
        f"{len(listed)} lines: {ended['ok']} runs ended well, {ended['diverged']} diverged, "
        f"{ended['failed']} failed; {seconds / 60:.1f} minutes of {where}"
    )


def ended_at(record: Record) -> float:
    """The time at which a run ended, in seconds."""
    return datetime.fromisoformat(record["when"]).timestamp()


def occupied(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds in which at least one of some spans lasts."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def aux_table(stage: Stage, log: Log) -> str:
    chosen, trials = stages.aux_lr(stage, log.loss)
    rows = [
        [f"{t.aux_lr:.3g}" + (" (chosen)" if t.aux_lr == chosen else ""), told(log.loss(t))]
        for t in sorted(trials, key=lambda t: t.aux_lr or 0.0)
    ]
    return table(["`aux_lr`", f"loss at rate {stage.aux_rate:.3g}"], rows)


def rates_table(found: Results) -> str:
    """The mean loss at each rate; in brackets how many seeds, and the loss of seed 0 by itself."""
    rates = sorted({rate for method in found.methods for rate in found.losses_by_rate(method)})

    def cell(losses: Mapping[int, float]) -> str:
        if not losses:
            return ""
        alone = f"; {losses[0]:.4f}" if len(losses) > 1 and 0 in losses else ""
        return f"{fmean(losses.values()):.4f} ({len(losses)}{alone})"

    rows = [
        [method, *(cell(found.losses(method, rate)) for rate in rates), found.interior(method)]
        for method in found.methods
    ]
    header = ["loss (seeds; that of seed 0) at rate", *(f"{r:.3g}" for r in rates), "best"]
    return table(header, rows)


def against_muon(found: Results) -> str:
    """Each method beside Muon: at the best rate of each, and at each other multiple of it."""
    multiples = found.stage.rates if found.stage.frozen else found.stage.multiples
    known = [m for m in found.methods if m in found.best and MUON in found.best]

    def beside(multiple: float) -> Callable[[str], str]:
        def cell(method: str) -> str:
            rate, muons = multiple * found.best[method], multiple * found.best[MUON]
            less = found.difference(method, rate, MUON, muons)
            seeds = "seed" if less.count == 1 else "seeds"
            some = f" ({less.count} {seeds})" if 0 < less.count < found.stage.seeds else ""
            return f"{less}{some}"

        return cell

    def beside_leon(method: str) -> str:
        if method == LEON or LEON not in found.best:
            return "—"
        return str(found.difference(method, found.best[method], LEON, found.best[LEON]))

    def share(method: str) -> str:
        shares = found.steps_to_reach(method)
        there = [value for value in shares if math.isfinite(value)]
        if len(there) < len(shares):
            return f"reached by {len(there)} of {len(shares)} seeds"
        return str(interval(shares))

    columns: dict[str, Callable[[str], str]] = {
        "less Muon's loss, 95 % interval": lambda method: method,
        **{f"at {multiple:g}× the best rate": beside(multiple) for multiple in multiples},
        "less Leon c=1's at 1×": beside_leon,
        "share of Muon's steps to its loss": share,
        "smoothing share": lambda m: found.mean_of("smoothing_share_half", m),
        "at the end": lambda m: found.mean_of("smoothing_share_end", m),
        "cosine to Muon": lambda m: found.mean_of("cosine_to_muon_half", m),
    }
    rows = [[cell(method) for cell in columns.values()] for method in known if method != MUON]
    return table(columns, rows) if rows else ""


def shorter_table(found: Results) -> str:
    """Leon with fewer steps, the schedule made for them, beside Muon with all of its steps."""
    rows: list[list[str]] = []
    for share in found.cell.shorter:
        for method in (m for m in (LEON, LEON3) if {m, MUON} <= found.best.keys()):
            rate, muons = found.best[method], found.best[MUON]
            less = found.difference(method, rate, MUON, muons, share)
            if less.count:
                rows.append([f"{method}, {share:g} of the steps", str(less), str(less.count)])
    return (
        table(["less Muon's loss with all steps", "95 % interval", "seeds"], rows) if rows else ""
    )


def variants_table(found: Results) -> str:
    """Each variant beside the method that it changes, at the best rate of each."""
    before = found.stage.before
    assert before is not None
    original = Results(before, before.cell(found.cell.name), found.log)
    pairs = [(method, VARIANTS[method].of) for method in found.methods] + [*COMPARED]
    rows: list[list[str]] = []
    for method, other in pairs:
        theirs = found if other in VARIANTS else original
        if method in found.best and other in theirs.best:
            rate, ours = theirs.best[other], found.losses(method, found.best[method])
            less, twice = (
                interval([ours[s] - others[s] for s in ours if s in others])
                for others in (theirs.losses(other, rate), theirs.losses(other, 2 * rate))
            )
            beyond = str(twice) if twice.count == less.count else "—"
            rows.append([method, f"{other} at {rate:.3g}", str(less), beyond, str(less.count)])
    header = ["variant, at its best rate", "less the loss of", "95 % interval"]
    header += ["the same at twice that rate", "seeds"]
    return table(header, rows) if rows else ""


def figure(stage: Stage, cells: Sequence[Results]) -> Figure:
    """Loss against rate, a panel for each cell; over several batch sizes, Leon beside Muon last."""
    ordered = sorted(cells, key=lambda found: (found.cell.adapter, found.cell.sequences))
    panels = [rates_panel(found) for found in ordered]
    if len(ordered) > 1 and not stage.tunes:
        panels.append(batches_panel(ordered))
    caption = f"What is above the best by more than {NEAR} is not drawn."
    return Figure(f"stage-{stage.name.lower()}", TITLES[stage.name], caption, tuple(panels))


def rates_panel(found: Results) -> Panel:
    """The loss at each rate that is near the best of all, a line for each method.

    It is the mean over the seeds that all points have: seeds differ by more than methods do.
    """
    lines = {m: {r: found.losses(m, r) for r in found.losses_by_rate(m)} for m in found.methods}
    seeds = set.intersection(*({*one} for line in lines.values() for one in line.values())) or {0}
    means = {
        method: {
            rate: fmean(one[s] for s in seeds) for rate, one in line.items() if seeds <= {*one}
        }
        for method, line in lines.items()
    }
    lowest = min((mean for line in means.values() for mean in line.values()), default=0.0)
    series: list[Series] = []
    for method, line in means.items():
        near = {
            r: mean for r, mean in line.items() if math.isfinite(mean) and mean <= lowest + NEAR
        }
        series.append(Series(method, [*near], [*near.values()], style=STYLES[method]))
    title = named(found.stage, found.cell)
    return Panel(title, "learning rate", "held-out loss, nats", tuple(series), "log", marked=True)


def batches_panel(cells: Sequence[Results]) -> Panel:
    """The loss of each Leon less Muon's at the best rate of each, with its interval."""
    lines: list[Series] = []
    for method in (LEON, LEON3):
        less: dict[float, Interval] = {}
        for found in (f for f in cells if {method, MUON} <= f.best.keys()):
            here = found.difference(method, found.best[method], MUON, found.best[MUON])
            if math.isfinite(here.margin):
                less[found.cell.sequences * found.stage.context] = here
        low, high = ([i.mean + s * i.margin for i in less.values()] for s in (-1, 1))
        means = [i.mean for i in less.values()]
        lines.append(Series(method, [*less], means, low, high, STYLES[method]))
    sizes = [x for line in lines for x in line.x] or [1.0]
    lines.append(Series(MUON, [min(sizes), max(sizes)], [0.0, 0.0], style=STYLES[MUON]))
    title = "less Muon's loss, each tuned; 95 % intervals"
    return Panel(title, "tokens per step", "nats", tuple(lines), "log", marked=True)


def named(stage: Stage, cell: Cell) -> str:
    """A cell, for a reader of the picture."""
    if not stage.tunes:
        return f"{cell.name} tokens per step"
    what = "LoRA" if cell.adapter else "all weights"
    return f"{what}, {cell.sequences} sequences per step"


def told(loss: float | None) -> str:
    return "—" if loss is None else f"{loss:.4f}"
