"""Regret and bound of a run in NumPy float64, from its gradients and the directions applied."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from nucleon.optim.engines import reference


@contextmanager
def applied_directions(monkeypatch):
    """Log P (b, m, n), m ≤ n, of every parameter at every step, as it moves the weights.

    A matrix that is skipped has NaN; a parameter in several pieces is not logged.
    """
    log, move = {}, reference.move

    def logged(work, settings, direction, taken):
        stack = work.stack
        parts = zip(
            stack.params, direction.split(stack.counts), taken.split(stack.counts), strict=True
        )
        for param, part, ok in parts:
            played = part.double().masked_fill(~ok[:, None, None], math.nan)
            log.setdefault(param, []).append(played.numpy().copy())
        return move(work, settings, direction, taken)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "move", logged)
        yield log


class Measured(NamedTuple):
    """Measurement of one matrix by a ledger."""

    regret: float
    bound: float
    largest: float
    sharp: float
    """The bound with ‖G_1‖_* and ‖E_t‖_* themselves."""
    scale: float
    """Σγ^{T−t}|⟨G_t, X_t⟩| + ‖Ĝ_T‖_*, of which rounding is a part."""


def short_side_first(x):
    return x if x.shape[-2] <= x.shape[-1] else x.swapaxes(-2, -1)


def certified(
    gradients,
    directions,
    *,
    discount,
    smoothing,
    gradient_bound,
    alpha=1.0,
    beta=1.0,
    action=None,
):
    """Measure one matrix: G_t answers X_t = −P_{t−1}, and X_1 is `action`, 0 by default.

    The bound is Theorem 3.2's with √m‖G_1‖_F for ‖G_1‖_*, or ‖G_1‖_F where it enters negatively,
    and min{√m‖G‖_F(1 − h/u), m(u − h)} for ‖E‖_*, E the part of G above h, where the upper bound of
    ‖G‖_op without a decomposition is u = (Σσ^4N)^(1/4N), N = 2¹².
    """
    total = loss = size = largest = first = nuclear = excess = exact = 0.0
    gram, eta = 0.0, math.inf if not smoothing else smoothing**-0.5
    for g, direction in zip(gradients, directions, strict=True):
        g = short_side_first(np.asarray(g, dtype=np.float64))
        m, values = g.shape[0], np.linalg.svd(g, compute_uv=False)
        total, gram = discount * total + g, discount**2 * gram + g @ g.T
        entered = 0.0 if action is None else (g * action).sum()
        loss, size = discount * loss + entered, discount * size + abs(entered)
        action = -direction
        top, frobenius = values.max(), np.linalg.norm(g)
        u = top and top * np.sum((values / top) ** 2**14) ** 2**-14
        first = discount * first if largest > 0 else frobenius
        nuclear = discount * nuclear if largest > 0 else values.sum()
        above = max(0.0, u - gradient_bound)
        part = min(math.sqrt(m) * frobenius * above / u, m * above) if u else 0.0
        excess, largest = discount * excess + part, max(largest, u)
        exact = discount * exact + np.maximum(values - gradient_bound, 0).sum()
    spread = np.linalg.svd(total, compute_uv=False).sum()
    measured = {"regret": loss + spread, "largest": largest, "scale": size + spread}
    if not smoothing or not gradient_bound:
        return Measured(bound=math.inf, sharp=math.inf, **measured)
    squares = np.linalg.eigvalsh(gram).clip(min=0) + (gradient_bound / discount) ** 2
    trace = (beta * eta + alpha / eta) * np.sqrt(squares).sum()
    slope = 1 - beta * eta
    side = math.sqrt(m) if slope > 0 else 1.0
    bound = trace + slope * side * first + 2 * excess
    return Measured(bound=bound, sharp=trace + slope * nuclear + 2 * exact, **measured)
