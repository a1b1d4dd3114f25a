"""The regret bounds of the paper on a history of gradients (…, with the corrections of its slips).

Diameters are those of a ball of radius D, 2D, where Appendices B and C print D.
"""

import math

import numpy as np

from nucleon.claims.oracle.algebra import (
    Array,
    discounted,
    inner,
    moments,
    nuclear,
    trace_root,
    transposed,
    wide,
)
from nucleon.claims.oracle.learners import Ball, Preconditioner, Update, metric_of, reaches

REGULARIZED, HYPERBOLIC = (0.5, 1.0), (1.0, 1.0)
"""(α, β) of Proposition 3.3 and Theorem 4.2."""


def padded(m: int, n: int) -> int:
    """n′ = max(n, 2m, m+2), the width to which the library pads."""
    return max(n, 2 * m, m + 2)


def gaussian(m: int, width: int) -> tuple[float, float]:
    """(α, β) = (√m + √n′, 1/√(n′−m−1)) of Theorem 4.1."""
    return math.sqrt(m) + math.sqrt(width), 1 / math.sqrt(width - m - 1)


def spherical(dimension: int) -> tuple[float, float]:
    """(α, β) = (E‖u‖, E‖u‖^{-1}), u ~ N(0, I_d), the moments of a chi variable."""
    half = dimension / 2
    mean = math.sqrt(2) * math.gamma(half + 0.5) / math.gamma(half)
    return mean, math.gamma(half - 0.5) / math.gamma(half) / math.sqrt(2)


def eta(constants: tuple[float, float]) -> float:
    """η = √(α/β)."""
    return math.sqrt(constants[0] / constants[1])


def gbpa(
    gradients: Array,
    constants: tuple[float, float],
    *,
    radius: float,
    bound: float | Array,
    factor: float = 1.0,
    discount: float = 1.0,
) -> Array:
    """D((βη + α/η)·Tr√(G²γ^{-2}I + M̂_T) + (1 − βη)γ^{T-1}‖G_1‖_*), η = factor·√(α/β).

    At factor 1 it is Theorem 3.2: 2√(αβ)·D·Tr√(…) + (1 − √(αβ))·D·γ^{T-1}‖G_1‖_*. The game begins
    with its first gradient that is not zero.
    """
    begins = int((gradients != 0).reshape(len(gradients), -1).any(-1).argmax())
    gradients = gradients[begins:]
    (alpha, beta), step = constants, factor * eta(constants)
    gram = moments(wide(gradients), discount)[1]
    level = np.asarray(bound / discount)[..., None, None]
    trace = trace_root(gram + level**2 * np.eye(gram.shape[-1]))
    first = discount ** (len(gradients) - 1) * nuclear(gradients[0])
    return radius * ((beta * step + alpha / step) * trace + (1 - beta * step) * first)


def excess(gradients: Array, bound: float, discount: float) -> Array:
    """Σγ^{T-t}·min{√m‖G‖_F(1 − h/u), m(u − h)}, at least the nuclear norms of what is above h.

    u = (Σσ^{4N})^{1/4N}, N = 2¹², is at least ‖G‖_op and needs no decomposition.
    """
    values = np.linalg.svd(gradients, compute_uv=False)
    top, side = values.max(-1), values.shape[-1]
    u = top * ((values / top[..., None]) ** 2**14).sum(-1) ** 2**-14
    above = np.maximum(u - bound, 0.0)
    whole = np.sqrt(side * (values**2).sum(-1)) * above / u
    return discounted(np.minimum(whole, side * above), discount)


def faml(gradients: Array, *, radius: float, bound: float) -> Array:
    """2D(Tr M_T^{1/2} + mG), Theorem 4.2 as printed."""
    gram = moments(wide(gradients))[1]
    return 2 * radius * (trace_root(gram) + gram.shape[-1] * bound)


def ftpl(gradients: Array, *, width: int, radius: float, bound: float) -> Array:
    """2√2·D·(n′/(n′−m−1))^{1/4}(Tr M_T^{1/2} + mG), Theorem 4.1 as printed."""
    m = min(gradients.shape[-2:])
    factor = math.sqrt(2) * (width / (width - m - 1)) ** 0.25
    return factor * faml(gradients, radius=radius, bound=bound)


def scalar_gbpa(gradients: Array, *, radius: float, bound: float) -> Array:
    """2√m·D·√(G² + Σ‖G_t‖_F²), the baseline of Section 3 with its √m, α = β = 1."""
    square = bound**2 + inner(gradients, gradients).sum(0)
    return 2 * math.sqrt(min(gradients.shape[-2:])) * radius * np.sqrt(square)


def shampoo(gradients: Array, *, radius: float) -> Array:
    """√2·D(‖L‖_op‖R‖_* + ‖L‖_*‖R‖_op + ‖L‖_F‖R‖_F), Theorem C.1's terms at η = √2·D."""
    left, right = _quarters(gradients)
    pairs = left.max(-1) * right.sum(-1) + left.sum(-1) * right.max(-1)
    frobenius = np.sqrt((left**2).sum(-1) * (right**2).sum(-1))
    return math.sqrt(2) * radius * (pairs + frobenius)


def original_shampoo(gradients: Array, *, radius: float, rank: int) -> Array:
    """√(2r)·2D√min(m, n)·Tr M^{1/4}·Tr N^{1/4}, Shampoo's first bound."""
    left, right = _quarters(gradients)
    constant = math.sqrt(2 * rank * min(gradients.shape[-2:])) * 2 * radius
    return constant * left.sum(-1) * right.sum(-1)


def one_sided_shampoo(gradients: Array, *, radius: float) -> Array:
    """2√2·D·Tr M_T^{1/2}."""
    return 2 * math.sqrt(2) * radius * trace_root(moments(wide(gradients))[1])


def kronecker_ftrl(gradients: Array, *, radius: float, bound: float) -> Array:
    """D/√2·(Σλ_i(L)λ_i(R) + √(Tr M^{1/2}·Tr N^{1/2})), λ descending, at η = D/√2."""
    rows, columns = (np.sort(v)[..., ::-1] for v in _quarters(gradients, bound**2))
    left, right = _quarters(gradients)
    pairs = (rows * columns[..., : rows.shape[-1]]).sum(-1)
    energy = np.sqrt((left**2).sum(-1) * (right**2).sum(-1))
    return radius / math.sqrt(2) * (pairs + energy)


def adagrad(
    gradients: Array,
    *,
    update: Update,
    preconditioner: Preconditioner,
    ball: Ball,
    radius: float,
    delta: float = 0.0,
) -> Array:
    """√2·R·Tr H + δR₂²/(√2·R), R = D_p for FTRL, the diameter 2D_p for OGD (Table 2).

    H is the root without δ, R₂ the same reach in ℓ2; scalar H counts once.
    """
    dimension = gradients.shape[-1]
    times = 1.0 if update == "ftrl" else 2.0
    reach, euclidean = reaches(dimension, preconditioner, ball, times * radius)
    second = (transposed(gradients) @ gradients).sum(0)
    metric = metric_of(second, preconditioner)
    trace = np.trace(metric, axis1=-2, axis2=-1)
    trace = trace / dimension if preconditioner == "scalar" else trace
    return math.sqrt(2) * reach * trace + delta * euclidean**2 / (math.sqrt(2) * reach)


def projected_descent(gradients: Array, *, radius: float = 1.0) -> Array:
    """2√2·D·√m·√Σ‖G_t‖_F²."""
    energy = np.sqrt(inner(gradients, gradients).sum(0))
    return 2 * radius * math.sqrt(2 * min(gradients.shape[-2:])) * energy


def _quarters(gradients: Array, offset: float = 0.0) -> tuple[Array, Array]:
    """The eigenvalues of (offset·I + M)^{1/4} and (offset·I + N)^{1/4}, short side first."""
    fed = wide(gradients)
    left, right = (
        (np.maximum(np.linalg.eigvalsh(moments(g)[1]), 0.0) + offset) ** 0.25
        for g in (fed, transposed(fed))
    )
    return left, right


# ---------------------------------------------------------------------- with probability 1 − δ
# The terms that k samples of FTPL add to the regret of its mean actions. X_1 = 0 is not drawn, so
# the first gradient costs nothing; in the discounted game ‖G_t‖_* counts γ^{T-t} times. Several
# games share δ equally.


def oblivious(
    gradients: Array,
    *,
    radius: float,
    samples: int,
    delta: float,
    discount: float = 1.0,
    redraw: bool = True,
) -> Array:
    """D√(2 log(1/δ)·Σ‖G_t‖_*²/k) (Hoeffding); with one Z for the game D√(2 log(1/δ)/k)·Σ‖G_t‖_*."""
    norms = _norms(gradients, discount)
    size = np.sqrt((norms**2).sum(0)) if redraw else norms.sum(0)
    return radius * math.sqrt(-2 * math.log(delta / _games(gradients)) / samples) * size


def adaptive(
    gradients: Array, *, radius: float, samples: int, delta: float, discount: float = 1.0
) -> Array:
    """D·ε·Σ‖G_t‖_*, ε of the matrix Bernstein inequality with δ/T for every round."""
    sides, rounds = sum(gradients.shape[-2:]), len(gradients)
    log = math.log(sides * rounds * _games(gradients) / delta)
    return radius * bernstein(log, samples) * _norms(gradients, discount).sum(0)


def bernstein(log: float, samples: int) -> float:
    """The ε ≤ 2 at which kε²/2/(1 + 2ε/3) passes ℓ, by bisection."""
    low, high = 0.0, 2.0
    for _ in range(80):
        middle = (low + high) / 2
        if samples * middle**2 / 2 / (1 + 2 * middle / 3) < log:
            low = middle
        else:
            high = middle
    return high


def _norms(gradients: Array, discount: float) -> Array:
    ages = np.arange(len(gradients))[::-1].reshape(-1, *(1 for _ in gradients.shape[1:-2]))
    return (discount**ages * nuclear(gradients))[1:]


def _games(gradients: Array) -> int:
    return math.prod(gradients.shape[1:-2])
