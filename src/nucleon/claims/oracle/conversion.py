"""Muon, Pion and Leon (Algorithms 1–3), and the online-to-nonconvex conversion (Appendix G)."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nucleon.claims.oracle.algebra import Array, discounted, inner, nuclear, transposed
from nucleon.claims.oracle.learners import Direction


def descend(
    direction: Direction,
    start: Array,
    gradient: Callable[[Array], Array],
    steps: int,
    *,
    lr: float,
    momentum: float,
    beta2: float | None = None,
    smoothing_scale: float = 1.0,
    gradient_bound: float = 0.0,
) -> Array:
    """W_{t+1} = W_t − lr·P_t, P_t = direction(Ĝ_t, c(G²β₁⁻²I + M̂_t)): (steps+1, …, m, n), m ≤ n.

    Ĝ_t = Σβ₁^{t-s}G_s and M̂_t = Σβ₂^{t-s}G_sG_sᵀ are sums, as printed; β₂ is β₁² by default.
    """
    beta2 = momentum**2 if beta2 is None else beta2
    floor = (gradient_bound / momentum) ** 2 * np.eye(start.shape[-2])
    weights, history = [start], list[Array]()
    for t in range(1, steps + 1):
        history.append(gradient(weights[-1]))
        seen = np.stack(history)
        gram = discounted(seen @ transposed(seen), beta2)
        total = discounted(seen, momentum)
        weights.append(weights[-1] - lr * direction(total, smoothing_scale * (floor + gram), t))
    return np.stack(weights)


def radius(rho: float, discount: float) -> float:
    """D = (1−γ)ρ/(2γ)."""
    return (1 - discount) * rho / (2 * discount)


def average(path: Array, discount: float) -> Array:
    """W̄_t = (1−γ)/(1−γ^t)·Σ_{s≤t} γ^{t-s}W_s of a path W_1 … W_t."""
    return (1 - discount) / (1 - discount ** len(path)) * discounted(path, discount)


def law_of_tau(rounds: int, discount: float) -> Array:
    """Pr(τ = t): (1−γ^t)/T for t < T, (1−γ^T)/((1−γ)T) for t = T."""
    law = (1 - discount ** np.arange(1, rounds + 1)) / rounds
    law[-1] /= 1 - discount
    return law


def tau(uniform: Array, rounds: int, discount: float) -> Array:
    """τ by its inverse from two uniform numbers, (…, 2): t uniform, T with probability γ^t."""
    t = np.ceil(uniform[..., 0] * rounds)
    return np.where(uniform[..., 1] <= discount**t, rounds, t)


def proposition(
    truths: Array, gradients: Array, actions: Array, *, rho: float, discount: float, fall: Array
) -> tuple[Array, Array]:
    """Both sides of Proposition G.1 on histories (T, …, m, n) of ∇L(W_t), G_t and X_t.

    Left E_τ‖E∇L(Y_τ)‖_*; right 2γ·fall/((1−γ)ρT) and the means of the discounted regrets of the
    unit ball and of the noise, (v_T + (1−γ)Σ_{t<T}v_t)/T each.
    """
    rounds = len(truths)
    d = radius(rho, discount)

    def mean(values: list[Array]) -> Array:
        return (values[-1] + (1 - discount) * sum(values[:-1])) / rounds

    regrets, noises, left = list[Array](), list[Array](), 0.0
    for t, chance in enumerate(law_of_tau(rounds, discount), 1):
        seen = gradients[:t]
        loss = discounted(inner(seen, actions[:t]), discount)
        regrets.append(loss / d + nuclear(discounted(seen, discount)))
        noises.append(nuclear(discounted(seen - truths[:t], discount)))
        left = left + chance * nuclear(average(truths[:t], discount))
    descent = 2 * discount * fall / ((1 - discount) * rho * rounds)
    return np.asarray(left), descent + mean(regrets) + mean(noises)


def discounted_changes(losses: Sequence[float], discount: float) -> tuple[Fraction, Fraction]:
    """Σ_t γ^{T-t}δ_t and (1−γ)Σ_{t<T}Σ_{s≤t}γ^{t-s}δ_s, δ_t = L_t − L_{t-1} (Lemma G.2)."""
    gamma, exact = Fraction(discount), [Fraction(loss) for loss in losses]
    steps = [after - before for before, after in pairwise(exact)]
    powers = [gamma**k for k in range(len(steps))]

    def sum_up_to(t: int) -> Fraction:
        terms = (power * step for power, step in zip(powers, reversed(steps[:t]), strict=False))
        return sum(terms, Fraction(0))

    inner_sums = sum((sum_up_to(t) for t in range(1, len(steps))), Fraction(0))
    return sum_up_to(len(steps)), (1 - gamma) * inner_sums


class TheoremPlan(NamedTuple):
    """γ, D and T of Theorem 5.2, with C of Pion, or 5.3, where C = 1."""

    discount: float
    radius: float
    rounds: int


def plan(
    *,
    rho: float,
    epsilon: float,
    q_nuclear: float,
    loss_gap: float,
    gradient_bound: float,
    rows: int,
    factor: float = 1.0,
) -> TheoremPlan:
    """γ = 1 − (ε/(20C‖Q‖_*))², T = ⌈max{4000C²‖Q‖_*²ΔL/(ρε³), 400C²‖Q‖_*²/ε², 10√2·C·mG/ε}⌉."""
    size = factor * q_nuclear
    discount = 1 - (epsilon / (20 * size)) ** 2
    rounds = max(
        4000 * size**2 * loss_gap / (rho * epsilon**3),
        400 * size**2 / epsilon**2,
        10 * math.sqrt(2) * factor * rows * gradient_bound / epsilon,
    )
    return TheoremPlan(discount, radius(rho, discount), math.ceil(rounds))


def promised(
    plan: TheoremPlan,
    *,
    q_nuclear: float,
    loss_gap: float,
    gradient_bound: float,
    rows: int,
    constant: float,
) -> Array:
    """The proposition's descent, regret and noise under E[GGᵀ] ⪯ Q² (Appendix G.2).

    Every discounted sum of noise is at most q = ‖Q‖_*/√(1−γ²) in the mean, and every regret
    at most c(q + mG/γ), c = 2 for Leon and 2√2·C for Pion.
    """
    gamma, rounds = plan.discount, plan.rounds
    q = q_nuclear / math.sqrt((1 - gamma) * (1 + gamma))
    weights = 1 / rounds + (1 - gamma) * (1 - 1 / rounds)
    descent = loss_gap / (plan.radius * rounds)  # 2γΔL/((1−γ)ρT)
    regret = constant * (q + rows * gradient_bound / gamma)
    return np.array([descent, weights * regret, weights * q])


def pion_factor(rows: int, width: int) -> float:
    """C = (n′/(n′−m−1))^{1/4}."""
    return (width / (width - rows - 1)) ** 0.25
