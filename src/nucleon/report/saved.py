"""Read runs from disk; report each damaged one by name."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nucleon._files import to_json
from nucleon.report.runs import MANIFEST, RESULT, SCHEMA, identity

RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(-\d+)?")
_KEYS = {
    MANIFEST: {
        *("id", "title", "statement", "place", "tolerance", "passed", "command", "options"),
        *("started", "seconds", "expected", "versions", "source", "commit", "machine"),
    },
    RESULT: {"checks", "tables", "figures", "notes"},
}


class DamagedRunError(Exception):
    """A run with a file that is missing or cannot be read."""

    def __init__(self, folder: Path, reason: object) -> None:
        super().__init__(f"{folder} cannot be read: {reason}")
        self.folder = folder


@dataclass(frozen=True)
class Saved:
    """A run on disk: folder, manifest, checks, tables, figures and notes, and each figure's SVG.

    Numbers that JSON lacks are the words "nan", "inf" and "-inf".
    """

    folder: Path
    manifest: Mapping[str, Any]
    result: Mapping[str, Any]
    drawings: tuple[bytes, ...]


def load(folder: Path) -> Saved:
    """Read the run in `folder`; raise `DamagedRunError` where that fails."""
    try:
        manifest = _parsed(folder, MANIFEST, {"schema"})
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"its schema is {manifest['schema']}, not {SCHEMA}")
        manifest, result = (_parsed(folder, name, _KEYS[name]) for name in (MANIFEST, RESULT))
        names = [figure["name"] for figure in result["figures"]]
        drawings = tuple((folder / f"{name}.svg").read_bytes() for name in names)
        return Saved(folder, manifest, result, drawings)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedRunError(folder, error) from error


def _parsed(folder: Path, name: str, keys: set[str]) -> dict[str, Any]:
    """Read a JSON file that has these keys."""
    try:
        value: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if missing := keys - value.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    return value


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
