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
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.linalg import kernels
from nucleon.linalg.half import augmented_from, polar_from
from nucleon.optim.methods import chosen_method
from nucleon.optim.polynomials import polynomials
from nucleon.optim.stacks import Layout, Stack, gram_key

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_GRID = 65535


@dataclass(frozen=True)
class Job:
    """What the kernels must know of a stack besides where its tensors are."""

    rows: int
    columns: int
    layout: Layout
    gradient: torch.dtype
    total: torch.dtype
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
    iterations: int

    @property
    def tall(self) -> bool:
        """Whether it is transposed: the recursion wants the short side first."""
        return self.rows > self.columns


def job_of(
    optimizer: "MatrixOptimizer", stack: Stack, gradient: Tensor, total: Tensor, group: Any
) -> Job | None:
    """The job, or None where the method, the device or the layout is not for these kernels."""
    first, (m, n) = stack.params[0], sorted(stack.shape)
    if not runs_on(first.device) or not optimizer.has_gram_form or group["certify"]:
        return None
    if chosen_method(group, m, n, first.device, first.dtype) != "half":
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
        has_gram,
        sign=-1.0 if group["maximize"] else 1.0,
        momentum=float(momentum),  # the kernels are compiled for the type of a number
        nesterov=group["nesterov"],
        keep=float(momentum**2 if keep is None else keep),
        smoothing=float(optimizer.smoothing_scale(group, m, n)) if has_gram else 0.0,
        bound=(group["gradient_bound"] / (momentum or 1.0)) ** 2 if has_gram else 0.0,
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
    places = None if job is None else moment_places(stack, job, states, gradients)
    if job is None or places is None:
        return None
    return compute(job, table(places, gradients[0].device), present)


def compute(job: Job, where: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by a table of the four kinds of tensors, see `moment_places`."""
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
    where: Tensor | None = None,
) -> bool:
    """W ← W − rate·P − decay·W for the matrices that are `taken`, (b,); False if it cannot.

    `where` is a table of the weights; None has it made.
    """
    first = stack.params[0]
    if not runs_on(first.device) or directions.dtype not in DTYPES:
        return False
    if any(isinstance(x, Tensor) and x.device != first.device for x in (rate, decay)):
        return False
    layout = _layout(stack)
    if layout is None:
        return False
    if where is None:
        places = places_in(layout, stack.params, first.device)
        if places is None:
            return False
        where = table(places, first.device)
    from nucleon.optim import triton_step

    given = (where, directions.contiguous(), taken, rate, decay, cautious)
    with torch.cuda.device_of(first):
        triton_step.moved(stack, layout, *given)
    return True


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are at hand; a compiler makes its own of the torch path."""
    return device.type == "cuda" and kernels.triton_works() and not torch.compiler.is_compiling()


def _layout(stack: Stack) -> Layout | None:
    """Where the matrices lie, if the kernels can follow it."""
    layout = stack.layout
    return None if layout is None or layout.count > LARGEST_GRID else layout


# ---------------------------------------------------------------------- tables of addresses


def moment_places(
    stack: Stack, job: Job, states: Sequence[Mapping[str, Tensor]], gradients: Sequence[Tensor]
) -> list[int] | None:
    """Where each run has its gradient, total, skipped and Gram, kind after kind, as addresses.

    None where one of them is irregular; without a Gram the third stands for it.
    """
    layout, device = job.layout, stack.params[0].device
    new = places_in(layout, gradients, device)
    old = places_in(layout, [state["total"] for state in states], device)
    if new is None or old is None:
        return None
    skipped: list[int] = []
    grams: list[int] = []
    square = 4 * min(stack.shape) ** 2
    for piece, state in zip(stack.pieces, states, strict=True):
        starts, first = range(piece.start, piece.stop, layout.each), piece.block.first
        count = state["skipped"]
        if not _regular(count, torch.int64, device):
            return None
        skipped += [count.data_ptr() + 8 * (first + start) for start in starts]
        if job.has_gram:
            gram = state[gram_key(piece.block)]
            if not _regular(gram, torch.float32, device):
                return None
            grams += [gram.data_ptr() + square * start for start in starts]
    if any(place % 16 for place in grams):
        return None
    return [*new, *old, *skipped, *(grams or skipped)]


def places_in(layout: Layout, tensors: Sequence[Tensor], device: torch.device) -> list[int] | None:
    """Where the runs of a stack lie in tensors like its parameters; None where it is irregular.

    Irregular are tensors that are not contiguous, of other dtypes, on another device, without a
    storage of their own as some subclasses are, or off a boundary of 16 bytes.
    """
    dtype, size = tensors[0].dtype, tensors[0].element_size()
    found: list[int] = []
    for tensor, offsets in zip(tensors, layout.offsets, strict=True):
        start = tensor.data_ptr()
        if not start or not _regular(tensor, dtype, device):
            return None
        found += [start + size * offset for offset in offsets]
    return None if dtype not in DTYPES or any(place % 16 for place in found) else found


def _regular(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    # A kernel given the address of anything else would take the whole process down.
    return tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()


def table(places: Sequence[int], device: torch.device) -> Tensor:
    """Addresses as a tensor on the device; kept, as most of them are the same at every step."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():  # filled when the graph is replayed, not now
            return _filled(tuple(places), device)
        return _kept(tuple(places), device, torch.cuda.current_stream().cuda_stream)


@lru_cache(maxsize=1024)
def _kept(places: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _filled(places, device)


def _filled(places: tuple[int, ...], device: torch.device) -> Tensor:
    from nucleon.optim import triton_step

    return triton_step.filled(places, device)
