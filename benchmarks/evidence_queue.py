"""The queue of `evidence.py`: a log of finished runs, and lanes in which the next ones advance.

Only the log counts. A run that is killed leaves nothing and is done again; one that fails leaves a
line that says why, and is tried once more without a captured step.
"""

import gc
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

import evidence_stages as stages
import nucleon
from evidence_corpus import load
from evidence_stages import TRIES, Stage, Trial
from evidence_training import Loss, Texts, Training, Weights, reason
from nucleon._files import to_json
from nucleon.training import models

Record = Mapping[str, Any]
MARGIN = 1.3
"""A run is expected to take so much longer than the median of those nearest to it so far."""
MOST_MEMORY = 60 * 2**30
"""Bytes above which what finished runs have left is given back to the device."""
LOST = ("CUDA error", "device-side assert", "CUDNN_STATUS", "CUBLAS_STATUS")
"""Words of an error after which the process can use the device no more."""


class Log:
    """Finished runs, one JSON line each, and what they say; one process may write it.

    Args:
        path: the file, made with the first line; those of the other stages are beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self.finals: dict[Trial, float] = {}
        self.failures: Counter[Trial] = Counter()
        for other in sorted({*path.parent.glob("stage-*.jsonl"), path}):
            self._take(read(other))

    def append(self, record: Record) -> None:
        """Write a line at once, and have the disk hold it; half a line of a killed one goes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as opened:
            opened.seek(0)
            content = opened.read()
            opened.truncate(content.rfind(b"\n") + 1)
            os.write(opened.fileno(), (to_json(record) + "\n").encode())
            os.fsync(opened.fileno())
        self._take([json.loads(to_json(record))])

    def loss(self, trial: Trial) -> float | None:
        """The final loss, infinite where it diverged or failed for good; None: still to be done."""
        if trial in self.finals:
            return self.finals[trial]
        return float("inf") if self.failures[trial] >= TRIES else None

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            self.records.append(record)
            trial = trial_of(record)
            if record["status"] == "failed":
                self.failures[trial] += 1
            else:
                fine = record["status"] == "ok"
                self.finals[trial] = record["final_loss"] if fine else float("inf")


def read(path: Path) -> list[Record]:
    """The lines of a log; without the last where it has no end."""
    if not path.exists():
        return []
    *lines, _ = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines]


def trial_of(record: Record) -> Trial:
    """The run that a line is of."""
    return Trial(**{f.name: record[f.name] for f in fields(Trial)})


class Queue:
    """Runs of a stage, several side by side, until none is wanted or the time is over.

    Args:
        stage: whose.
        log: what is done.
        data: the folder of the corpora.
        device: where to run.
        jobs: runs side by side.
        seconds: that may be spent; no run begins that is not expected to end by then.
        loss: of a model on a batch (`models.loss`).
        say: is told of each run.
    """

    def __init__(
        self,
        stage: Stage,
        log: Log,
        data: Path,
        device: torch.device,
        *,
        jobs: int,
        seconds: float,
        loss: Loss = models.loss,
        say: Callable[[str], None] = print,
    ) -> None:
        self.stage, self.log, self.data, self.device = stage, log, data, device
        self.jobs, self.loss, self.say = jobs, loss, say
        self.end = time.monotonic() + seconds
        self.texts = Texts(load(data / stage.corpus), stage.context, device)
        self.lanes: list[Training] = []
        # Memory that a run has left is used again on its stream, so they are few.
        self.streams = (
            [torch.cuda.Stream(device) for _ in range(jobs)] if device.type == "cuda" else []
        )
        self.weights: Weights | None = None
        self.lost = False

    def work(self) -> bool:
        """Do what is wanted; False where the device was lost, and another process must go on."""
        if self.stage.tunes and self.left():  # the same seed gives the same model every time
            self.weights = self._base()
        while not self.lost:
            while not self.lost and len(self.lanes) < self.jobs and self._begin():
                pass
            if not self.lanes:
                break
            self._advance()
        return not self.lost

    def left(self) -> int:
        """Runs that are wanted as things stand; others may follow from their losses."""
        return sum(self.log.loss(t) is None for t in dict.fromkeys(self._wanted()))

    def expected(self, trial: Trial) -> float | None:
        """The seconds that a run will take, from those before it; None before the first."""
        own = [r for r in self.log.records if r["stage"] == trial.stage and "seconds" in r]
        here = [r for r in own if r["device"] == self._device() and r["jobs"] == self.jobs]
        if not here:
            return None
        # Where none like it was done: a smaller batch takes no longer per step, a larger one
        # no longer per token.
        size = trial.sequences
        nearest = min({r["sequences"] for r in here}, key=lambda n: abs(math.log(n / size)))
        alike = [r["seconds"] / r["steps"] for r in here if r["sequences"] == nearest]
        return MARGIN * trial.steps * median(alike) * max(1.0, size / nearest)

    def _wanted(self) -> Iterable[Trial]:
        return stages.wanted(self.stage, self.log.loss)

    def _begin(self) -> bool:
        """Put the next run into a lane; False where there is none, or no time for it."""
        running = {lane.trial for lane in self.lanes}
        for trial in self._wanted():
            if trial not in running and self.log.loss(trial) is None:
                break
        else:
            return False
        left = self.end - time.monotonic()
        if left <= 0 or (self.expected(trial) or 0.0) > left:
            return False
        if self.device.type == "cuda" and torch.cuda.memory_reserved() > MOST_MEMORY:
            gc.collect()
            torch.cuda.empty_cache()
        try:
            self.lanes.append(self._training(trial))
        except Exception as error:  # whatever it is, the others go on
            self._failed(trial, error)
        return True

    def _training(self, trial: Trial) -> Training:
        taken = [lane.stream for lane in self.lanes]
        return Training(
            self.stage,
            trial,
            self.texts,
            capture=self.log.failures[trial] == 0,
            loss=self.loss,
            weights=self.weights,
            stream=next((stream for stream in self.streams if stream not in taken), None),
        )

    def _advance(self) -> None:
        """Each lane that is not far ahead of the device goes on; those at their end are logged."""
        moved = False
        for lane in list(self.lanes):
            if self.lost:
                break
            try:
                if not lane.ready():
                    continue
                moved = True
                if not lane.over:
                    lane.advance()
                else:
                    self._finished(lane.trial, lane.results())
                    self.lanes.remove(lane)
            except Exception as error:  # whatever it is, the others go on
                self.lanes.remove(lane)
                self._failed(lane.trial, error)
        if not moved:
            time.sleep(5e-4)

    def _base(self) -> Weights | None:
        """Train the model to begin with; its weights are kept in memory only."""
        stage, trial = self.stage.before, stages.base(self.stage, self.log.loss)
        if stage is None or trial is None:
            raise ValueError("stage C begins with a model of stage A; run --stage A first")
        texts = Texts(load(self.data / stage.corpus), stage.context, self.device)
        lane = Training(stage, trial, texts, loss=self.loss)
        while not lane.over:
            lane.advance()
        found = lane.results()
        self.say(f"the model to tune: {trial.method}, loss {found['final_loss']:.4f}")
        return lane.model.state_dict()

    def _finished(self, trial: Trial, results: Record) -> None:
        self.log.append(self._record(trial, results))
        self.say(
            f"{_words(trial)}  {results['final_loss']:.4f}  {results['seconds']:.1f} s"
            + ("" if results["status"] == "ok" else f"  {results['status']}")
            + (f"  {results['note']}" if "note" in results else "")
        )

    def _failed(self, trial: Trial, error: Exception) -> None:
        said = reason(error)
        self.lost = any(word in said for word in LOST)
        self.log.append(self._record(trial, {"status": "failed", "error": said}))
        self.say(f"{_words(trial)}  failed: {said}")

    def _record(self, trial: Trial, results: Record) -> dict[str, Any]:
        return {
            **asdict(trial),
            "tokens_per_step": trial.sequences * self.stage.context,
            **results,
            "jobs": self.jobs,
            "corpus": self.texts.fingerprint,
            "device": self._device(),
            "torch": torch.__version__,
            "nucleon": nucleon.__version__,
            "python": platform.python_version(),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _device(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type


def restart(seconds: float) -> None:
    """Begin this process anew, with the time that is left: a lost device comes back only so."""
    words = [word for word in sys.argv if not word.startswith("--budget=")]
    with suppress(ValueError):
        at = words.index("--budget")
        del words[at : at + 2]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words, f"--budget={seconds / 60:.3f}"])


def _words(trial: Trial) -> str:
    aux = "" if trial.aux_lr is None else f"  aux {trial.aux_lr:.3g}"
    return (
        f"{trial.cell}  {trial.method}  rate {trial.rate:.3g}{aux}  seed {trial.seed}  "
        f"{trial.steps} steps"
    )
