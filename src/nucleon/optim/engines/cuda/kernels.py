"""The Triton kernels of a step around its direction: moments in, weights out; see `engine`.

They read and write the tensors of many parameters at once, by a table of their addresses. Entry i
is that of the matrices i·each … (i+1)·each − 1 of the stack, which begin `inner` entries apart; two
sides locate the entries of a matrix, see `addresses`. The compiler accesses each tensor along the
side that is contiguous in it, so a tensor that is stored transposed is turned on the way.
"""
# A compile-time constant is declared as tl.constexpr and passed as a plain value.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nucleon.linalg._precision import floor, roundings
from nucleon.linalg.half import FIRST_FLOOR, LEAST_FLOOR, Start
from nucleon.linalg.triton_symmetric import TYPES, matrix, symmetric, table_bytes
from nucleon.optim.engines.cuda.program import Program
from nucleon.optim.engines.rest import Rest
from nucleon.optim.polar_methods import polynomials

BLOCK = 1024
TILE = tl.constexpr(64)
WIDE = 4096
"""Most entries of a tile of a matrix below 64 rows, 32 kB in float64."""


@triton.jit
def tile_of(m, n):
    """Return row and column numbers of the tile of this program, and the mask of its entries."""
    across = tl.cdiv(n, TILE)
    i = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    j = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    return i, j, (i < m)[:, None] & (j < n)[None, :]


@triton.jit
def _along(k, stride, size, within, FOLDED: tl.constexpr):
    """Return the offsets of the entries `k` of a side, see `addresses`."""
    if FOLDED:
        offsets = (k // size).to(tl.int64) * stride + (k % size).to(tl.int64) * within
    else:
        offsets = k.to(tl.int64) * stride
    return offsets


@triton.jit
def entries(
    i, j, i_stride, j_stride, i_size, i_within, j_size, j_within,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a tile in tensors like the parameters, from the start of its matrix."""
    rows = _along(i, i_stride, i_size, i_within, I_FOLDED)
    return rows[:, None] + _along(j, j_stride, j_size, j_within, J_FOLDED)[None, :]


@triton.jit
def moments(
    gradients, totals, batch, at, inside, each, inner, sign, momentum, lead, extra,
    GRADIENT: tl.constexpr, TOTAL: tl.constexpr,
    GRADIENT_BYTES: tl.constexpr, TOTAL_BYTES: tl.constexpr,
):  # fmt: skip
    """Return a tile of G, of βĜ + G and of S, and the pointers to it in Ĝ.

    S is infinite if the new Ĝ overflows its dtype.
    """
    here = matrix(gradients, batch, each, inner, GRADIENT, GRADIENT_BYTES) + at
    g = tl.load(here, mask=inside, other=0.0)
    where = matrix(totals, batch, each, inner, TOTAL, TOTAL_BYTES) + at
    g = g.to(tl.float32) * sign
    total = momentum * tl.load(where, mask=inside, other=0.0).to(tl.float32) + g
    s = lead * total + extra * g
    if tl.float32 != TOTAL:
        s = tl.where(tl.abs(total.to(TOTAL).to(tl.float32)) < float("inf"), s, float("inf"))
    return g, total, s, where


@triton.jit(do_not_specialize=["each"])
def sum_squares(
    gradients, totals, mask, sums, m, n, each, inner,
    i_stride, j_stride, i_size, i_within, j_size, j_within, sign, momentum, lead, extra,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr, GRADIENT: tl.constexpr, TOTAL: tl.constexpr,
    GRADIENT_BYTES: tl.constexpr, TOTAL_BYTES: tl.constexpr,
    MASKED: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Store parts of ‖S‖_F², ‖G‖_F² and ‖Ĝ‖_F², float64: a float32 square may overflow."""
    batch = tl.program_id(1)
    i, j, inside = tile_of(m, n)
    if MASKED:  # without a gradient there is no address to read
        inside = inside & (tl.load(mask + batch) != 0)
    at = entries(
        i, j, i_stride, j_stride, i_size, i_within, j_size, j_within, I_FOLDED, J_FOLDED
    )  # fmt: skip
    g, total, s, _ = moments(
        gradients, totals, batch, at, inside, each, inner, sign, momentum, lead, extra,
        GRADIENT, TOTAL, GRADIENT_BYTES, TOTAL_BYTES,
    )  # fmt: skip
    g, s = g.to(tl.float64), s.to(tl.float64)
    place = 3 * (batch.to(tl.int64) * tl.num_programs(0) + tl.program_id(0))
    size = tl.sum(s * s)
    tl.store(sums + place, size)
    tl.store(sums + place + 1, tl.sum(g * g))
    if LOOKAHEAD:  # or S is Ĝ
        total = total.to(tl.float64)
        size = tl.sum(total * total)
    tl.store(sums + place + 2, size)


@triton.jit
def verdict(
    batch, finite, faded, gradient2, total2, skipped, quiet, mask, each, longest, settled, falls,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return three flags of a matrix: stepped, its gradient entered, and moving, see `rest`.

    `gradient2` is ‖G‖_F², `total2` ‖Ĝ‖_F², `falls` log₂β₁. Updates the counts of skipped and quiet
    steps.
    """
    there = batch >= 0  # all are
    if MASKED:
        there = tl.load(mask + batch) != 0
    ok = finite & there
    old = tl.load(skipped + batch // each).to(tl.pointer_type(tl.int64)) + batch % each
    tl.store(old, tl.load(old) + tl.where(there & (finite == 0), 1, 0))
    past = tl.load(quiet + batch // each).to(tl.pointer_type(tl.int64)) + batch % each
    without = tl.where(gradient2 == 0, tl.load(past) + 1, 0)
    tl.store(past, without, mask=ok)
    entered = ok & (faded == 0)
    most = settled * tl.exp2(falls * without.to(tl.float32))
    return ok, entered, entered & ((without <= longest) | (tl.sqrt(total2) < most))


@triton.jit(do_not_specialize=["each", "parts", "longest"])
def measure(
    sums, grams, skipped, quiet, mask, factors, taken, parts, m, each, longest,
    settled, falls, keep, smoothing, bound, copies, spread, limit, tiny, least,
    HAS_GRAM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    TABLE_BYTES: tl.constexpr = 16,
):  # fmt: skip
    """Compute from the sums the mask of stepped matrices, and the factors into float16.

    factors (6, b): on S, 1/‖[S L]‖_F, on G, its inverse, on M̂, on Ĝ. `copies` is the weight of
    ‖L‖_F²: the number of columns of Z, since LZ has the mean square copies·‖L‖_F².
    """
    batch, count = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    square = tl.zeros((BLOCK,), dtype=tl.float64)
    moment = tl.zeros((BLOCK,), dtype=tl.float64)
    for k in range(0, parts, BLOCK):
        at = k + tl.arange(0, BLOCK)
        place = sums + 3 * (batch.to(tl.int64) * parts + at)
        total += tl.load(place, mask=at < parts, other=0.0)
        square += tl.load(place + 1, mask=at < parts, other=0.0)
        moment += tl.load(place + 2, mask=at < parts, other=0.0)
    size, gradient2, total2 = tl.sum(total), tl.sum(square), tl.sum(moment)
    finite = (size < float("inf")) & (gradient2 < float("inf")) & (total2 < float("inf"))
    faded = total2 < least
    if HAS_GRAM:
        gram = matrix(grams, batch, each, m * m, tl.float32, TABLE_BYTES)
        trace = tl.zeros((BLOCK,), dtype=tl.float64)
        for k in range(0, m, BLOCK):
            at = k + tl.arange(0, BLOCK)
            trace += tl.load(gram + at * (m + 1), mask=at < m, other=0.0).to(tl.float64)
        whole = keep * tl.sum(trace) + gradient2
        size += copies * (smoothing * (whole + m * bound))
        # With room for rounding: M̂ and Λ are float32.
        finite = finite & (whole < limit) & (smoothing * (whole + m * bound) < limit)
        faded = faded & (whole < least)
    ok, entered, moving = verdict(
        batch, finite, faded, gradient2, total2, skipped, quiet, mask, each, longest, settled,
        falls, MASKED,
    )  # fmt: skip
    smallest = tiny * spread
    inverse = tl.where(entered, 1.0 / tl.maximum(tl.sqrt(size), smallest), 0.0)
    back = tl.maximum(tl.sqrt(gradient2), smallest) / spread
    tl.store(taken + batch, ok)
    tl.store(factors + batch, tl.where(moving, spread * inverse, 0.0).to(tl.float32))
    tl.store(factors + count + batch, inverse.to(tl.float32))
    tl.store(factors + 2 * count + batch, tl.where(entered, 1.0 / back, 0.0).to(tl.float32))
    tl.store(factors + 3 * count + batch, tl.where(entered, back, 0.0).to(tl.float32))
    left = tl.where(entered, keep, 0.0)
    tl.store(factors + 4 * count + batch, tl.where(ok, left, 1.0).to(tl.float32))
    tl.store(factors + 5 * count + batch, tl.where(entered, 1.0, 0.0).to(tl.float32))


@triton.jit(do_not_specialize=["each"])
def advance(
    gradients, totals, factors, taken, x, scaled, m, n, each, inner,
    i_stride, j_stride, i_size, i_within, j_size, j_within, sign, momentum, lead, extra,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr, GRADIENT: tl.constexpr, TOTAL: tl.constexpr,
    GRADIENT_BYTES: tl.constexpr, TOTAL_BYTES: tl.constexpr, HAS_GRAM: tl.constexpr,
):  # fmt: skip
    """Update Ĝ ← βĜ + G of stepped matrices; store S and, for the Gram matrix, G in float16."""
    batch, count = tl.program_id(1), tl.num_programs(1)
    i, j, inside = tile_of(m, n)
    ok = tl.load(taken + batch) != 0
    at = entries(
        i, j, i_stride, j_stride, i_size, i_within, j_size, j_within, I_FOLDED, J_FOLDED
    )  # fmt: skip
    g, total, s, where = moments(
        gradients, totals, batch, at, inside & ok, each, inner, sign, momentum, lead, extra,
        GRADIENT, TOTAL, GRADIENT_BYTES, TOTAL_BYTES,
    )  # fmt: skip
    total *= tl.load(factors + 5 * count + batch)
    tl.store(where, total.to(TOTAL), mask=inside & ok)
    # A non-finite entry would survive a factor of zero.
    s = tl.where(ok, s * tl.load(factors + batch), 0.0).to(tl.float16)
    here = batch.to(tl.int64) * m * n + i[:, None].to(tl.int64) * n + j[None, :]
    tl.store(x + here, s, mask=inside)
    if HAS_GRAM:
        g = tl.where(ok, g * tl.load(factors + 2 * count + batch), 0.0).to(tl.float16)
        tl.store(scaled + here, g, mask=inside)


@triton.jit
def skip(damaged, batch, taken, skipped, each):
    """Skip a damaged matrix, and count it, unless it was skipped before."""
    damaged = damaged & (tl.load(taken + batch) != 0)
    tl.store(taken + batch, False, mask=damaged)
    old = tl.load(skipped + batch // each).to(tl.pointer_type(tl.int64)) + batch % each
    tl.store(old, tl.load(old) + 1, mask=damaged)


@triton.jit(do_not_specialize=["each", "parts"])
def lengths(
    norms, r, taken, skipped, scale, length, floor, parts, m, each, spread, most, least,
    WATCHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute 1/‖r‖_F, √(m/‖r‖_F)/spread and the first floor from the parts of ‖r‖_F².

    With WATCHED, a matrix with a non-finite Gram matrix is skipped.
    """
    batch = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, parts, BLOCK):
        at = k + tl.arange(0, BLOCK)
        total += tl.load(norms + batch * parts + at, mask=at < parts, other=0.0)
    norm = tl.sum(total)
    if WATCHED:
        skip((norm < float("inf")) == 0, batch, taken, skipped, each)
    inverse = 1.0 / tl.maximum(tl.sqrt(norm), 1.0)
    tl.store(scale + batch, inverse)
    tl.store(length + batch, tl.sqrt(m * inverse) / spread)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    first = r + batch.to(tl.int64) * m * m
    for k in range(0, m, BLOCK):
        at = k + tl.arange(0, BLOCK)
        entry = tl.load(first + at.to(tl.int64) * (m + 1), mask=at < m, other=0.0).to(tl.float32)
        squares += entry * entry
    tl.store(floor + batch, tl.maximum(most * tl.sqrt(tl.sum(squares)) / m, least))


@triton.jit(do_not_specialize=["each"])
def move(
    weights, directions, taken, rate, decay, m, n, each, inner,
    i_stride, j_stride, i_size, i_within, j_size, j_within,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr, WEIGHT: tl.constexpr, BYTES: tl.constexpr,
    DECAYS: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Update W ← W − rate·P − decay·W of stepped matrices."""
    batch = tl.program_id(1)
    if tl.load(taken + batch) != 0:
        i, j, inside = tile_of(m, n)
        here = batch.to(tl.int64) * m * n + i[:, None].to(tl.int64) * n + j[None, :]
        p = tl.load(directions + here, mask=inside, other=0.0).to(tl.float32)
        p = tl.where(tl.abs(p) < float("inf"), p, 0.0)  # whatever P is, weights stay finite
        where = matrix(weights, batch, each, inner, WEIGHT, BYTES)
        where += entries(
            i, j, i_stride, j_stride, i_size, i_within, j_size, j_within, I_FOLDED, J_FOLDED
        )  # fmt: skip
        w = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        change = (tl.load(rate) if ON_DEVICE else rate) * p
        if DECAYS:
            change += (tl.load(decay) if ON_DEVICE else decay) * w
        tl.store(where, (w - change).to(WEIGHT), mask=inside)


# ---------------------------------------------------------------------- a short side below 64

# Such matrices leave the matrix units idle and float16 too few rows to average its rounding. So one
# program each does moments and direction: SSᵀ and GGᵀ are summed in float64, where no scale
# overflows, and the recursion of Appendix F.3 runs in them,
#
#     B = (SSᵀ + Λ)/‖[S L]‖_F²,   T = aI + bB + cB²,   Q ← TQ,   B ← TBT,   P = QS/‖[S L]‖_F
#
# It reads the gradient and Ĝ twice: once for the sums, then to write Ĝ and P. Both are float32:
# Triton 3.6 has no float64 product of operands that were loaded in fewer bits.


@triton.jit(do_not_specialize=["each", "longest"])
def step_small(
    gradients, totals, skipped, quiet, grams, mask, taken, directions, m, n, each, inner,
    i_stride, j_stride, i_size, i_within, j_size, j_within, sign, momentum, lead, extra,
    longest, settled, falls, keep, smoothing, bound, limit, least, floor,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr, GRADIENT: tl.constexpr, TOTAL: tl.constexpr,
    GRADIENT_BYTES: tl.constexpr, TOTAL_BYTES: tl.constexpr, HAS_GRAM: tl.constexpr,
    MASKED: tl.constexpr, LOOKAHEAD: tl.constexpr, POLYNOMIALS: tl.constexpr, STEPS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TABLE_BYTES: tl.constexpr = 16,
):  # fmt: skip
    """Update Ĝ ← βĜ + G and M̂ ← β₂M̂ + GGᵀ of stepped matrices; store P in float32."""
    batch = tl.program_id(0)
    i, wide = tl.arange(0, M), tl.arange(0, N)
    there = i < m
    if MASKED:  # without a gradient there is no address to read
        there = there & (tl.load(mask + batch) != 0)
    b = tl.zeros((M, M), dtype=tl.float64)
    new = tl.zeros((M, M), dtype=tl.float64)
    moment = tl.zeros((M, N), dtype=tl.float64)
    for first in range(0, n, N):
        j = first + wide
        inside = there[:, None] & (j < n)[None, :]
        at = entries(
            i, j, i_stride, j_stride, i_size, i_within, j_size, j_within, I_FOLDED, J_FOLDED
        )  # fmt: skip
        g, total, s, _ = moments(
            gradients, totals, batch, at, inside, each, inner, sign, momentum, lead, extra,
            GRADIENT, TOTAL, GRADIENT_BYTES, TOTAL_BYTES,
        )  # fmt: skip
        g, s = g.to(tl.float64), s.to(tl.float64)
        b = tl.dot(s, s.T, b, out_dtype=tl.float64)
        new = tl.dot(g, g.T, new, out_dtype=tl.float64)
        if LOOKAHEAD:  # or S is Ĝ
            total = total.to(tl.float64)
            moment += total * total
    diagonal = i[:, None] == i[None, :]
    size, gradient2 = tl.sum(tl.where(diagonal, b, 0.0)), tl.sum(tl.where(diagonal, new, 0.0))
    total2 = tl.sum(moment) if LOOKAHEAD else size
    finite = (size < float("inf")) & (gradient2 < float("inf")) & (total2 < float("inf"))
    faded = total2 < least
    here = i[:, None] * m + i[None, :]
    square = (i < m)[:, None] & (i < m)[None, :]
    if HAS_GRAM:
        gram = matrix(grams, batch, each, m * m, tl.float32, TABLE_BYTES) + here
        old = tl.load(gram, mask=square, other=0.0)
        new = (keep * old.to(tl.float64) + new).to(tl.float32)
        whole = tl.sum(tl.where(diagonal, new, 0.0).to(tl.float64))
        # With room for rounding: M̂ and Λ are float32.
        finite = finite & (whole < limit) & (smoothing * (whole + m * bound) < limit)
        finite = finite & (tl.sum(tl.abs(new.to(tl.float64))) < float("inf"))
        faded = faded & (whole < least)
        shift = tl.where(diagonal & square, bound, 0.0).to(tl.float64)
        raised = smoothing * (new.to(tl.float64) + shift)
        # Rounding to float32 may have taken as much from the least eigenvalue of Λ.
        raised += tl.where(diagonal & square, floor * tl.sqrt(tl.sum(raised * raised)), 0.0)
        b += raised
    ok, entered, moving = verdict(
        batch, finite, faded, gradient2, total2, skipped, quiet, mask, each, longest, settled,
        falls, MASKED,
    )  # fmt: skip
    ok = ok.to(tl.int32) != 0  # the interpreter takes it for a float64, like the operands compared
    if HAS_GRAM:
        tl.store(gram, tl.where(entered, new, 0.0), mask=square & ok)

    b = tl.where(moving, b, 0.0)  # a non-finite entry would stay
    norm = tl.sum(tl.where(diagonal, b, 0.0))
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    b *= inverse
    one = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    q = one
    for index in range(STEPS):  # not unrolled: the products would take the compiler half a minute
        a0, a1, a2 = 0.0, 0.0, 0.0
        for k in tl.static_range(STEPS):
            a0 = tl.where(index == k, POLYNOMIALS[3 * k], a0)
            a1 = tl.where(index == k, POLYNOMIALS[3 * k + 1], a1)
            a2 = tl.where(index == k, POLYNOMIALS[3 * k + 2], a2)
        t = a0 * one + a1 * b + a2 * tl.dot(b, b, out_dtype=tl.float64)
        q = tl.dot(t, q, out_dtype=tl.float64)
        b = tl.dot(tl.dot(t, b, out_dtype=tl.float64), t, out_dtype=tl.float64)
    q = tl.where(moving, q * tl.sqrt(inverse), 0.0)
    for first in range(0, n, N):
        j = first + wide
        inside = there[:, None] & (j < n)[None, :]
        at = entries(
            i, j, i_stride, j_stride, i_size, i_within, j_size, j_within, I_FOLDED, J_FOLDED
        )  # fmt: skip
        g, total, s, where = moments(
            gradients, totals, batch, at, inside & ok, each, inner, sign, momentum, lead, extra,
            GRADIENT, TOTAL, GRADIENT_BYTES, TOTAL_BYTES,
        )  # fmt: skip
        tl.store(where, tl.where(entered, total, 0.0).to(TOTAL), mask=inside & ok)
        p = tl.dot(q, tl.where(ok, s, 0.0).to(tl.float64), out_dtype=tl.float64)
        place = directions + batch.to(tl.int64) * m * n + i[:, None].to(tl.int64) * n + j[None, :]
        tl.store(place, p.to(tl.float32), mask=(i < m)[:, None] & (j < n)[None, :])
    tl.store(taken + batch, ok)


# ---------------------------------------------------------------------- their launches


def tiles(m: int, n: int) -> int:
    """Return the number of programs that a matrix is divided among."""
    return triton.cdiv(m, TILE.value) * triton.cdiv(n, TILE.value)


def place(program: Program) -> dict[str, int | bool]:
    """Return the layout as arguments of the kernels."""
    layout = program.layout
    short, long = layout.short, layout.long
    arguments = {"m": program.m, "n": program.n, "each": layout.each, "inner": layout.inner}
    arguments |= {"i_stride": short.stride, "i_size": short.size, "i_within": short.within}
    arguments |= {"j_stride": long.stride, "j_size": long.size, "j_within": long.within}
    return arguments | {"I_FOLDED": short.size > 1, "J_FOLDED": long.size > 1}


def reading(program: Program) -> dict[str, Any]:
    """Return the arguments with which kernels read G, Ĝ and S."""
    hyper = program.hyper
    lead, extra = (hyper.momentum, 1.0) if hyper.lookahead else (1.0, 0.0)
    arguments = {"sign": hyper.sign, "momentum": hyper.momentum, "lead": lead, "extra": extra}
    arguments |= {"GRADIENT": TYPES[program.gradient], "GRADIENT_BYTES": program.alignments[0]}
    arguments |= {"TOTAL": TYPES[program.total], "TOTAL_BYTES": program.alignments[1]}
    return place(program) | arguments


def resting(rule: Rest) -> tuple[int, float, float]:
    """Return `longest`, `settled` and `falls` of `verdict`."""
    falls = math.log2(rule.momentum) if rule.momentum else -1.0
    return rule.longest, min(rule.settled, torch.finfo(torch.float32).max), falls


def small(program: Program, table: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Update the moments; return P (b, m, n) in float32 and the mask of stepped matrices, (b,)."""
    hyper, m, n, count = program.hyper, program.m, program.n, program.layout.count
    gradients, totals, skipped, quiet, grams = table.view(5, -1).unbind()
    taken = torch.empty(count, dtype=torch.bool, device=table.device)
    directions = torch.empty((count, m, n), dtype=torch.float32, device=table.device)
    limits = torch.finfo(torch.float32)
    rows = max(16, triton.next_power_of_2(m))
    longest, settled, falls = resting(hyper.rest)
    lost = roundings(hyper.gram_decay) * limits.eps
    quintics = polynomials("polar-express", program.iterations)
    step_small[(count,)](
        gradients, totals, skipped, quiet, grams, taken if mask is None else mask, taken,
        directions, **reading(program),
        longest=longest, settled=settled, falls=falls,
        keep=hyper.gram_decay, smoothing=hyper.smoothing, bound=hyper.shift,
        limit=limits.max / 2, least=limits.tiny / limits.eps,
        floor=floor(torch.float32) + lost,
        HAS_GRAM=program.has_gram, MASKED=mask is not None, LOOKAHEAD=hyper.lookahead,
        POLYNOMIALS=tuple(x for quintic in quintics for x in quintic), STEPS=len(quintics),
        M=rows, N=min(WIDE // rows, max(16, triton.next_power_of_2(n))),
        TABLE_BYTES=table_bytes(m), num_warps=8 if rows == 64 else 4,
    )  # fmt: skip
    return directions, taken


def begin(program: Program, table: Tensor, mask: Tensor | None) -> tuple[Start, Tensor]:
    """Update the moments; return the start of the recursion and the mask of steps, (b,)."""
    x, factors, taken = enter(program, table, mask)
    _, _, skipped, _, grams = table.view(program.kinds, -1).unbind()
    watched: dict[str, Any] = {"taken": taken, "skipped": skipped, "each": program.layout.each}
    if not program.has_gram:
        return start(x, program, **watched), taken
    hyper = program.hyper
    smoothing = {"addend": grams, "scale": factors[1], "powers": (0, 2)}
    smoothing |= {"beta": program.m * hyper.smoothing, "addend_shift": hyper.shift}
    return start(x, program, remainder=True, **watched, **smoothing), taken


def enter(program: Program, table: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Update Ĝ and M̂ in place by the present gradients; return (X, factors, taken).

    X is S·spread/‖[S L]‖_F in float16, (b, m, n), zero if a matrix does not move; the factors,
    (6, b), are those of `measure`; `taken`, (b,), is the mask of stepped matrices.
    """
    hyper, m, n = program.hyper, program.m, program.n
    count, each, device = program.layout.count, program.layout.each, table.device
    gradients, totals, skipped, quiet, grams, *_ = table.view(program.kinds, -1).unbind()
    copies = 1 if program.draws is None else program.draws.width
    parts, read = tiles(m, n), reading(program)
    sums = torch.empty((count, parts, 3), dtype=torch.float64, device=device)
    factors = torch.empty((6, count), dtype=torch.float32, device=device)
    taken = torch.empty(count, dtype=torch.bool, device=device)
    asked = taken if mask is None else mask
    masked = {"MASKED": mask is not None}
    sum_squares[(parts, count)](
        gradients, totals, asked, sums, **read, **masked, LOOKAHEAD=hyper.lookahead
    )  # fmt: skip
    limits = torch.finfo(torch.float32)
    measure[(count,)](
        sums, grams, skipped, quiet, asked, factors, taken,
        parts, m, each, *resting(hyper.rest),
        hyper.gram_decay, hyper.smoothing, hyper.shift, float(copies), program.spread,
        limits.max / 2, limits.tiny, limits.tiny / limits.eps,
        HAS_GRAM=program.has_gram, BLOCK=BLOCK, TABLE_BYTES=table_bytes(m), **masked,
    )  # fmt: skip
    x = torch.empty((count, m, n), dtype=torch.float16, device=device)
    scaled = torch.empty_like(x) if program.has_gram else x
    advance[(parts, count)](
        gradients, totals, factors, taken, x, scaled, **read, HAS_GRAM=program.has_gram
    )  # fmt: skip
    if program.has_gram:
        back, kept = factors[3], factors[4]
        symmetric(
            scaled, scaled, grams, addend=grams, scale=back, addend_scale=kept, powers=(2, 1),
            each=each,
        )  # fmt: skip
    return x, factors, taken


def start(
    y: Tensor,
    program: Program,
    *,
    remainder: bool = False,
    taken: Tensor | None = None,
    skipped: Tensor | None = None,
    each: int = 1,
    **smoothing: Any,
) -> Start:
    """Return the start of the recursion: R = m(YYᵀ + Λ)/spread², and n leading columns of Y.

    With `taken` and `skipped` non-finite matrices are skipped; `smoothing` are the options of
    `symmetric` that add Λ.
    """
    count, m, _ = y.shape
    spread = program.spread
    r = torch.empty((count, m, m), dtype=torch.float16, device=y.device)
    rest = torch.empty_like(r) if remainder else None
    kind = "remainder" if remainder else ""
    norms = torch.empty(count * math.comb(-(-m // 64) + 1, 2), dtype=torch.float32, device=y.device)
    parts = symmetric(
        y, y, r, rest, alpha=m / spread**2, kind=kind, norms=norms, each=each, **smoothing
    )
    scale, length, floor = torch.empty((3, count), dtype=torch.float32, device=y.device).unbind()
    lengths[(count,)](
        norms, r, norms if taken is None else taken, norms if skipped is None else skipped,
        scale, length, floor, parts, m, each, spread, FIRST_FLOOR, LEAST_FLOOR,
        WATCHED=taken is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return Start(y[..., : program.n], r, rest, scale, length, floor, spread)


def moved(
    program: Program,
    weights: Tensor,
    directions: Tensor,
    taken: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
) -> None:
    """Launch `move`; if one rate is on the device, the other is copied there."""
    on_device = isinstance(rate, Tensor)
    if isinstance(rate, Tensor):
        rate = rate.to(weights.device, torch.float32)
        decay = decay if isinstance(decay, Tensor) else rate.new_full((), decay)
        decay = decay.to(weights.device, torch.float32)
    else:  # also of NumPy's numbers, which Triton does not take
        rate, decay = float(rate), float(decay)
    move[(tiles(program.m, program.n), program.layout.count)](
        weights, directions.contiguous(), taken, rate, decay, **place(program),
        WEIGHT=TYPES[program.weight], BYTES=program.alignments[2],
        DECAYS=program.decays, ON_DEVICE=on_device,
    )  # fmt: skip
