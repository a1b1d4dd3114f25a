"""The folder of a run, which one process at a time may write.

The operating system keeps a lock on a file in it. The lock is gone with the process, however that
ends, so none is ever stale. The file stays; what it says of its holder is true while it is locked.
"""

import errno
import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nucleon._files import NotPlainError, open_plain, to_json

LOCK = ".lock"

if sys.platform == "win32":
    import msvcrt

    def _lock(opened: int) -> None:
        os.lseek(opened, 1 << 30, os.SEEK_SET)  # what is locked there nobody else can read
        msvcrt.locking(opened, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(opened: int) -> None:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunError(Exception):
    """The folder cannot take this run; `remedy` says what to do instead."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


@dataclass
class _Hold:
    """The open file of a lock of this process, what it says, and how often it is held."""

    opened: int
    said: bytes | None
    """None where the file system has no locks: then the file is nobody's."""
    times: int = 0


_holds: dict[Path, _Hold] = {}


def _let_go() -> None:
    """A forked child holds nothing: the lock is its parent's, and gone with that."""
    for held in _holds.values():
        os.close(held.opened)
    _holds.clear()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only process that writes `folder`, or raise a `RunError` that says who does.

    A process may hold again what it holds. Where the file system has no locks there is a warning,
    and nothing is held.
    """
    place = folder.resolve()
    if place not in _holds:
        _holds[place] = _Hold(*_locked(folder))
    held = _holds[place]
    held.times += 1
    try:
        yield
    finally:
        held.times -= 1
        if not held.times and _holds.get(place) is held:  # else a child leaves its parent's block
            del _holds[place]
            os.close(held.opened)  # and with it the lock


def check_held(folder: Path) -> None:
    """Raise a `RunError` where the lock of this process on `folder` was deleted or replaced.

    Then another process may hold the folder too, and neither sees the other. Without locks every
    process may open the file, a refused one too, and it tells nothing.
    """
    held = _holds.get(folder.resolve())  # None where `folder` is a link that leads elsewhere now
    if held is not None and held.said is None:
        return
    try:
        # What it says, not which file it is: some network file systems number files anew.
        lock = folder / LOCK
        there = held is not None and lock.is_file() and lock.read_bytes() == held.said
    except OSError:
        there = False
    if not there:
        raise RunError(
            f"{folder / LOCK} was deleted or replaced while this process held it",
            "look whether another one writes there, then go on with --resume",
        )


def _locked(folder: Path) -> tuple[int, bytes | None]:
    """The open file of a new lock, and what it says, as `_Hold` has them."""
    opened = _opened(folder / LOCK)
    try:
        _lock(opened)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            holder = _holder(opened)
            os.close(opened)
            raise RunError(
                f"{folder} is being written by {holder}",
                "wait until it ends, or stop it, or choose another --output",
            ) from error
        warnings.warn(  # network file systems may have none
            f"{folder} cannot be locked: {error.strerror}; let no second process write it",
            RuntimeWarning,
            stacklevel=4,
        )
        return opened, None
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    who = to_json({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
    os.ftruncate(opened, 0)
    os.lseek(opened, 0, os.SEEK_SET)
    os.write(opened, who)
    return opened, who


def _opened(path: Path) -> int:
    """A plain file, made where there is none: what a link leads to is not to be written over."""
    try:
        return open_plain(path, os.O_RDWR | os.O_CREAT)
    except NotPlainError as error:
        raise RunError(
            f"{path} {error}, so {path.parent} cannot be locked",
            "delete it if you know where the folder comes from, or choose another --output",
        ) from error


def _holder(opened: int) -> str:
    try:
        os.lseek(opened, 0, os.SEEK_SET)
        who = json.loads(os.read(opened, 4096))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock, and has not said yet who it is
        return "another process"
