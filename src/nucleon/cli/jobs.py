"""Check a claim and write its run, in this process or in several at once."""

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from nucleon.claims import Claim, Progress, Result, Settings
from nucleon.cli.console import CommandError, explain
from nucleon.report.runs import draft, publish

START = "spawn"  # a fork of a process with threads may hang


@dataclass(frozen=True)
class Outcome:
    """Outcome of checking a claim.

    Args:
        claim: the claim.
        result: its result; None if the measurement failed.
        seconds: duration of the measurement.
        folder: folder of the run; None if it could not be saved.
        trouble: a sentence and a hint, if an error occurred.
        resumed: True if an earlier run was used.
    """

    claim: Claim
    result: Result | None = None
    seconds: float = 0.0
    folder: Path | None = None
    trouble: tuple[str, str] | None = None
    resumed: bool = False


def command_of(claim: Claim, settings: Settings) -> str:
    """Return the command that repeats the run of a claim."""
    words = f"nucleon reproduce {claim.id}" + " --quick" * settings.quick
    for name, default in (("seeds", None), ("first_seed", 0)):
        if (value := getattr(settings, name)) != default:
            words += f" --{name.replace('_', '-')} {value}"
    return words


def check(
    claim: Claim,
    settings: Settings,
    output: Path,
    progress: Progress,
    debug: bool,
    command: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Outcome:
    """Measure `claim` and write its run; return a failed measurement as an outcome too.

    The draft comes first, so an output folder that cannot be written raises before any work.

    `command` repeats the run, with these `options`; default: `nucleon reproduce` with the settings.
    """
    with draft(output, claim.id) as folder:
        started, clock = datetime.now().astimezone(), time.perf_counter()
        outcome = Outcome(claim)
        try:
            result = claim.run(settings, progress)
            outcome = Outcome(claim, result, time.perf_counter() - clock)
            final = publish(
                folder,
                claim,
                result,
                command=command or command_of(claim, settings),
                options=options or asdict(settings),
                started=started,
                seconds=outcome.seconds,
            )
            return replace(outcome, folder=final)
        except Exception as error:
            if debug:
                raise
            return replace(outcome, trouble=explain(error))


def check_in_parallel(
    claims: Sequence[Claim], settings: Settings, output: Path, jobs: int, debug: bool
) -> Iterator[Outcome]:
    """Yield outcomes as claims finish in `jobs` processes."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, mp.get_context(START), _enter_worker, (threads,))
    try:
        rest = (settings, output, Progress(), debug)
        futures = [pool.submit(check, claim, *rest) for claim in claims]
        yield from (future.result() for future in as_completed(futures))
    except BrokenProcessPool:
        raise CommandError(
            "a process was killed, perhaps for want of memory",
            "run the same command with --resume and fewer --jobs",
        ) from None
    except BaseException:
        for worker in mp.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _enter_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, which deletes drafts
