"""Matrices with a short side below 64: moments and direction in one launch, a program for each.

Such matrices leave the matrix units idle and float16 too few rows to average its rounding. The Gram
matrices SSᵀ and GGᵀ are summed in float64, where no scale overflows, and the recursion of Appendix
F.3 runs in them:

    B = (SSᵀ + Λ)/‖[S L]‖_F²,   T = aI + bB + cB²,   Q ← TQ,   B ← TBT,   P = QS/‖[S L]‖_F

A program reads the gradient and Ĝ twice: once for the sums, then to write Ĝ and P. Both are
float32: Triton 3.6 has no float64 product of what was loaded in fewer bits.
"""
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nucleon.linalg._precision import floor, roundings
from nucleon.linalg.triton_symmetric import matrix, table_bytes
from nucleon.optim.engines.cuda.kernels import entries, moments, reading, resting, verdict
from nucleon.optim.engines.cuda.program import Program
from nucleon.optim.polar_methods import polynomials

WIDE = 4096
"""Most entries of a tile, 32 kB in float64."""


@triton.jit(do_not_specialize=["each", "longest"])
def advance(
    gradients, totals, skipped, quiet, grams, mask, taken, directions, m, n, each, inner,
    i_stride, j_stride, i_size, i_within, j_size, j_within, sign, momentum, lead, extra,
    longest, settled, falls, keep, smoothing, bound, limit, least, floor,
    I_FOLDED: tl.constexpr, J_FOLDED: tl.constexpr, GRADIENT: tl.constexpr, TOTAL: tl.constexpr,
    GRADIENT_BYTES: tl.constexpr, TOTAL_BYTES: tl.constexpr, HAS_GRAM: tl.constexpr,
    MASKED: tl.constexpr, LOOKAHEAD: tl.constexpr, POLYNOMIALS: tl.constexpr, STEPS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TABLE_BYTES: tl.constexpr = 16,
):  # fmt: skip
    """Ĝ ← βĜ + G and M̂ ← β₂M̂ + GGᵀ where the matrix is taken; P in float32."""
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
        # What rounding to float32 may have taken from the least eigenvalue of Λ.
        raised += tl.where(diagonal & square, floor * tl.sqrt(tl.sum(raised * raised)), 0.0)
        b += raised
    ok, entered, moving = verdict(
        batch, finite, faded, gradient2, total2, skipped, quiet, mask, each, longest, settled,
        falls, MASKED,
    )  # fmt: skip
    ok = ok.to(tl.int32) != 0  # the interpreter takes it for a float64, as what was compared
    if HAS_GRAM:
        tl.store(gram, tl.where(entered, new, 0.0), mask=square & ok)

    b = tl.where(moving, b, 0.0)  # what is not finite would not stop
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


def compute(program: Program, table: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Update the moments; return P (b, m, n) in float32, and which matrices are taken, (b,)."""
    hyper, m, n, count = program.hyper, program.m, program.n, program.layout.count
    gradients, totals, skipped, quiet, grams = table.view(5, -1).unbind()
    taken = torch.empty(count, dtype=torch.bool, device=table.device)
    directions = torch.empty((count, m, n), dtype=torch.float32, device=table.device)
    limits = torch.finfo(torch.float32)
    rows = max(16, triton.next_power_of_2(m))
    longest, settled, falls = resting(hyper.rest)
    lost = roundings(hyper.gram_decay) * limits.eps
    quintics = polynomials("polar-express", program.iterations)
    advance[(count,)](
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
