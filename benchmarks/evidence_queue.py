"""The queue of `evidence.py`: logs of finished runs, and lanes in which the next ones advance.

Only the logs count. A run that is killed leaves nothing and is done again; one that fails leaves a
line that says why, and is tried once more without a captured step.
"""

import gc
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import evidence_stages as stages
import gpt
import nucleon
from evidence_corpus import load
from evidence_plan import expected
from evidence_stages import TRIES, Part, Stage, Trial
from evidence_start import Start, trained
from evidence_training import Loss, Texts, Training, reason
from nucleon._files import to_json
from nucleon.report.runs import commit

Record = Mapping[str, Any]
MARGIN = 1.15
"""What a run may take of the time that is expected of it."""
MOST_MEMORY = 60 * 2**30
"""Bytes above which what finished runs have left is given back to the device."""
LOST = ("CUDA error", "device-side assert", "CUDNN_STATUS", "CUBLAS_STATUS")
"""Words of an error after which the process can use the device no more."""


class Log:
    """Finished runs of all stages, one JSON line each, and what they say; one process may write.

    Args:
        folder: of the files, `stage-a.jsonl` and so on, each made with its first line.

    Runs of fine-tuning are compared only with those that began with the same model: the others are
    in the log and count as still to be done. That model is the one of most lines, until
    `begin_with` names another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = [r for path in sorted(folder.glob("stage-*.jsonl")) for r in read(path)]
        starts = Counter(r["start"] for r in self.records if "start" in r)
        self.begin_with(max(starts, key=lambda start: starts[start], default=None))

    def begin_with(self, start: str | None) -> None:
        """Of the runs of fine-tuning, those count that began with the model of this hash."""
        self.start = start
        self.finals: dict[Trial, float] = {}
        self.failures: Counter[Trial] = Counter()
        for record in self.records:
            self._count(record)

    def counts(self, record: Record) -> bool:
        """Whether a line is one of those that are compared."""
        return record.get("start") in (None, self.start)

    def path(self, stage: str) -> Path:
        """The file of a stage."""
        return self.folder / f"stage-{stage.lower()}.jsonl"

    def append(self, record: Record) -> None:
        """Write a line at once, and have the disk hold it; half a line of a killed one goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(record["stage"]).open("ab+") as opened:
            opened.seek(0)
            content = opened.read()
            opened.truncate(content.rfind(b"\n") + 1)
            os.write(opened.fileno(), (to_json(record) + "\n").encode())
            os.fsync(opened.fileno())
        self.records.append(json.loads(to_json(record)))
        self._count(self.records[-1])

    def loss(self, trial: Trial) -> float | None:
        """The final loss, infinite where it diverged or failed for good; None: still to be done."""
        if trial in self.finals:
            return self.finals[trial]
        return float("inf") if self.failures[trial] >= TRIES else None

    def _count(self, record: Record) -> None:
        if not self.counts(record):
            return
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
    """Runs of several parts, some side by side, until none is wanted or the time is over.

    Args:
        parts: in the order in which they are done.
        log: what is done.
        data: the folder of the corpora.
        device: where to run.
        jobs: runs side by side.
        seconds: that may be spent; no run begins that is not expected to end by then.
        loss: of a model on a batch (`gpt.loss`); fine-tuning, whose runs are short, has the
            plain one.
        say: is told of each run.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        log: Log,
        data: Path,
        device: torch.device,
        *,
        jobs: int,
        seconds: float,
        loss: Loss = gpt.loss,
        say: Callable[[str], None] = print,
    ) -> None:
        self.parts, self.log, self.data, self.device = parts, log, data, device
        self.stages = {part.stage.name: part.stage for part in parts}
        self.jobs, self.loss, self.say = jobs, loss, say
        self.end = time.monotonic() + seconds
        self.texts: dict[str, Texts] = {}
        self.lanes: list[Training] = []
        # Memory that a run has left is used again on its stream, so they are few.
        self.streams = (
            [torch.cuda.Stream(device) for _ in range(jobs)] if device.type == "cuda" else []
        )
        self.start: Start | None = None
        self._commit = commit()
        self.lost = False
        self.open = True  # another run may begin; once none can, that is so until one ends
        self._check_corpora()

    def work(self) -> bool:
        """Do what is wanted; False where the device was lost, and another process must go on."""
        while not self.lost:
            while self.open and not self.lost and len(self.lanes) < self.jobs:
                self.open = self._begin()
            if not self.lanes:
                break
            self._advance()
        return not self.lost

    def left(self) -> int:
        """Runs that are wanted as things stand; others may follow from their losses."""
        return sum(1 for _ in self._wanted())

    def expected(self, stage: Stage, trial: Trial) -> float | None:
        """The seconds that a run may take, from those before it; None before the first."""
        here = [r for r in self.log.records if "seconds" in r and r["device"] == self._device()]
        seconds = expected(stage, trial, here, self.jobs)
        return None if seconds is None else MARGIN * seconds

    def _check_corpora(self) -> None:
        needed = {stage.corpus for stage in self.stages.values()}
        needed |= {s.before.corpus for s in self.stages.values() if s.tunes and s.before}
        if missing := sorted(name for name in needed if not (self.data / name).exists()):
            raise SystemExit(
                f"the folder of the corpora, {self.data}, has no {', '.join(missing)}; "
                "make it by nucleon bench evidence_corpus, or name the folder by --data"
            )

    def _texts(self, stage: Stage) -> Texts:
        if stage.corpus not in self.texts:
            corpus = load(self.data / stage.corpus)
            self.texts[stage.corpus] = Texts(corpus, stage.context, self.device)
        return self.texts[stage.corpus]

    def _wanted(self) -> Iterator[tuple[Stage, Trial]]:
        """The runs that are not done, the next one first."""
        for part, trial in stages.in_order(self.parts, self.log.loss):
            if self.log.loss(trial) is None:
                yield part.stage, trial

    def _begin(self) -> bool:
        """Put the next run that will end in time into a lane; False where there is none."""
        running = {lane.trial for lane in self.lanes}
        left = self.end - time.monotonic()
        for stage, trial in self._wanted():
            if trial not in running and (self.expected(stage, trial) or 0.0) < left:
                break
        else:
            return False
        if stage.tunes and not self._has_start(stage):
            return True
        if self.device.type == "cuda" and torch.cuda.memory_reserved() > MOST_MEMORY:
            gc.collect()
            torch.cuda.empty_cache()
        try:
            self.lanes.append(self._training(stage, trial))
        except Exception as error:  # whatever it is, the others go on
            self._failed(trial, error)
        return True

    def _training(self, stage: Stage, trial: Trial) -> Training:
        taken = [lane.stream for lane in self.lanes]
        return Training(
            stage,
            trial,
            self._texts(stage),
            capture=self.log.failures[trial] == 0,
            loss=gpt.loss if stage.tunes else self.loss,
            weights=self.start.weights if stage.tunes and self.start else None,
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

    def _has_start(self, stage: Stage) -> bool:
        """Have the model that fine-tuning begins with; False: nothing is tuned by this process."""
        if self.start is not None:
            return True
        before, trial = stage.before, stages.base(stage, self.log.loss)
        assert before is not None and trial is not None  # else none of its runs is wanted
        try:
            self.start = trained(before, trial, self._texts(before), self.data / "start.pt")
        except Exception as error:  # no fault of the runs that would begin with it
            self.lost = any(word in reason(error) for word in LOST)
            self.parts = [part for part in self.parts if not part.stage.tunes]
            self.say(f"no fine-tuning, as its start failed: {reason(error)}")
            return False
        self.log.begin_with(self.start.fingerprint)
        self.say(
            f"fine-tuning begins with {_words(trial)}: loss {self.start.loss:.4f}, "
            f"hash {self.start.fingerprint}"
        )
        return True

    def _finished(self, trial: Trial, results: Record) -> None:
        self.open = True
        self.log.append(self._record(trial, results))
        self.say(
            f"{_words(trial)}  {results['final_loss']:.4f}  {results['seconds']:.1f} s"
            + ("" if results["status"] == "ok" else f"  {results['status']}")
            + (f"  {results['note']}" if "note" in results else "")
        )

    def _failed(self, trial: Trial, error: Exception) -> None:
        said, self.open = reason(error), True
        self.lost = any(word in said for word in LOST)
        self.log.append(self._record(trial, {"status": "failed", "error": said}))
        self.say(f"{_words(trial)}  failed: {said}")

    def _record(self, trial: Trial, results: Record) -> dict[str, Any]:
        stage = self.stages[trial.stage]
        return {
            **asdict(trial),
            "tokens_per_step": trial.sequences * stage.context,
            **results,
            "jobs": self.jobs,
            "corpus": self._texts(stage).fingerprint,
            **({"start": self.start.fingerprint} if stage.tunes and self.start else {}),
            "device": self._device(),
            "torch": torch.__version__,
            "nucleon": nucleon.__version__,
            "commit": self._commit,
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
