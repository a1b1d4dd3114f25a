"""The sabotage table: every fault of `faults.py`, and which check of which claim notices it.

    python tests/mutants/sabotage.py             # all of them, on two processes
    python tests/mutants/sabotage.py "η = 1" …   # these; --first: by the first claim of each

Each pair of a fault and a claim runs with `--quick` in a process of its own, forked from one that
has imported everything. A claim notices by a check that fails with the fault and passes without it.
The exit code is 1 unless every claim named beside a fault notices it.
"""

import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from faults import FAULTS, Fault

from nucleon.experiments import CLAIMS, Settings, Silent

SECONDS = 900  # of a run, at most


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def failures(job: tuple[int | None, str]) -> list[str]:
    """The checks of a claim that fail with a fault, or without any."""
    index, claim = job
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    if index is not None:
        FAULTS[index].put_in()
    try:
        result = CLAIMS[claim].run(Settings(quick=True), Silent())
    except TimeoutError:
        return []
    except Exception as error:
        return [f"breaks: {type(error).__name__}: {error}"]
    return [check.name for check in result.checks if not check.passed]


def noticed(
    names: list[str], *, first: bool, processes: int
) -> Iterator[tuple[Fault, str, list[str]]]:
    """Each fault and claim with the checks that fail because of it, as they are found."""
    chosen = [i for i, f in enumerate(FAULTS) if not names or f.name in names]
    pairs = [(i, claim) for i in chosen for claim in FAULTS[i].claims[: 1 if first else None]]
    claims = list(dict.fromkeys(claim for _, claim in pairs))
    sound: list[tuple[int | None, str]] = [(None, claim) for claim in claims]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        found = pool.imap(failures, [*sound, *pairs])
        always = {claim: next(found) for claim in claims}
        for (index, claim), checks in zip(pairs, found, strict=True):
            yield FAULTS[index], claim, [name for name in checks if name not in always[claim]]
        pool.close()
        pool.join()


def row(fault: Fault, claim: str, checks: list[str]) -> str:
    more = f" (+{len(checks) - 1})" if len(checks) > 1 else ""
    seen = f"{checks[0]}{more}" if checks else "NOT NOTICED"
    return f"{'*' if fault.issue else ' '} {fault.name:<48} {claim:<20} {seen}"


def main(names: list[str]) -> int:
    first = names[:1] == ["--first"]
    names = names[first:]
    unknown = set(names) - {f.name for f in FAULTS}
    if unknown:
        print(f"no fault is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the processes share the cores
    begun, found = time.perf_counter(), dict[tuple[str, str], list[str]]()
    for fault, claim, checks in noticed(names, first=first, processes=2):
        found[fault.name, claim] = checks
        print(row(fault, claim, checks), flush=True)
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    missed = [pair for pair, checks in found.items() if not checks]
    faults, seen = {name for name, _ in found}, len(found) - len(missed)
    print(
        f"{len(faults)} faults (* of the issue), {seen} of {len(found)} pairs noticed, "
        f"{time.perf_counter() - begun:.0f} s, {spent:.0f} s of processor time"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
