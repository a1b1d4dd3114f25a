"""Smoothings of the nuclear norm: their values, the ratios of Definition 3.1, and mixtures."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nucleon.claims.oracle import algebra
from nucleon.claims.oracle.algebra import Array, inner, nuclear, polar, power, shifted, transposed
from nucleon.claims.oracle.learners import Noise, maximizer

Value = Callable[[Array, Array], Array]
"""(S, Λ) → Ψ(S; Λ)."""


def hyperbolic_value(s: Array, smoothing: Array) -> Array:
    """Tr √(SSᵀ + Λ)."""
    return algebra.trace_root(s @ transposed(s) + smoothing)


def regularized_value(s: Array, smoothing: Array) -> Array:
    """Ψ = max ⟨S, X⟩ − ½Tr XᵀLX + ½Tr L over the unit ball, L = Λ^{1/2}."""
    return _maximum(s, power(smoothing, 0.5))


def _maximum(s: Array, root: Array) -> Array:
    x = maximizer(s, root)
    return inner(s - root @ x / 2, x) + np.trace(root, axis1=-2, axis2=-1) / 2


def perturbed_value(noise: Noise) -> Value:
    """The mean of ‖[S 0] + LZ‖_* over one Z for all rounds."""
    return lambda s, level: nuclear(shifted(s, np.linalg.cholesky(level), noise(0))).mean(0)


# ---------------------------------------------------------------------- at a point, by draws


class Smoothing(NamedTuple):
    """Ψ(S; L²), (k,), and ∇Ψ, (k, m, n): of each of k draws, one where nothing is random."""

    value: Callable[[Array, Array], Array]
    slope: Callable[[Array, Array], Array]


def hyperbolic() -> Smoothing:
    """Tr √(SSᵀ + L²) = ‖[S L]‖_*."""

    def joined(s: Array, root: Array) -> Array:
        return np.concatenate([s, root], -1)[None]

    return Smoothing(
        lambda s, root: nuclear(joined(s, root)),
        lambda s, root: polar(joined(s, root))[..., : s.shape[-1]],
    )


def regularized() -> Smoothing:
    """½Tr L + max ⟨S, X⟩ − ½Tr XᵀLX over the unit ball."""
    return Smoothing(
        lambda s, root: _maximum(s, root)[None], lambda s, root: maximizer(s, root)[None]
    )


def gaussian(draws: Array) -> Smoothing:
    """‖[S 0] + LZ‖_* of each Z of `draws`, (k, m, n′)."""
    return Smoothing(
        lambda s, root: nuclear(shifted(s, root, draws)),
        lambda s, root: polar(shifted(s, root, draws))[..., : s.shape[-1]],
    )


def stability(psi: Smoothing, s: Array, root: Array, larger: Array) -> Array:
    """(Ψ(S; L₂) − Ψ(S; L₁))/(Tr L₂ − Tr L₁), at most α in the mean; NaN unless 0 ⪯ L₁ ⪯ L₂."""
    least = min(np.linalg.eigvalsh(a)[0] for a in (root, larger - root))
    if least < -1e-12 * np.trace(larger):
        return np.array([np.nan])
    return (psi.value(s, larger) - psi.value(s, root)) / np.trace(larger - root)


def smoothness(psi: Smoothing, s: Array, root: Array, step: Array) -> Array:
    """2(Ψ(S+D) − Ψ(S) − ⟨∇Ψ(S), D⟩)/Tr DᵀL⁻¹D at L, at most β in the mean."""
    ahead = psi.value(s + step, root) - psi.value(s, root) - inner(psi.slope(s, root), step)
    return 2 * ahead / inner(step, np.linalg.solve(root, step))


# ---------------------------------------------------------------------- mixtures Σw_iΨ_i(S; c_iL)

Part = tuple[Value, tuple[float, float], float, float]
"""Ψ_i, its (α_i, β_i), its weight w_i and its scale c_i."""


def mixture_value(parts: Sequence[Part], s: Array, root: Array) -> Array:
    """Σw_iΨ_i(S; c_i²Λ), Λ = L²."""
    smoothing = root @ root
    return np.sum([w * psi(s, c**2 * smoothing) for psi, _, w, c in parts], axis=0)


def mixture_constants(parts: Sequence[Part]) -> tuple[float, float]:
    """(Σw_ic_iα_i, Σw_iβ_i/c_i)."""
    alpha = sum(w * c * pair[0] for _, pair, w, c in parts)
    return alpha, sum(w / c * pair[1] for _, pair, w, c in parts)


def least_product(parts: Sequence[Part]) -> float:
    """(Σw_i√(α_iβ_i))², below which no scales bring αβ, by Cauchy–Schwarz."""
    return sum(w * math.sqrt(math.prod(pair)) for _, pair, w, _ in parts) ** 2


def ceiling(x: Array, root: Array, pair: tuple[float, float]) -> Array:
    """α Tr L + β/2·Tr XᵀL⁻¹X."""
    alpha, beta = pair
    trace = np.trace(root, axis1=-2, axis2=-1)
    return alpha * trace + beta / 2 * inner(x, np.linalg.solve(root, x))


def best_root(x: Array, pair: tuple[float, float]) -> Array:
    """L = √(β/2α)·√(XXᵀ), where the ceiling is √(2αβ)‖X‖_*."""
    return math.sqrt(pair[1] / (2 * pair[0])) * power(x @ transposed(x), 0.5)
