"""What is left to do for `evidence.py`, and the minutes it takes, from the runs that are done."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import evidence_stages as stages
from evidence_stages import Losses, Part, Stage, Trial

Record = Mapping[str, Any]
PLAIN = 6.3 / 4.3
"""A step of a model that is not compiled beside one that is (`--probe` at 4 k tokens per step)."""
COMPILING = 40.0
"""Seconds in which the first run of a process at a batch size is compiled and the others wait."""


def expected(stage: Stage, trial: Trial, records: Sequence[Record], jobs: int) -> float | None:
    """The seconds that a run takes beside `jobs` − 1 others, from those done on the same device.

    Those of its own stage at the nearest batch size count, and of these the ones that had as many
    beside them; where none had, the device is shared: with twice the runs each takes twice as long.
    Where no run had that batch size: a smaller one takes no longer per step, a larger one no longer
    per token. A stage that has none takes the time of the stage before it, which grows with the
    weights of the blocks. None where there is no run at all.
    """
    alike = [r for r in records if r["stage"] == stage.name]
    if not alike and stage.before is not None:
        factor = weights(stage) / weights(stage.before) * (PLAIN if stage.tunes else 1.0)
        earlier = expected(stage.before, trial, records, jobs)
        return None if earlier is None else factor * earlier
    if not alike:
        return None
    size = trial.sequences
    nearest = min({r["sequences"] for r in alike}, key=lambda n: abs(math.log(n / size)))
    near = [r for r in alike if r["sequences"] == nearest]
    near = [r for r in near if r["jobs"] == jobs] or near
    per_step = median(r["seconds"] / r["steps"] * jobs / r["jobs"] for r in near)
    return trial.steps * per_step * max(1.0, size / nearest)


def weights(stage: Stage) -> int:
    """Those in its blocks."""
    return 12 * stage.layers * stage.width**2


def plan(parts: Sequence[Part], losses: Losses, records: Iterable[Record]) -> list[str]:
    """Lines of a table: each part, its runs that are left and their minutes, and their sum.

    The times are those of the device, and of the number of runs side by side, that most runs had.
    """
    left, timed = to_come(parts, losses), [r for r in records if "seconds" in r]
    if not timed:
        return [f"{len(left)} runs; no run was timed yet, so their minutes are not known"]
    ways = Counter((r["device"], r["jobs"]) for r in timed)
    device, jobs = max(ways, key=lambda way: ways[way])
    timed = [r for r in timed if r["device"] == device]
    lines, total = list[str](), 0.0
    for part in parts:
        own = [made for whose, made in left if whose is part]
        if not own:
            continue
        sizes = 0 if part.stage.tunes else len({made.sequences for made in own})
        spent = sum(expected(part.stage, made, timed, jobs) or 0.0 for made in own) / jobs
        minutes = (spent + sizes * COMPILING) / 60
        total += minutes
        lines.append(row(len(own), minutes, part.name))
    return [*lines, row(len(left), total, f"in all, {jobs} runs side by side on {device}")]


def row(runs: int, minutes: float, name: str) -> str:
    """A line of the table."""
    return f"{runs:4} runs  {minutes:5.1f} minutes  {name}"


def to_come(parts: Sequence[Part], losses: Losses) -> list[tuple[Part, Trial]]:
    """The runs that are left if no grid has to be extended further than it is known to be."""
    guesses: dict[Trial, float] = {}

    def loss(made: Trial) -> float | None:
        known = losses(made)
        return guesses.get(made) if known is None else known

    found: list[tuple[Part, Trial]] = []
    while True:
        new = [(p, t) for p, t in stages.in_order(parts, loss) if loss(t) is None]
        if not new:
            return found
        for part, made in new:
            cell = part.stage.cell(made.cell)
            rates = stages.first_rates(part.stage, cell, made.method, loss)
            middle = rates[len(rates) // 2]
            guesses[made] = 1e3 + abs(math.log(made.rate / middle))  # above all that are known
        found += new
