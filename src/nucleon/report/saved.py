"""Read runs from disk; report each damaged one by name."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nucleon._files import to_json
from nucleon.claims import Check, Figure, Panel, Series, Table
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
        if manifest["passed"] not in (True, False, None):
            raise ValueError(f"{MANIFEST} has the verdict {manifest['passed']!r}")
        result = _result(result)
        names = [figure["name"] for figure in result["figures"]]
        drawings = tuple((folder / f"{name}.svg").read_bytes() for name in names)
        return Saved(folder, manifest, result, drawings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedRunError(folder, error) from error


def _parsed(folder: Path, name: str, keys: set[str]) -> dict[str, Any]:
    """Read a JSON file that has these keys."""
    try:
        value = json.loads((folder / name).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no JSON object")
    if missing := keys - value.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    return value


def _result(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with the defaults of absent keys; raise where no page can show it."""
    try:
        return {
            "checks": [_check(**check) for check in values["checks"]],
            "tables": [_table(**table) for table in values["tables"]],
            "figures": [_figure(**figure) for figure in values["figures"]],
            "notes": list(values["notes"]),
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{RESULT} is damaged: {error}") from error


def _check(*, passed: bool, **values: Any) -> dict[str, Any]:
    check = Check(**values)
    _ = float(check.measured), float(check.threshold)
    return {**asdict(check), "passed": passed}


def _table(**values: Any) -> dict[str, Any]:
    table = Table(**values)
    _ = [float(cell) for row in table.rows for cell in row if not isinstance(cell, str)]
    return asdict(table)


def _figure(*, panels: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    figure = Figure(panels=(), **values)
    return {**asdict(figure), "panels": [_panel(**panel) for panel in panels]}


def _panel(*, series: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    panel = Panel(series=(), **values)
    return {**asdict(panel), "series": [_series(**one) for one in series]}


def _series(*, style: int = 0, **values: Any) -> dict[str, Any]:
    series = Series(style=int(style), **values)
    for column in (series.x, series.y, series.low or (), series.high or ()):
        _ = [float(value) for value in column]  # accepts the words "nan", "inf" and "-inf" too
    return asdict(series)


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
