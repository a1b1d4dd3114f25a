"""A step around its direction in a few passes over the gradients, whatever their number.

Where the direction is the float16 recursion on CUDA, its operands are made from the parameters' own
gradients and moments, without a float32 copy of the stack:

    look      ‖S‖_F and ‖G‖_F of each matrix, S = βĜ + G, and from them which are finite
    advance   Ĝ ← βĜ + G;  S and G in float16, short side first
    M̂ ← β₂M̂ + GGᵀ in place, and with it the first Gram matrix of the recursion
    move      W ← W − lr·s·scale·P − lr·`weight_decay`·W, for any direction

Elsewhere the library does the same with torch, in more passes: `MatrixOptimizer.compute` and
`weights.apply`. The kernels are in `triton_step`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.linalg import kernels
from nucleon.linalg.half import Start, augmented_from, polar_from, spread_of
from nucleon.optim.methods import chosen_method
from nucleon.optim.polynomials import polynomials
from nucleon.optim.stacks import Layout, Stack

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer

States = Sequence[Mapping[str, Tensor]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_GRID = 65535
BLOCK = 1024


def direction(
    optimizer: "MatrixOptimizer",
    stack: Stack,
    states: States,
    gradients: Sequence[Tensor],
    group: Mapping[str, Any],
    present: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Enter the gradients into the state; (P in float16, which matrices are to be moved).

    None, with nothing changed, where the method, the device or the layout is another.
    """
    first, (m, n) = stack.params[0], sorted(stack.shape)
    if not runs_on(first.device) or not optimizer.has_gram_form or group["certify"]:
        return None
    if chosen_method(group, m, n, first.device, first.dtype) != "half":
        return None
    layout = stack.layout
    if layout is None:
        return None
    new, old = _table(layout, gradients), _table(layout, [s["total"] for s in states])
    if new is None or old is None:
        return None
    begin, taken = _begin(optimizer, stack, layout, states, (new, old), gradients, group, present)
    recursion = augmented_from if optimizer.has_gram else polar_from
    return recursion(begin, polynomials("half", group["iterations"]), torch.float16), taken


def move(
    stack: Stack,
    directions: Tensor,
    taken: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
    *,
    cautious: bool,
) -> bool:
    """W ← W − rate·P − decay·W for the matrices that are `taken`, (b,); False if it cannot."""
    first = stack.params[0]
    if not runs_on(first.device) or directions.dtype not in DTYPES:
        return False
    if isinstance(rate, Tensor) and rate.device != first.device:
        return False
    layout = stack.layout
    table = None if layout is None else _table(layout, stack.params)
    if layout is None or table is None:
        return False
    from nucleon.optim import triton_step

    decays = isinstance(decay, Tensor) or decay != 0.0
    if isinstance(rate, Tensor):
        rate = rate.float()
        decay = decay.float() if isinstance(decay, Tensor) else rate.new_full((), decay)
    rows, columns = stack.shape
    triton_step.move[(triton_step.tiles(rows, columns), layout.count)](
        table,
        directions.contiguous(),
        taken,
        rate,
        decay,
        rows,
        columns,
        layout.each,
        layout.inner,
        layout.stride,
        WEIGHT=triton_step.TYPES[first.dtype],
        TALL=rows > columns,
        DECAYS=decays,
        CAUTIOUS=cautious,
        ON_DEVICE=isinstance(rate, Tensor),
    )
    return True


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are at hand; a compiler makes its own of the torch path."""
    return device.type == "cuda" and kernels.triton_works() and not torch.compiler.is_compiling()


def _begin(
    optimizer: "MatrixOptimizer",
    stack: Stack,
    layout: Layout,
    states: States,
    tables: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    group: Mapping[str, Any],
    present: Tensor | None,
) -> tuple[Start, Tensor]:
    """The new moments, and where the recursion begins; which matrices are taken, (b,)."""
    from nucleon.linalg import triton_symmetric
    from nucleon.optim import triton_step

    (rows, columns), (m, n) = stack.shape, sorted(stack.shape)
    count, each, device = layout.count, layout.each, tables[0].device
    momentum, has_gram = group["momentum"], optimizer.has_gram
    pieces = list(zip(stack.pieces, states, strict=True))
    grams = skipped = _addresses([p.own(s["skipped"]).data_ptr() for p, s in pieces], device)
    keep, smoothing, bound = 0.0, 0.0, 0.0
    if has_gram:
        grams = _addresses([p.gram(s).data_ptr() for p, s in pieces], device)
        keep = momentum**2 if group["beta2"] is None else group["beta2"]
        smoothing = optimizer.smoothing_scale(group, m, n)
        bound = (group["gradient_bound"] / (momentum or 1.0)) ** 2

    spread = spread_of(n)
    tiles = triton_step.tiles(rows, columns)
    place = (rows, columns, each, layout.inner, layout.stride)
    ahead = (momentum, 1.0) if group["nesterov"] else (1.0, 0.0)
    factors_of = (-1.0 if group["maximize"] else 1.0, momentum, *ahead)
    types = {
        "GRADIENT": triton_step.TYPES[gradients[0].dtype],
        "TOTAL": triton_step.TYPES[states[0]["total"].dtype],
    }
    sums = torch.empty((count, tiles, 2), dtype=torch.float64, device=device)
    triton_step.look[(tiles, count)](*tables, sums, *place, *factors_of, **types)

    factors = torch.empty((5, count), dtype=torch.float32, device=device)
    taken = torch.empty(count, dtype=torch.bool, device=device)
    limits = torch.finfo(torch.float32)
    triton_step.measure[(count,)](
        sums, grams, skipped, taken if present is None else present, factors, taken,
        tiles, m, each, keep, smoothing, bound, spread, limits.max, limits.tiny,
        HAS_GRAM=has_gram, HAS_PRESENT=present is not None, BLOCK=BLOCK,
    )  # fmt: skip
    x = torch.empty((count, m, n), dtype=torch.float16, device=device)
    scaled = torch.empty_like(x) if has_gram else x
    triton_step.advance[(tiles, count)](
        *tables, factors, taken, x, scaled, *place, *factors_of,
        **types, HAS_GRAM=has_gram, TALL=rows > columns,
    )  # fmt: skip

    product = triton_symmetric.symmetric
    rest = ("tf32", "", kernels.REMAINDER_SCALE)
    r = torch.empty((count, m, m), dtype=torch.float16, device=device)
    parts = math.comb(-(-m // 64) + 1, 2)
    norms = torch.empty(count * parts, dtype=torch.float32, device=device)
    alpha, remainder = m / spread**2, None
    if has_gram:
        _, inverse, _, back, kept = factors.unbind()
        given = (grams, back, grams, grams, [1.0, 1.0, 0.0], [2, 1], *rest)
        product(scaled, scaled, *given, addend_scale=kept, each=each)
        remainder = torch.empty_like(r)
        given = (grams, inverse, r, remainder, [alpha, m * smoothing, 0.0], [0, 2], "tf32")
        parts = product(
            x, x, *given, "remainder", rest[-1], addend_shift=bound, norms=norms, each=each
        )
    else:
        parts = product(x, x, None, None, r, r, [alpha, 0.0, 0.0], [0, 0], *rest, norms=norms)
    scale, length = torch.empty((2, count), dtype=torch.float32, device=device).unbind()
    triton_step.lengths[(count,)](norms, scale, length, parts, m, spread, BLOCK=BLOCK)
    return Start(x, r, remainder, scale, length, spread), taken


def _table(layout: Layout, tensors: Sequence[Tensor]) -> Tensor | None:
    """Where the pieces of a stack lie in tensors like its parameters; None where it is irregular.

    Irregular are tensors that are not contiguous, of other dtypes, or off a boundary of 16 bytes.
    """
    dtype, size = tensors[0].dtype, tensors[0].element_size()
    found: list[int] = []
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        address = tensor.data_ptr() + offset * size
        if tensor.dtype != dtype or not tensor.is_contiguous() or address % 16:
            return None
        found.append(address)
    if dtype not in DTYPES or layout.count > LARGEST_GRID:
        return None
    return _addresses(found, tensors[0].device)


def _addresses(found: Sequence[int], device: torch.device) -> Tensor:
    """Addresses as a tensor on the device; kept, as most of them are the same at every step."""
    if torch.cuda.is_current_stream_capturing():  # filled when the graph is replayed, not now
        return _filled(tuple(found), device)
    return _kept(tuple(found), device, torch.cuda.current_stream(device).cuda_stream)


def _filled(found: tuple[int, ...], device: torch.device) -> Tensor:
    from nucleon.optim import triton_step

    some = triton_step.POINTERS
    padded = [*found, *found[-1:] * (-len(found) % some)]
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for i in range(0, len(padded), some):
        triton_step.fill[(1,)](table[i:], *padded[i : i + some])
    return table


@lru_cache(maxsize=1024)
def _kept(found: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _filled(found, device)
