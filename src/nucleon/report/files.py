"""Files that are whole or not there, their digests, and JSON that stays JSON."""

import hashlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast


def write_whole(path: Path, text: str) -> None:
    """Write `text` under a temporary name and rename it: no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names nothing, others the temporary name
        raise
    finally:
        with suppress(OSError):  # of a read-only disk, which is not to hide the first one
            temporary.unlink(missing_ok=True)


def to_json(value: object, indent: int | None = None) -> str:
    """`value` as JSON, with "nan", "inf" and "-inf" as words where JSON has no numbers."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in cast(Sequence[object], value)]
    return value
