"""A run as a folder `<root>/<id>/<time>-<hash>/`, complete or not there at all.

Everything is written into a hidden folder beside it, which is renamed at the end: a run that is
killed, or a full disk, leaves no folder under a final name. The hash is that of the trace, so
equal hashes are equal measurements.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import cast

import torch

import nucleon
from nucleon.experiments.base import Claim, Result, Settings
from nucleon.report.page import render
from nucleon.report.plots import draw

SCHEMA = 1
REPORT, MANIFEST, TRACE = "report.html", "manifest.json", "trace.jsonl"


@dataclass(frozen=True)
class Run:
    """A claim, how it was run and what came out."""

    claim: Claim
    settings: Settings
    result: Result
    started: datetime
    seconds: float

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = ["nucleon reproduce", self.claim.id]
        if self.settings.quick:
            words.append("--quick")
        if self.settings.seeds is not None:
            words.append(f"--seeds {self.settings.seeds}")
        if self.settings.first_seed:
            words.append(f"--first-seed {self.settings.first_seed}")
        return " ".join(words)


@contextmanager
def draft(root: Path, claim: Claim) -> Iterator[Path]:
    """A hidden folder to prepare a run in; gone afterwards unless it was published."""
    parent = root / claim.id
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{uuid.uuid4().hex[:12]}.tmp"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(run: Run, folder: Path) -> Path:
    """Write `run` into its draft `folder`, rename it, and return the final folder."""
    trace = folder / TRACE
    lines = (_json(record) + "\n" for record in run.result.records)
    trace.write_text("".join(lines), encoding="utf-8")
    drawings = [draw(figure, folder)[0].read_text("utf-8") for figure in run.result.figures]
    manifest = _manifest(run)
    page = render(
        run.claim,
        run.result,
        command=run.command,
        drawings=drawings,
        facts=_facts(run, manifest),
    )
    (folder / REPORT).write_text(page, encoding="utf-8")
    manifest["files"] = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(_json(manifest, indent=2) + "\n", encoding="utf-8")
    return _rename(folder, f"{run.started:%Y%m%d-%H%M%S}-{_sha256(trace)[:8]}")


def _rename(folder: Path, name: str) -> Path:
    names = chain((name,), (f"{name}-{n}" for n in count(2)))
    return folder.rename(next(p for p in map(folder.with_name, names) if not p.exists()))


def _manifest(run: Run) -> dict[str, object]:
    claim = run.claim
    return {
        "schema": SCHEMA,
        "id": claim.id,
        "title": claim.title,
        "statement": claim.statement,
        "place": claim.place,
        "tolerance": claim.tolerance,
        "passed": run.result.passed,
        "checks": [{**asdict(check), "passed": check.passed} for check in run.result.checks],
        "notes": list(run.result.notes),
        "command": run.command,
        "options": asdict(run.settings),
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 3),
        "versions": {
            "nucleon": nucleon.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "matplotlib": version("matplotlib"),
        },
        "commit": _commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
        },
    }


def _facts(run: Run, manifest: dict[str, object]) -> dict[str, str]:
    return {
        "started": f"{run.started:%Y-%m-%d %H:%M:%S %z}",
        "took": f"{run.seconds:.1f} s",
        "first seed": str(run.settings.first_seed),
        "nucleon": nucleon.__version__,
        "commit": str(manifest["commit"] or "not known"),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _commit() -> str | None:
    """The commit of the source this runs from, marked when changed; None outside a checkout."""
    here = Path(nucleon.__file__)
    git = ("git", "-C", str(here.parent))
    commands = (
        # An installed package may lie inside somebody else's repository: then it is not tracked.
        (*git, "ls-files", "--error-unmatch", here.name),
        (*git, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"),
    )
    answer = ""
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        answer = done.stdout.strip()
    return answer or None


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    """`value` with "nan", "inf" and "-inf" as words: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(Sequence[object], value)]
    return value


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
