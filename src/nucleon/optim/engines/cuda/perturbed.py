"""The mean of polar factors of [S 0] + LZ, LLᵀ = Λ, with the noise Z of `nucleon.noise`: Pion.

    cholesky   L, Cholesky's factor of Λ scaled to a unit diagonal, a block column per launch
    draw       Z from the keys (seed, step, sample, stream), in float16
    perturb    Y = [S 0] + LZ, reading only the triangle of L
    YYᵀ        then the float16 recursion, in which the k samples of a stack are one batch
    P = (Q₁X₁ + … + Q_kX_k)/k, one product with an inner dimension of km

With zero columns beside S the recursion is that of (X, R) with X the leading n columns of Y and
R = YYᵀ: no later product contains the other columns.
"""
# A compile-time constant is declared as tl.constexpr and passed as a plain value.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nucleon import noise
from nucleon.linalg.half import augmented_factors, polar_factors
from nucleon.linalg.triton_symmetric import boxes, fits, matrix, table_bytes
from nucleon.optim.engines.cuda import kernels
from nucleon.optim.engines.cuda.program import Program
from nucleon.optim.engines.work import Draws
from nucleon.optim.matrices.stacks import LARGEST_GRID
from nucleon.optim.polar_methods import polynomials

ENTRIES = 2**27
"""Entries of noise drawn at once, 4 bytes each with all operands; at least those of a matrix."""
PAIRS = 1024
SIDE, SLICE = 64, 32
"""Side of a block of Cholesky's factor, and depth of its products, at which no register spills."""
DEPTH = 64
"""Depth of the products LZ."""

_WORD = 2**64 - 1
_GOLDEN = tl.constexpr(noise.GOLDEN & _WORD)
_SHIFTS = [tl.constexpr(shift) for shift, _ in noise.ROUNDS]
_FACTORS = [tl.constexpr(factor & _WORD) for _, factor in noise.ROUNDS]
_SHIFT0, _SHIFT1, _SHIFT2 = _SHIFTS
_FACTOR0, _FACTOR1, _ = _FACTORS
_TURN = tl.constexpr(math.pi * 2.0**-31)
_UNIT = tl.constexpr(2.0**-31)


@triton.jit
def _mix(z):
    """Apply the finalizer of splitmix64 to uint64."""
    z = (z ^ (z >> _SHIFT0)) * _FACTOR0
    z = (z ^ (z >> _SHIFT1)) * _FACTOR1
    return z ^ (z >> _SHIFT2)


@triton.jit
def _absorb(key, word):
    return _mix((key ^ word.to(tl.uint64)) + _GOLDEN)


@triton.jit
def _words(t, key, other):
    """Return the int32 words number `t` of a key, as float32: halves of 64-bit words, low first."""
    w = (t // 2).to(tl.uint64)
    bits = _mix((w ^ key) * _GOLDEN + other)
    return tl.where(t % 2 == 0, bits, bits >> 32).to(tl.int32).to(tl.float32)


@triton.jit(do_not_specialize=["key", "each", "first"])
def draw(
    z, streams, steps, key: tl.int64, entries, pairs, each, first,
    DRAWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store standard normals, those of `noise.normal` in float32, rounded to float16.

    `key` is that of the seed; matrix number `first` of the stack has the first Z.
    """
    place = tl.program_id(1)
    index = first + place // DRAWS
    step = tl.load(tl.load(steps).to(tl.pointer_type(tl.int64)))
    stream = tl.load(tl.load(streams + index // each).to(tl.pointer_type(tl.int64)) + index % each)
    hashed = _absorb(_absorb(_absorb(key.to(tl.uint64), step), place % DRAWS), stream)
    other = _mix(hashed + _GOLDEN)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.abs(_words(p, hashed, other) + 0.5) * _UNIT
    radius = tl.sqrt_rn(-2.0 * tl.log(unit))
    angle = _words(pairs + p, hashed, other) * _TURN
    here = z + place.to(tl.int64) * entries + p
    tl.store(here, (tl.cos(angle) * radius).to(tl.float16), mask=p < pairs)
    inside = (p < pairs) & (pairs + p < entries)  # an odd number of entries leaves one out
    tl.store(here + pairs, (tl.sin(angle) * radius).to(tl.float16), mask=inside)


@triton.jit
def _roots(gram, at, m, smoothing, shift):
    """Return √Λ_ii of the rows `at`, and its inverse or 0."""
    entry = tl.load(gram + at * (m + 1), mask=at < m, other=0.0)
    root = tl.sqrt_rn(tl.maximum(smoothing * (entry + shift), 0.0))
    root = tl.where(at < m, root, 0.0)
    return root, tl.where(root > 0, 1.0 / tl.where(root > 0, root, 1.0), 0.0)


@triton.jit
def _correlation(gram, at_i, at_j, inverse_i, inverse_j, m, smoothing, jitter):
    """Return a block of Λ scaled to a unit diagonal, with 1 + jitter on it."""
    inside = (at_i < m)[:, None] & (at_j < m)[None, :]
    entry = tl.load(gram + at_i[:, None] * m + at_j[None, :], mask=inside, other=0.0)
    diagonal = at_i[:, None] == at_j[None, :]
    entry = inverse_i[:, None] * (smoothing * entry) * inverse_j[None, :]
    return tl.where(diagonal, 1.0 + jitter, entry)


@triton.jit(do_not_specialize=["each", "j"])
def cholesky_column(
    grams, factor, root, scale, broken, m, each, j, smoothing, shift, jitter,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, TABLE_BYTES: tl.constexpr,
):  # fmt: skip
    """Store block column j of Cholesky's factor F, and of L = √Λ_ii·F times `scale` in float16.

    Each program has a block below the diagonal, and again the one on it, which it needs first.
    `broken` becomes 1 if a pivot is not positive, 2 if it is not finite.
    """
    i, batch = j + tl.program_id(0), tl.program_id(1)
    gram = matrix(grams, batch.to(tl.int64), each, m * m, tl.float32, TABLE_BYTES)
    far = batch.to(tl.int64) * m * m
    k = tl.arange(0, SIDE)
    at_i, at_j = i * SIDE + k, j * SIDE + k
    size, inverse_i = _roots(gram, at_i, m, smoothing, shift)
    _, inverse_j = _roots(gram, at_j, m, smoothing, shift)
    top = _correlation(gram, at_j, at_j, inverse_j, inverse_j, m, smoothing, jitter)
    block = _correlation(gram, at_i, at_j, inverse_i, inverse_j, m, smoothing, jitter)
    at_k = tl.arange(0, DEPTH)
    left = factor + far + at_i[:, None] * m + at_k[None, :]
    right = factor + far + at_j[:, None] * m + at_k[None, :]
    for done in range(0, j * SIDE, DEPTH):
        a = tl.load(left + done, mask=(at_i < m)[:, None], other=0.0)
        b = tl.load(right + done, mask=(at_j < m)[:, None], other=0.0)
        block -= tl.dot(a, b.T, input_precision="tf32x3")
        top -= tl.dot(b, b.T, input_precision="tf32x3")

    row, col = k[:, None], k[None, :]
    info = tl.load(broken + batch)
    before = info
    for c in range(SIDE):
        pivot = tl.sum(tl.where((row == c) & (col == c), top, 0.0))
        why = tl.where((pivot <= 0) & (pivot > -float("inf")), 1, 2)
        info = tl.where((info == 0) & ((pivot > 0) & (pivot < float("inf")) == 0), why, info)
        inverse = 1.0 / tl.sqrt_rn(pivot)
        across = tl.sum(tl.where(row == c, top, 0.0), axis=0) * inverse
        down = tl.sum(tl.where(col == c, top, 0.0), axis=1) * inverse
        beside = tl.sum(tl.where(col == c, block, 0.0), axis=1) * inverse
        later = col > c
        top = tl.where(later, top - down[:, None] * across[None, :], top)
        block = tl.where(later, block - beside[:, None] * across[None, :], block)
        block = tl.where(col == c, beside[:, None], block)
    here = at_i[:, None] * m + at_j[None, :]
    inside = (at_i < m)[:, None] & (at_j < m)[None, :]
    block = tl.where(at_i[:, None] >= at_j[None, :], block, 0.0)
    tl.store(factor + far + here, block, mask=inside)
    block = block * size[:, None] * tl.load(scale + batch)
    tl.store(root + far + here, block.to(tl.float16), mask=inside)
    tl.store(broken + batch, info, mask=(i == j) & (info != before))


@triton.jit(do_not_specialize=["each"])
def diagonal_fallback(
    grams, x, root, scale, broken, taken, skipped, m, n, each, smoothing, shift, less,
    SIDE: tl.constexpr, TABLE_BYTES: tl.constexpr,
):  # fmt: skip
    """Set L to √(m·diag Λ) if Λ is indefinite; to 0, and skip the matrix, if it is not finite.

    `less` is 1/√m, by which S and L are then both smaller, so that they fit float16.
    """
    i, batch = tl.program_id(0), tl.program_id(1)
    info = tl.load(broken + batch)
    if info != 0:
        k = tl.arange(0, SIDE)
        at = i * SIDE + k
        gram = matrix(grams, batch.to(tl.int64), each, m * m, tl.float32, TABLE_BYTES)
        size, _ = _roots(gram, at, m, smoothing, shift)
        size = tl.where(info == 1, size * tl.load(scale + batch), 0.0)
        here = root + batch.to(tl.int64) * m * m + at[:, None] * m
        for first in range(0, (i + 1) * SIDE, SIDE):
            to = first + k
            value = tl.where(at[:, None] == to[None, :], size[:, None], 0.0)
            inside = (at < m)[:, None] & (to < m)[None, :]
            tl.store(here + to[None, :], value.to(tl.float16), mask=inside)
        for first in range(0, n, SIDE):
            to = first + k
            there = x + batch.to(tl.int64) * m * n + at[:, None] * n + to[None, :]
            inside = (at < m)[:, None] & (to < n)[None, :]
            s = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(there, (s * less).to(tl.float16), mask=inside)
        if i == 0:
            kernels.skip(info == 2, batch, taken, skipped, each)


@triton.jit
def perturb(
    root, z, x, y, m, n, width,
    DRAWS: tl.constexpr, COPY_ENGINE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Store Y = [S 0] + LZ of each draw in float16."""
    across = tl.cdiv(width, TILE)
    # Rows with the most products first: those at the end fill what room is left.
    i = tl.cdiv(m, TILE) - 1 - tl.program_id(0) // across
    j = tl.program_id(0) % across
    at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    number = tl.program_id(1)
    place = number.to(tl.int64)
    batch = place // DRAWS
    end = tl.minimum((i + 1) * TILE, m)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    if COPY_ENGINE:  # which fills with zeros past the end of a matrix
        for k in range(0, end, DEPTH):
            a = tl.reshape(root.load([number // DRAWS, i * TILE, k]), (TILE, DEPTH))
            b = tl.reshape(z.load([number, k, j * TILE]), (DEPTH, TILE))
            total = tl.dot(a, b, total)
    else:
        at_k = tl.arange(0, DEPTH)
        left = root + batch * m * m + at_i[:, None] * m + at_k[None, :]
        right = z + place * m * width + at_k[:, None] * width + at_j[None, :]
        for k in range(0, end, DEPTH):
            known = at_k < m - k
            a = tl.load(left + k, mask=(at_i < m)[:, None] & known[None, :], other=0.0)
            b = tl.load(right + k * width, mask=known[:, None] & (at_j < width)[None, :], other=0.0)
            total = tl.dot(a, b, total)
    inside = (at_i < m)[:, None] & (at_j < width)[None, :]
    source = x + batch * m * n + at_i[:, None] * n + at_j[None, :]
    s = tl.load(source, mask=inside & (at_j < n)[None, :], other=0.0).to(tl.float32)
    here = at_i[:, None] * width + at_j[None, :]
    tl.store(y + place * m * width + here, (s + total).to(tl.float16), mask=inside)


# ---------------------------------------------------------------------- their launches


def compute(program: Program, table: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Update the moments; return P (b, m, n) in float16 and the mask of stepped matrices, (b,)."""
    draws, m, n, count = program.draws, program.m, program.n, program.layout.count
    assert draws is not None
    x, factors, taken = kernels.enter(program, table, mask)
    root = cholesky(program, table, x, factors[0], taken)
    streams, steps = table.view(program.kinds, -1)[5:].unbind()
    padded, sequence = draws.width > n, polynomials("half", program.iterations)
    recursion = augmented_factors if padded else polar_factors
    directions = torch.empty((count, m, n), dtype=torch.float16, device=table.device)
    most = max(1, min(ENTRIES // (m * draws.width), LARGEST_GRID) // draws.samples)
    for first in range(0, count, most):
        part = slice(first, first + most)
        out = directions[part]
        z = drawn(draws, streams, steps, m, program.layout.each, first, len(out))
        y = perturbed(draws, root[part], z, x[part])
        del z
        q, leading = recursion(kernels.start(y, program, remainder=padded), sequence)
        # Q is symmetric, so [Q₁ … Q_k] is a view: the mean is one product.
        rows = draws.samples * m
        left, right = q.view(len(out), rows, m).mT, leading.reshape(len(out), rows, n)
        torch.baddbmm(out, left, right, beta=0.0, alpha=1 / draws.samples, out=out)
    return directions, taken


def cholesky(program: Program, table: Tensor, x: Tensor, scale: Tensor, taken: Tensor) -> Tensor:
    """Return L of `linalg.roots.cholesky_root`, scaled as S in `x` is, (b, m, m) in float16."""
    hyper, m, count, each = program.hyper, program.m, program.layout.count, program.layout.each
    _, _, skipped, _, grams, *_ = table.view(program.kinds, -1).unbind()
    factor = torch.empty((count, m, m), dtype=torch.float32, device=table.device)
    root = torch.zeros_like(factor, dtype=torch.float16)
    broken = torch.zeros(count, dtype=torch.int32, device=table.device)
    jitter = 8 * m * torch.finfo(torch.float32).eps
    blocks = triton.cdiv(m, SIDE)
    shared = {"SIDE": SIDE, "TABLE_BYTES": table_bytes(m)}
    for j in range(blocks):
        cholesky_column[(blocks - j, count)](
            grams, factor, root, scale, broken, m, each, j,
            hyper.smoothing, hyper.shift, jitter, **shared, DEPTH=SLICE, num_warps=4, num_stages=2,
        )  # fmt: skip
    diagonal_fallback[(blocks, count)](
        grams, x, root, scale, broken, taken, skipped, m, program.n, each,
        hyper.smoothing, hyper.shift, 1 / math.sqrt(m), **shared,
    )  # fmt: skip
    return root


def drawn(
    draws: Draws, streams: Tensor, steps: Tensor, m: int, each: int, first: int, count: int
) -> Tensor:
    """Return Z of `count` matrices from number `first` on, (b·k, m, n′) in float16."""
    entries = m * draws.width
    pairs, many = (entries + 1) // 2, count * draws.samples
    z = torch.empty((many, m, draws.width), dtype=torch.float16, device=streams.device)
    draw[(triton.cdiv(pairs, PAIRS), many)](
        z, streams, steps, noise.normal_key(draws.seed), entries, pairs, each, first,
        DRAWS=draws.samples, BLOCK=PAIRS,
    )  # fmt: skip
    return z


def perturbed(draws: Draws, root: Tensor, z: Tensor, x: Tensor) -> Tensor:
    """Return Y of all samples of each matrix in turn, (b·k, m, n′) in float16."""
    m, n = x.shape[-2:]
    width = draws.width
    y = torch.empty_like(z)
    tile, warps = (128, 8) if m > 64 else (64, 4)
    grid = (triton.cdiv(m, tile) * triton.cdiv(width, tile), len(z))
    engine = fits(root) and fits(z)
    perturb[grid](
        boxes(root, tile, DEPTH) if engine else root, boxes(z, DEPTH, tile) if engine else z,
        x, y, m, n, width, DRAWS=draws.samples, COPY_ENGINE=engine, TILE=tile,
        DEPTH=DEPTH, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y
