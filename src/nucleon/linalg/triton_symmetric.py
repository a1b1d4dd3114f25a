"""The Triton kernels behind the half-precision recursion; imported only where Triton is installed.

XXᵀ, a product AB of commuting symmetric matrices, and AQᵀ with A = QR are all A·Bᵀ of row-major A
and B, and all symmetric: one kernel computes the tiles of one triangle and stores each twice. That
halves the arithmetic, and addends and factors stay in registers.
"""
# A compile-time constant is declared as tl.constexpr and given as the value it holds.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false

import math
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from nucleon.linalg._scaling import REMAINDER_SCALE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Few: each is compiled for each kind of product, and timed at every new shape of it. Three stages
# of a 128×64 tile leave room for two programs on a multiprocessor, so that one multiplies while the
# other stores, if a thread takes no more than 128 registers with eight warps, 256 with four: see
# the test.
CONFIGS = [
    triton.Config({"TILE": 128, "DEPTH": 64}, num_warps=8, num_stages=3),
    triton.Config({"TILE": 128, "DEPTH": 64}, num_warps=4, num_stages=3),
    triton.Config({"TILE": 128, "DEPTH": 128}, num_warps=8, num_stages=3),
    triton.Config({"TILE": 64, "DEPTH": 64}, num_warps=4, num_stages=4),
]
LARGE, SMALL = CONFIGS[0], CONFIGS[-1]
CHUNK, CHUNKS = 1024, 64
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_REMAINDER = tl.constexpr(REMAINDER_SCALE)
_tuned: dict[object, Any] = {}


@triton.jit
def matrix(table, index, each, size, TYPE: tl.constexpr, BYTES: tl.constexpr = 16):
    """Return the pointer to matrix `index` of runs of `each`, `size` entries apart, by their table.

    All entries of the table are multiples of BYTES.
    """
    base = tl.load(table + index // each).to(tl.pointer_type(TYPE))
    return tl.multiple_of(base, BYTES) + (index % each).to(tl.int64) * size


@triton.jit
def _tile_of(x, batch, i, j, rows, AT: tl.constexpr, TILE: tl.constexpr):
    """Return tile (i, j) of a symmetric matrix, as float32; zero outside of it."""
    if AT == "engine":
        entries = tl.reshape(x.load([batch, i * TILE, j * TILE]), (TILE, TILE))
    else:
        at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        inside = (at_i < rows)[:, None] & (at_j < rows)[None, :]
        entries = tl.load(x + at_i[:, None] * rows + at_j[None, :], mask=inside, other=0.0)
    return entries.to(tl.float32)


@triton.jit
def _store(x, value, batch, i, j, on_diagonal, rows, AT: tl.constexpr, TILE: tl.constexpr):
    """Store tile (i, j) of a symmetric matrix, and (j, i) unless both are one."""
    if AT == "engine":
        x.store([batch, i * TILE, j * TILE], tl.reshape(value, (1, TILE, TILE)))
        if not on_diagonal:
            x.store([batch, j * TILE, i * TILE], tl.reshape(value.T, (1, TILE, TILE)))
    else:
        at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        inside = (at_i < rows)[:, None] & (at_j < rows)[None, :]
        tl.store(x + at_i[:, None] * rows + at_j[None, :], value, mask=inside)
        if not on_diagonal:
            tl.store(x + at_j[:, None] * rows + at_i[None, :], value.T, mask=inside.T)


@triton.jit
def _place(t):
    """Return (i, j) of number t of a lower triangle, row by row: t = i(i+1)/2 + j with j ≤ i."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root may be off by one either way
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit(do_not_specialize=["product_power", "addend_power", "each"])
def _symmetric(
    a, b, addend, out, second, norms, scale, addend_scale,
    rows, depth, alpha, beta, shift, second_shift, addend_shift, product_power, addend_power, each,
    ADDEND: tl.constexpr, ADDEND_AT: tl.constexpr, OUT_AT: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_NORMS: tl.constexpr, KIND: tl.constexpr, COPY_ENGINE: tl.constexpr,
    TABLE_BYTES: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one matrix, and its part of ‖out‖_F²."""
    side = tl.cdiv(rows, TILE)
    parts = side * (side + 1) // 2
    batch = tl.program_id(0) // parts
    i, j = _place(tl.program_id(0) % parts)
    at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    diagonal = at_i[:, None] == at_j[None, :]
    on_diagonal = i == j
    # The copy engine knows where the matrices are; for the others, where is this one?
    far = batch.to(tl.int64)
    if ADDEND_AT == "table":
        addend = matrix(addend, far, each, rows * rows, tl.float32, TABLE_BYTES)
    if ADDEND_AT == "pointer":
        addend += far * rows * rows
    if OUT_AT == "table":
        out = matrix(out, far, each, rows * rows, tl.float32, TABLE_BYTES)
    if OUT_AT == "pointer":
        out, second = out + far * rows * rows, second + far * rows * rows
    s1, s2, u1, u2 = 1.0, 1.0, 1.0, 1.0
    if HAS_SCALE:
        s, u = tl.load(scale + batch), tl.load(addend_scale + batch)
        s1, s2 = tl.where(product_power == 0, 1.0, s), tl.where(product_power == 2, s, 1.0)
        u1, u2 = tl.where(addend_power == 0, 1.0, u), tl.where(addend_power == 2, u, 1.0)
        # A matrix to which nothing is added keeps its bits, a NaN's too.
        if OUT_AT == "table":  # noqa: SIM102  (known to the compiler, the other is not)
            if (s == 0.0) & (u == 1.0):
                return

    # An addend that the sums begin with takes no registers when they are complete, and then there
    # are none to spare; the factors that are divided out now are multiplied in later. One factor at
    # a time: u² or the addend times β alone may leave the range.
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    if ADDEND == "first":
        plus = _tile_of(addend, batch, i, j, rows, ADDEND_AT, TILE)
        if ADDEND_AT == "table" and on_diagonal:
            plus += tl.where(diagonal, addend_shift, 0.0)
        total = plus * u1 * beta * u2 * (1.0 / (alpha * s1 * s2))
    if COPY_ENGINE:  # which fills with zeros past the end of a matrix
        for k in range(0, depth, DEPTH):
            left = tl.reshape(a.load([batch, i * TILE, k]), (TILE, DEPTH))
            right = tl.reshape(b.load([batch, j * TILE, k]), (TILE, DEPTH))
            total = tl.dot(left, right.T, total)
    else:  # rows past the end wrap around instead of being masked: they are never stored
        at_k = tl.arange(0, DEPTH)
        a_tile = a + far * rows * depth + (at_i % rows)[:, None] * depth + at_k[None, :]
        b_tile = b + far * rows * depth + (at_j % rows)[:, None] * depth + at_k[None, :]
        for k in range(0, depth, DEPTH):
            known = at_k[None, :] < depth - k
            left = tl.load(a_tile + k, mask=known, other=0.0)
            right = tl.load(b_tile + k, mask=known, other=0.0)
            total = tl.dot(left, right.T, total)

    total = total * alpha * s1 * s2
    if ADDEND == "last":
        plus = _tile_of(addend, batch, i, j, rows, ADDEND_AT, TILE)
        if ADDEND_AT == "table" and on_diagonal:
            plus += tl.where(diagonal, addend_shift, 0.0)
        total += plus * u1 * beta * u2
    if on_diagonal:
        total += tl.where(diagonal, shift, 0.0)
    if HAS_NORMS:
        inside = (at_i < rows)[:, None] & (at_j < rows)[None, :]
        known = tl.where(inside, total, 0.0)
        weight = tl.where(on_diagonal, 1.0, 2.0)
        tl.store(norms + tl.program_id(0), weight * tl.sum(known * known))

    # Operands that commute up to rounding only leave a tile on the diagonal asymmetric.
    OUT_TYPE: tl.constexpr = tl.float32 if OUT_AT == "table" else tl.float16
    result = total.to(OUT_TYPE)
    below = at_i[:, None] >= at_j[None, :]
    if KIND == "remainder":
        other = ((total - result.to(tl.float32)) * _REMAINDER).to(OUT_TYPE)
        if on_diagonal:
            other = tl.where(below, other, other.T)
        _store(second, other, batch, i, j, on_diagonal, rows, OUT_AT, TILE)
    if on_diagonal:
        result = tl.where(below, result, result.T)
    _store(out, result, batch, i, j, on_diagonal, rows, OUT_AT, TILE)
    if KIND == "shifted":
        if on_diagonal:
            result = (result.to(tl.float32) + tl.where(diagonal, second_shift, 0.0)).to(OUT_TYPE)
        _store(second, result, batch, i, j, on_diagonal, rows, OUT_AT, TILE)


def table_bytes(rows: int) -> int:
    """Return the number that divides the addresses of a batch of such float32 squares."""
    return 4 if rows % 2 else 16


def symmetric(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    second: Tensor | None = None,
    *,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    second_shift: float = 0.0,
    scale: Tensor | None = None,
    powers: tuple[int, int] = (0, 0),
    kind: str = "",
    addend_scale: Tensor | None = None,
    addend_shift: float = 0.0,
    norms: Tensor | None = None,
    each: int = 1,
    config: Any = None,
) -> int:
    """Store the pair of `kernels.symmetric_pair` in `out` and `second`; all are contiguous.

    `addend` may be a table, int64, of the addresses of float32 tensors with `each` matrices;
    `addend_shift`·I is then part of it, and `addend_scale` its factor instead of `scale`. An `out`
    that is a table is its addend, and keeps its bits with the factors 0 and 1. Unless `out` is a
    table or has a remainder, the factor of the product must be a normal number: the addend is
    divided by it first. `norms`, flat, receives the parts of ‖out‖_F² if `out` is no table, as many
    for each matrix as are returned, of 64² entries or more each. `config` is tuned if it is None.
    """
    count, rows, depth = a.shape
    engine = fits(a) and fits(b)

    def place(x: Tensor) -> str:
        if x.dtype == torch.int64:
            return "table"
        return "engine" if engine and fits(x) else "pointer"

    factor = scale if addend_scale is None else addend_scale
    addend_at, out_at = "" if addend is None else place(addend), place(out)
    # The matrix units truncate their sums, each time by a last bit of the partial sum: too
    # much of an addend that is to be kept to more digits than float16 has.
    precise = out_at == "table" or kind == "remainder"
    when = "" if addend is None else "last" if precise else "first"
    targets = [out, second] if kind else [out]

    def run(config: Any) -> int:
        tile, step = config.kwargs["TILE"], config.kwargs["DEPTH"]
        parts = math.comb(triton.cdiv(rows, tile) + 1, 2)
        # In boxes of a tile where the copy engine takes them.
        left = boxes(a, tile, step) if engine else a
        right = left if a is b else boxes(b, tile, step) if engine else b
        plus = a if addend is None else addend
        plus = boxes(plus, tile, tile) if addend_at == "engine" else plus
        results = [boxes(x, tile, tile) if out_at == "engine" else x for x in targets]
        _symmetric[(parts * count,)](
            left, right, plus, results[0], results[-1], a if norms is None else norms,
            a if scale is None else scale, a if factor is None else factor,
            rows, depth, alpha, beta, shift, second_shift, addend_shift, *powers, each,
            ADDEND=when, ADDEND_AT=addend_at, OUT_AT=out_at, HAS_SCALE=scale is not None,
            HAS_NORMS=norms is not None, KIND=kind, COPY_ENGINE=engine,
            TABLE_BYTES=table_bytes(rows), **config.all_kwargs(),
        )  # fmt: skip
        return parts

    if config is None and (INTERPRETED or rows <= 96):
        config = SMALL  # large tiles would be masked mostly
    with torch.cuda.device_of(a):  # Triton launches on the current device
        if config is None and (precise or out_at == "pointer"):
            # More is in registers at their end: large tiles if they fill the device, not timed.
            tiles = count * math.comb(triton.cdiv(rows, LARGE.kwargs["TILE"]) + 1, 2)
            config = LARGE if tiles >= _multiprocessors(a.device) else SMALL
        if config is None:
            config = _tuned_for((a.device, a.shape, when, kind), run)
        return run(config)


def _tuned_for(key: object, run: Callable[[Any], object]) -> Any:
    """Return the fastest configuration for a key, timed once; in a capture, the first.

    The key has the facts that take time: the shape, the addend and the second result.
    """
    if key not in _tuned:
        if torch.cuda.is_current_stream_capturing():
            return CONFIGS[0]
        times = [_time(partial(run, config)) for config in CONFIGS]
        _tuned[key] = CONFIGS[times.index(min(times))]
    return _tuned[key]


def _time(launch: Callable[[], object]) -> float:
    """Return milliseconds; infinity where the device has too little shared memory."""
    try:
        return float(triton.testing.do_bench(launch, warmup=2, rep=8))
    except OutOfResources:
        return math.inf


def fits(x: Tensor) -> bool:
    """Return True if Hopper's copy engine takes a tensor: 16-bit entries, rows of 16k bytes."""
    regular = x.element_size() == 2 and x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0
    return regular and _has_copy_engine(x.device)


def boxes(x: Tensor, high: int, wide: int) -> TensorDescriptor:
    """Return a contiguous (b, m, n) for the copy engine, in boxes of one matrix each."""
    _, m, n = x.shape  # the strides of a dimension of size 1 may be any
    return TensorDescriptor(x, list(x.shape), [m * n, n, 1], [1, high, wide])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)


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
    """Return ‖X‖_F² of contiguous (b, m, n), (b,) float64: torch would first copy X to float64."""
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
    """Return float16(factor·X) for (b,) factors and contiguous (b, m, n), in one pass."""
    out, size = torch.empty_like(x, dtype=torch.float16), x[0].numel()
    with torch.cuda.device_of(x):
        _scaled_half[(triton.cdiv(size, 4 * CHUNK), x.shape[0])](x, factor, out, size, 4 * CHUNK)
    return out
