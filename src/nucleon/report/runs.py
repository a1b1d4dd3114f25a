"""A run as a folder `<root>/<id>/<time>-<hash>/`: written whole or not at all, found, and read.

All files are written into a hidden folder beside it, which is renamed at the end. A killed run or a
full disk therefore leaves no folder under a final name. The hash is of the trace, so equal hashes
mean equal measurements.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import nucleon
from nucleon._files import digest, flush, to_json, write_whole
from nucleon.claims import Check, Claim, Figure, Result, Table

SCHEMA = 3
MANIFEST, RESULT, TRACE = "manifest.json", "result.json", "trace.jsonl"
RUN_NAME = re.compile(r"\d{8}-\d{6}-\d{6}-[0-9a-f]{8}")


def _source() -> str:
    root = Path(nucleon.__file__).parent
    files = sorted(root.rglob("*.py"))
    return digest(
        b"".join(str(f.relative_to(root)).encode() + b"\0" + f.read_bytes() for f in files)
    )


SOURCE = _source()  # at import, since the files may change during a run
"""The digest of the package's code, which also tells two changed checkouts apart."""

# ------------------------------------------------------------------ writing


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


def publish(
    folder: Path,
    claim: Claim,
    result: Result,
    *,
    command: str,
    options: Mapping[str, object],
    started: datetime,
    seconds: float,
) -> Path:
    """Write a run into its draft `folder`, rename it, and return the final folder.

    `command` repeats the run, with these plain `options`.
    """
    trace = "".join(to_json(record) + "\n" for record in result.records)
    texts = ("id", "title", "statement", "place", "tolerance")
    manifest: dict[str, object] = {
        "schema": SCHEMA,
        **{name: getattr(claim, name) for name in texts},
        "passed": result.passed if result.checks else None,
        "command": command,
        "options": dict(options),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        **identity(),
        "commit": commit(),
        "machine": _machine(),
    }
    content = {
        "checks": [{**asdict(check), "passed": check.passed} for check in result.checks],
        "tables": list(map(asdict, result.tables)),
        "figures": list(map(asdict, result.figures)),
        "notes": result.notes,
    }
    write_whole(folder / TRACE, trace)
    write_whole(folder / RESULT, to_json(content) + "\n")
    from nucleon.report.plots import draw  # here: `processor` should not import matplotlib

    for figure in result.figures:
        for path in draw(figure, folder):
            flush(path)
    write_whole(folder / MANIFEST, to_json(manifest, indent=2) + "\n")
    final = folder.with_name(f"{started:%Y%m%d-%H%M%S-%f}-{digest(trace.encode())[:8]}")
    folder.rename(final)
    flush(final.parent)
    return final


def identity() -> dict[str, object]:
    """Return the versions and the digest of the source, equal for runs that can be compared."""
    versions = {
        "nucleon": nucleon.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "matplotlib": version("matplotlib"),
    }
    return {"versions": versions, "source": SOURCE}


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


# ------------------------------------------------------------------ reading


class DamagedRunError(Exception):
    """A run with a file that is missing or cannot be read."""


@dataclass(frozen=True)
class Saved:
    """A run on disk: folder, manifest, result without records and panels, each figure's SVG."""

    folder: Path
    manifest: Mapping[str, Any]
    result: Result
    drawings: tuple[bytes, ...]


def load(folder: Path) -> Saved:
    """Read the run in `folder`; raise `DamagedRunError` where that fails."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"its schema is {manifest['schema']}, not {SCHEMA}")
        values = json.loads((folder / RESULT).read_text("utf-8"))
        result = Result(
            checks=tuple(
                Check(c["name"], float(c["measured"]), c["relation"], float(c["threshold"]))
                for c in values["checks"]
            ),
            tables=tuple(Table(**table) for table in values["tables"]),
            figures=tuple(
                Figure(f["name"], f["title"], f["caption"], ()) for f in values["figures"]
            ),
            notes=tuple(values["notes"]),
        )
        drawings = tuple((folder / f"{f.name}.svg").read_bytes() for f in result.figures)
        return Saved(folder, manifest, result, drawings)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedRunError(f"{folder} cannot be read: {error}") from error


def load_all(folders: Iterable[Path]) -> tuple[list[Saved], list[DamagedRunError]]:
    """Return the readable runs, and an error for each damaged one."""
    saved, damaged = list[Saved](), list[DamagedRunError]()
    for folder in folders:
        try:
            saved.append(load(folder))
        except DamagedRunError as error:
            damaged.append(error)
    return saved, damaged


def find(path: Path) -> list[Path]:
    """Return the folders of the runs at `path`.

    `path` is a run, the folder of an id (its newest run is returned) or a folder of ids (the newest
    run of each, and runs stored in it under other names).
    """
    if (path / MANIFEST).exists():
        return [path]
    folders = _runs(path)[-1:]
    for folder in _folders(path):
        if not RUN_NAME.fullmatch(folder.name):
            folders += [folder] if (folder / MANIFEST).exists() else _runs(folder)[-1:]
    return folders


def completed(root: Path, name: str, options: Mapping[str, object]) -> Saved | None:
    """Return the newest readable run of `name` with these options and the present source."""
    expected = {**identity(), "options": json.loads(to_json(dict(options)))}
    saved, _ = load_all(reversed(_runs(root / name)))
    return next((s for s in saved if {key: s.manifest[key] for key in expected} == expected), None)


def _runs(path: Path) -> list[Path]:
    """Return the runs in the folder of an id, the newest last."""
    return [folder for folder in _folders(path) if RUN_NAME.fullmatch(folder.name)]


def _folders(path: Path) -> list[Path]:
    """Return the folders in `path`, without the hidden ones of drafts."""
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
