"""Runs read back from disk: each whole and of its form, or refused with the file that is not."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from nucleon._files import digest, to_json
from nucleon.claims.base import Check, Relation, Result
from nucleon.claims.shown import Cell, Figure, Panel, Scale, Series, Table
from nucleon.report.runs import MANIFEST, RESULT, SCHEMA, State, identity, own_digest
from nucleon.report.untrusted import (
    FormError,
    check_name,
    choice,
    digest_of,
    field,
    parse,
    read,
    real,
    texts,
)

TRAIN = "train"
"""The id of training runs, which differ by their options: none stands for the others."""
RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(-\d+)?")


class DamagedRunError(Exception):
    """A file of a run that is missing, cut off, altered or not of its form."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{_printable(path)} {what}")
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
    """Read a run, every file held to its digest and its form; `DamagedRunError` names the first
    that differs.

    A run that has not ended has a manifest alone, and no result yet.
    """
    with _named(folder / MANIFEST):
        if any("\ud800" <= sign <= "\udfff" for sign in str(folder)):  # bytes that are no text
            raise FormError("lies in a folder whose name is not UTF-8")
        manifest = _manifest(read(folder, MANIFEST))
    if manifest.get("state") == "running":
        return Saved(folder, manifest, Result(checks=()), ())
    contents = dict[str, bytes]()
    for name, expected in manifest["files"].items():
        with _named(folder / name):
            if name == RESULT or name.endswith(".svg"):  # what is shown; of the rest the digest
                contents[name] = read(folder, name)
                found = digest(contents[name])
            else:
                found = digest_of(folder, name)
            if found != expected:
                raise FormError("is cut off or was altered")
    with _named(folder / RESULT):  # of its form too: anybody can write a digest
        if RESULT not in contents:
            raise FormError(f"is not among the files of {MANIFEST}")
        result = _result(parse(contents[RESULT]))
        drawings = tuple(_drawing(figure, contents) for figure in result.figures)
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

    A run stands for itself, the folder of an id for its newest run, of training for all its runs, a
    folder of ids for what each of them stands for, and for runs put into it under other names.
    """
    if _has_manifest(path):
        return [path]
    found = _representatives(path)
    for folder in _folders(path):
        if not RUN_NAME.fullmatch(folder.name):
            found += [folder] if _has_manifest(folder) else _representatives(folder)
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


def _representatives(path: Path) -> list[Path]:
    return _runs(path) if path.name == TRAIN else _runs(path)[-1:]


def _runs(path: Path) -> list[Path]:
    """The runs in the folder of an id, the newest last."""
    return [folder for folder in _folders(path) if RUN_NAME.fullmatch(folder.name)]


def _folders(path: Path) -> list[Path]:
    """Those in it that are not hidden, as drafts are."""
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _has_manifest(folder: Path) -> bool:
    """Or a link that leads nowhere, or a folder that lets nobody look: refused, not passed over."""
    barred = folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)
    return barred or os.path.lexists(folder / MANIFEST)


def _printable(path: Path) -> str:
    """A path in a line: what is no sign of any script, or half of one, as Python writes it."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(path))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file, with its name."""
    try:
        yield
    except FormError as error:
        raise DamagedRunError(path, str(error)) from error


# ------------------------------------------------------------------ the form of the manifest

_ABOUT: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("id", "title", "statement", "place", "tolerance", "command", "source"), (str,)
    ),
    **dict.fromkeys(("options", "versions", "machine", "files"), (dict,)),
    "started": (str,),
    "seconds": (int, float),
    "expected": (int, float, NoneType),
    "commit": (str, NoneType),
}
_MACHINE: Mapping[str, tuple[type, ...]] = {
    "system": (str,),
    "processor": (str,),
    "cores": (int, NoneType),
    "threads": (int,),
    "gpu": (str, NoneType),
}
LONGEST = 1e10
"""Seconds of a run: some centuries."""


def _manifest(content: bytes) -> dict[str, Any]:
    manifest = parse(content)
    schema = field(manifest, "schema", int)
    if schema != SCHEMA:
        raise FormError(f"is of another version: schema {str(schema)[:20]}, not {SCHEMA}")
    if manifest.get("digest") != own_digest(manifest):
        raise FormError("is cut off or was altered")
    for name, kinds in _ABOUT.items():
        field(manifest, name, *kinds)
    for name, kinds in _MACHINE.items():
        field(manifest["machine"], name, *kinds)
    for name in ("versions", "files"):
        for key in manifest[name]:
            field(manifest[name], key, str)
    for name in manifest["files"]:
        check_name(name)
    if "state" in manifest:
        choice(manifest, "state", get_args(State))
    for name in ("seconds", "expected"):
        if manifest[name] is not None and not 0 <= real(manifest[name], name) <= LONGEST:
            raise FormError(f"has no length of time as {name!r}")
    try:
        datetime.fromisoformat(manifest["started"])
    except ValueError:
        raise FormError("has no date as 'started'") from None
    return manifest


# ------------------------------------------------------------------ the form of the result


def _result(values: Mapping[str, Any]) -> Result:
    return Result(
        checks=tuple(map(_check, field(values, "checks", list))),
        tables=tuple(map(_table, field(values, "tables", list))),
        figures=tuple(map(_figure, field(values, "figures", list))),
        notes=tuple(texts(values, "notes")),
    )


def _check(values: Any) -> Check:
    measured, threshold = (
        real(field(values, name, int, float, str), name) for name in ("measured", "threshold")
    )
    relation = choice(values, "relation", get_args(Relation))
    return Check(field(values, "name", str), measured, relation, threshold)


def _table(values: Any) -> Table:
    columns, rows = tuple(texts(values, "columns")), list[tuple[Cell, ...]]()
    for row in field(values, "rows", list):
        if not isinstance(row, list):
            raise FormError("has a row in a table that is no list")
        for cell in row:
            if not isinstance(cell, str | bool):
                real(cell, "cell of a table")
        rows.append(tuple(row))
    return Table(field(values, "title", str), columns, tuple(rows))


def _figure(values: Any) -> Figure:
    return Figure(
        *(field(values, name, str) for name in ("name", "title", "caption")),
        panels=tuple(map(_panel, field(values, "panels", list))),
        shared_axes=field(values, "shared_axes", bool),
    )


def _panel(values: Any) -> Panel:
    return Panel(
        *(field(values, name, str) for name in ("title", "x_label", "y_label")),
        series=tuple(map(_series, field(values, "series", list))),
        x_scale=choice(values, "x_scale", get_args(Scale)),
        y_scale=choice(values, "y_scale", get_args(Scale)),
        marked=field(values, "marked", bool),
    )


def _series(values: Any) -> Series:
    columns = dict[str, Any]()
    for name in ("x", "y", "low", "high"):
        given = field(values, name, *((list,) if name in "xy" else (list, NoneType)))
        columns[name] = None if given is None else [real(value, name) for value in given]
    if len({len(column) for column in columns.values() if column is not None}) > 1:
        raise FormError("has a series whose columns differ in length")
    return Series(field(values, "name", str), **columns, style=field(values, "style", int))


def _drawing(figure: Figure, contents: Mapping[str, bytes]) -> bytes:
    if f"{figure.name}.svg" not in contents:
        raise FormError(f"has a figure {figure.name[:40]!r} without its drawing")
    return contents[f"{figure.name}.svg"]
