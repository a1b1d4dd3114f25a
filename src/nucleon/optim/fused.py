"""The step of a stack in a few passes over its gradients, however many parameters they are of.

Where the direction is the float16 recursion on CUDA, its operands are made from the parameters' own
gradients and moments, without a float32 copy of the stack:

    look      ‖S‖_F and ‖G‖_F of each matrix, S = βĜ + G, and from them which are finite
    advance   Ĝ ← βĜ + G;  S and G in float16, short side first
    M̂ ← β₂M̂ + GGᵀ in place, and with it the first Gram matrix of the recursion
    move      W ← W − lr·s·scale·P − lr·`weight_decay`·W, for any direction

Elsewhere the library does the same with torch, in more passes: `MatrixOptimizer.compute` and
`weights.apply`. The kernels are in `triton_step`; `replay` launches all of them at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.linalg import kernels
from nucleon.linalg.half import augmented_from, polar_from
from nucleon.optim import addresses, rest, shards
from nucleon.optim.axes import Block
from nucleon.optim.methods import chosen_method
from nucleon.optim.polynomials import polynomials
from nucleon.optim.stacks import LARGEST_GRID, Layout, Stack, strides

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


@dataclass(frozen=True)
class Job:
    """What the kernels must know of a stack besides where its tensors are."""

    rows: int
    columns: int
    layout: Layout
    gradient: torch.dtype
    total: torch.dtype
    weight: torch.dtype
    has_gram: bool
    sign: float
    """−1 to climb."""
    momentum: float
    nesterov: bool
    keep: float
    """β₂."""
    smoothing: float
    bound: float
    """c and G²β₁⁻² of Λ = c(G²β₁⁻²I + M̂)."""
    longest_quiet: int
    """Steps without a gradient after which the direction is zero, see `rest`."""
    iterations: int
    boundaries: tuple[int, int, int] = (16, 16, 16)
    """Of gradients, totals and weights, see `addresses.boundary`."""

    @property
    def tall(self) -> bool:
        """Whether it is transposed: the recursion wants the short side first."""
        return self.rows > self.columns


def serves(optimizer: "MatrixOptimizer", group: Any, param: Tensor, m: int, n: int) -> bool:
    """Whether the kernels compute the direction of such matrices, m ≤ n, of a parameter."""
    if not runs_on(param.device) or not optimizer.has_gram_form or group["certify"]:
        return False
    return chosen_method(group, m, n, param.device, param.dtype) == "half"


def expected(optimizer: "MatrixOptimizer", group: Any, param: Tensor, block: Block) -> bool:
    """Whether they do the whole step of a block of it, if its gradients lie regularly."""
    local = group["placement"] == "local" and not shards.sharded(param)
    plain = not group["stochastic_rounding"] and group["momentum_dtype"] != torch.float64
    regular = param.is_contiguous() and strides(block, tuple(param.shape)) is not None
    m, n = sorted((block.rows, block.columns))
    return local and plain and regular and serves(optimizer, group, param, m, n)


def job_of(
    optimizer: "MatrixOptimizer", stack: Stack, gradient: Tensor, total: Tensor, group: Any
) -> Job | None:
    """The job, or None where the method, the device or the layout is not for these kernels."""
    first, (m, n) = stack.params[0], sorted(stack.shape)
    if not serves(optimizer, group, first, m, n):
        return None
    layout = _layout(stack)
    if layout is None:
        return None
    momentum, has_gram = group["momentum"], optimizer.has_gram
    keep = group.get("beta2")
    return Job(
        *stack.shape,
        layout,
        gradient.dtype,
        total.dtype,
        first.dtype,
        has_gram,
        sign=-1.0 if group["maximize"] else 1.0,
        momentum=float(momentum),  # the kernels are compiled for the type of a number
        nesterov=group["nesterov"],
        keep=float(momentum**2 if keep is None else keep),
        smoothing=float(optimizer.smoothing_scale(group, m, n)) if has_gram else 0.0,
        bound=(group["gradient_bound"] / (momentum or 1.0)) ** 2 if has_gram else 0.0,
        longest_quiet=rest.longest_quiet(momentum, group.get("gradient_bound", 0.0)),
        iterations=group["iterations"],
    )


def direction(
    optimizer: "MatrixOptimizer",
    stack: Stack,
    states: Sequence[Mapping[str, Tensor]],
    gradients: Sequence[Tensor],
    group: Mapping[str, Any],
    present: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Enter the gradients into the state; (P in float16, which matrices are to be moved).

    None, with nothing changed, where the method, the device or the layout is another.
    """
    job = job_of(optimizer, stack, gradients[0], states[0]["total"], group)
    if job is None:
        return None
    device = gradients[0].device
    new = addresses.places_in(job.layout, gradients, device)
    old = addresses.of_states(stack, states, has_gram=job.has_gram)
    if new is None or old is None:
        return None
    places = [*new, *old]
    return compute(placed(job, places), addresses.table(places, device), present)


def placed(job: Job, places: Sequence[int]) -> Job:
    """The job for gradients, then `addresses.of_states`, then weights that lie at these places."""
    runs = job.layout.runs
    parts = places[:runs], places[runs : 2 * runs], places[5 * runs :]
    dtypes = job.gradient, job.total, job.weight
    gradient, total, weight = map(addresses.boundary, parts, (dtype.itemsize for dtype in dtypes))
    if (gradient, total, weight) == job.boundaries:  # as mostly: a copy costs time
        return job
    return replace(job, boundaries=(gradient, total, weight))


def compute(job: Job, where: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by a table of the places, without the weights."""
    from nucleon.optim import triton_step

    with torch.cuda.device_of(where):  # Triton launches on the current device
        begin, taken = triton_step.begin(job, where, present)
        recursion = augmented_from if job.has_gram else polar_from
        return recursion(begin, polynomials("half", job.iterations), torch.float16), taken


def move(
    stack: Stack,
    directions: Tensor,
    taken: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
    *,
    cautious: bool,
    where: tuple[Tensor, int] | None = None,
) -> bool:
    """W ← W − rate·P − decay·W for the matrices that are `taken`, (b,); False if it cannot.

    `where` is a table of the weights with their boundary; None has it made.
    """
    first = stack.params[0]
    if not runs_on(first.device) or directions.dtype not in addresses.DTYPES:
        return False
    if any(isinstance(x, Tensor) and x.device != first.device for x in (rate, decay)):
        return False
    layout = _layout(stack)
    if layout is None:
        return False
    if where is None:
        places = addresses.places_in(layout, stack.params, first.device)
        if places is None:
            return False
        boundary = addresses.boundary(places, first.element_size())
        where = addresses.table(places, first.device), boundary
    from nucleon.optim import triton_step

    given = (directions.contiguous(), taken, rate, decay, cautious)
    with torch.cuda.device_of(first):
        triton_step.moved(stack, layout, *where, *given)
    return True


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are at hand; a compiler makes its own of the torch path."""
    return device.type == "cuda" and kernels.triton_works() and not torch.compiler.is_compiling()


def _layout(stack: Stack) -> Layout | None:
    """Where the matrices lie, if the kernels can follow it."""
    layout = stack.layout
    return None if layout is None or layout.count > LARGEST_GRID else layout
