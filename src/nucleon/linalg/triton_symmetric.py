"""The Triton kernels behind the half-precision recursion; imported only where Triton is installed.

XXᵀ, a product AB of commuting symmetric matrices, and AQᵀ with A = QR are all A·Bᵀ of row-major A
and B, and all symmetric: one kernel computes the tiles of one triangle and stores each twice. That
halves the arithmetic, and what is added or scaled meanwhile stays in registers.
"""
# A compile-time constant is declared as tl.constexpr and given as the value it holds.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Few: each is compiled once, and timed at every new shape. Three stages of a 128×64 tile leave
# room for two programs on a multiprocessor, so that one multiplies while the other stores.
CONFIGS = [
    triton.Config({"TILE": 128, "DEPTH": 64}, num_warps=4, num_stages=3),
    triton.Config({"TILE": 128, "DEPTH": 64}, num_warps=8, num_stages=3),
    triton.Config({"TILE": 128, "DEPTH": 128}, num_warps=8, num_stages=3),
    triton.Config({"TILE": 64, "DEPTH": 64}, num_warps=4, num_stages=4),
]
SMALL = CONFIGS[-1]
CHUNK, CHUNKS = 1024, 64

_tuned: dict[object, Any] = {}


@triton.jit
def matrix(table, index, each, size, TYPE: tl.constexpr):
    """Matrix `index` of runs of `each`, `size` entries apart, by a table of where they begin."""
    base = tl.load(table + index // each).to(tl.pointer_type(TYPE))
    return tl.multiple_of(base, 16) + (index % each).to(tl.int64) * size


@triton.jit(do_not_specialize=["product_power", "addend_power", "each"])
def _symmetric(
    a,
    b,
    addend,
    scale,
    addend_scale,
    out,
    second,
    norms,
    rows,
    depth,
    alpha,
    beta,
    shift,
    second_shift,
    addend_shift,
    product_power,
    addend_power,
    each,
    HAS_ADDEND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ADDEND_TABLE: tl.constexpr,
    OUT_TABLE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    REMAINDER: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Tile t of the lower triangle, row by row: t = i(i+1)/2 + j with j ≤ i.
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root may be off by one either way
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)

    at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    at_k = tl.arange(0, DEPTH)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    # Rows past the end are those of the next matrix, or wrap around, or are zero, instead of being
    # masked: what they give is never stored.
    if COPY_ENGINE:
        above = tl.program_id(1) * rows
        for k in range(0, depth, DEPTH):
            left, right = a.load([above + i * TILE, k]), b.load([above + j * TILE, k])
            total = tl.dot(left, right.T, total)
    else:
        a_tile = a + batch * rows * depth + (at_i % rows)[:, None] * depth + at_k[None, :]
        b_tile = b + batch * rows * depth + (at_j % rows)[:, None] * depth + at_k[None, :]
        for k in range(0, depth, DEPTH):
            known = at_k[None, :] < depth - k
            left = tl.load(a_tile + k, mask=known, other=0.0)
            right = tl.load(b_tile + k, mask=known, other=0.0)
            total = tl.dot(left, right.T, total, input_precision=PRECISION)

    total *= alpha
    inside = (at_i < rows)[:, None] & (at_j < rows)[None, :]
    lower = at_i[:, None] * rows + at_j[None, :]
    upper = at_j[:, None] * rows + at_i[None, :]
    first = batch * rows * rows
    if ADDEND_TABLE:
        addend = matrix(addend, batch, each, rows * rows, tl.float32)
    else:
        addend += first
    if OUT_TABLE:
        out = matrix(out, batch, each, rows * rows, tl.float32)
    else:
        out += first
    if HAS_SCALE:
        s = tl.load(scale + batch)
        total *= tl.where(product_power == 0, 1.0, s)
        total *= tl.where(product_power == 2, s, 1.0)
    diagonal = at_i[:, None] == at_j[None, :]
    if HAS_ADDEND:
        plus = tl.load(addend + lower, mask=inside, other=0.0).to(tl.float32)
        plus += tl.where(diagonal, addend_shift, 0.0)
        if HAS_SCALE:  # one factor at a time: u² or the addend times β alone may leave the range
            u = tl.load(addend_scale + batch)
            plus *= tl.where(addend_power == 0, 1.0, u)
            total += plus * beta * tl.where(addend_power == 2, u, 1.0)
        else:
            total += plus * beta
    if i == j:  # operands that commute up to rounding only leave this tile asymmetric
        total = (total + total.T) / 2
    total += tl.where(diagonal, shift, 0.0)
    if HAS_NORMS:
        known = tl.where(inside, total, 0.0)
        weight = tl.where(i == j, 1.0, 2.0)
        tl.store(norms + batch * tl.num_programs(0) + t, weight * tl.sum(known * known))

    result = total.to(out.dtype.element_ty)
    tl.store(out + lower, result, mask=inside)
    if i != j:
        tl.store(out + upper, result.T, mask=inside.T)
    if KIND == "remainder":
        other = ((total - result.to(tl.float32)) * REMAINDER).to(second.dtype.element_ty)
    if KIND == "shifted":
        other = (total + tl.where(diagonal, second_shift, 0.0)).to(second.dtype.element_ty)
    if KIND != "":
        tl.store(second + first + lower, other, mask=inside)
        if i != j:
            tl.store(second + first + upper, other.T, mask=inside.T)


def symmetric(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    scale: Tensor | None,
    out: Tensor,
    second: Tensor,
    factors: list[float],
    powers: list[int],
    precision: str,
    kind: str,
    remainder_scale: float,
    config: Any = None,
    *,
    addend_scale: Tensor | None = None,
    addend_shift: float = 0.0,
    norms: Tensor | None = None,
    each: int = 1,
) -> int:
    """Run the kernel on contiguous operands, with the tiles of `config` or with tuned ones.

    `second` receives what `out` lost to rounding ("remainder"), times `remainder_scale`, or
    out + factors[3]·I ("shifted"). An `addend` or `out` of int64 is a table of the addresses of
    float32 tensors with `each` matrices, which may be the same ones; `addend_shift`·I is part of
    the addend, `addend_scale` its own factor. `norms`, flat, receives the parts of ‖out‖_F², as
    many for each matrix as are returned, 64² entries or more each.
    """
    count, rows, depth = a.shape
    half = a.element_size() == 2
    # The bulk copy engine of Hopper and later wants rows that begin at multiples of 16 bytes.
    engine = half and depth % 8 == 0 and not INTERPRETED and _has_copy_engine(a.device)
    other = scale if addend_scale is None else addend_scale

    def run(config: Any, out: Tensor) -> int:
        tile, step = config.kwargs["TILE"], config.kwargs["DEPTH"]
        tiles = triton.cdiv(rows, tile)
        tiles = tiles * (tiles + 1) // 2
        operands = (a, b)
        if engine:
            box = [count * rows, depth], [depth, 1], [tile, step]
            left = TensorDescriptor(a, *box)
            operands = (left, left if a is b else TensorDescriptor(b, *box))
        _symmetric[(tiles, count)](
            *operands,
            a if addend is None else addend,
            a if scale is None else scale,
            a if other is None else other,
            out,
            second if kind else out,
            a if norms is None else norms,
            rows,
            depth,
            *(*factors, 0.0)[:4],
            addend_shift,
            *powers,
            each,
            HAS_ADDEND=addend is not None,
            HAS_SCALE=scale is not None,
            HAS_NORMS=norms is not None,
            ADDEND_TABLE=addend is not None and addend.dtype == torch.int64,
            OUT_TABLE=out.dtype == torch.int64,
            KIND=kind,
            PRECISION=precision,
            REMAINDER=remainder_scale,
            COPY_ENGINE=engine,
            **config.all_kwargs(),
        )
        return tiles

    if config is None and (INTERPRETED or rows <= 96 or not half):
        config = SMALL  # large tiles would be masked mostly, or of float32 fill the memory
    key = (a.device, a.shape, a.dtype)  # what comes after the product matters little
    config = config or _tuned.get(key)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        if config is None:
            table = out.dtype == torch.int64  # timed elsewhere: it may be the addend as well
            spare = a.new_empty((count, rows, rows), dtype=torch.float32) if table else out
            config = _tune(key, partial(run, out=spare))
        return run(config, out)


def _tune(key: object, run: Callable[[Any], object]) -> Any:
    """The fastest configuration for a shape, timed once; while a graph is captured, the first."""
    if torch.cuda.is_current_stream_capturing():
        return CONFIGS[0]
    times = [triton.testing.do_bench(partial(run, c), warmup=2, rep=8) for c in CONFIGS]
    _tuned[key] = CONFIGS[times.index(min(times))]
    return _tuned[key]


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _squares(x, sums, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    batch, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), dtype=tl.float64)
    for start in range(0, size, CHUNK * CHUNKS):
        value = tl.load(x + batch * size + start + at, mask=start + at < size, other=0.0)
        value = value.to(tl.float64)
        total += value * value
    tl.store(sums + batch * CHUNKS + chunk, tl.sum(total))


def squares(x: Tensor) -> Tensor:
    """‖X‖_F² of each contiguous (b, m, n), (b,) float64: torch would first copy X to float64."""
    sums = x.new_empty((x.shape[0], CHUNKS), dtype=torch.float64)
    with torch.cuda.device_of(x):
        _squares[(x.shape[0], CHUNKS)](x, sums, x[0].numel(), CHUNK, CHUNKS)
    return sums.sum(-1)


@triton.jit
def _scaled_half(x, factor, out, size, CHUNK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + batch * size + at, mask=at < size, other=0.0) * tl.load(factor + batch)
    tl.store(out + batch * size + at, value.to(tl.float16), mask=at < size)


def scaled_half(x: Tensor, factor: Tensor) -> Tensor:
    """float16(factor·X), (b,) factors and contiguous (b, m, n), in one pass of wide loads."""
    out, size = torch.empty_like(x, dtype=torch.float16), x[0].numel()
    with torch.cuda.device_of(x):
        _scaled_half[(triton.cdiv(size, 4 * CHUNK), x.shape[0])](x, factor, out, size, 4 * CHUNK)
    return out
