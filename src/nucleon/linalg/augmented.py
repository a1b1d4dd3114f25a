"""aug(S, Λ) = (SSᵀ + Λ)^(-1/2) S, the primitive behind Muon, Leon and one-sided Shampoo.

With Λ = LLᵀ it is the leading m×n block of the polar factor of [S L], so ‖aug‖_op ≤ 1; Λ = 0 gives
the polar factor of S, and a large Λ the unconstrained FTRL direction Λ^(-1/2) S.
"""

import math
from collections.abc import Container, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg import coefficients
from nucleon.linalg._precision import check_method, exact, floor, full_float32, widest
from nucleon.linalg._scaling import is_zero, joint_unit_scale, unit_scale
from nucleon.linalg.coefficients import Quintic
from nucleon.linalg.kernels import add_gram, add_product, add_to_diagonal, lifted
from nucleon.linalg.polar import polar_bfloat16
from nucleon.linalg.roots import cholesky_root, coupled_inverse_sqrt, coupled_steps, psd_eigh

AugmentedMethod = Literal["eigh", "newton-schulz", "polar-express", "coupled"]
METHODS: tuple[AugmentedMethod, ...] = get_args(AugmentedMethod)

PROMISE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""By `"eigh"` ‖P‖_op ≤ 1 + this, by the dtype of the input."""

GRAM_FLOOR = 4.0
"""Times eps·‖B‖_F, added to B = XXᵀ + YYᵀ: more than its rounding was seen to move eigenvalues by.
Five quintics lift singular values from 3e-3 on to 1 by B alone, so one whose square B has too small
would end above 1."""


@full_float32()
def augmented_polar(
    s: Tensor,
    smoothing: Tensor,
    method: AugmentedMethod = "eigh",
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
) -> Tensor:
    """Return (SSᵀ + Λ)^(-1/2) S of matrices S (…, m, n) and smoothings Λ (…, m, m).

    Both are rescaled together by an exact power of two: for every S and Λ that the dtype can hold,
    subnormal numbers among them, P is finite and ‖P‖_op ≤ 1 + 1e-9 in float64 and 1 + 1e-5 in
    float32 by `"eigh"`, 1 + 1e-3 by the iterations, 1 + 1e-2 in half precision. Directions in which
    SSᵀ + Λ vanishes give 0, and S = 0 gives 0. To differentiate, take an iterative method: a
    decomposition has no derivative at repeated eigenvalues.

    Args:
        s: the matrices; half precision is computed in float32, by `"eigh"` in float64.
        smoothing: Λ, symmetric positive semidefinite, acting on the rows of `s`.
        method: `"eigh"`, the reference: the float64 Gram SSᵀ + Λ where its condition number κ
            leaves the promise ‖P‖_op ≤ 1 + 1e-9 (1e-5 in float32) intact, else the SVD of [S L].
            `"newton-schulz"`: the paper's recursion on (X, B), Appendix F.3, restarted;
            `"polar-express"`: the same recursion with the optimal quintics.
            `"coupled"`: the coupled inverse root of SSᵀ + Λ, times S. The recursions add a floor
            of 32 eps·‖Λ‖_F to Λ, which rounding may have made indefinite, and 4 eps·‖B‖_F to every
            B that is summed anew; `"coupled"` adds 32 eps·‖SSᵀ + Λ‖_F. The rounding of a subnormal
            Λ is absolute: the iterations add what it may have taken, 32m times the smallest number
            of the dtype at most.
        steps: of the iteration; None takes enough for singular values of [S L] down to
            `rank_tolerance` times the largest.
        rank_tolerance: relative singular value of [S L] that still counts; None is √m·eps for
            `"eigh"`, √eps for the iterations, or with `steps` of `"polar-express"` the least that
            so many take to 0.99. Smaller ones end between 0 and 1.
    """
    _checks.matrix("s", s)
    _checks.acting_on("smoothing", smoothing, s)
    m, work = s.shape[-2], _checks.work_dtype(s.dtype)
    cut = check_method(work, m, method, METHODS, steps, rank_tolerance)
    if s.numel() == 0:
        return torch.zeros_like(s)
    if method == "eigh":
        return augmented_eigh(s.double(), smoothing.double(), cut, dtype=s.dtype).to(s.dtype)
    x = s.to(work)
    if method == "coupled":
        steps = coupled_steps(work) if steps is None else steps
        return augmented_coupled(x, smoothing, steps).to(s.dtype)
    start = cut / math.sqrt(m)  # the recursion divides by ‖[S L]‖_F ≤ √m σ_max
    if steps is None:
        steps = coefficients.steps_for(method, start, torch.finfo(work).eps)
    elif rank_tolerance is None:
        start = max(start, coefficients.bound_for(method, steps))
    sequence = coefficients.quintics(method, start, steps)
    every = 5 if method == "newton-schulz" else 2
    smoothing, restarts = smoothing.expand(*s.shape[:-1], m), range(every, steps, every)
    return augmented_polynomial(x, smoothing, sequence, restarts=restarts).to(s.dtype)


@torch.no_grad()
def residual(
    p: Tensor, s: Tensor, smoothing: Tensor | None = None, *, rank_tolerance: float | None = None
) -> Tensor:
    """Return `‖Uᵀ(P − P*)‖_op` per matrix, (…), the float64 distance to the exact `P*`.

    P* is (SSᵀ + Λ)^(-1/2) S, the polar factor of S where Λ is None. U are the left singular vectors
    of [S L], Λ = LLᵀ, whose singular values are above rank_tolerance·σ_max, default √eps: a
    direction that needs more steps counts, one that is rounding noise does not.
    """
    _checks.matrix("s", s)
    if _checks.matrix("p", p).shape != s.shape:
        raise ValueError(f"p must have the shape {tuple(s.shape)} of s, got {tuple(p.shape)}")
    cut = math.sqrt(torch.finfo(_checks.work_dtype(s.dtype)).eps)
    if rank_tolerance is not None:
        cut = _checks.fraction("rank_tolerance", rank_tolerance, closed="0")
    if s.numel() == 0:
        return torch.zeros(s.shape[:-2], dtype=widest(s.device), device=s.device)
    x, n = exact(s), s.shape[-1]
    if smoothing is None:
        x = unit_scale(x)
    else:
        rest = exact(_checks.acting_on("smoothing", smoothing, s))
        rest = rest.expand(*s.shape[:-1], s.shape[-2])
        x, rest = joint_unit_scale(x, rest)
        values, vectors = psd_eigh(rest)
        x = torch.cat([x, vectors * values.sqrt().unsqueeze(-2)], dim=-1)
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    counts = (sigma > cut * sigma[..., :1]).unsqueeze(-1)
    difference = u.mT @ exact(p) - vh[..., :n]
    return torch.linalg.matrix_norm(difference * counts, ord=2)


def augmented_eigh(s: Tensor, smoothing: Tensor, cut: float, *, dtype: torch.dtype) -> Tensor:
    """Compute the reference by the eigendecomposition of SSᵀ + Λ, or the SVD of [S L].

    The Gram route errs by about eps·κ, κ = cond(SSᵀ + Λ), and leaves the ball where rounding made Λ
    indefinite. It serves the matrices with 4 eps·κ within the promise of the input's dtype, no
    singular value of [S L] to cut, and a Cholesky factor of Λ + εI, ε = ¼ promise·λ_min. The SVD of
    [S L] serves the others: it errs by eps·√κ and leaves the ball by eps at most. Float64
    throughout; synchronizes to choose.
    """
    smoothing = smoothing.expand(*s.shape[:-1], s.shape[-2])
    s, smoothing = joint_unit_scale(s, smoothing)
    values, vectors = torch.linalg.eigh(s @ s.mT + smoothing)
    smallest, largest = values[..., 0], values[..., -1]
    allowed = 0.25 * PROMISE[dtype] * smallest
    shifted = add_to_diagonal(smoothing.clone(), allowed)
    _, indefinite = torch.linalg.cholesky_ex(shifted)
    safe = (allowed > torch.finfo(s.dtype).eps * largest) & (smallest > cut**2 * largest)
    safe &= indefinite == 0
    result = (vectors * values.rsqrt().unsqueeze(-2)) @ (vectors.mT @ s)
    if not safe.all():
        result[~safe] = augmented_svd(s[~safe], smoothing[~safe], cut)
    return result


def augmented_definite(s: Tensor, smoothing: Tensor, smallest: Tensor) -> Tensor:
    """Return `augmented_eigh` where Λ ⪰ smallest·I, (…), is known: one `eigh`, three products.

    Then κ = cond(SSᵀ + Λ) is at most the largest eigenvalue over `smallest`. While 4 eps·κ is
    within the promise, rounding cannot have made Λ indefinite and no singular value of [S L] is to
    be cut: there is nothing to prove and nothing to rescale. Otherwise, or where the Gram matrix
    overflows, this is `augmented_eigh`. Float64 only; synchronizes to choose.
    """
    m, eps = s.shape[-2], torch.finfo(s.dtype).eps
    most = 0.25 * PROMISE[s.dtype] / eps * smallest
    gram = add_product(smoothing, s, s.mT)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    if bool((trace < m * most).all()):  # else the mean of the eigenvalues is too large already
        values, vectors = torch.linalg.eigh(gram)
        if bool((values[..., -1] < most).all()):
            return (vectors * values.rsqrt().unsqueeze(-2)) @ (vectors.mT @ s)
    return augmented_eigh(s, smoothing, math.sqrt(m) * eps, dtype=s.dtype)


def augmented_svd(s: Tensor, smoothing: Tensor, cut: float) -> Tensor:
    """Return the leading block of polar([S L]), by QR and SVD: feasible at any condition.

    [S L]ᵀ = QR gives polar([S L]) = polar(Rᵀ) Qᵀ with R only m×m. Singular values up to
    cut·σ_max count as zero.
    """
    s, smoothing = joint_unit_scale(s, smoothing)
    values, vectors = psd_eigh(smoothing.expand(*s.shape[:-1], s.shape[-2]))
    factor = vectors * values.sqrt().unsqueeze(-2)
    q, r = torch.linalg.qr(torch.cat([s, factor], dim=-1).mT)
    u, sigma, vh = torch.linalg.svd(r.mT)
    kept = (sigma > cut * sigma[..., :1]).to(s.dtype)
    p = (u * kept.unsqueeze(-2)) @ vh @ q[..., : s.shape[-1], :].mT
    return p.masked_fill(is_zero(s), 0.0)  # for S = 0 this block of q is rounding


def augmented_polynomial(
    s: Tensor, smoothing: Tensor, sequence: Sequence[Quintic], *, restarts: Container[int]
) -> Tensor:
    """Run the (X, B) recursion of Appendix F.3 for any odd polynomials; unchecked, no sync.

    S and Λ, of any scale, must have one batch shape.

    On [X Y] = [S L]/‖[S L]‖_F a step is T = aI + bB + cB², X ← TX, B ← TBT with B = XXᵀ + YYᵀ.
    The products with X are postponed in Q ← TQ and carried out before each step in `restarts`:
    X ← QX, YYᵀ ← Q YYᵀ Qᵀ, B ← XXᵀ + YYᵀ. T amplifies the rounding of B with it, so that one too
    small would take X out of the ball; its floor makes it too large instead. Without restarts that
    leaves singular values below 1e-3 of the largest short of 1 in float32, however many the steps.

    Flops: 4m²n for the first Gram and the last product; 8m³ a quintic and 6m³ a cubic step, less
    2m³ for the first step after a start and 4m³ for the last one before an end; 4m²n + 4m³ a
    restart.
    """
    x, rest = _normalized(s, smoothing)
    add_to_diagonal(rest, floor(s.dtype) * torch.linalg.matrix_norm(rest.detach()))
    b, q = _gram(x, rest), None
    product = torch.bmm if s.ndim == 3 else torch.matmul  # this makes views of a stack first
    last = len(sequence) - 1
    for i, (c1, c3, c5) in enumerate(sequence):
        if i in restarts and q is not None:
            x, rest = product(q, x), product(product(q, rest), q.mT)
            b, q = _gram(x, rest), None
        t = add_to_diagonal(add_product(b, b, b, beta=c3, alpha=c5) if c5 else c3 * b, c1)
        q = t if q is None else product(t, q)
        if i < last and i + 1 not in restarts:
            b = product(product(t, b), t)
            if last > 8:  # then B comes so near to I that the rest squares into slow subnormals
                b = torch.nn.functional.hardshrink(b, torch.finfo(b.dtype).eps ** 2)
    return x if q is None else product(q, x)


def _gram(x: Tensor, rest: Tensor) -> Tensor:
    """Return XXᵀ + YYᵀ and a floor of `GRAM_FLOOR`·eps·‖B‖_F, which rounding may take from it."""
    b = add_gram(rest, x)
    share = GRAM_FLOOR * torch.finfo(b.dtype).eps
    return add_to_diagonal(b, share * torch.linalg.matrix_norm(b.detach()))


def _normalized(s: Tensor, smoothing: Tensor) -> tuple[Tensor, Tensor]:
    """Return X = S/‖[S L]‖_F and YYᵀ = Λ/‖[S L]‖_F², Λ lifted; 0 for 0."""
    smoothing, wide = lifted(smoothing), widest(s.device)
    if s.dtype == wide:  # the square of a representable norm need not be representable
        s, smoothing = joint_unit_scale(s, smoothing)
    norm = torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True, dtype=wide)
    trace = smoothing.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=wide)[..., None, None]
    norm = (norm.square() + trace).sqrt().clamp_min(2.0**-149)
    length = norm.to(s.dtype)  # infinite only where Λ is lost beside S
    rest = smoothing / length / length
    if s.dtype != wide:  # nor need the norm or its inverse: an exact power of two goes first
        tiny = torch.finfo(s.dtype).tiny
        power = (torch.frexp(norm).mantissa / norm).detach().clamp(tiny, 1 / tiny)
        s, length = s * power.to(s.dtype), (norm * power).to(s.dtype)
    return s / length, rest


def augmented_coupled(s: Tensor, smoothing: Tensor, steps: int) -> Tensor:
    """Return (A + δI)^(-1/2) S with A = SSᵀ + Λ by the coupled iteration; unchecked, no sync.

    The floor δ bounds the root by (32 eps)^(-1/2), so its product with S keeps half the digits.
    """
    s, smoothing = joint_unit_scale(s, lifted(smoothing))
    return coupled_inverse_sqrt(add_gram(smoothing, s), steps) @ s


def augmented_bfloat16(s: Tensor, smoothing: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """Return polar(C) C⁻¹S, CCᵀ = SSᵀ + Λ, polar(C) by products of bfloat16; unchecked, no sync.

    C is Cholesky's factor, so polar(C) = (SSᵀ + Λ)^(-1/2) C. ‖P‖_op ≤ 1.01 with contracted
    quintics: that is the promise of `polar_bfloat16`, and ‖C⁻¹S‖_op ≤ 1 as each row of the
    diagonal has been raised by what rounding may take from an eigenvalue: by √n·eps for the sums
    in SSᵀ, 4m·eps for Cholesky's, and 32√m·eps of Λ for those that Λ has been through.

    Flops: 4m²n for the Gram and the last product, 4m³/3 for C and C⁻¹; 6m³ a step, of bfloat16.
    """
    (m, n), info = s.shape[-2:], torch.finfo(s.dtype)
    x, rest = _normalized(s, smoothing)
    rest.diagonal(dim1=-2, dim2=-1).mul_(1 + math.sqrt(m) * floor(s.dtype))
    gram = add_gram(rest, x)
    add_to_diagonal(gram, info.tiny / info.eps)  # less is rounding; and 0 has a factor too
    root, _ = cholesky_root(gram, (4 * m + math.sqrt(n)) * info.eps)
    factor = polar_bfloat16(root, sequence)
    return torch.linalg.solve_triangular(root, factor, upper=False, left=False) @ x
