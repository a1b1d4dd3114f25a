"""Mixtures Σw_iΨ_i(S; c_iL) of smoothings, and the proof of αβ ≥ ½ (Proposition 3.3)."""

import math
from collections.abc import Sequence

import numpy as np

from nucleon.claims.oracle.algebra import Array, inner, power, transposed
from nucleon.claims.oracle.lemma import Value

Part = tuple[Value, tuple[float, float], float, float]
"""Ψ_i, its (α_i, β_i), its weight w_i and its scale c_i."""


def value(parts: Sequence[Part], s: Array, root: Array) -> Array:
    """Σw_iΨ_i(S; c_i²Λ), Λ = L²."""
    smoothing = root @ root
    return np.sum([w * psi(s, c**2 * smoothing) for psi, _, w, c in parts], axis=0)


def constants(parts: Sequence[Part]) -> tuple[float, float]:
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
