"""The polar factor polar(S) = (SSᵀ)^{-1/2} S = U Vᵀ, where S = U Σ Vᵀ is the compact SVD.

`polar` checks its arguments and chooses the number of steps. The functions it wraps take a number
of steps, look at no value and never synchronize (`polar_svd` excepted, where the SVD itself does);
all of them take stacks (…, m, n) and work on the short side.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg import coefficients
from nucleon.linalg._precision import exact, full_float32
from nucleon.linalg._scaling import unit_scale
from nucleon.linalg.coefficients import Quintic
from nucleon.linalg.convergence import Convergence
from nucleon.linalg.kernels import add_product

Method = Literal["svd", "newton-schulz", "polar-express", "scaled-newton", "qdwh"]
METHODS: tuple[Method, ...] = get_args(Method)

RIDGE = 1 / 3
"""Scaled Newton inverts S augmented by RIDGE·rank_tolerance·I."""

CHOLESKY_WEIGHT = 100.0
"""QDWH factors I + cXXᵀ, of condition number 1 + c at most, once c is no larger than this."""


@overload
def polar(
    s: Tensor,
    method: Method = "svd",
    *,
    steps: int | None = None,
    tolerance: float | None = None,
    rank_tolerance: float | None = None,
    report: Literal[False] = False,
) -> Tensor: ...


@overload
def polar(
    s: Tensor,
    method: Method = "svd",
    *,
    steps: int | None = None,
    tolerance: float | None = None,
    rank_tolerance: float | None = None,
    report: Literal[True],
) -> tuple[Tensor, Convergence]: ...


@full_float32()
def polar(
    s: Tensor,
    method: Method = "svd",
    *,
    steps: int | None = None,
    tolerance: float | None = None,
    rank_tolerance: float | None = None,
    report: bool = False,
) -> Tensor | tuple[Tensor, Convergence]:
    """The polar factor P = U Vᵀ of each matrix of `s`, a partial isometry; 0 gives 0.

    A singular value above rank_tolerance·σ_max becomes 1 up to `tolerance`, a zero one stays 0,
    and ‖P‖_op ≤ 1 + 1e-3, in half precision 1 + 1e-2. Smaller ones are cut to 0 by "svd"; the
    other methods take them into [0, 1] and those far below, rounding noise included, to
    κ√min(m, n)·σ/(rank_tolerance‖S‖_F) with the κ given here for the default tolerances.
    polar(2^k s) = polar(s) bit for bit while 2^k s is exact, subnormal or not.

    - "svd": the reference, in float64.
    - "newton-schulz": X ← 3X/2 − XXᵀX/2 from X = S/‖S‖_F; matrix products only; κ from 4 to 9.
    - "polar-express": the optimal quintics instead, a third of the steps; κ from 3 to 8.
    - "scaled-newton": X ← (γX + X^{-ᵀ}/γ)/2 by m×m inverses, then Newton–Schulz; κ 10 or 15.
    - "qdwh": dynamically weighted Halley by QR and Cholesky, 3 to 6 steps; κ from 4 to 20.

    Args:
        s: (…, m, n); half precision is computed in float32, whose defaults then apply.
        method: one of the above.
        steps: run exactly this many (for the iterative methods), instead of `tolerance`.
        tolerance: how close to 1; default eps^¾ (6e-6 in float32, 2e-12 in float64). The number of
            steps follows from it and from `rank_tolerance`, on the host.
        rank_tolerance: relative to σ_max; default √min(m, n)·eps for "svd", the most that rounding
                the entries of S can move a singular value; √eps for the others.
        report: also return a `Convergence` with the residual max |1 − σ_i(UᵀP)|, U the left
            singular vectors of σ > rank_tolerance·σ_max, before P is rounded to the dtype of `s`.
    """
    s = _checks.matrix("s", s)
    _checks.choice("method", method, METHODS)
    x = s.to(_checks.work_dtype(s.dtype))
    eps = _eps(x)
    if steps is not None and tolerance is not None:
        raise ValueError(f"give steps or tolerance, not both, got {steps!r} and {tolerance!r}")
    tolerance = _tolerance("tolerance", tolerance, eps**0.75, at_least=eps)
    if method == "svd":
        if steps is not None:
            raise ValueError(f'steps does not apply to method="svd", got {steps!r}; leave it out')
        if rank_tolerance is None:
            rank_tolerance = _rounding(x)
        rank_tolerance = _checks.fraction("rank_tolerance", rank_tolerance, closed="0")
        p, steps = polar_svd(exact(x), rank_tolerance), 0
    else:
        rank_tolerance = _tolerance("rank_tolerance", rank_tolerance, eps**0.5, at_least=eps)
        steps = _steps(x, method, tolerance, rank_tolerance) if steps is None else steps
        p = _iterate(x, method, _checks.count("steps", steps), rank_tolerance)
    result = p.to(s)
    if not report:
        return result
    return result, Convergence(_residual(x, p, rank_tolerance), tolerance, steps)


def polar_svd(s: Tensor, rank_tolerance: float | None = None) -> Tensor:
    """U Vᵀ over the singular values above rank_tolerance·σ_max, default √min(m, n)·eps.

    GPU solvers return U and V orthogonal to 1e-11 only (float64, side 1024); one Newton–Schulz step
    squares that error.
    """
    if _is_tall(s):
        return polar_svd(s.mT, rank_tolerance).mT
    if rank_tolerance is None:
        rank_tolerance = _rounding(s)
    u, sigma, vh = torch.linalg.svd(_checks.decomposable(unit_scale(s)), full_matrices=False)
    keep = sigma > rank_tolerance * sigma[..., :1]
    return _compose((u * keep.unsqueeze(-2)) @ vh, [coefficients.newton_schulz()]).to(s.device)


def polar_polynomial(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """X ← aX + bXXᵀX + c(XXᵀ)²X for each (a, b, c) in `sequence`, from X = S/‖S‖_F.

    `[newton_schulz()] * steps`, `polar_express(lower_bound, steps)` or `[muon()] * 5`; any dtype.
    """
    if _is_tall(s):
        return polar_polynomial(s.mT, sequence).mT
    return _compose(_normalized(s), sequence)


def polar_bfloat16(s: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """`polar_polynomial` by products of bfloat16 that are summed in float32; of the dtype of S.

    Every step looks at the X at hand, so it makes good what the ones before have rounded, and
    ‖P‖_op ≤ 1.01 with contracted quintics.
    """
    if _is_tall(s):
        return polar_bfloat16(s.mT, sequence).mT
    if s.ndim == 3 and len(s) == 1:  # torch multiplies a matrix faster than a stack of one
        return polar_bfloat16(s[0], sequence)[None]
    return _compose(_normalized(s).bfloat16(), sequence).to(s.dtype)


def polar_scaled_newton(s: Tensor, steps: int, rank_tolerance: float | None = None) -> Tensor:
    """X ← (γX + X^{-ᵀ}/γ)/2 on the m×m factor of [S τI], then Newton–Schulz steps on S's block.

    The ridge τ = RIDGE·rank_tolerance makes any S invertible, bounds the spectrum from below, so
    that γ is known on the host, and leaves σ/√(σ²+τ²) for each σ; the Newton–Schulz steps take
    that to 1 within eps where σ ≥ rank_tolerance·σ_max. float32 or float64.
    """
    if _is_tall(s):
        return polar_scaled_newton(s.mT, steps, rank_tolerance).mT
    columns = s.shape[-1]
    ridge = RIDGE * _lower_bound(s, rank_tolerance)
    factors, bound = coefficients.scaled_newton(_ridged(ridge), steps)
    augmented = torch.cat([_normalized(s), ridge * _identity(s)], dim=-1) / math.hypot(1, ridge)
    q, r = torch.linalg.qr(augmented.mT)  # (…, n+m, m), (…, m, m)
    x = r.mT
    for factor in factors:
        x = (factor * x + torch.linalg.inv_ex(x).inverse.mT / factor) / 2
    x = (x / bound) @ q[..., :columns, :].mT  # the singular values of x lay in [1, bound]
    repair = coefficients.newton_schulz_steps(1 / math.hypot(1, RIDGE), _eps(s))
    return _compose(x, [coefficients.newton_schulz()] * repair)


def polar_qdwh(s: Tensor, steps: int, rank_tolerance: float | None = None) -> Tensor:
    """X ← X(aI + bXᵀX)(I + cXᵀX)^{-1} with weights from the lower bound; float32 or float64."""
    if _is_tall(s):
        return polar_qdwh(s.mT, steps, rank_tolerance).mT
    columns, identity, x = s.shape[-1], _identity(s), _normalized(s)
    for a, b, c in coefficients.qdwh(_lower_bound(s, rank_tolerance), steps)[0]:
        if c > CHOLESKY_WEIGHT:  # QR of [√c·X I]ᵀ: no Gram matrix of condition number c
            q, _ = torch.linalg.qr(torch.cat([math.sqrt(c) * x, identity], dim=-1).mT)
            inverse_x = q[..., columns:, :] @ q[..., :columns, :].mT / math.sqrt(c)
        else:
            factor, _ = torch.linalg.cholesky_ex(identity + c * (x @ x.mT))
            inverse_x = torch.cholesky_solve(x, factor)
        x = b / c * x + (a - b / c) * inverse_x  # inverse_x = (I + cXXᵀ)^{-1}X
    return x


def _steps(s: Tensor, method: str, tolerance: float, rank_tolerance: float) -> int:
    lower_bound = _lower_bound(s, rank_tolerance)
    if method == "newton-schulz":
        return coefficients.newton_schulz_steps(lower_bound, tolerance)
    if method == "polar-express":
        return coefficients.polar_express_steps(lower_bound, tolerance)
    if method == "scaled-newton":
        return coefficients.scaled_newton_steps(_ridged(RIDGE * lower_bound), tolerance)
    return coefficients.qdwh_steps(lower_bound, tolerance)


def _iterate(s: Tensor, method: str, steps: int, rank_tolerance: float) -> Tensor:
    if method == "newton-schulz":
        return polar_polynomial(s, [coefficients.newton_schulz()] * steps)
    if method == "polar-express":
        sequence = coefficients.polar_express(_lower_bound(s, rank_tolerance), steps)
        return polar_polynomial(s, coefficients.contracted(sequence))
    if method == "scaled-newton":
        return polar_scaled_newton(s, steps, rank_tolerance)
    return polar_qdwh(s, steps, rank_tolerance)


def _residual(s: Tensor, p: Tensor, rank_tolerance: float) -> Tensor:
    """The residual max |1 − σ_i(UᵀP)|, U the left singular vectors of S above rank_tolerance·σ_max.

    P is seen only where S is: a direction that needed more steps counts, one of rank noise does
    not; and UᵀP, unlike the norms of its rows, also sees a rotation within equal singular values.
    """
    if _is_tall(s):
        return _residual(s.mT, p.mT, rank_tolerance)
    if s.numel() == 0:
        return torch.zeros(s.shape[:-2], dtype=torch.float64, device=s.device)
    u, sigma, _ = torch.linalg.svd(unit_scale(exact(s)), full_matrices=False)
    u = torch.linalg.qr(u).Q  # orthogonal to rounding, which GPU solvers do not give
    keep = sigma > rank_tolerance * sigma[..., :1]  # descending: the first rank(S) ones
    block = (u * keep.unsqueeze(-2)).mT @ exact(p)
    values = torch.linalg.eigvalsh(block @ block.mT).flip(-1).clamp_min(0).sqrt()
    return torch.where(keep, (1 - values).abs(), 0.0).amax(dim=-1)


def _compose(x: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    for a, b, c in sequence:
        gram = x @ x.mT  # (…, m, m)
        factor = add_product(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        x = add_product(x, factor, x, beta=a)
    return x


def _normalized(s: Tensor) -> Tensor:
    """S/‖S‖_F, and 0 for 0; a nonzero matrix has a norm of at least ½ after unit scaling."""
    x = unit_scale(s)
    return x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(0.25)


def _rounding(s: Tensor) -> float:
    """Relative to σ_max, the most that rounding the entries moves a singular value."""
    return math.sqrt(max(1, min(s.shape[-2:]))) * _eps(s)


def _lower_bound(s: Tensor, rank_tolerance: float | None) -> float:
    """What rank_tolerance·σ_max, default √eps·σ_max, is at least in units of ‖S‖_F."""
    if rank_tolerance is None:
        rank_tolerance = math.sqrt(_eps(s))
    return rank_tolerance / math.sqrt(max(1, min(s.shape[-2:])))


def _ridged(ridge: float) -> float:
    """The least singular value of [X ridge·I]/√(1+ridge²), whose largest is at most 1."""
    return ridge / math.hypot(1, ridge)


def _tolerance(name: str, value: float | None, default: float, at_least: float = 0.0) -> float:
    number = default if value is None else _checks.fraction(name, value)
    if number < at_least:
        raise ValueError(f"{name} must be ≥ the rounding unit {at_least:.3g}, got {value!r}")
    return number


def _identity(s: Tensor) -> Tensor:
    rows = s.shape[-2]
    return torch.eye(rows, dtype=s.dtype, device=s.device).expand(*s.shape[:-2], rows, rows)


def _is_tall(s: Tensor) -> bool:
    return s.shape[-2] > s.shape[-1]


def _eps(s: Tensor) -> float:
    return torch.finfo(s.dtype).eps
