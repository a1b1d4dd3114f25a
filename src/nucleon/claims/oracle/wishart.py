"""Lemmas E.1, E.2 and E.3 by differences and quadrature."""

import math

import numpy as np

from nucleon.claims.oracle.algebra import Array, inner, nuclear, power, transposed

PANELS = 4000
"""Panels of the quadrature in v, where e^{−λ(1−v²)/2} needs λ/panels < 1."""
ANGLES = 40
"""Panels of the quadrature over the angle, whose integrand is smooth."""


def hessian(x: Array, direction: Array, step: float = 1e-3) -> float:
    """∇²‖X‖_*[D, D] by a fourth-order second difference."""
    points = np.arange(-2, 3)[:, None, None]
    weights = np.array([-1.0, 16.0, -30.0, 16.0, -1.0])
    return float(weights @ nuclear(x + points * step * direction) / (12 * step**2))


def hessian_bound(x: Array, direction: Array) -> float:
    """Tr Dᵀ(XXᵀ)^{-1/2}D."""
    return float(inner(direction, power(x @ transposed(x), -0.5) @ direction))


def inverse_moment(degrees: int, noncentrality: float) -> float:
    """E[1/χ²_k(λ)] = ∫_0^1 v^{k−3}·exp(−λ(1−v²)/2) dv, from the moment generating function."""
    v, weights = _legendre(PANELS)
    return float(weights @ (v ** (degrees - 3) * np.exp(-noncentrality * (1 - v**2) / 2)))


def shifted_entry(m: int, n: int, shift: float) -> float:
    """E[(((Z+Y)(Z+Y)ᵀ)⁻¹)_11] for Y = σe_1e_1ᵀ: E.2 at k = n−m+1 in the mean over λ = σ²B.

    B ~ Beta((n−m+1)/2, (m−1)/2) is the share of e_1 that the other rows leave. With B = sin²θ its
    law is sin^{n−m}θ·cos^{m−2}θ dθ, smooth for m ≥ 2.
    """
    if m == 1:
        return inverse_moment(n, shift**2)
    v, weights = _legendre(ANGLES)
    theta = v * math.pi / 2
    law = np.sin(theta) ** (n - m) * np.cos(theta) ** (m - 2) * weights
    moments = [inverse_moment(n - m + 1, shift**2 * b) for b in np.sin(theta) ** 2]
    return float(law @ np.array(moments) / law.sum())


def largest_inverse(shift: Array, noise: Array) -> float:
    """λ_max of the mean of ((Z+Y)(Z+Y)ᵀ)⁻¹ over the given Z, from singular vectors of Z+Y."""
    u, sigma, _ = np.linalg.svd(noise + shift, full_matrices=False)
    mean = ((u / sigma[..., None, :] ** 2) @ transposed(u)).mean(0)
    return float(np.linalg.eigvalsh(mean)[-1])


def _legendre(panels: int) -> tuple[Array, Array]:
    """Nodes and weights on [0, 1]: five-point Gauss–Legendre on equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(5)
    half = 0.5 / panels
    centers = (np.arange(panels) + 0.5) / panels
    return (centers[:, None] + half * nodes).ravel(), np.tile(half * weights, panels)
