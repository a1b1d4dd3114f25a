"""Files written whole or not at all, digests, and strict JSON."""

import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content`, text in UTF-8, under a temporary name that then becomes `path`.

    The content reaches the disk before the name does. If the process or the machine stops, a reader
    finds the old file or the new one, never half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        if error.errno is not None:  # a full disk names nothing, others the temporary name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # a read-only disk raises here too and would hide the first error
            temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders, and logs their changes
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(content: bytes) -> str:
    """Return the SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def to_json(value: object, indent: int | None = None) -> str:
    """Return plain values as JSON; "nan", "inf" and "-inf" stand for numbers that JSON lacks.

    `indent` is the number of spaces per level; None is one line.
    """
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in cast(Sequence[object], value)]
    return value
