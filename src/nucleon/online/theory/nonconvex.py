"""The online-to-nonconvex conversion and the complexity of Pion and Leon (Section 5, Appendix G).

The paper's β is the discount γ here. Regrets are those of the unit ball, Reg_t^{[γ]}(1): a learner
of radius D has D times as much.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.online.theory.gbpa import ftpl_factor


@dataclass(frozen=True)
class ConversionBound:
    """The right side of Proposition G.1, term by term."""

    descent: float
    """2γΔL/((1−γ)ρT)."""
    regret: float
    """The discounted regrets' share."""
    noise: float
    """The stochastic noise's share."""

    @property
    def total(self) -> float:
        """The bound on E‖∇L(W̄_τ)‖^{[ρ]}."""
        return self.descent + self.regret + self.noise


@dataclass(frozen=True)
class Complexity:
    """The parameters with which a theorem reaches a (ρ, ε)-stationary point, and its conditions."""

    discount: float
    """γ = 1 − (ε/(20C‖Q‖_*))²."""
    radius: float
    """D = (1−γ)ρ/(2γ)."""
    rounds: int
    """T, the smallest integer that is at least each of `terms`."""
    terms: dict[str, float]
    """The three lower bounds on T: descent, regret and gradient_bound."""
    conditions: dict[str, bool]
    """Assumptions of the proof on ε, by name, and if they hold."""

    @property
    def valid(self) -> bool:
        """True if the theorem applies."""
        return all(self.conditions.values())


class OutOfReachError(ValueError):
    """A target whose γ or T float64 cannot hold."""


def o2nc_radius(*, rho: float, discount: float) -> float:
    """Return D = (1−γ)ρ/(2γ), the learner's radius (Proposition 5.1)."""
    discount = _checks.fraction("discount", discount)
    return (1 - discount) * _checks.positive("rho", rho) / (2 * discount)


def ewa_distance_bound(*, radius: float, discount: float) -> float:
    """Return 2γD/(1−γ) ≥ E‖Y_t − W̄_t‖, in expectation over the Exp(1) steps (Lemma G.3)."""
    discount = _checks.fraction("discount", discount)
    return 2 * discount * _checks.positive("radius", radius) / (1 - discount)


def ewa_weights(rounds: int, discount: float) -> Tensor:
    """Return the weights of W̄_t, (1−γ)γ^{t-s}/(1−γ^t) for s ≤ t = `rounds` (Prop. G.1)."""
    discount = _checks.fraction("discount", discount)
    powers = discount ** torch.arange(_checks.count("rounds", rounds), dtype=torch.float64).flip(0)
    return powers / powers.sum()


def tau_law(rounds: int, discount: float) -> Tensor:
    """Return Pr(τ = t) = (1−γ^t)/T for t < T, (1−γ^T)/((1−γ)T) for t = T, (T,) (Prop. G.1)."""
    discount = _checks.fraction("discount", discount)
    t = torch.arange(1, _checks.count("rounds", rounds) + 1, dtype=torch.float64)
    law = -torch.expm1(t * math.log(discount)) / rounds
    law[-1] /= 1 - discount
    return law


def o2nc_bound(
    *, loss_gap: float, rho: float, discount: float, regrets: Tensor, noises: Tensor
) -> ConversionBound:
    """Bound E‖∇L(W̄_τ)‖^{[ρ]} by 2γΔL/((1−γ)ρT) + mean Reg_t(1) + mean noise (Proposition G.1).

    The mean of v_1…v_T is (v_T + (1−γ)Σ_{t<T} v_t)/T. The proof divides ΔL by DT with
    D = (1−γ)ρ/(2γ), which gives the first term; the printed one lacks its factor 2γ and fails.

    `loss_gap` ΔL is L(W_0) − inf L; `regrets` are E Reg_t^{[γ]}(1) and `noises`
    E‖Σ_s γ^{t-s}(G_s − ∇L(W_s))‖_*, both (T,).
    """
    rounds = len(regrets)
    weights = torch.full((rounds,), 1 - discount, dtype=torch.float64)
    weights[-1] = 1.0
    regret, noise = ((weights * values).sum().item() / rounds for values in (regrets, noises))
    return ConversionBound(_descent_term(loss_gap, rho, discount, rounds), regret, noise)


def stationarity_bound(
    *,
    loss_gap: float,
    rho: float,
    discount: float,
    rounds: int,
    q_nuclear: float,
    gradient_bound: float,
    rows: int,
    regret_constant: float,
) -> ConversionBound:
    """Bound Proposition G.1 for E[GGᵀ] ⪯ Q², Reg_t(1) ≤ c(Tr M̂_t^{1/2} + mG/γ) (Appendix G.2).

    2γΔL/((1−γ)ρT) + (1+(1−γ)(T−1))/T · [c(q + mG/γ) + q],  q = ‖Q‖_*/√(1−γ²)

    `regret_constant` c is 2 for Leon and 2√2·C for Pion. Unlike `pion_complexity` it holds for any
    T and γ.
    """
    descent = _descent_term(loss_gap, rho, discount, rounds)
    q = _checks.positive("q_nuclear", q_nuclear) / math.sqrt(1 - discount**2)
    bound = _checks.nonnegative("gradient_bound", gradient_bound)
    share = (1 + (1 - discount) * (rounds - 1)) / rounds
    regret = _checks.positive("regret_constant", regret_constant) * (
        q + _checks.count("rows", rows) * bound / discount
    )
    return ConversionBound(descent, share * regret, share * q)


def pion_complexity(
    *,
    rho: float,
    epsilon: float,
    q_nuclear: float,
    loss_gap: float,
    gradient_bound: float,
    rows: int,
    width: int,
) -> Complexity:
    """Return the iterations of Pion to a (ρ, ε)-stationary point (Theorem 5.2).

    T ≥ max{4000C²‖Q‖_*²ΔL/(ρε³), 400C²‖Q‖_*²/ε², 10√2·C·mG/ε},  C = (n'/(n'−m−1))^{1/4}

    with `width` n' the padded number of columns; the expectation over Z is taken as exact. Valid
    for ε ≤ 10√2·C‖Q‖_* (so that γ ≥ ½) and ε ≤ 10√2·C‖Q‖_*²/(mG).
    """
    factor = ftpl_factor(rows, width)
    return leon_complexity(
        rho=rho,
        epsilon=epsilon,
        q_nuclear=factor * q_nuclear,
        loss_gap=loss_gap,
        gradient_bound=factor * gradient_bound,
        rows=rows,
    )


def leon_complexity(
    *,
    rho: float,
    epsilon: float,
    q_nuclear: float,
    loss_gap: float,
    gradient_bound: float,
    rows: int,
) -> Complexity:
    """Return the iterations of Leon to a (ρ, ε)-stationary point (Theorem 5.3).

    T ≥ max{4000‖Q‖_*²ΔL/(ρε³), 400‖Q‖_*²/ε², 10√2·mG/ε}

    Valid for ε ≤ 10√2·‖Q‖_* (so that γ ≥ ½) and ε ≤ 10√2·‖Q‖_*²/(mG).
    """
    rho, epsilon = _checks.positive("rho", rho), _checks.positive("epsilon", epsilon)
    q_nuclear = _checks.positive("q_nuclear", q_nuclear)
    loss_gap = _checks.nonnegative("loss_gap", loss_gap)
    bound = _checks.count("rows", rows) * _checks.nonnegative("gradient_bound", gradient_bound)
    if epsilon >= 20 * q_nuclear:
        raise ValueError(
            f"epsilon must be below 20·C·‖Q‖_* = {20 * q_nuclear:.6g} for a discount to exist, got "
            f"{epsilon!r}; any point is already stationary to ε = {q_nuclear:.6g}"
        )
    ratio = q_nuclear / epsilon  # products of ratios, so that only a T beyond float64 overflows
    discount = 1 - 1 / (20 * ratio) ** 2 if ratio < 1e150 else 1.0
    terms = {
        "descent": 4000 * ratio * ratio * (loss_gap / rho) / epsilon,
        "regret": 400 * ratio * ratio,
        "gradient_bound": 10 * math.sqrt(2) * bound / epsilon,
    }
    radius = (1 - discount) * rho / (2 * discount)
    representable = 1 - discount >= 2.0**-52 and radius > 0
    if not (representable and all(map(math.isfinite, terms.values()))):
        raise OutOfReachError(
            f"epsilon={epsilon!r} is so small, or rho={rho!r} so small or a bound so large, that "
            f"float64 cannot hold the discount or the rounds; pass a larger epsilon"
        )
    conditions = {
        "discount_at_least_half": epsilon <= 10 * math.sqrt(2) * q_nuclear,
        "gradient_bound_small": bound / q_nuclear <= 10 * math.sqrt(2) * ratio,
    }
    return Complexity(
        discount=discount,
        radius=radius,
        rounds=max(1, math.ceil(max(terms.values()))),
        terms=terms,
        conditions=conditions,
    )


def _descent_term(loss_gap: float, rho: float, discount: float, rounds: int) -> float:
    radius = o2nc_radius(rho=rho, discount=discount)
    return _checks.nonnegative("loss_gap", loss_gap) / (radius * _checks.count("rounds", rounds))
