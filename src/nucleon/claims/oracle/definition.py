"""The two ratios of Definition 3.1 at a point, of smoothings as functions of S and the root L."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nucleon.claims.oracle.algebra import (
    Array,
    inner,
    minimize,
    nuclear,
    operator_ball,
    polar,
    shifted,
)


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

    def slope(s: Array, root: Array) -> Array:
        largest = np.linalg.eigvalsh(root)[-1]
        return minimize(-s, lambda x: root @ x, largest, operator_ball(1.0))[None]

    def value(s: Array, root: Array) -> Array:
        x = slope(s, root)
        return inner(s - root @ x / 2, x) + np.trace(root) / 2

    return Smoothing(value, slope)


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
