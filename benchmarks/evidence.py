"""Does Leon beat Muon where batches are small or rates are off? Runs, a log, tables, a picture.

    python benchmarks/evidence.py --plan                  # what is left, and its minutes
    python benchmarks/evidence.py --compile --budget 9 --jobs 4 --data DATA
    python benchmarks/evidence.py --report                # draws what the logs say
    python benchmarks/evidence.py --tiny --logs TRY --data DATA   # a small network, anywhere

The protocol is `docs/evidence.md`, the corpora in DATA are made by `evidence_corpus.py`. The queue
may be stopped at any moment: each finished run is one line of a log, and the next call goes on.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import gpt
from evidence_corpus import load
from evidence_plan import plan
from evidence_queue import Log, Queue, restart
from evidence_stages import LEON, MUON, STAGES, Part, Stage, Trial, parts, tiny, trial
from evidence_training import Loss, Texts, Training, reason

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs/evidence"
DATA = ROOT / ".data/evidence"
LIMIT = 1_000_000
WARM, TIMED = 5, 40
"""Steps of a probe."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=STAGES, help="only this one (all, the answer first)")
    parser.add_argument("--budget", type=float, default=LIMIT, help="minutes (until all is done)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (1)")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of the corpora")
    parser.add_argument("--logs", type=Path, default=DOCS, help="their folder (docs/evidence)")
    parser.add_argument("--compile", action="store_true", help="compile the models of A and B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small network and short runs")
    parser.add_argument("--probe", nargs="*", type=int, metavar="JOBS", help="time steps (1 4 8)")
    parser.add_argument("--plan", action="store_true", help="say what is left, in its order")
    parser.add_argument("--report", action="store_true", help="draw the logs")
    return parser.parse_args()


def run(chosen: argparse.Namespace, todo: Sequence[Part], loss: Loss) -> int:
    """Work through the queue."""
    began, seconds = time.monotonic(), 60 * chosen.budget
    chosen.logs.mkdir(parents=True, exist_ok=True)
    log, device = Log(chosen.logs), torch.device(chosen.device)
    queue = Queue(todo, log, chosen.data, device, jobs=chosen.jobs, seconds=seconds, loss=loss)
    whole = queue.work()
    spent = time.monotonic() - began
    if not whole and spent < seconds:
        restart(seconds - spent)
    print(f"{spent / 60:.1f} minutes; {queue.left()} runs are still wanted", flush=True)
    return 0


def probe(stage: Stage, data: Path, device: torch.device, jobs: Sequence[int], loss: Loss) -> None:
    """Milliseconds per step and run, for each cell and method, with so many runs side by side."""
    texts = Texts(load(data / stage.corpus), stage.context, device)
    print("  ".join(["tokens per step", "method", *(f"{n} jobs, ms" for n in jobs), "captured"]))
    totals = dict.fromkeys(jobs, 0.0)
    for cell in stage.cells:
        count = len(stage.rates) + len(stage.multiples) * (stage.seeds - 1)
        for method in (MUON, LEON):  # of the four methods two are Leon; AdamW takes less
            times, captured = list[str](), True
            for n in jobs:
                made = trial(stage, cell, method, 1e-3, 1e-3, 0, "probe")
                short = replace(made, steps=2 * (WARM + TIMED))
                try:
                    milliseconds, whole = timed(stage, short, texts, n, loss)
                except Exception as error:  # the other cells still tell
                    times.append(reason(error))
                    continue
                captured = captured and whole
                times.append(f"{milliseconds:.3f}")
                totals[n] += 2 * count * stage.steps(cell) * milliseconds / 60e3
            words = [str(cell.sequences * stage.context), method, *times, str(captured)]
            print("  ".join(words), flush=True)
    for n, minutes in totals.items():
        print(f"stage {stage.name} with {n} jobs, without extended grids: {minutes:.1f} minutes")


def timed(stage: Stage, made: Trial, texts: Texts, jobs: int, loss: Loss) -> tuple[float, bool]:
    """Milliseconds per step of one of `jobs` runs, and whether all of them are captured."""
    lanes = [Training(stage, made, texts, loss=loss) for _ in range(jobs)]

    def steps(count: int) -> None:
        for _ in range(count):
            for lane in lanes:
                with lane.on_stream():
                    lane.take(1)
        if texts.tokens.is_cuda:
            torch.cuda.synchronize()

    steps(WARM)
    clock = time.perf_counter()
    steps(TIMED)
    spent = time.perf_counter() - clock
    captured = all(lane.graph is not None for lane in lanes)
    lanes.clear()
    if texts.tokens.is_cuda:
        torch.cuda.empty_cache()
    return 1e3 * spent / (TIMED * jobs), captured


def main() -> int:
    chosen = arguments()
    todo = parts(chosen.stage, small=chosen.tiny)
    if chosen.plan:
        log = Log(chosen.logs)
        print(*plan(todo, log.loss, log.records), sep="\n")
        return 0
    if chosen.report:
        from evidence_report import report  # needs matplotlib

        known = {name: tiny(s) if chosen.tiny else s for name, s in STAGES.items()}
        report(chosen.logs, known)
        return 0
    loss = torch.compile(gpt.loss, dynamic=False) if chosen.compile else gpt.loss
    if chosen.probe is not None:
        stage = todo[0].stage
        probe(stage, chosen.data, torch.device(chosen.device), chosen.probe or (1, 4, 8), loss)
        return 0
    return run(chosen, todo, loss)


if __name__ == "__main__":
    sys.exit(main())
