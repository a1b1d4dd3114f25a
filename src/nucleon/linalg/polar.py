"""The polar factor polar(S) = (SSᵀ)^{-1/2} S = U Vᵀ, where S = U Σ Vᵀ is the compact SVD.

`polar` checks its arguments and chooses the number of steps. The functions that it wraps accept a
number of steps and never synchronize, except `polar_svd`; all of them work on the short side.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg import coefficients as design
from nucleon.linalg._precision import check_method, exact, full_float32
from nucleon.linalg._scaling import unit_scale
from nucleon.linalg.coefficients import Quintic
from nucleon.linalg.kernels import add_product

Method = Literal["svd", "newton-schulz", "polar-express", "scaled-newton", "qdwh"]
METHODS: tuple[Method, ...] = get_args(Method)

RIDGE = 1 / 3
"""Scaled Newton inverts S augmented by RIDGE·lower_bound·I."""

CHOLESKY_WEIGHT = 100.0
"""QDWH factors I + cXXᵀ, of condition number 1 + c at most, once c is no larger than this."""


@full_float32()
def polar(
    s: Tensor,
    method: Method | None = None,
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
    coefficients: Sequence[Quintic] | None = None,
) -> Tensor:
    """Return the polar factor P = U Vᵀ of each matrix of `s`, a partial isometry; 0 gives 0.

    A singular value above rank_tolerance·σ_max becomes 1 up to eps^¾ (6e-6 in float32, 2e-12 in
    float64), a zero one stays 0, and ‖P‖_op ≤ 1 + 1e-3, in half precision 1 + 1e-2. Smaller ones
    are cut to 0 by "svd"; the other methods take them into [0, 1] and those far below, rounding
    noise included, to κ√min(m, n)·σ/(rank_tolerance‖S‖_F) with the κ listed here.
    polar(2^k s) = polar(s) bit for bit while 2^k s is exact, subnormal or not.

    - "svd": the reference, in float64.
    - "newton-schulz": X ← 3X/2 − XXᵀX/2 from X = S/‖S‖_F; matrix products only; κ from 4 to 9.
    - "polar-express": the optimal quintics instead, a third of the steps; κ from 3 to 8.
    - "scaled-newton": X ← (γX + X^{-ᵀ}/γ)/2 by m×m inverses, then Newton–Schulz; κ 10 or 15.
    - "qdwh": dynamically weighted Halley by QR and Cholesky, 3 to 6 steps; κ from 4 to 20.

    Args:
        s: (…, m, n); half precision is computed in float32, whose defaults then apply.
        method: one of the above; None is "svd".
        steps: run exactly this many (for the iterative methods); None runs as many as
            `rank_tolerance` needs.
        rank_tolerance: relative to σ_max; default √min(m, n)·eps for "svd", the most that rounding
            the entries of S can move a singular value; √eps for the others, or with `steps` the
            least that so many take to 0.99: five steps of "polar-express" reach σ = 3.2e-3·‖S‖_F.
        coefficients: triples (a, b, c) in the place of a method: X ← aX + bXXᵀX + c(XXᵀ)²X, one a
            step, from X = S/‖S‖_F; the last is repeated up to `steps`. Nothing keeps P in the ball:
            ‖P‖_op is at most `nucleon.linalg.coefficients.largest(coefficients)`, 1.203 for five
            times (3.4445, -4.7750, 2.0315), the triple of `torch.optim.Muon`.
    """
    s = _checks.matrix("s", s)
    if not s.numel():
        return s.clone()
    x = s.to(_checks.work_dtype(s.dtype))
    if coefficients is not None:
        if method is not None or rank_tolerance is not None:
            raise ValueError(
                f"coefficients take the place of method and rank_tolerance, got method={method!r} "
                f"and rank_tolerance={rank_tolerance!r}; leave them out"
            )
        return polar_polynomial(x, design.custom(coefficients, steps)).to(s)
    method = "svd" if method is None else method
    side = min(s.shape[-2:])
    cut = check_method(x.dtype, side, method, METHODS, steps, rank_tolerance)
    if method == "svd":
        return polar_svd(exact(x), cut).to(s)
    bound = cut / math.sqrt(side)  # of ‖S‖_F
    if steps is None:
        least = _ridged(RIDGE * bound) if method == "scaled-newton" else bound
        steps = design.steps_for(method, least, _eps(x) ** 0.75)
    elif rank_tolerance is None:
        bound = max(bound, design.bound_for(method, steps))
    if method == "scaled-newton":
        return polar_scaled_newton(x, steps, bound).to(s)
    if method == "qdwh":
        return polar_qdwh(x, steps, bound).to(s)
    return polar_polynomial(x, design.quintics(method, bound, steps)).to(s)


def polar_svd(s: Tensor, rank_tolerance: float | None = None) -> Tensor:
    """Return U Vᵀ over the singular values above rank_tolerance·σ_max, default √min(m, n)·eps.

    GPU solvers return U and V orthogonal to 1e-11 only (float64, side 1024); one Newton–Schulz step
    squares that error.
    """
    if _is_tall(s):
        return polar_svd(s.mT, rank_tolerance).mT
    if rank_tolerance is None:
        rank_tolerance = math.sqrt(s.shape[-2]) * _eps(s)
    u, sigma, vh = torch.linalg.svd(_checks.decomposable(unit_scale(s)), full_matrices=False)
    keep = sigma > rank_tolerance * sigma[..., :1]
    return _compose((u * keep.unsqueeze(-2)) @ vh, [design.newton_schulz()]).to(s.device)


def polar_polynomial(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """Iterate X ← aX + bXXᵀX + c(XXᵀ)²X over the (a, b, c) of `sequence`, from X = S/‖S‖_F.

    `[newton_schulz()] * steps`, `polar_express(lower_bound, steps)` or `[muon()] * 5`; any dtype.
    """
    if _is_tall(s):
        return polar_polynomial(s.mT, sequence).mT
    return _compose(_normalized(s), sequence)


def polar_bfloat16(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """Return `polar_polynomial` by products of bfloat16, summed in float32; in the dtype of S.

    Every step starts from the rounded X, so it corrects the rounding of the steps before, and
    ‖P‖_op ≤ 1.01 with contracted quintics.
    """
    if _is_tall(s):
        return polar_bfloat16(s.mT, sequence).mT
    if s.ndim == 3 and len(s) == 1:  # torch multiplies a matrix faster than a stack of one
        return polar_bfloat16(s[0], sequence)[None]
    return _compose(_normalized(s).bfloat16(), sequence).to(s.dtype)


def polar_scaled_newton(s: Tensor, steps: int, lower_bound: float) -> Tensor:
    """Iterate X ← (γX + X^{-ᵀ}/γ)/2 on the factor of [S τI], then Newton–Schulz on S's block.

    The ridge τ = RIDGE·lower_bound makes any S, here of ‖S‖_F = 1, invertible, bounds the spectrum
    from below, so that γ is known on the host, and leaves σ/√(σ²+τ²) for each σ; the Newton–Schulz
    steps take that to 1 within eps where σ ≥ lower_bound. float32 or float64.
    """
    if _is_tall(s):
        return polar_scaled_newton(s.mT, steps, lower_bound).mT
    columns, ridge = s.shape[-1], RIDGE * lower_bound
    factors, bound = design.scaled_newton(_ridged(ridge), steps)
    augmented = torch.cat([_normalized(s), ridge * _identity(s)], dim=-1) / math.hypot(1, ridge)
    q, r = torch.linalg.qr(augmented.mT)  # (…, n+m, m), (…, m, m)
    x = r.mT
    for factor in factors:
        x = (factor * x + torch.linalg.inv_ex(x).inverse.mT / factor) / 2
    x = (x / bound) @ q[..., :columns, :].mT  # the singular values of x lay in [1, bound]
    repair = design.steps_for("newton-schulz", 1 / math.hypot(1, RIDGE), _eps(s))
    return _compose(x, [design.newton_schulz()] * repair)


def polar_qdwh(s: Tensor, steps: int, lower_bound: float) -> Tensor:
    """Iterate X ← X(aI + bXᵀX)(I + cXᵀX)^{-1} for singular values ≥ lower_bound·‖S‖_F."""
    if _is_tall(s):
        return polar_qdwh(s.mT, steps, lower_bound).mT
    columns, identity, x = s.shape[-1], _identity(s), _normalized(s)
    for a, b, c in design.qdwh(lower_bound, steps)[0]:
        if c > CHOLESKY_WEIGHT:  # QR of [√c·X I]ᵀ: no Gram matrix of condition number c
            q, _ = torch.linalg.qr(torch.cat([math.sqrt(c) * x, identity], dim=-1).mT)
            inverse_x = q[..., columns:, :] @ q[..., :columns, :].mT / math.sqrt(c)
        else:
            factor, _ = torch.linalg.cholesky_ex(identity + c * (x @ x.mT))
            inverse_x = torch.cholesky_solve(x, factor)
        x = b / c * x + (a - b / c) * inverse_x  # inverse_x = (I + cXXᵀ)^{-1}X
    return x


def _compose(x: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    for a, b, c in sequence:
        gram = x @ x.mT  # (…, m, m)
        factor = add_product(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        x = add_product(x, factor, x, beta=a)
    return x


def _normalized(s: Tensor) -> Tensor:
    """Return S/‖S‖_F, and 0 for 0; the norm of a nonzero matrix is at least ½ in unit scale."""
    x = unit_scale(s)
    return x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(0.25)


def _ridged(ridge: float) -> float:
    """Return the least singular value of [X ridge·I]/√(1+ridge²), whose largest is at most 1."""
    return ridge / math.hypot(1, ridge)


def _identity(s: Tensor) -> Tensor:
    rows = s.shape[-2]
    return torch.eye(rows, dtype=s.dtype, device=s.device).expand(*s.shape[:-2], rows, rows)


def _is_tall(s: Tensor) -> bool:
    return s.shape[-2] > s.shape[-1]


def _eps(s: Tensor) -> float:
    return torch.finfo(s.dtype).eps
