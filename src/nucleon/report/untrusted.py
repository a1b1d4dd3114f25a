"""Files that anybody may have written: read without waiting, and held to their form.

A run may have been cut off, edited or sent by a stranger. What is read of it lies in its folder, is
a plain file of a bounded size, and is not used before its fields are known to be there and of their
kinds.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import NoneType
from typing import Any, cast

from nucleon._files import WORDS, NotPlainError, digest, open_plain, to_json

LARGEST = 1 << 28
"""Bytes of a file of which the digest is taken; the longest trace of a claim has a few million."""
LARGEST_READ = 1 << 26
"""Bytes of a file that is held in memory; two million points of a figure fit."""
LONGEST_NAME = 255
"""Bytes of the name of a file, the most that file systems take."""
DEEPEST = 32
"""Lists and objects within each other."""
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"} | {
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


class FormError(ValueError):
    """What is wrong with a file, as a sentence that wants its name before it."""


def check_name(name: str) -> None:
    """Refuse what leads out of a folder, on any system, or what a terminal would act upon."""
    outward = name in ("", ".", "..") or any(sign in name for sign in "/\\:")
    if outward or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise FormError(f"names {_short(name)}, which is no file in its folder")


def read(folder: Path, name: str) -> bytes:
    """The content of the plain file `name`, which `check_name` lets pass, in `folder`."""
    with _plain_file(folder / name, LARGEST_READ) as opened:
        return opened.read(os.fstat(opened.fileno()).st_size)  # to ask for more would allocate it


def digest_of(folder: Path, name: str) -> str:
    """The SHA-256 of such a file, which is never in memory as a whole."""
    with _plain_file(folder / name, LARGEST) as opened:
        return digest(opened)


@contextmanager
def _plain_file(path: Path, most: int) -> Iterator[BufferedReader]:
    """A file of at most so many bytes, open to be read: no link, no pipe, no device."""
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most:
                raise FormError(f"has {size} bytes, more than the {most} that are read")
            yield opened
    except NotPlainError as error:
        raise FormError(str(error)) from error
    except OSError as error:
        raise FormError(f"cannot be read: {error.strerror}") from error


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
        raise FormError(f"has {_kind(values)} where an object with {_short(name)} belongs")
    if name not in values:
        raise FormError(f"has no {_short(name)}")
    value: Any = values[name]
    if type(value) not in kinds:
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise FormError(f"has {_kind(value)} as {_short(name)}, not {wanted}")
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
        raise FormError(f"has {_short(value)} as {name!r}, which is none of {', '.join(options)}")
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


def _short(word: str) -> str:
    """A word of a file in a line: not too long, and with no sign that a terminal acts upon."""
    return repr(word[:40])


def _kind(value: Any) -> str:
    return _NAMES[type(value)]


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
