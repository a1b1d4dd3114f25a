"""Checkpoints that are complete or not there, whatever the moment at which a run is killed.

A checkpoint is a folder `step-00000100` with its files and a manifest of their hashes. It is
written under a hidden name, flushed to the disk, and only then renamed, which file systems do at
once or not at all. Older ones are deleted after that, so there is always a complete one; should the
disk damage it, the hashes tell, and the one before it is taken.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nucleon import _checks
from nucleon._files import digest, drafted, flush, to_json, write_whole

STATE, MANIFEST, LATEST = "state.pt", "manifest.json", "latest"
Read = TypeVar("Read")
_NAME = re.compile(r"step-(\d{8,})")


class DamagedError(Exception):
    """A checkpoint that is not what was written, or not all of it."""


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: where they are, or will be.
        keep: how many of the newest stay (2: should the newest be damaged, there is another).
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = _checks.count("keep", keep)

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    @contextmanager
    def draft(self, step: int) -> Iterator[Path]:
        """A hidden folder for the files of a checkpoint, which it becomes if nothing is raised.

        `save` writes one file into it; a distributed run may have every rank write its own.
        """
        final = self.path(step)
        tidy(self.folder)
        with drafted(self.folder / f".{final.name}.tmp") as draft:
            yield draft
            _seal(draft)
            if final.exists():  # a damaged one: a complete one would have been resumed from
                shutil.rmtree(final)
            draft.rename(final)
            flush(self.folder)
        write_whole(self.folder / LATEST, f"{final.name}\n")  # for scripts
        # Later ones are damaged, else the run would have gone on from them: they do not count.
        for old in [s for s in self.steps() if s <= step][: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write what `torch.load(..., weights_only=True)` can read back."""
        content = io.BytesIO()  # written by Python, a full disk is an OSError that says so
        torch.save(state, content)
        with self.draft(step) as folder:
            (folder / STATE).write_bytes(content.getbuffer())

    def load(self, step: int, *, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The state of a step, or `DamagedError` with what is wrong with it."""
        path = verify(self.path(step), STATE) / STATE
        return torch.load(path, map_location=device, weights_only=True)

    def newest(
        self, say: Callable[[str], None], *, device: torch.device | str = "cpu"
    ) -> tuple[int, dict[str, Any]] | None:
        """The newest step whose checkpoint is complete, with its state; None if there is none.

        `say` is told of each damaged one that was passed over.
        """
        return self.newest_by(lambda step: self.load(step, device=device), say)

    def newest_by(
        self, read: Callable[[int], Read], say: Callable[[str], None]
    ) -> tuple[int, Read] | None:
        """The newest step that `read` reads without a `DamagedError`, with what it returns."""
        for step in reversed(self.steps()):
            try:
                return step, read(step)
            except DamagedError as error:
                say(f"the checkpoint of step {step} is damaged ({error}); trying the one before it")
        return None


def tidy(folder: Path) -> None:
    """Delete what a run that was killed left under temporary names; nobody else may be writing."""
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def verify(folder: Path, *needed: str) -> Path:
    """Return the folder of a checkpoint if its files, the needed ones too, are as once written."""
    try:
        expected: dict[str, str] = json.loads((folder / MANIFEST).read_text("utf-8"))["sha256"]
        for name, digest in expected.items():
            if _sha256(folder / name) != digest:
                raise DamagedError(f"{name} is not what was written")
        for name in needed:
            if name not in expected:
                raise DamagedError(f"{name} is missing")
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read") from error
    return folder


def _seal(folder: Path) -> None:
    """Write the manifest, and have the disk hold everything before the rename that counts."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(to_json({"sha256": digests}, indent=1), encoding="utf-8")
    for path in (*files, manifest, folder):
        flush(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return digest(opened)
