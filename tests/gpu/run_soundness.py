"""Long, quiet and hostile runs on a CUDA device, judged on the host: a table, and exit code 1.

    python tests/gpu/run_soundness.py                      # all of it, on CUDA
    python tests/gpu/run_soundness.py --group skips rest   # some of it
    python tests/gpu/run_soundness.py --device cpu         # the same list with small matrices

It needs torch alone. The cases are those of `tests/soundness`: every step is compared with a
float64 oracle of the equations, see `soundness/oracle.py`.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from soundness.everything import every_case
from soundness.watch import Watched

GROUPS = ("quiet", "scales", "rest", "experts", "bound", "skips", "neighbours")


def outcome(case):
    """What a case came to, in one line, and the steps of matrices that it judged."""
    try:
        watched = case.run()
    except Exception as error:  # a program that lists failures goes on after one
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return "FAILED", found, 0, 0.0
    judged, longest = 0, 0.0
    if isinstance(watched, Watched):
        judged, longest = watched.judged, watched.longest
    return "passed", "", judged, longest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=GROUPS)
    options = parser.parse_args()
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    broken = False
    for group in options.group:
        start, counts, steps, longest = time.perf_counter(), {}, 0, 0.0
        for case in every_case(options.device):
            if case.group != group:
                continue
            word, line, judged, norm = outcome(case)
            counts[word] = counts.get(word, 0) + 1
            steps, longest = steps + judged, max(longest, norm)
            if word == "FAILED":
                broken = True
                print(f"    {word}: {case.group}: {case.name}: {line}", flush=True)
        tally = ", ".join(f"{n} {word}" for word, n in counts.items())
        seconds = time.perf_counter() - start
        judged = f"; {steps} steps judged, ‖P‖_op at most {longest:.5f}" if steps else ""
        print(f"{group:<11} {tally}{judged}; {seconds:.0f} s", flush=True)
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
