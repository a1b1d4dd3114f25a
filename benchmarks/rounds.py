"""A long game in constant memory: the peak of the process and what the trace holds, as it grows.

    python benchmarks/rounds.py                       # FAML at 32×64, a million rounds
    python benchmarks/rounds.py --learner ftl --stream sparse --rounds 10000

The stream is lazy, the learner and the ledger keep sums, and the trace about 20 rows a decade, so
the peak after the first rounds, when libraries have loaded, is the peak at the end.
"""

import argparse
import platform
import resource
import time

import torch

from nucleon.online import learners, play
from nucleon.online.game import Row
from nucleon.online.streams import STREAMS

LEARNERS = {kind.name: kind for kind in (learners.FTL, learners.FTPL, learners.FAML)}
LAZY = {name: entry.constructor for name, entry in STREAMS.items() if name != "replay"}
MIB = 2**20


def peak() -> float:
    """The most memory the process has ever held resident, in MiB."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--learner", default="faml", choices=LEARNERS, help="default faml")
    parser.add_argument("--stream", default="gaussian", choices=LAZY, help="default gaussian")
    parser.add_argument("--shape", default="32x64", help="m x n (default 32x64)")
    parser.add_argument("--rounds", type=int, default=10**6, help="default 1000000")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    m, n = map(int, arguments.shape.split("x"))
    learner = LEARNERS[arguments.learner]((m, n), dtype=torch.float64, validate=False)
    stream = LAZY[arguments.stream]((m, n), dtype=torch.float64)
    marks = {10**k for k in range(2, 10)} | {arguments.rounds}
    print(f"torch {torch.__version__}, {learner.name} on {stream.name}, {m}×{n}")
    print(f"{'rounds':>10}{'seconds':>10}{'peak MiB':>10}{'regret':>14}{'bound':>14}", flush=True)
    began, peaks = time.perf_counter(), []

    def report(row: Row) -> None:
        if row.round in marks:
            peaks.append(peak())
            numbers = f"{row.regret.item():14.6g}{row.bound.item():14.6g}"
            elapsed = time.perf_counter() - began
            print(f"{row.round:10}{elapsed:10.1f}{peaks[-1]:10.1f}{numbers}", flush=True)

    trace = play(learner, stream, arguments.rounds, on_record=report)
    grown = peaks[-1] - peaks[0]
    print(f"{len(trace.rounds)} rows in the trace")
    print(f"{'PASS' if grown < 4 else 'FAIL'}  growth of the peak, MiB: {grown:.1f} < 4")


if __name__ == "__main__":
    main()
