"""Worst streams: gradients for which a search maximized a learner's regret over its bound.

Each is a small JSON file with the learner, the shape, the ratio reached, and the gradients of norm
≤ 1 as integers, in units of 1/10⁴. Streams of the package are in the folder `worst_cases`;
`nucleon.online.adversary.search` finds others.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from nucleon._files import to_json, write_whole
from nucleon.online.streams.setting import Setting, Shape, Stream, StreamOptions

FORMAT, VERSION = "nucleon-worst-case", 1
FOLDER = Path(__file__).parent / "worst_cases"
UNITS = 10_000


@dataclass(frozen=True, eq=False)
class WorstCase:
    """Gradients that a search found, and the share of its bound to which they bring a learner."""

    learner: str
    """The learner's name, as `online.learners.LEARNERS` has it."""
    gradients: Tensor
    """(T, m, n), m ≤ n, float64, ‖G_t‖_op ≤ 1, every entry a multiple of 1/10⁴."""
    ratio: float
    """Regret/bound after the last round with radius and gradient bound 1; for FTPL in the mean."""
    margin: float
    """Half the width of its interval: 0 where nothing is random."""
    search: dict[str, Any]
    """The options of the search."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        rows, columns = self.gradients.shape[1:]
        return rows, columns

    @property
    def rounds(self) -> int:
        """T."""
        return len(self.gradients)

    @property
    def file_name(self) -> str:
        """File name such as faml-2x4-100.json."""
        rows, columns = self.shape
        return f"{self.learner}-{rows}x{columns}-{self.rounds}.json"

    def save(self, folder: str | Path) -> Path:
        """Write the file into `folder`, whole or not at all, and return its path."""
        path = Path(folder) / self.file_name
        header = {"format": FORMAT, "version": VERSION, "learner": self.learner}
        header |= {"ratio": self.ratio, "margin": self.margin, "search": self.search}
        units = (self.gradients * UNITS).round().to(torch.int64).tolist()
        write_whole(path, to_json({**header, "gradients": units}) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "WorstCase":
        """Read a file of `save`; raise on any other."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = values.pop("format"), values.pop("version")
            gradients = torch.tensor(values.pop("gradients"), dtype=torch.float64) / UNITS
            if kind != (FORMAT, VERSION) or gradients.ndim != 3:
                raise ValueError(f"it is of format {kind} with {tuple(gradients.shape)} gradients")
            return cls(gradients=gradients, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a whole worst-case stream: {error}; search for it again"
            ) from error


def to_units(gradients: Tensor) -> Tensor:
    """Round streams (…, T, m, n) of norm ≤ 1 to multiples of 1/10⁴, shrunk to keep norm ≤ 1.

    Rounding moves a matrix by at most √(mn)/2 units in the Frobenius norm. A first gradient that
    vanishes becomes one unit: the learners' bounds count from the first that is not zero.
    """
    shrink = 1 - math.sqrt(math.prod(gradients.shape[-2:])) / UNITS
    units = (gradients * (shrink * UNITS)).round()
    first = units[..., 0, :, :]
    first[..., 0, 0] += (first == 0).all(-1).all(-1)
    return units / UNITS


def worst_cases(folder: str | Path = FOLDER) -> Sequence[WorstCase]:
    """Return the streams in `folder` (default: of the package), by learner, shape and T."""
    cases = (WorstCase.load(path) for path in sorted(Path(folder).glob("*.json")))
    return sorted(cases, key=lambda case: (case.learner, case.shape, case.rounds))


def worst(
    shape: Shape,
    *,
    learner: str = "faml",
    rounds: int | None = None,
    file: str | Path | None = None,
    **options: Unpack[StreamOptions],
) -> Stream:
    """Stream that a search found worst for `learner`: alternation first, then a drift.

    The package has streams for faml (default), ftrl and ftpl at 1×1, 2×2 and 2×4 and a few numbers
    of `rounds` (default: the most available); `file` names another file of `WorstCase.save`. A seed
    turns the stream into random bases, which changes no regret and no bound of a GBPA learner.
    """
    s = Setting(shape, **options)
    case = _kept(learner, s, rounds) if file is None else WorstCase.load(file)
    if case.shape != (s.short, s.long):
        raise ValueError(
            f"{file} holds matrices of shape {case.shape}, got shape={tuple(shape)}; pass its own"
        )
    gradients = case.gradients.to(s.device).unsqueeze(1)  # (T, b, m, n)
    if s.seed is None:
        gradients = gradients.expand(-1, math.prod(s.shape[:-2]), -1, -1)
    else:
        left, right = s.orthonormal(s.short, s.short, 0), s.orthonormal(s.long, s.long, 1)
        gradients = left @ gradients @ right.mT
    return s.stream("worst", lambda t, action: gradients[t - 1], rounds=case.rounds)


def _kept(learner: str, setting: Setting, rounds: int | None) -> WorstCase:
    """Return the package's stream for a learner and shape, by default with the most rounds."""
    stem = f"{learner}-{setting.short}x{setting.long}-"
    lengths = [int(path.stem.removeprefix(stem)) for path in FOLDER.glob(f"{stem}*.json")]
    length = max(lengths, default=None) if rounds is None else rounds
    if length not in lengths:
        names = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise ValueError(
            f"there is no worst stream for learner={learner!r}, shape={setting.shape}, "
            f"rounds={rounds!r}; those kept are {names}; "
            f"`nucleon.online.adversary.search` finds others"
        )
    return WorstCase.load(FOLDER / f"{stem}{length}.json")
