"""Files and folders that are whole or not there, plain files, digests, JSON that stays JSON."""

import hashlib
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import cast

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How `to_json` writes numbers that JSON lacks."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to, which becomes `path` if nothing is raised.

    The content is on the disk before the name is: whatever the moment at which the process or the
    machine stops, a reader finds the old file or the new one, never half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        if error.errno is not None:  # a full disk names nothing, others the temporary name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # of a read-only disk, which is not to hide the first one
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content`, text in UTF-8, so that no reader ever sees half of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A new folder, hidden by its name, which is gone afterwards unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)  # whose error names no hidden folder
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders, and logs their changes
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NotPlainError(Exception):
    """What there is instead of a plain file, as a sentence that wants the path before it."""


def open_plain(path: Path, flags: int) -> int:
    """The descriptor of a plain file: no link is followed, and no pipe or device waited for."""
    for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # no system has all of them
        flags |= getattr(os, flag, 0)
    if path.is_symlink():
        raise NotPlainError("is a link, which may lead anywhere")
    try:
        opened = os.open(path, flags, 0o644)
        if stat.S_ISREG(os.fstat(opened).st_mode):
            return opened
        os.close(opened)
    except OSError:
        if path.is_file() or not os.path.lexists(path):
            raise  # of the folder, or of the disk
    raise NotPlainError("is not a plain file")


def digest(content: bytes | BufferedReader) -> str:
    """SHA-256, in hexadecimal; an open file is never in memory as a whole."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return hashlib.file_digest(content, "sha256").hexdigest()


def to_json(
    value: object, indent: int | None = None, default: Callable[[object], object] | None = None
) -> str:
    """`value` as JSON, with `WORDS` where JSON has no numbers.

    Args:
        value: of plain types, unless `default` makes one of any other.
        indent: spaces per level; None is one line.
        default: as of `json.dumps`.
    """
    plain = _finite(value)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent, default=default)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in cast(Sequence[object], value)]
    return value
