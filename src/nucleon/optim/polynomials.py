"""The odd polynomials that the iterative methods of the optimizers are made of."""

import math
from functools import lru_cache

from nucleon._compiler import constant_result
from nucleon.linalg import coefficients
from nucleon.linalg.coefficients import Quintic

REACH = 0.99
"""Polar Express takes the singular values it is designed for to at least this."""


@constant_result  # or the compiler would trace the Remez exchange
def polynomials(method: str, iterations: int) -> tuple[Quintic, ...]:
    """The odd polynomials of a method; their composition maps [0, 1] into itself but for "muon"."""
    return _polynomials(method, iterations)


@lru_cache
def _polynomials(method: str, iterations: int) -> tuple[Quintic, ...]:
    if method == "muon":
        return (coefficients.muon(),) * iterations
    if method == "newton-schulz":
        return (coefficients.newton_schulz(),) * iterations
    if method == "half":
        return coefficients.half_polar_express(iterations)
    return _polar_express(_lower_bound(iterations), iterations)


def _polar_express(lower_bound: float, iterations: int) -> tuple[Quintic, ...]:
    return coefficients.contracted(coefficients.polar_express(lower_bound, iterations))


def _lower_bound(iterations: int) -> float:
    """The least singular value that so many quintics take to REACH; the Frobenius norm is 1.

    Five reach down to 3.2e-3, six to 7.8e-4; designing them for less would leave the large singular
    values short of 1.
    """
    low, high = 1e-12, 1.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        if coefficients.image(_polar_express(middle, iterations), middle, 1.0)[0] >= REACH:
            high = middle
        else:
            low = middle
    return high
