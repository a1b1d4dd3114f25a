"""Read runs from disk; report each damaged one by name."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nucleon._files import to_json
from nucleon.claims import Check, Figure, Panel, Result, Series, Table
from nucleon.report.runs import MANIFEST, RESULT, SCHEMA, identity

RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(-\d+)?")
_KEYS = {
    *("id", "title", "statement", "place", "tolerance", "command", "options", "started"),
    *("seconds", "expected", "versions", "source", "commit", "machine"),
}


class DamagedRunError(Exception):
    """A run with a file that is missing or cannot be read."""

    def __init__(self, folder: Path, reason: object) -> None:
        super().__init__(f"{folder} cannot be read: {reason}")
        self.folder = folder


@dataclass(frozen=True)
class Saved:
    """A run as it is on disk: the folder, its manifest, the result and the SVG of each figure."""

    folder: Path
    manifest: Mapping[str, Any]
    result: Result
    drawings: tuple[bytes, ...]

    @property
    def passed(self) -> bool | None:
        """True where all checks passed; None where there were none."""
        return self.result.passed if self.result.checks else None


def load(folder: Path) -> Saved:
    """Read the run in `folder`; raise `DamagedRunError` where that fails."""
    try:
        manifest = _parsed(folder / MANIFEST)
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"its schema is {manifest['schema']}, not {SCHEMA}")
        if missing := _KEYS - manifest.keys():
            raise ValueError(f"{MANIFEST} has no {', '.join(sorted(missing))}")
        result = _result(_parsed(folder / RESULT))
        drawings = tuple((folder / f"{f.name}.svg").read_bytes() for f in result.figures)
        return Saved(folder, manifest, result, drawings)
    except KeyError as error:
        raise DamagedRunError(folder, f"there is no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedRunError(folder, error) from error


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error


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


# ------------------------------------------------------------------ the result


def _result(values: Mapping[str, Any]) -> Result:
    return Result(
        checks=tuple(_check(**check) for check in values["checks"]),
        tables=tuple(_table(**table) for table in values["tables"]),
        figures=tuple(_figure(**figure) for figure in values["figures"]),
        notes=tuple(values["notes"]),
    )


def _check(*, measured: float, threshold: float, passed: bool, **words: Any) -> Check:
    return Check(measured=float(measured), threshold=float(threshold), **words)


def _table(*, columns: list[str], rows: list[list[Any]], title: str) -> Table:
    return Table(title, tuple(columns), tuple(tuple(row) for row in rows))


def _figure(*, panels: list[dict[str, Any]], **words: Any) -> Figure:
    return Figure(panels=tuple(_panel(**panel) for panel in panels), **words)


def _panel(*, series: list[dict[str, Any]], **words: Any) -> Panel:
    return Panel(series=tuple(_series(**one) for one in series), **words)


def _series(*, name: str, style: int, **columns: list[float] | None) -> Series:
    """Return a series; `float` also reads the words "nan", "inf" and "-inf"."""
    read = {key: None if c is None else [float(value) for value in c] for key, c in columns.items()}
    return Series(name=name, style=int(style), **read)  # pyright: ignore[reportArgumentType]
