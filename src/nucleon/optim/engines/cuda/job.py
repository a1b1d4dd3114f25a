"""What the kernels must know of a stack besides where its tensors are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nucleon.optim.engines.cuda import pointers
from nucleon.optim.engines.cuda.layout import Layout
from nucleon.optim.engines.work import Draws, Hyperparameters

MOST_NOISE = 2**30
"""Entries of all samples of a matrix, which are drawn at once: 4 GiB with what becomes of them."""
LONGEST = 2**16
"""Columns of a matrix below 64 rows: one program goes through them in turn."""


@dataclass(frozen=True)
class Job:
    """What the kernels must know of a stack besides where its tensors are."""

    m: int
    """Of the short side."""
    n: int
    layout: Layout
    recursion: str
    """`kernel` of the method."""
    small: bool
    """Whether its direction is that of `small`."""
    gradient: torch.dtype
    total: torch.dtype
    weight: torch.dtype
    has_gram: bool
    masked: bool
    """Whether a mask says which matrices have a gradient."""
    decays: bool
    """Whether the weights decay."""
    iterations: int
    hyper: Hyperparameters
    alignments: tuple[int, int, int] = (16, 16, 16)
    """Of gradients, totals and weights, see `pointers.alignment`."""

    @property
    def draws(self) -> Draws | None:
        """The noise that the kernels draw."""
        return self.hyper.draws if self.recursion == "perturbed" else None

    @property
    def kinds(self) -> int:
        """How many tables of addresses there are before that of the weights."""
        return 5 if self.draws is None else 7

    @property
    def directions(self) -> int:
        """How many matrices go through the recursion."""
        return self.layout.count * (1 if self.draws is None else self.draws.samples)


def aligned(job: Job, addresses: Sequence[int]) -> Job:
    """The job for gradients, `pointers.of_states` and weights at these addresses, in this order."""
    runs = job.layout.runs
    parts = addresses[:runs], addresses[runs : 2 * runs], addresses[job.kinds * runs :]
    dtypes = job.gradient, job.total, job.weight
    gradient, total, weight = map(pointers.alignment, parts, (dtype.itemsize for dtype in dtypes))
    if (gradient, total, weight) == job.alignments:  # as mostly: a copy costs time
        return job
    return replace(job, alignments=(gradient, total, weight))
