"""The actions X_1 … X_T of every learner on a history of gradients.

X_1 = 0, and X_{t+1} is computed from G_1 … G_t as the paper writes it.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from nucleon.claims.oracle import algebra
from nucleon.claims.oracle.algebra import Array, discounted, inner, moments, power, transposed

Direction = Callable[[Array, Array, int], Array]
"""(S, Λ, t) → ∇Ψ(S; Λ) after t rounds."""
Noise = Callable[[int], Array]
"""t → Z of that round, (k, …, m, n′)."""


# ---------------------------------------------------------------------- Sections 3 and 4


def leader(s: Array, smoothing: Array, t: int = 0) -> Array:
    """Ψ = ‖S‖_*: polar(S)."""
    return algebra.polar(s)


def augmented(s: Array, smoothing: Array, t: int = 0) -> Array:
    """Ψ = Tr √(SSᵀ + Λ): (SSᵀ + Λ)^{-1/2}S."""
    return power(s @ transposed(s) + smoothing, -0.5) @ s


def regularized(s: Array, smoothing: Array, t: int = 0) -> Array:
    """Ψ = max ⟨S, X⟩ − ½Tr XᵀLX + ½Tr L over the unit ball, L = Λ^{1/2}: its maximizer."""
    return maximizer(s, power(smoothing, 0.5))


def maximizer(s: Array, root: Array) -> Array:
    """The X of that maximum, from L."""
    largest = np.linalg.eigvalsh(root)[..., -1]
    return algebra.minimize(-s, lambda x: root @ x, largest, algebra.operator_ball(1.0))


def perturbed(noise: Noise) -> Direction:
    """Ψ = E‖[S 0] + LZ‖_*, LLᵀ = Λ: the mean of polar's leading block over the given Z."""

    def direction(s: Array, smoothing: Array, t: int) -> Array:
        factors = algebra.polar(algebra.shifted(s, np.linalg.cholesky(smoothing), noise(t)))
        return factors[..., : s.shape[-1]].mean(0)

    return direction


def spherical(s: Array, smoothing: Array, t: int = 0) -> Array:
    """Ψ = E‖s + ℓu‖₂ on rows, ℓ = √Λ: E (s + ℓu)/‖s + ℓu‖ over u ~ N(0, I_d).

    It points along s. With κ = ‖s‖/ℓ its length is the mean of (κ + a)/√((κ + a)² + b²) over a
    standard normal a and a b of density ∝ b^{d-2}e^{-b²/2}, summed on a grid: for
    even d, where the density is smooth at 0, to rounding, for others to 1e-5.
    """
    a, b = np.linspace(-9.0, 9.0, 451)[:, None], np.linspace(0.0, 12.0, 452)[None, 1:]
    density = np.exp(-(a**2 + b**2) / 2) * b ** (s.shape[-1] - 2)
    density /= density.sum()
    norm = np.linalg.norm(s, axis=-1, keepdims=True)
    along = (norm / np.sqrt(smoothing))[..., None] + a[None, None, :, :]
    along = along.reshape(-1, *density.shape[:1], 1)
    length = (along / np.sqrt(along**2 + b**2) * density).sum((-2, -1)).reshape(norm.shape)
    return s / np.where(norm > 0, norm, 1.0) * length


Rule = Callable[[Array, list[Array]], Array]
"""(G_1 … G_t, X_1 … X_t) → X_{t+1}."""


def played(rule: Rule, gradients: Array) -> Array:
    """X_1 = 0, X_2 … X_T by a rule that sees every matrix with its short side first."""
    fed = algebra.wide(gradients)
    actions = [np.zeros_like(fed[0])]
    for t in range(1, len(fed)):
        actions.append(rule(fed[:t], actions))
    stack = np.stack(actions)
    return stack if stack.shape == gradients.shape else transposed(stack)


def gbpa(
    direction: Direction,
    gradients: Array,
    *,
    radius: float = 1.0,
    bound: float | Array | None = 1.0,
    eta: float = 1.0,
    discount: float = 1.0,
) -> Array:
    """X_{t+1} = −D∇Ψ(Ĝ_t; (G²γ^{-2}I + M̂_t)/η²); no `bound` is the largest ‖G_s‖_op so far.

    A `bound` of each round, (T, …), is the one in force after it.
    """
    largest = np.maximum.accumulate(algebra.operator(gradients), 0) if bound is None else bound
    levels = np.broadcast_to(largest, gradients.shape[:-2]) / discount

    def action(history: Array, actions: list[Array]) -> Array:
        total, gram = moments(history, discount)
        level = levels[len(history) - 1][..., None, None]
        smoothing = (level**2 * np.eye(gram.shape[-1]) + gram) / eta**2
        return -radius * direction(total, smoothing, len(history))

    return played(action, gradients)


def scalar_gbpa(gradients: Array, *, radius: float, bound: float) -> Array:
    """X_{t+1} = −D(S_tS_tᵀ + (G² + Σ‖G_s‖_F²)/m·I)^{-1/2}S_t, η = √m."""

    def action(history: Array, actions: list[Array]) -> Array:
        eye = np.eye(history.shape[-2])
        level = (bound**2 + inner(history, history).sum(0)) / len(eye)
        return -radius * augmented(history.sum(0), level[..., None, None] * eye)

    return played(action, gradients)


# ---------------------------------------------------------------------- Section 2, Appendix C


def shampoo(
    gradients: Array,
    *,
    radius: float,
    exponents: tuple[float, float] = (0.25, 0.25),
    factor: float = 1.0,
    epsilon: float = 0.0,
) -> Array:
    """X_{t+1} = argmin ⟨G_t, X⟩ + Tr((X−X_t)ᵀL_t(X−X_t)R_t)/(2η), L = (εI+M)^p, R = (εI+N)^q.

    η = factor·√2·D; (¼, ¼) is Shampoo, (½, 0) the one-sided one. Unique where L and R are definite.
    """
    eta = factor * math.sqrt(2) * radius

    def action(history: Array, actions: list[Array]) -> Array:
        left, right = _roots(history, exponents, epsilon)
        linear = history[-1] - left @ actions[-1] @ right / eta
        return _solved(linear, left, right, eta, radius)

    return played(action, gradients)


def one_sided_gaps(gradients: Array, actions: Array, *, radius: float) -> Array:
    """Σ_t ⟨∇F_t(X_{t+1}), X_{t+1}⟩ + D‖∇F_t(X_{t+1})‖_*, F_t what one-sided Shampoo minimizes.

    The actions are X_1 … X_{T+1}, T + 1 of them.
    """
    fed, x = algebra.wide(gradients), algebra.wide(actions)
    total = np.zeros(fed.shape[1:-2])
    for t in range(1, len(fed) + 1):
        left, _ = _roots(fed[:t], (0.5, 0.0), 0.0)
        slope = fed[t - 1] + left @ (x[t] - x[t - 1]) / (math.sqrt(2) * radius)
        total = total + inner(slope, x[t]) + radius * algebra.nuclear(slope)
    return total


def kronecker_ftrl(gradients: Array, *, radius: float, bound: float, factor: float = 1.0) -> Array:
    """X_{t+1} = argmin ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η), fourth roots of G²I + M and N.

    η = factor·D/√2.
    """
    eta = factor * radius / math.sqrt(2)

    def action(history: Array, actions: list[Array]) -> Array:
        left, right = _roots(history, (0.25, 0.25), bound**2)
        return _solved(history.sum(0), left, right, eta, radius)

    return played(action, gradients)


def _roots(history: Array, exponents: tuple[float, float], offset: float) -> tuple[Array, Array]:
    grams = (moments(history)[1], moments(transposed(history))[1])
    left, right = (
        power(gram + offset * np.eye(gram.shape[-1]), p) if p else np.eye(gram.shape[-1])
        for gram, p in zip(grams, exponents, strict=True)
    )
    return left, right


def _solved(linear: Array, left: Array, right: Array, eta: float, radius: float) -> Array:
    largest = np.linalg.eigvalsh(left)[..., -1] * np.linalg.eigvalsh(right)[..., -1] / eta
    return algebra.minimize(
        linear, lambda x: left @ x @ right / eta, largest, algebra.operator_ball(radius)
    )


def projected_descent(gradients: Array, *, radius: float = 1.0) -> Array:
    """X_{t+1} = Π(X_t − η_tG_t), η_t = D√(2m)/√Σ‖G_s‖_F²: online gradient descent."""
    reach = radius * math.sqrt(2 * min(gradients.shape[-2:]))

    def action(history: Array, actions: list[Array]) -> Array:
        length = reach / np.sqrt(inner(history, history).sum(0))[..., None, None]
        return algebra.operator_ball(radius)(actions[-1] - length * history[-1])

    return played(action, gradients)


# ---------------------------------------------------------------------- Appendix B

Update = Literal["ogd", "ftrl"]
Preconditioner = Literal["scalar", "diagonal", "full"]
Ball = Literal["l2", "linf"]


def adagrad(
    gradients: Array,
    *,
    update: Update,
    preconditioner: Preconditioner,
    ball: Ball,
    radius: float,
    delta: float = 0.0,
) -> Array:
    """AdaGrad on rows, H_t = δI + the root of Σg_sᵀg_s, its diagonal or its trace (Table 2).

    OGD minimizes ⟨g_t, x⟩ + ‖x − x_t‖²_{H_t}/(2η), η = √2·D_p, FTRL ⟨s_t, x⟩ + ‖x‖²_{H_t}/(2η),
    η = D_p/√2.
    """
    dimension = gradients.shape[-1]
    reach, _ = reaches(dimension, preconditioner, ball, radius)
    eta = reach * (math.sqrt(2) if update == "ogd" else math.sqrt(0.5))

    def action(history: Array, actions: list[Array]) -> Array:
        second = (transposed(history) @ history).sum(0)
        metric = (metric_of(second, preconditioner) + delta * np.eye(dimension)) / eta
        ogd = history[-1] - actions[-1] @ metric
        linear = ogd if update == "ogd" else history.sum(0)
        largest = np.linalg.eigvalsh(metric)[..., -1]
        return algebra.minimize(linear, lambda x: x @ metric, largest, within(ball, radius))

    return played(action, gradients)


def reaches(
    dimension: int, preconditioner: Preconditioner, ball: Ball, radius: float
) -> tuple[float, float]:
    """D_p, the ball's radius in ℓ∞ for "diagonal", else in ℓ2, and D_2."""
    euclidean = radius * (math.sqrt(dimension) if ball == "linf" else 1.0)
    return radius if preconditioner == "diagonal" else euclidean, euclidean


def within(ball: Ball, radius: float) -> algebra.Project:
    """The nearest point of a ball of rows."""
    return algebra.operator_ball(radius) if ball == "l2" else algebra.box(radius)


def metric_of(second: Array, preconditioner: str) -> Array:
    """√Tr A·I, √diag A or √A."""
    eye = np.eye(second.shape[-1])
    if preconditioner == "full":
        return power(second, 0.5)
    squares = np.diagonal(second, axis1=-2, axis2=-1)
    if preconditioner == "scalar":
        return np.sqrt(squares.sum(-1))[..., None, None] * eye
    return np.sqrt(squares)[..., None, :] * eye


# ---------------------------------------------------------------------- the game


def regret(
    gradients: Array,
    actions: Array,
    *,
    radius: float,
    discount: float = 1.0,
    ball: Literal["op", "linf"] = "op",
) -> Array:
    """Σγ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖, in the norm dual to the ball's."""
    total = discounted(gradients, discount)
    best = algebra.nuclear(total) if ball == "op" else np.abs(total).sum((-2, -1))
    return discounted(inner(gradients, actions), discount) + radius * best
