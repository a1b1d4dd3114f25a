"""(SSᵀ + Λ)^(-1/2) S in float16, at the speed of the matrix units.

After one Gram product everything is a polynomial in one symmetric matrix R. With R scaled to
Frobenius norm 1 a step (a, b, c) is

    Z = bR + cR²,   Q ← Q(aI + Z),   R ← (aI + Z)²R,

and the result is QX: products of m×m matrices whose result is symmetric, half the arithmetic of
others. Eleven bits are too few for a Gram matrix, so

- the first R is kept to 22 bits, as a float16 matrix and the float16 remainder of its rounding;
- the recursion restarts once, X ← QX, with R recomputed: from X, or as QRQᵀ where Λ is part of it;
- R gets a floor on its spectrum, relative to its norm, in the first step and at the restart, so
  that rounding leaves no negative eigenvalue for the polynomials to amplify;
- Z is formed without aI, whose rounding would be as large as that of the whole.

Without these the recursion leaves the ball or diverges; with them ‖P‖_op ≤ 1.01.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nucleon.linalg.coefficients import HALF_RESTART, Quintic
from nucleon.linalg.kernels import (
    REMAINDER_SCALE,
    scaled_half,
    squares,
    symmetric_pair,
    symmetric_product,
)

FIRST_FLOOR = 7e-4
"""Added to R after the first step, which multiplies small eigenvalues by 67: 1e-5 before it."""
RESTART_FLOOR = 3e-3
"""Added to R at the restart, where rounding may have moved its eigenvalues by about as much."""


WIDE = 1.5
"""From this ratio n/m on the Gram recursion is the faster way to a polar factor."""


def half_polar(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """polar(S) for S (b, m, n), m ≤ n, in float16; float32 out, unchecked, no synchronization.

    Nearly square matrices gain nothing from the Gram recursion: X ← aX + (bR + cR²)X with R = XXᵀ
    in every step takes 4m²n + m³ flops each, needs no restart and no floor.
    """
    m, n = s.shape[-2:]
    if n >= WIDE * m:
        return half_augmented(s, None, sequence)
    x, r, _, spread = _start(s, None)
    scale = _inverse_norm(r)
    x *= ((m * scale).sqrt() / spread).half()[:, None, None]
    first: Tensor | None = scale
    for a, b, c in sequence[:-1]:
        z = symmetric_product(r, r, r, alpha=c, beta=b, scale=first, powers=(2, 1))
        x = torch.baddbmm(x, z, x, beta=a)
        r, first = symmetric_product(x, x), None
    a, b, c = sequence[-1]
    return _product(symmetric_pair(r, r, r, alpha=c, beta=b, second_shift=a)[1], x)


def half_augmented(s: Tensor, smoothing: Tensor | None, sequence: Sequence[Quintic]) -> Tensor:
    """(SSᵀ + Λ)^(-1/2) S for S (b, m, n), m ≤ n, and Λ (b, m, m) or None for 0; float32 out.

    Unchecked, no synchronization; `sequence` from `half_polar_express`, two steps at least.
    Flops: m²n for XXᵀ, 4m²n for the two products QX; 14m³ for five steps; m²n for the restart
    without Λ, 5m³ with it.
    """
    m, last = s.shape[-2], len(sequence) - 1
    x, r, remainder, spread = _start(s, smoothing)
    scale: Tensor | None = _inverse_norm(r)  # R of the equations is r·scale
    length = (m * scale).sqrt() / spread  # and X is x·length
    first, q, z = r, r, r
    for i, (a, b, c) in enumerate(sequence):
        if i == HALF_RESTART:
            x = q @ x
            if smoothing is None:
                r = symmetric_product(x, x, shift=RESTART_FLOOR)
            else:
                qr = (q @ remainder).baddbmm_(q, first, beta=1 / REMAINDER_SCALE)
                r = symmetric_product(qr, q, alpha=spread * spread / m, shift=RESTART_FLOOR)
        if i in (0, HALF_RESTART):
            z, q = symmetric_pair(
                r, r, r, alpha=c, beta=b, second_shift=a, scale=scale, powers=(2, 1)
            )
        else:
            z = symmetric_product(r, r, r, alpha=c, beta=b)
            ends = i == min(HALF_RESTART - 1, last)  # Q is about to meet the unscaled x
            q = symmetric_product(q, z, q, beta=a, scale=length if ends else None, powers=(1, 1))
        if i + 1 not in (HALF_RESTART, last + 1):
            rz = symmetric_product(r, z, r, beta=a, scale=scale, powers=(1, 1))
            r = symmetric_product(z, rz, rz, beta=a, shift=FIRST_FLOOR if i == 0 else 0.0)
        scale = None
    return _product(q, x)


def _start(s: Tensor, smoothing: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """X = S·spread/‖[S L]‖_F, r = m(SSᵀ + Λ)/‖[S L]‖_F², its remainder, and spread ≈ √n.

    The factors keep the entries in the middle of float16's range whatever the shape.
    """
    m, n = s.shape[-2:]
    spread = 2.0 ** round(math.log2(n) / 2)
    square = squares(s)
    if smoothing is not None:
        square = square + smoothing.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
    tiny = torch.finfo(torch.float32).tiny
    inverse = square.sqrt().clamp_min(tiny * spread).reciprocal()  # its square overflows no float32
    x = scaled_half(s, (spread * inverse).float())
    alpha = m / (spread * spread)
    if smoothing is None:
        r = symmetric_product(x, x, alpha=alpha)
        return x, r, r, spread
    r, remainder = symmetric_pair(
        x, x, smoothing, alpha=alpha, beta=float(m), scale=inverse.float(), powers=(0, 2)
    )
    return x, r, remainder, spread


def _inverse_norm(r: Tensor) -> Tensor:
    """1/‖r‖_F, (b,): at most m^(-1/2) as tr r = m, and 1 for a zero matrix."""
    norm = torch.linalg.vector_norm(r, dim=(-2, -1), dtype=torch.float32)
    return norm.clamp_min(1.0).reciprocal()


def _product(q: Tensor, x: Tensor) -> Tensor:
    """QX in float32, not rounded to float16 on its way."""
    if x.is_cuda:
        return torch.bmm(q, x, out_dtype=torch.float32)
    return q.float() @ x.float()
