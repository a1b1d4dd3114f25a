"""(SSᵀ + Λ)^(-1/2) S in float16, at the speed of the matrix units.

After one Gram product everything is a polynomial in one symmetric matrix R. With R scaled to
Frobenius norm 1 a step (a, b, c) is

    Z = bR + cR²,   Q ← Q(aI + Z),   R ← (aI + Z)²R,

and the result is QX: products of m×m matrices whose result is symmetric, half the arithmetic of
others. The last polynomial needs no R after it, so from Q = R on

    Q ← αQ² + βR + δI

doubles its degree with every product. Eleven bits are too few for a Gram matrix, so

- the first R is kept to 22 bits, as a float16 matrix and the float16 remainder of its rounding;
- the recursion restarts once, X ← QX, with R recomputed: from X, or as QRQᵀ where Λ is part of it;
- R gets a floor on its spectrum in the first step and at the restart, as large as what rounding may
  do to its eigenvalues, so that none is negative or too small, for the polynomials to amplify;
- Z is formed without aI, whose rounding would be as large as that of the whole.

Without these the recursion leaves the ball or diverges; with them ‖P‖_op ≤ 1.01 but for rare inputs
that are made for it (`tests/half_contract.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon.linalg._scaling import REMAINDER_SCALE, joint_unit_scale, unit_scale
from nucleon.linalg.coefficients import HALF_RESTART, HALF_SQUARES, Quintic
from nucleon.linalg.kernels import (
    add_to_diagonal,
    lifted,
    scaled_half,
    squares,
    symmetric_pair,
    symmetric_product,
)

FIRST_FLOOR = 0.1
"""Over √k, added to R after the first step, which multiplies small eigenvalues by 67. Rounding to
eleven bits moves them the more, the fewer rows k have the large entries."""
LEAST_FLOOR = FIRST_FLOOR / 16
"""The least value of it: beyond 16² rows rounding in the later steps is the larger part."""
RESTART_FLOOR = 3e-3
"""Added to R at the restart, where rounding may have moved its eigenvalues by about as much."""
SMOOTHED_FLOOR = 6e-2
"""Over √m, this floor where Λ is part of R: QR is rounded relative to its largest entries, which
may be those of Λ alone."""
WIDE = 1.5
"""From this ratio n/m on the Gram recursion is the faster way to a polar factor."""


@dataclass(frozen=True)
class Start:
    """S and SSᵀ + Λ in float16, in the middle of its range whatever their scale and shape."""

    x: Tensor
    """(b, m, n): S·spread/‖[S L]‖_F."""
    r: Tensor
    """(b, m, m): m(SSᵀ + Λ)/‖[S L]‖_F²."""
    remainder: Tensor | None
    """The part of r that rounding lost, times `REMAINDER_SCALE`; None where Λ = 0."""
    scale: Tensor
    """(b,): 1/‖r‖_F, so that R of the equations is r·scale."""
    length: Tensor
    """(b,): √(m·scale)/spread, so that X of the equations is x·length."""
    floor: Tensor
    """(b,): added to R after the first step, see `first_floor`."""
    spread: float
    """About √n."""


def half_polar(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """Return polar(S) for S (b, m, n), m ≤ n, in float32; unchecked, no synchronization.

    A float32 S with ‖S‖_F below about √n·2^-126, the smallest normal number, shrinks towards 0.
    """
    return _product(*polar_factors(start(s, None), sequence))


def half_augmented(s: Tensor, smoothing: Tensor | None, sequence: Sequence[Quintic]) -> Tensor:
    """Return (SSᵀ + Λ)^(-1/2) S for S (b, m, n), m ≤ n, and Λ (b, m, m) or None for 0, in float32.

    Unchecked, no synchronization; `sequence` from `half_polar_express`, of five steps.
    """
    return _product(*augmented_factors(start(s, smoothing), sequence))


def polar_factors(begin: Start, sequence: Sequence[Quintic]) -> tuple[Tensor, Tensor]:
    """Return (Q, X) with QX = polar(S) and Q symmetric, by the cheaper way for the shape.

    Nearly square matrices gain nothing from the Gram recursion: X ← (aI + bR + cR²)X with R = XXᵀ
    in every step takes 3m²n + m³ flops each, needs no restart and no floor. As every R is made of
    the present X, the rounding of aI concerns its step alone.
    """
    m, n = begin.x.shape[-2:]
    if n >= WIDE * m:
        return augmented_factors(begin, sequence)
    x, r, q = scaled_half(begin.x, begin.length), begin.r, begin.r
    for i, (a, b, c) in enumerate(sequence):
        if i:
            x = q @ x
            r = symmetric_product(x, x)
        scale = None if i else begin.scale
        q = symmetric_product(r, r, r, alpha=c, beta=b, shift=a, scale=scale, powers=(2, 1))
    return q, x


def augmented_factors(begin: Start, sequence: Sequence[Quintic]) -> tuple[Tensor, Tensor]:
    """Return (Q, X) with QX = (SSᵀ + Λ)^(-1/2) S and Q symmetric, by the Gram recursion.

    The quintics of `sequence` up to the restart, then `HALF_SQUARES`. Flops: m²n for XXᵀ, 4m²n for
    the two products QX; 13m³ for the polynomials; m²n for the restart without Λ, 5m³ with it.
    """
    r, q, last = begin.r, begin.r, HALF_RESTART - 1
    for i, (a, b, c) in enumerate(sequence[:HALF_RESTART]):
        scale = None if i else begin.scale
        if i:
            z = symmetric_product(r, r, r, alpha=c, beta=b)
            length = begin.length if i == last else None  # as Q meets the unscaled x next
            q = symmetric_product(q, z, q, beta=a, scale=length, powers=(1, 1))
        else:
            terms: dict[str, Any] = {"alpha": c, "beta": b, "scale": scale, "powers": (2, 1)}
            z, q = symmetric_pair(r, r, r, **terms, second_shift=a, kind="shifted")
        if i < last:
            rz = symmetric_product(r, z, r, beta=a, scale=scale, powers=(1, 1))
            r = symmetric_product(z, rz, rz, beta=a)
            if not i:
                add_to_diagonal(r, begin.floor)
    x = q @ begin.x
    if begin.remainder is None:
        r = symmetric_product(x, x, shift=RESTART_FLOOR)
    else:
        m = begin.x.shape[-2]
        qr = (q @ begin.remainder).baddbmm_(q, begin.r, beta=1 / REMAINDER_SCALE)
        more = max(RESTART_FLOOR, SMOOTHED_FLOOR / math.sqrt(m))
        r = symmetric_product(qr, q, alpha=begin.spread**2 / m, shift=more)
    q = r
    for a, b, c in HALF_SQUARES:
        q = symmetric_product(q, q, r, alpha=a, beta=b, shift=c)
    return q, x


def first_floor(r: Tensor) -> Tensor:
    """Return `FIRST_FLOOR`/√k, (b,); k = (Σ r_ii)²/Σ r_ii² rows, about, have the large entries."""
    m = r.shape[-1]  # and the trace
    norm = torch.linalg.vector_norm(r.diagonal(dim1=-2, dim2=-1), dim=-1, dtype=torch.float32)
    return (norm * (FIRST_FLOOR / m)).clamp_min(LEAST_FLOOR)


def spread_of(n: int) -> float:
    """Return √n, rounded to a power of two."""
    return 2.0 ** round(math.log2(n) / 2)


def start(s: Tensor, smoothing: Tensor | None) -> Start:
    """Return the operands of the recursions for S and Λ in float32 or float64."""
    m, n = s.shape[-2:]
    spread = spread_of(n)
    if smoothing is not None:
        smoothing = lifted(smoothing)
    if s.dtype == torch.float64:  # its range is not that of the float32 factors
        s, smoothing = (
            (unit_scale(s), None) if smoothing is None else joint_unit_scale(s, smoothing)
        )
    square = squares(s)
    if smoothing is not None:
        square = square + smoothing.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=square.dtype)
    tiny = torch.finfo(torch.float32).tiny
    inverse = square.sqrt().clamp_min(tiny * spread).reciprocal()  # its square overflows no float32
    x = scaled_half(s, (spread * inverse).float())
    alpha, remainder = m / (spread * spread), None
    if smoothing is None:
        r = symmetric_product(x, x, alpha=alpha)
    else:
        r, remainder = symmetric_pair(
            x, x, smoothing, alpha=alpha, beta=float(m), scale=inverse.float(), powers=(0, 2)
        )
    # tr r = m, so its norm is at least √m, unless it is a zero matrix.
    norm = torch.linalg.vector_norm(r, dim=(-2, -1), dtype=torch.float32)
    scale = norm.clamp_min(1.0).reciprocal()
    length = (m * scale).sqrt() / spread
    return Start(x, r, remainder, scale, length, first_floor(r), spread)


def _product(q: Tensor, x: Tensor) -> Tensor:
    """Return QX in float32, not rounded to float16 on its way."""
    if x.is_cuda:
        return torch.bmm(q, x, out_dtype=torch.float32)
    return q.float() @ x.float()
