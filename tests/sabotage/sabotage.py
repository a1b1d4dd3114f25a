"""The sabotage table: every fault of `faults.py`, and which check of which claim notices it.

    python tests/sabotage/sabotage.py             # all of them, on two processes
    python tests/sabotage/sabotage.py "η = 1" …   # these; --first: by the first claim of each

Each pair of a fault and a claim runs with `--quick` in a process of its own, forked from one that
has imported everything. A claim notices by a check that fails with the fault; one that raises does
not, unless the fault says so. The exit code is 1 unless every claim named beside a fault notices it
and passes without any.
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
import faults_of_lemmas  # noqa: F401
from fault import FAULTS, Fault

from nucleon.claims import CLAIMS, Settings, Silent

SECONDS = 900  # of a run, at most


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


class Outcome(NamedTuple):
    """The checks of a run that failed, or the exception that ended it."""

    failed: list[str]
    error: str = ""


def outcome(job: tuple[int | None, str]) -> Outcome:
    """How a claim fares with a fault, or without any."""
    index, claim = job
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    if index is not None:
        FAULTS[index].put_in()
    try:
        result = CLAIMS[claim].run(Settings(quick=True), Silent())
    except Exception as error:
        return Outcome([], f"{type(error).__name__}: {error}")
    return Outcome([check.name for check in result.checks if not check.passed])


def outcomes(
    names: list[str], *, first: bool, processes: int
) -> Iterator[tuple[Fault | None, str, Outcome]]:
    """Every claim without a fault, then every fault and claim, as they are found."""
    chosen = [i for i, f in enumerate(FAULTS) if not names or f.name in names]
    pairs = [(i, claim) for i in chosen for claim in FAULTS[i].claims[: 1 if first else None]]
    sound = [(None, claim) for claim in dict.fromkeys(claim for _, claim in pairs)]
    jobs: list[tuple[int | None, str]] = [*sound, *pairs]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for (index, claim), found in zip(jobs, pool.imap(outcome, jobs), strict=True):
            yield None if index is None else FAULTS[index], claim, found
        pool.close()
        pool.join()


def as_it_should(fault: Fault | None, found: Outcome) -> bool:
    """Whether a sound library passes, or a fault is noticed."""
    if fault is None:
        return not found.failed and not found.error
    return bool(found.failed) or (fault.breaks and bool(found.error))


def row(fault: Fault | None, claim: str, found: Outcome) -> str:
    """A line of the table."""
    more = f" (+{len(found.failed) - 1})" if len(found.failed) > 1 else ""
    seen = f"{found.failed[0]}{more}" if found.failed else found.error and f"raises {found.error}"
    if fault is None:
        return f"  without a fault {claim} FAILS: {seen}"
    if not as_it_should(fault, found):
        seen = f"NOT NOTICED {seen}".rstrip()
    return f"{'*' if fault.issue else ' '} {fault.name:<48} {claim:<20} {seen}"


def main(names: list[str]) -> int:
    first = names[:1] == ["--first"]
    names = names[first:]
    unknown = set(names) - {f.name for f in FAULTS}
    if unknown:
        print(f"no fault is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the processes share the cores
    begun, seen, wrong = time.perf_counter(), set[str](), 0
    pairs = sound = 0
    for fault, claim, found in outcomes(names, first=first, processes=2):
        right = as_it_should(fault, found)
        wrong += not right
        if fault is not None:
            seen.add(fault.name)
            pairs += right
        else:
            sound += right
        if fault is not None or not right:
            print(row(fault, claim, found), flush=True)
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(
        f"{len(seen)} faults (* of the issue), {pairs} pairs noticed, {sound} claims pass without "
        f"a fault, {wrong} not as they should, {time.perf_counter() - begun:.0f} s, {spent:.0f} s "
        f"of processor time"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
