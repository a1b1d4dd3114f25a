"""The launches of a step, one by one: moments, direction, weights."""

import torch
from torch import Tensor

from nucleon.linalg import half
from nucleon.linalg._precision import exact_products
from nucleon.optim.engines.cuda.job import Job
from nucleon.optim.polar_methods import polynomials

RECURSIONS = {"polar": half.polar_from, "augmented": half.augmented_from}
"""Of `KERNELS` those without noise: the direction in float16, from the operands of `begin`."""


def compute(job: Job, table: Tensor, has_gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """The new moments and the direction, by a table of the pointers without the weights."""
    from nucleon.optim.engines.cuda import kernels, perturbed, small

    # Triton launches on the current device; products of float16 are summed in float32.
    with torch.cuda.device_of(table), exact_products(table.device):
        if job.recursion == "perturbed":
            return perturbed.compute(job, table, has_gradient)
        if job.small:
            return small.compute(job, table, has_gradient)
        start, taken = kernels.begin(job, table, has_gradient)
        recursion = RECURSIONS[job.recursion]
        return recursion(start, polynomials("half", job.iterations), torch.float16), taken


def step(
    job: Job, table: Tensor, mask: Tensor, rate: float | Tensor, decay: float | Tensor
) -> None:
    """The whole step, by a table of all pointers."""
    from nucleon.optim.engines.cuda import kernels

    runs = job.layout.runs
    moments, weights = table[: job.kinds * runs], table[job.kinds * runs :]
    directions, taken = compute(job, moments, mask if job.masked else None)
    with torch.cuda.device_of(table):
        kernels.moved(job, weights, directions, taken, rate, decay)
