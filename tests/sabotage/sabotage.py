"""The sabotage table: every fault of `faults.py`, and the check of each claim that notices it.

    python tests/sabotage/sabotage.py             # all of them, on two processes
    python tests/sabotage/sabotage.py "η = 1" …   # these; --first: by the first claim of each

Each pair of a fault and a claim runs with `--quick` in a process of its own, forked from one that
has imported everything. A claim notices by a check that fails with the fault, not by raising. The
exit code is 1 unless every claim named beside a fault notices it and passes without any.
"""

import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

import faults  # noqa: F401  (enters its rows)
from fault import FAULTS, Fault

from nucleon.claims import CLAIMS, Settings

SECONDS = 900  # of a run, at most


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


class Outcome(NamedTuple):
    """The checks of a run that failed, or the exception that ended it."""

    failed: list[str]
    error: str = ""


def outcome(job: tuple[int | None, str]) -> Outcome:
    """Run a claim with a fault, or without any."""
    index, claim = job
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    if index is not None:
        FAULTS[index].put_in()
    try:
        result = CLAIMS[claim].run(Settings(quick=True))
    except Exception as error:
        return Outcome([], f"{type(error).__name__}: {error}")
    return Outcome([check.name for check in result.checks if not check.passed])


def outcomes(
    names: list[str], *, first: bool, processes: int
) -> Iterator[tuple[Fault | None, str, Outcome]]:
    """Yield the outcome of every claim without a fault, then of every fault and claim."""
    chosen = [i for i, f in enumerate(FAULTS) if not names or f.name in names]
    pairs = [(i, claim) for i in chosen for claim in FAULTS[i].claims[: 1 if first else None]]
    sound = [(None, claim) for claim in dict.fromkeys(claim for _, claim in pairs)]
    jobs: list[tuple[int | None, str]] = [*sound, *pairs]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for (index, claim), result in zip(jobs, pool.imap(outcome, jobs), strict=True):
            yield None if index is None else FAULTS[index], claim, result
        pool.close()
        pool.join()


def as_it_should(fault: Fault | None, result: Outcome) -> bool:
    """Return whether a sound library passes, or a fault is noticed."""
    if fault is None:
        return not result.failed and not result.error
    return bool(result.failed)


def row(fault: Fault | None, claim: str, result: Outcome) -> str:
    """Return a line of the table."""
    failed, error = result
    more = f" (+{len(failed) - 1})" if len(failed) > 1 else ""
    words = f"{failed[0]}{more}" if failed else error and f"raises {error}"
    if fault is None:
        return f"  without a fault {claim} FAILS: {words}"
    if not failed:
        words = f"NOT NOTICED {words}".rstrip()
    return f"  {fault.name:<48} {claim:<20} {words}"


def main(names: list[str]) -> int:
    first = names[:1] == ["--first"]
    names = names[first:]
    unknown = set(names) - {f.name for f in FAULTS}
    unknown |= {claim for f in FAULTS for claim in f.claims} - set(CLAIMS)
    if unknown:
        print(f"no fault or claim is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the processes share the cores
    begun, seen, wrong = time.perf_counter(), set[str](), 0
    pairs = sound = 0
    for fault, claim, result in outcomes(names, first=first, processes=2):
        right = as_it_should(fault, result)
        wrong += not right
        if fault is not None:
            seen.add(fault.name)
            pairs += right
        else:
            sound += right
        if fault is not None or not right:
            print(row(fault, claim, result), flush=True)
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(
        f"{len(seen)} faults, {pairs} pairs noticed, {sound} claims pass without "
        f"a fault, {wrong} not as they should, {time.perf_counter() - begun:.0f} s, {spent:.0f} s "
        f"of processor time"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
