"""Runs read back from disk: each whole, or refused with the file that is damaged."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nucleon._files import digest, to_json
from nucleon.experiments.base import Check, Figure, Panel, Result, Series, Table
from nucleon.report.runs import MANIFEST, RESULT, SCHEMA, State, identity, own_digest

RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(-\d+)?")


class DamagedRunError(Exception):
    """A file of a run that is missing, cut off or altered."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.path = path


@dataclass(frozen=True)
class Saved:
    """A run as it lies on disk: the folder, its manifest, the result and the SVG of each figure."""

    folder: Path
    manifest: Mapping[str, Any]
    result: Result
    drawings: tuple[bytes, ...]

    @property
    def state(self) -> State:
        """Whether it came to its end; a manifest that does not say is that of one that did."""
        return self.manifest.get("state", "finished")

    @property
    def passed(self) -> bool | None:
        """Whether all checks passed; None where there were none."""
        return self.result.passed if self.result.checks else None


def load(folder: Path) -> Saved:
    """Read a run, every file held to its digest; `DamagedRunError` names the first that differs.

    A run that has not ended has a manifest alone, and no result yet.
    """
    manifest = _manifest(folder / MANIFEST)
    if manifest.get("state") == "running":
        return Saved(folder, manifest, Result(checks=()), ())
    contents = dict[str, bytes]()
    try:
        for name, expected in manifest["files"].items():
            contents[name] = _bytes(folder / name)
            if digest(contents[name]) != expected:
                raise DamagedRunError(folder / name, "is cut off or was altered")
        result = _result(json.loads(contents[RESULT]))
        drawings = tuple(contents[f"{figure.name}.svg"] for figure in result.figures)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # Digests agree, so it was written like this: by something else than `publish`.
        raise DamagedRunError(folder / RESULT, f"is not the result of a run ({error!r})") from error
    return Saved(folder, manifest, result, drawings)


def load_all(folders: Iterable[Path]) -> tuple[list[Saved], list[DamagedRunError]]:
    """What can be read, and what is damaged."""
    saved, damaged = list[Saved](), list[DamagedRunError]()
    for folder in folders:
        try:
            saved.append(load(folder))
        except DamagedRunError as error:
            damaged.append(error)
    return saved, damaged


def find(path: Path) -> list[Path]:
    """The folders of runs that `path` stands for.

    A run stands for itself, the folder of an id for its newest run, a folder of ids for the newest
    run of each, and for the runs that were put into it under names of their own.
    """
    if (path / MANIFEST).exists():
        return [path]
    found = _runs(path)[-1:]
    for folder in _folders(path):
        if not RUN_NAME.fullmatch(folder.name):
            found += [folder] if (folder / MANIFEST).exists() else _runs(folder)[-1:]
    return found


def completed(root: Path, name: str, options: Mapping[str, object]) -> Saved | None:
    """The newest undamaged run of `name` with these options, by this very code."""
    wanted = {**identity(), "options": json.loads(to_json(dict(options)))}
    for folder in reversed(_runs(root / name)):
        try:
            saved = load(folder)
        except DamagedRunError:
            continue
        if {key: saved.manifest.get(key) for key in wanted} == wanted:
            return saved
    return None


def _runs(path: Path) -> list[Path]:
    """The runs in the folder of an id, the newest last."""
    return [folder for folder in _folders(path) if RUN_NAME.fullmatch(folder.name)]


def _folders(path: Path) -> list[Path]:
    """Those in it that are not hidden, as drafts are."""
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedRunError(path, f"cannot be read: {error.strerror}") from error


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(_bytes(path))
        schema, whole = manifest["schema"], manifest.get("digest") == own_digest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedRunError(path, "is cut off or was altered") from None
    if schema != SCHEMA:
        raise DamagedRunError(path, f"is of another version: schema {schema}, not {SCHEMA}")
    if not whole:
        raise DamagedRunError(path, "is cut off or was altered")
    return manifest


def _result(values: Mapping[str, Any]) -> Result:
    return Result(
        checks=tuple(
            Check(c["name"], float(c["measured"]), c["relation"], float(c["threshold"]))
            for c in values["checks"]
        ),
        tables=tuple(
            Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])))
            for t in values["tables"]
        ),
        figures=tuple(map(_figure, values["figures"])),
        notes=tuple(values["notes"]),
    )


def _figure(values: Mapping[str, Any]) -> Figure:
    given: dict[str, Any] = {**values, "panels": tuple(map(_panel, values["panels"]))}
    return Figure(**given)


def _panel(values: Mapping[str, Any]) -> Panel:
    given: dict[str, Any] = {**values, "series": tuple(map(_series, values["series"]))}
    return Panel(**given)


def _series(values: Mapping[str, Any]) -> Series:
    given: dict[str, Any] = {**values}
    for name in ("x", "y", "low", "high"):
        if values[name] is not None:
            given[name] = [float(value) for value in values[name]]
    return Series(**given)
