"""A run as a folder `<root>/<id>/<time>-<hash>/`, written whole or not at all.

All files are written into a hidden folder beside it, which is renamed at the end. A killed run or a
full disk therefore leaves no folder under a final name. The hash is of the trace, so equal hashes
mean equal measurements.
"""

import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path

import torch

import nucleon
from nucleon._files import digest, flush, to_json, write_whole
from nucleon.claims import Claim, Result

SCHEMA = 3
MANIFEST, RESULT, TRACE = "manifest.json", "result.json", "trace.jsonl"


def _source() -> str:
    root = Path(nucleon.__file__).parent
    files = sorted(root.rglob("*.py"))
    return digest(
        b"".join(str(f.relative_to(root)).encode() + b"\0" + f.read_bytes() for f in files)
    )


SOURCE = _source()  # at import, since the files may change during a run
"""The digest of the package's code, which also tells two changed checkouts apart."""


@dataclass(frozen=True)
class About:
    """Name and texts of a run that checks no claim."""

    id: str
    title: str
    statement: str
    place: str = ""
    tolerance: str = ""


@dataclass(frozen=True)
class RunRecord:
    """A run: its subject, command and result.

    Args:
        subject: a claim, or the texts of a run without one.
        command: repeats the run.
        options: of the command, as plain values.
        result: the measurement.
        started: time of the start.
        seconds: duration.
        expected: duration announced before the start (None).
    """

    subject: Claim | About
    command: str
    options: Mapping[str, object]
    result: Result
    started: datetime
    seconds: float
    expected: float | None = None


@contextmanager
def draft(root: Path, name: str) -> Iterator[Path]:
    """Yield a hidden folder for a run of `name`; delete it afterwards unless it was published."""
    folder = root / name / f".{uuid.uuid4().hex[:12]}.tmp"
    folder.parent.mkdir(parents=True, exist_ok=True)  # its error names no hidden folder
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(run: RunRecord, folder: Path) -> Path:
    """Write `run` into its draft `folder`, rename it, and return the final folder."""
    trace = "".join(to_json(record) + "\n" for record in run.result.records)
    about = ("id", "title", "statement", "place", "tolerance")
    manifest: dict[str, object] = {
        "schema": SCHEMA,
        **{name: getattr(run.subject, name) for name in about},
        "passed": run.result.passed if run.result.checks else None,
        "command": run.command,
        "options": dict(run.options),
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 3),
        "expected": run.expected,
        **identity(),
        "commit": commit(),
        "machine": _machine(),
    }
    write_whole(folder / TRACE, trace)
    write_whole(folder / RESULT, to_json(_content(run.result)) + "\n")
    from nucleon.report.plots import draw  # here: `processor` should not import matplotlib

    for figure in run.result.figures:
        for path in draw(figure, folder):
            flush(path)
    write_whole(folder / MANIFEST, to_json(manifest, indent=2) + "\n")
    return _rename(folder, f"{run.started:%Y%m%d-%H%M%S}-{digest(trace.encode())[:8]}")


def identity() -> dict[str, object]:
    """Return the versions and the digest of the source, equal for runs that can be compared."""
    versions = {
        "nucleon": nucleon.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "matplotlib": version("matplotlib"),
    }
    return {"versions": versions, "source": SOURCE}


def _content(result: Result) -> dict[str, object]:
    checks = [{**asdict(check), "passed": check.passed} for check in result.checks]
    parts = {name: list(map(asdict, getattr(result, name))) for name in ("tables", "figures")}
    return {"checks": checks, **parts, "notes": list(result.notes)}


def _rename(folder: Path, name: str) -> Path:
    names = chain((name,), (f"{name}-{n}" for n in count(2)))
    free = next(p for p in map(folder.with_name, names) if not p.exists())
    try:
        folder.rename(free)
    except OSError:
        if not free.exists():
            raise
        return _rename(folder, name)  # another process took it in between
    flush(free.parent)
    return free


def _machine() -> dict[str, object]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str | None:
    """Return the commit of the source, marked when changed; None outside a checkout."""
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
