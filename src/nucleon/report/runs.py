"""A run as a folder `<root>/<id>/<time>-<hash>/`, complete or not there at all.

Everything is written into a hidden folder beside it, which is renamed at the end: a run that is
killed, or a full disk, leaves no folder under a final name. The hash is that of the trace, so
equal hashes are equal measurements. The manifest holds the digest of every other file and its own.

A run that can be resumed is in its final folder from the start, under the hash of what determines
it. Its manifest says so at once, without any digest, and again when it goes on; when it ends, a
manifest that seals all other files takes its place. Whenever it is killed, one of the two is there.
"""

import os
import platform
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Literal, Protocol

import torch

import nucleon
from nucleon._files import digest, drafted, flush, to_json, write_whole
from nucleon.claims.base import Result
from nucleon.report.plots import draw

SCHEMA = 2
MANIFEST, RESULT, TRACE = "manifest.json", "result.json", "trace.jsonl"
State = Literal["running", "stopped", "finished"]
"""Of a run; one that was killed says that it is running."""


def _source() -> str:
    root = Path(nucleon.__file__).parent
    files = sorted(root.rglob("*.py"))
    return digest(
        b"".join(str(f.relative_to(root)).encode() + b"\0" + f.read_bytes() for f in files)
    )


SOURCE = _source()  # now: by the end of a run the files may have changed
"""The digest of the package's code, which also tells two changed checkouts apart."""


class Subject(Protocol):
    """What a run is about; every claim is one."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def statement(self) -> str: ...  # noqa: D102
    @property
    def place(self) -> str: ...  # noqa: D102
    @property
    def tolerance(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class About:
    """What a run that checks no claim is about."""

    id: str
    title: str
    statement: str
    place: str = ""
    tolerance: str = ""


@dataclass(frozen=True)
class Run:
    """What was run, how, and what came out.

    Args:
        subject: names the run and says what it is held to.
        command: that repeats it.
        options: what the command was given, as plain values.
        result: the measurement.
        started: when.
        seconds: how long it took.
        state: whether it came to its end ("finished").
        expected: seconds that it was said to take, before it started (None: not said).
    """

    subject: Subject
    command: str
    options: Mapping[str, object]
    result: Result
    started: datetime
    seconds: float
    state: State = "finished"
    expected: float | None = None


@contextmanager
def draft(root: Path, name: str) -> Iterator[Path]:
    """A hidden folder to prepare a run of `name` in; gone afterwards unless it was published."""
    try:
        with drafted(root / name / f".{uuid.uuid4().hex[:12]}.tmp") as folder:
            yield folder
    except OSError as error:
        error.filename = error.filename or str(root)  # a full disk does not name itself
        raise


def publish(run: Run, folder: Path) -> Path:
    """Write `run` into its draft `folder`, rename it, and return the final folder."""
    trace = "".join(to_json(record) + "\n" for record in run.result.records)
    try:
        write_whole(folder / TRACE, trace)
        seal(run, folder)
    except OSError as error:
        if Path(error.filename or "").parent == folder:
            error.filename = None  # it is hidden, and soon gone
        raise
    return _rename(folder, run_name(run.started, trace))


def run_name(started: datetime, content: str) -> str:
    """`<time>-<hash>`, the name of the folder of a run."""
    return f"{started:%Y%m%d-%H%M%S}-{digest(content.encode())[:8]}"


def announce(run: Run, folder: Path) -> None:
    """Write the manifest of a run that goes on in `folder`: nothing there is held to a digest."""
    _write_manifest(run, folder, ())


def seal(run: Run, folder: Path) -> None:
    """Write the result and the figures of `run` beside its trace, and the manifest of them all."""
    write_whole(folder / RESULT, to_json(_content(run.result)) + "\n")
    drawn = [path for figure in run.result.figures for path in draw(figure, folder)]
    for path in drawn:
        flush(path)  # before the manifest that vouches for it
    _write_manifest(run, folder, (folder / RESULT, folder / TRACE, *drawn))


def _write_manifest(run: Run, folder: Path, files: Iterable[Path]) -> None:
    about = ("id", "title", "statement", "place", "tolerance")
    manifest: dict[str, object] = {
        "schema": SCHEMA,
        **{name: getattr(run.subject, name) for name in about},
        "passed": run.result.passed if run.result.checks else None,
        "state": run.state,
        "command": run.command,
        "options": dict(run.options),
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 3),
        "expected": run.expected,
        **identity(),
        "commit": commit(),
        "machine": _machine(),
        "files": {path.name: digest(path.read_bytes()) for path in sorted(files)},
    }
    manifest["digest"] = own_digest(manifest)
    write_whole(folder / MANIFEST, to_json(manifest, indent=2) + "\n")


def own_digest(manifest: Mapping[str, object]) -> str:
    """The digest of a manifest without its digest."""
    return digest(to_json({k: v for k, v in manifest.items() if k != "digest"}).encode())


def identity() -> dict[str, object]:
    """What must agree for two runs with the same options to be the same: versions and source."""
    versions = {
        "nucleon": nucleon.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "matplotlib": version("matplotlib"),
    }
    return {"versions": versions, "source": SOURCE}


def _content(result: Result) -> dict[str, object]:
    checks = [{**asdict(check), "passed": check.passed} for check in result.checks]
    kept = {name: list(map(asdict, getattr(result, name))) for name in ("tables", "figures")}
    return {"checks": checks, **kept, "notes": list(result.notes)}


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
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str | None:
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
