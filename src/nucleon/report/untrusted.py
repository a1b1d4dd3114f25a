"""Files that anybody may have written: read without waiting, and held to their form.

A run may have been cut off, edited or sent by a stranger. What is read of it lies in its folder, is
a plain file of a bounded size, and is not used before its fields are known to be there and of their
kinds.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, cast

from nucleon._files import to_json

LARGEST = 1 << 28
"""Bytes of a file; the longest trace of a claim has a few million."""
DEEPEST = 32
"""Lists and objects within each other."""
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How `to_json` writes numbers that JSON lacks."""
_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"} | {
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


class FormError(ValueError):
    """What is wrong with a file, as a sentence that wants its name before it."""


def read(folder: Path, name: str) -> bytes:
    """The content of the plain file `name` in `folder`: no link, no pipe, no device, no way out."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise FormError("is not a name of a file in the folder of its run")
    path = folder / name
    flags = os.O_RDONLY
    for flag in _FLAGS:  # a pipe without a writer is opened at once, a link not at all
        flags |= getattr(os, flag, 0)
    try:
        if path.is_symlink():
            raise FormError("is a link, which may lead anywhere")
        descriptor = os.open(path, flags)
        try:
            return _content(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FormError(f"cannot be read: {error.strerror}") from error


def _content(descriptor: int) -> bytes:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise FormError("is not a plain file")
    if about.st_size > LARGEST:
        raise FormError(f"has {about.st_size} bytes, more than the {LARGEST} that are read")
    with open(descriptor, "rb", closefd=False) as opened:
        return opened.read(LARGEST)


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object that `content` is, if it can be shown: text that is text, not too deep."""
    try:
        value = json.loads(content, parse_constant=_refuse)
        level = [value]
        for _ in range(DEEPEST):
            level = [inner for outer in level for inner in _inside(outer)]
        if level:
            raise FormError(f"is nested more than {DEEPEST} deep")
        to_json(value).encode()  # half of a character is none
    except FormError:
        raise
    except RecursionError:
        raise FormError(f"is nested more than {DEEPEST} deep") from None
    except ValueError:
        raise FormError("is cut off or was altered") from None
    if not isinstance(value, dict):
        raise FormError(f"is {_kind(value)}, not an object")
    return cast(dict[str, Any], value)


def field(values: Any, name: str, *kinds: type) -> Any:
    """The field `name` of an object, if it is there and of one of `kinds`."""
    if not isinstance(values, dict):
        raise FormError(f"has {_kind(values)} where an object with {name!r} belongs")
    if name not in values:
        raise FormError(f"has no {name!r}")
    value: Any = values[name]
    if type(value) not in kinds:
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise FormError(f"has {_kind(value)} as {name!r}, not {wanted}")
    return value


def texts(values: Any, name: str) -> list[str]:
    """A list of texts."""
    found: list[Any] = field(values, name, list)
    if not all(isinstance(item, str) for item in found):
        raise FormError(f"has more than text in {name!r}")
    return found


def choice(values: Any, name: str, options: Mapping[Any, Any] | tuple[str, ...]) -> Any:
    """A text that is one of a few."""
    value = field(values, name, str)
    if value not in options:
        raise FormError(f"has {value[:40]!r} as {name!r}, which is none of {', '.join(options)}")
    return value


def real(value: Any, name: str) -> float:
    """A number, or a word for one that JSON lacks."""
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    if type(value) not in (int, float):
        raise FormError(f"has {_kind(value)} as {name!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise FormError(f"has a number as {name!r} that is too large") from None


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []


def _kind(value: Any) -> str:
    return _NAMES[type(value)]


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
