"""One run with an average beside runs decayed to each horizon: runs, a log, tables, a picture.

    python benchmarks/evidence.py plan                       # what is left, and its minutes
    python benchmarks/evidence.py run --processes 2          # all of it on a CPU, or go on
    python benchmarks/evidence.py run --cells A1,B --processes 16 --minutes 9.5 --out DIR
    python benchmarks/evidence.py tokens --out .data         # byte pairs for the cells on a GPU
    python benchmarks/evidence.py report                     # tables and picture of the log

The protocol is `docs/evidence.md`. Data: `--data DIR` or the variable NUCLEON_DATA. Each finished
run is a line of OUT/CELL.jsonl; lines in docs/evidence count as well. Which runs are wanted is a
function of the lines alone: first those that tune, then those that are compared.
"""

import argparse
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]  # where nothing is installed

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
import torch  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from evidence_cells import CELLS, GROUPS, METHODS, Cell  # noqa: E402
from nucleon._files import to_json  # noqa: E402
from nucleon.optim.average import get_multi_avg_fn  # noqa: E402
from nucleon.report.runs import processor  # noqa: E402

DOCS = ROOT / "docs/evidence"
EXTENSIONS = 2
"""A grid whose best rate is at an end grows there by factors of 2, at most so many times."""
GRACE = 20
"""Seconds after the end of the time in which runs may still finish."""
FRACTIONS = (0.05, 0.1, 0.2)
"""Mean ages of the averages, as parts of the run so far."""
OPTION = 0.1
"""The one that is the option `average`; the others stand beside it in the same run."""
COOLDOWN = 0.2
"""Part of a horizon in which a fork of the constant run falls linearly to zero: "wsd"."""
WARMUP = 60
"""Every schedule rises linearly over the first T/60 steps, T the cell's longest run."""
FALLS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "sqrt": lambda part: (1 + 24 * part) ** -0.5,  # of t/T: t0 = T/24, 50 at T = 1,200
    "inverse": lambda part: 1 / (1 + 4 * part),  # t0 = T/4
}
"""Rates without a horizon, read by the average."""
DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda part: 1 - part,  # of t/horizon
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}


@dataclass(frozen=True)
class Run:
    """A configuration; at the horizons `forks` a copy of the constant run is decayed to zero."""

    cell: str
    method: str
    schedule: str
    rate: float
    seed: int
    steps: int
    forks: tuple[int, ...] = ()


class Need(NamedTuple):
    """A loss that the protocol asks for; `arm` is a fall, a decay or "wsd"."""

    cell: str
    method: str
    arm: str
    rate: float
    seed: int
    horizon: int


class Choice(NamedTuple):
    """A setting chosen on the tuning seeds; `reading` is an f or "last"."""

    arm: str
    rate: float
    reading: str
    score: float
    inside: bool  # the rate is not at an end of its grid


def perform(run: Run, cell: Cell, data: Path) -> dict[str, Any]:
    """Train, and return the line of the log: readings {step: {name: loss}} and forks {step: …}."""
    began = time.perf_counter()
    torch.manual_seed(run.seed)
    problem = cell.task.problem(run.seed, cell.steps, data, cell.device)
    model, falling = problem.model, run.schedule in FALLS
    optimizer = METHODS[run.method](model, run.rate, OPTION if falling else None)
    averaged = getattr(optimizer, "averaged", None) if falling else None
    peaks = [group["lr"] for group in optimizer.param_groups]
    factor = FALLS[run.schedule] if falling else DECAYS[run.schedule]
    beside = {
        f"{f:g}": AveragedModel(model, multi_avg_fn=get_multi_avg_fn(f))
        for f in FRACTIONS
        if falling and not (averaged and f == OPTION)
    }

    def advance(step: int, factor: float) -> None:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor * min(1.0, (step + 1) * WARMUP / cell.steps)
        problem.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def judged(*fractions: float) -> dict[str, float]:
        found = {"last": problem.judge(model)}
        for name in (f"{f:g}" for f in fractions):
            if name in beside:
                found[name] = problem.judge(beside[name].module)
            elif averaged:
                with averaged():
                    found[name] = problem.judge(model)
        return {name + kind: v for name, one in found.items() for kind, v in one.items()}

    readings: dict[int, dict[str, float]] = {}
    forks: dict[int, dict[str, float]] = {}
    for step in range(run.steps):
        advance(step, factor(step / (cell.steps if falling else run.steps)))
        for average in beside.values():
            average.update_parameters(model)
        done = step + 1
        for end in (end for end in run.forks if before(end) == done):
            saved = deepcopy((model.state_dict(), optimizer.state_dict()))
            for later in range(done, end):
                advance(later, (end - later) / (end - done))
            forks[end] = judged()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if done in cell.horizons if falling else done == run.steps:
            readings[done] = judged(*FRACTIONS)
        elif falling and done in cell.between:
            readings[done] = judged(OPTION)
    device = torch.cuda.get_device_name() if cell.device == "cuda" else processor()
    seconds = round(time.perf_counter() - began, 2)
    versions = {"torch": torch.__version__, "device": device, "seconds": seconds}
    return {"run": asdict(run), "readings": readings, "forks": forks, **versions}


class Log:
    """The losses of finished runs.

    Args:
        folders: with files *.jsonl; one line a run.
    """

    def __init__(self, *folders: Path) -> None:
        self.losses: dict[Need, dict[str, float]] = {}
        self.seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for name in CELLS:
            for path in sorted({folder / f"{name}.jsonl" for folder in folders}):
                for line in path.read_text("utf-8").splitlines() if path.exists() else ():
                    try:
                        self.add(json.loads(line))
                    except (ValueError, KeyError, TypeError):
                        print(f"{path}: left out a broken line, {line[:60]}", file=sys.stderr)

    def add(self, record: dict[str, Any]) -> None:
        """Take in a line; of two runs of one configuration the first counts."""
        run = Run(**{**record["run"], "forks": tuple(record["run"]["forks"])})
        self.seconds[run.cell, run.method].append(record["seconds"] / length(run))
        for arm, found in ((run.schedule, record["readings"]), ("wsd", record["forks"])):
            for horizon, losses in found.items():
                need = Need(run.cell, run.method, arm, run.rate, run.seed, int(horizon))
                numbers = {k: float(v) for k, v in losses.items()}  # "inf" and "nan" too
                finite = {k: math.inf if math.isnan(v) else v for k, v in numbers.items()}
                self.losses.setdefault(need, finite)

    def expected(self, run: Run) -> float:
        """Return the seconds that a run is expected to take."""
        known = self.seconds[run.cell, run.method]
        return length(run) * (statistics.median(known) if known else CELLS[run.cell].seconds)


def length(run: Run) -> float:
    """Return the steps of a run and its forks."""
    return run.steps + COOLDOWN * sum(run.forks)


def arms(cell: Cell) -> list[tuple[str, tuple[int, ...]]]:
    """Return what is tuned on its own: every fall over all horizons, every decay at one."""
    falls = [(fall, cell.horizons) for fall in cell.falls]
    return falls + [(kind, (horizon,)) for kind, horizon in cell.decays]


def tune(
    name: str, method: str, arm: str, horizons: Sequence[int], log: Log
) -> Choice | list[Need]:
    """Return the setting with the least mean loss over tuning seeds and horizons, or what it lacks.

    A run with an average has one rate and one f for all of its horizons.
    """
    cell = CELLS[name]
    if cell.settings and arm in FALLS:
        return tune(cell.settings, method, arm, CELLS[cell.settings].horizons, log)
    rates, grown = list(cell.grids[method]), {0.5: 0, 2.0: 0}
    readings = [f"{f:g}" for f in FRACTIONS] if arm in FALLS else ["last"]
    while True:
        wanted = {
            rate: [Need(name, method, arm, rate, s, h) for s in cell.tuning for h in horizons]
            for rate in rates
        }
        if missing := [n for needs in wanted.values() for n in needs if n not in log.losses]:
            return missing
        score, rate, reading = min(
            (statistics.fmean(log.losses[n][reading] for n in needs), rate, reading)
            for rate, needs in wanted.items()
            for reading in readings
        )
        factor = 0.5 if rate == min(rates) else 2.0
        inside = min(rates) < rate < max(rates)
        if inside or grown[factor] == EXTENSIONS:
            return Choice(arm, rate, reading, score, inside)
        grown[factor] += 1
        rates.append(factor * rate)


def needs(name: str, log: Log) -> Iterator[Need]:
    """Yield what a cell lacks: for each method what chooses its settings, then what is compared."""
    for method in CELLS[name].grids:
        tuned = [(tune(name, method, *arm, log), arm[1]) for arm in arms(CELLS[name])]
        if missing := [need for found, _ in tuned if isinstance(found, list) for need in found]:
            yield from missing
            continue
        for (arm, rate, *_), horizons in tuned:
            seeds = range(CELLS[name].seeds)
            wanted = (Need(name, method, arm, rate, s, h) for s in seeds for h in horizons)
            yield from (need for need in wanted if need not in log.losses)


def runs(wanted: Sequence[Need]) -> list[Run]:
    """Return the runs that answer; one constant run serves its average and all of its forks."""
    grouped: defaultdict[Any, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for cell, method, arm, rate, seed, horizon in wanted:
        schedule = "constant" if arm == "wsd" else arm
        end = 0 if schedule in FALLS else horizon
        grouped[cell, method, schedule, rate, seed, end][arm == "wsd"].add(horizon)
    return [
        Run(*key[:5], max(*reads, *map(before, forks), 0), tuple(sorted(forks)))
        for key, (reads, forks) in grouped.items()
    ]


def before(horizon: int) -> int:
    """Return the step at which the cooldown to a horizon begins."""
    return round((1 - COOLDOWN) * horizon)


def identity(run: Run) -> tuple[Any, ...]:
    """Return what two runs share of which one may serve for both."""
    end = 0 if run.schedule in FALLS else run.steps
    return (run.cell, run.method, run.schedule, run.rate, run.seed, end)


def outstanding(cells: Sequence[str], log: Log) -> list[Run]:
    """Return the runs that are wanted now: those that tune first, then the longest."""

    def late(run: Run) -> tuple[bool, float]:
        return run.seed not in CELLS[run.cell].tuning, -log.expected(run)

    return sorted(runs([need for name in cells for need in needs(name, log)]), key=late)


def work(tasks: Any, results: Any, data: Path) -> None:
    """Perform runs in a process of one thread until there are none."""
    torch.set_num_threads(1)
    for run in iter(tasks.get, None):
        try:
            results.put((run, perform(run, CELLS[run.cell], data)))
        except Exception:
            results.put((run, traceback.format_exc()))


def finish(
    cells: Sequence[str], log: Log, out: Path, data: Path, processes: int, end: float
) -> int:
    """Perform what is outstanding and ends before `end`; return how many runs raised."""
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(tasks, results, data), daemon=True)
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    running: dict[tuple[Any, ...], Run] = {}
    raised: set[tuple[Any, ...]] = set()
    try:
        while True:
            for run in outstanding(cells, log):
                fits = time.monotonic() + 1.1 * log.expected(run) < end
                if fits and len(running) < processes and identity(run) not in {*running, *raised}:
                    running[identity(run)] = run
                    tasks.put(run)
            if not running or time.monotonic() > end + GRACE:
                return len(raised)
            try:
                run, record = results.get(timeout=1)
            except queue.Empty:
                if not all(worker.is_alive() for worker in workers):
                    raise RuntimeError("a process died, perhaps of memory; take fewer") from None
                continue
            del running[identity(run)]
            if isinstance(record, str):
                print(f"{run}\n{record}", file=sys.stderr, flush=True)
                raised.add(identity(run))
                continue
            log.add(record)
            append(out / f"{run.cell}.jsonl", record)
    finally:
        for worker in workers:
            worker.kill()


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = to_json(record).encode() + b"\n"
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        line = b"\n" + line  # after a line that a full disk or a lost machine cut off
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("plan", "run", "tokens", "report"))
    parser.add_argument("--cells", default="all", help="names with commas; C, G, all (on a CPU)")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each (2)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then (when all is done)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of new lines")
    default = os.environ.get("NUCLEON_DATA", ROOT / ".data")
    parser.add_argument("--data", type=Path, default=Path(default), help="or NUCLEON_DATA")
    chosen = parser.parse_args()
    end = time.monotonic() + 60 * chosen.minutes
    cells = [c for word in chosen.cells.split(",") for c in GROUPS.get(word, [word])]
    if unknown := set(cells) - set(CELLS):
        parser.error(f"unknown cells {sorted(unknown)}; valid: {', '.join([*GROUPS, *CELLS])}")
    if chosen.command == "tokens":
        from evidence_cells import write_tokens

        write_tokens(chosen.data, chosen.out)
        return 0
    log = Log(DOCS, chosen.out)
    if chosen.command == "report":
        from evidence_report import report

        report(log, DOCS.with_suffix(".md"), DOCS / "anytime.png")
        return 0
    raised = 0
    if chosen.command == "run":
        if not chosen.data.is_dir():
            parser.error(f"there is no folder {chosen.data}; --data DIR or NUCLEON_DATA names it")
        raised = finish(cells, log, chosen.out, chosen.data, chosen.processes, end)
    left = outstanding(cells, log)
    for cell in dict.fromkeys(run.cell for run in left):
        some = [run for run in left if run.cell == cell]
        minutes = sum(map(log.expected, some)) / 60
        print(f"{cell}: {len(some)} runs wanted now, {minutes:.0f} minutes of one process")
    print(f"{'all done' if not left else 'run again'}; {raised} runs raised")
    return raised > 0


if __name__ == "__main__":
    sys.exit(main())
