"""Regret of FTPL with k samples above that of its mean actions, with high probability.

Theorem 3.2 bounds the regret of the mean actions X̄_t on every path. The k draws of a round add
Σ_t ⟨G_t, X_t − X̄_t⟩, which depends on what G_t may know of them: nothing
(`ftpl_oblivious_deviation`, of order √T) or all (`ftpl_adaptive_deviation`, linear in T). Both hold
in the discounted game with γ^{T-t}‖G_t‖_* for the norms. Antithetic pairs Z, −Z are not independent
of each other: k draws in pairs count as k/2 samples. Proofs: docs/theory.md, "High probability".
"""

import math

from torch import Tensor

from nucleon import _checks
from nucleon.certificate import real


def ftpl_oblivious_deviation(
    gradient_nuclear_norms: Tensor,
    *,
    radius: float,
    samples: int,
    delta: float,
) -> Tensor:
    """Return D√(2 log(1/δ)·Σ‖G_t‖_*²/k) ≥ Reg_T − E Reg_T with probability ≥ 1−δ, gradients fixed.

    Proof by Hoeffding's inequality. By Azuma's it also holds for gradients that answer earlier
    rounds but not the draws of their own, if the norms passed here are bounds fixed beforehand.
    Where one Z serves all rounds, the bound is D√(2 log(1/δ)/k)·Σ‖G_t‖_*.

    Args:
        gradient_nuclear_norms: ‖G_t‖_*, (…, T), or in their place the one entry √Σ‖G_t‖_*²;
            Σ‖G_t‖_* where one Z serves all rounds.
        radius: D.
        samples: k, the independent draws of a round.
        delta: δ, the probability with which it may fail.
    """
    norms = real("gradient_nuclear_norms", gradient_nuclear_norms, gradient_nuclear_norms)
    log = -math.log(_checks.fraction("delta", delta))
    scale = math.sqrt(2 * log / _checks.count("samples", samples))
    return _checks.positive("radius", radius) * scale * norms.square().sum(-1).sqrt()


def ftpl_adaptive_deviation(
    gradient_nuclear_norms: Tensor,
    *,
    rows: int,
    columns: int,
    radius: float,
    samples: int,
    delta: float,
    rounds: int | None = None,
) -> Tensor:
    """Return D·ε·Σ‖G_t‖_* ≥ Reg_T(X) − Reg_T(X̄) with probability ≥ 1−δ, for any gradients.

    ε = min{2, (2ℓ/3 + √(4ℓ²/9 + 2kℓ))/k},  ℓ = log((m+n)T/δ)

    bounds ‖X_t − X̄_t‖_op/D in all rounds at once, by the matrix Bernstein inequality (Tropp 2012,
    Theorem 1.6). Every round must have its own noise: with one Z for the game, the draws are not
    independent of the gradients before.

    Args:
        gradient_nuclear_norms: ‖G_t‖_*, (…, T), or their sum as one entry beside `rounds`.
        rows: m.
        columns: n, without padding.
        radius: D.
        samples: k.
        delta: δ.
        rounds: T; None is the number of norms (default).
    """
    norms = real("gradient_nuclear_norms", gradient_nuclear_norms, gradient_nuclear_norms)
    rounds = _checks.count("rounds", norms.shape[-1] if rounds is None else rounds)
    sides = _checks.count("rows", rows) + _checks.count("columns", columns)
    log = math.log(sides * rounds / _checks.fraction("delta", delta))
    linear, samples = 2 * log / 3, _checks.count("samples", samples)
    # No difference of two contractions exceeds 2.
    epsilon = min(2.0, (linear + math.sqrt(linear**2 + 2 * samples * log)) / samples)
    return _checks.positive("radius", radius) * epsilon * norms.sum(-1)
