"""1×1 matrices, D = G = 1: every action in closed form."""

import math
from collections.abc import Callable, Iterable

CONSTANTS = {"FAML": (1.0, 1.0), "FTRL": (0.5, 1.0), "FTPL": (1 + math.sqrt(3), 1.0)}
"""(α, β); FTPL's matrix is padded to three columns."""
ACTIONS: dict[str, Callable[[float], float]] = {
    "FAML": lambda x: x / math.hypot(x, 1.0),
    "FTRL": lambda x: max(-1.0, min(1.0, x)),
    "FTPL": lambda x: mean_cosine(x),
}
"""Actions from x = ηs/√(1 + Σg²), up to the sign; FTPL's in the mean over its noise."""


def ratio(learner: str, gradients: Iterable[float]) -> float:
    """Regret over the bound of Theorem 3.2."""
    alpha, beta = CONSTANTS[learner]
    eta, root = math.sqrt(alpha / beta), math.sqrt(alpha * beta)
    total, square, loss, first = 0.0, 1.0, 0.0, 0.0
    for g in gradients:
        loss -= g * ACTIONS[learner](eta * total / math.sqrt(square))
        first = first or abs(g)
        total, square = total + g, square + g * g
    return (loss + abs(total)) / (2 * root * math.sqrt(square) + (1 - root) * first)


def mean_cosine(mu: float) -> float:
    """E[x_1/‖x‖], x ~ N(μe_1, I_3): the derivative in μ of E‖x‖ in closed form."""
    if abs(mu) < 1e-3:
        return mu * (2 / 3) * math.sqrt(2 / math.pi)
    tail = math.sqrt(2 / math.pi) * math.exp(-mu * mu / 2) / mu
    return (1 - 1 / mu**2) * math.erf(mu / math.sqrt(2)) + tail
