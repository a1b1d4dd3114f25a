"""One claim checked and written, here or in a process of its own beside others."""

import multiprocessing as mp
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from nucleon.claims import Claim, Progress, Result, Settings
from nucleon.cli.console import CommandError, explain, several_progresses
from nucleon.report import Run, draft, publish

START = "spawn"  # a fork of a process with threads may hang
SAY_EVERY = 0.1
"""Seconds between two messages of a process on its progress."""


@dataclass(frozen=True)
class Outcome:
    """What became of a claim.

    Args:
        claim: that was checked.
        result: None when the claim could not be measured.
        seconds: the measurement took.
        folder: of the run; None when it could not be saved.
        trouble: a sentence and a hint, where something went wrong.
        resumed: whether it was found rather than measured.
    """

    claim: Claim
    result: Result | None = None
    seconds: float = 0.0
    folder: Path | None = None
    trouble: tuple[str, str] | None = None
    resumed: bool = False


def command(claim: Claim, settings: Settings) -> str:
    """What repeats the run."""
    words = ["nucleon reproduce", claim.id]
    if settings.quick:
        words.append("--quick")
    if settings.seeds is not None:
        words.append(f"--seeds {settings.seeds}")
    if settings.first_seed:
        words.append(f"--first-seed {settings.first_seed}")
    if settings.device != "cpu":
        words.append(f"--device {settings.device}")
    return " ".join(words)


def check(
    claim: Claim, settings: Settings, output: Path, progress: Progress, debug: bool
) -> Outcome:
    """Measure `claim` and write its run; a measurement that fails is an outcome too.

    The draft comes first: an output folder that cannot be written is an error, before any work.
    """
    with draft(output, claim.id) as folder:
        started, clock = datetime.now().astimezone(), time.perf_counter()
        try:
            result = claim.run(settings, progress)
        except Exception as error:
            if debug:
                raise
            return Outcome(claim, trouble=explain(error))
        outcome = Outcome(claim, result, time.perf_counter() - clock)
        run = Run(
            claim,
            command(claim, settings),
            asdict(settings),
            result,
            started,
            outcome.seconds,
            expected=claim.expected(settings.quick),
        )
        try:
            return replace(outcome, folder=publish(run, folder))
        except OSError as error:
            if debug:
                raise
            error.filename = error.filename or str(output)  # a full disk does not name itself
            return replace(outcome, trouble=explain(error))


def check_in_parallel(
    claims: Sequence[Claim],
    settings: Settings,
    output: Path,
    jobs: int,
    debug: bool,
    starting: Callable[[Claim], None],
) -> Iterator[Outcome]:
    """Outcomes as they come, from `jobs` processes; `starting` is told of each claim before it."""
    context = mp.get_context(START)
    messages: mp.Queue[tuple[Any, ...]] = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, context, _enter_worker, (messages, threads))
    bars = dict[str, Progress]()
    with several_progresses() as named:
        try:
            left, pending = list(claims), set[Future[Outcome]]()
            while left or pending:
                while left and len(pending) < jobs:  # no claim waits in the pool's own queue
                    starting(left[0])
                    pending.add(pool.submit(_work, left.pop(0), settings, output, debug))
                _relay(messages, bars, named)
                finished, pending = wait(pending, timeout=0)
                yield from map(_outcome, finished)
        except BaseException:
            for worker in mp.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _outcome(finished: Future[Outcome]) -> Outcome:
    try:
        return finished.result()
    except BrokenProcessPool:
        raise CommandError(
            "a process was killed, perhaps for want of memory",
            "run the same command with --resume and fewer --jobs",
        ) from None


def _relay(messages: "mp.Queue[tuple[Any, ...]]", bars: dict[str, Progress], named: Any) -> None:
    """Pass on what the processes say, for a moment."""
    deadline = time.monotonic() + SAY_EVERY
    while (left := deadline - time.monotonic()) > 0:
        try:
            name, method, *arguments = messages.get(timeout=left)
        except queue.Empty:
            return
        if name not in bars:
            bars[name] = named(name)
        getattr(bars[name], method)(*arguments)


# ------------------------------------------------------------------ in the process

_messages: "mp.Queue[tuple[Any, ...]]"


def _enter_worker(messages: "mp.Queue[tuple[Any, ...]]", threads: int) -> None:
    global _messages
    _messages = messages
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so drafts are gone


def _work(claim: Claim, settings: Settings, output: Path, debug: bool) -> Outcome:
    return check(claim, settings, output, Messenger(claim.id, _messages), debug)


class Messenger:
    """Progress told to another process, not too often."""

    def __init__(self, name: str, messages: "mp.Queue[tuple[Any, ...]]") -> None:
        self.name, self.messages = name, messages

    def begin(self, total: int, unit: str) -> None:
        """Pass it on."""
        self.left, self.kept, self.said = total, 0, time.monotonic()
        self.messages.put((self.name, "begin", total, unit))

    def advance(self, amount: int, stage: str) -> None:
        """Pass it on when the last message is a moment old, or it is the last."""
        self.left -= amount
        self.kept += amount
        now = time.monotonic()
        if self.left <= 0 or now - self.said > SAY_EVERY:
            self.messages.put((self.name, "advance", self.kept, stage))
            self.kept, self.said = 0, now
