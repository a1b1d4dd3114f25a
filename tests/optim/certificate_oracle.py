"""Regret and bound of a run in NumPy float64, from its gradients and the directions applied."""

import math
from contextlib import contextmanager

import numpy as np

from nucleon.optim.engines import reference


@contextmanager
def applied_directions(monkeypatch):
    """Log P of every parameter at every step, as it moves the weights; None where it is skipped."""
    log = {}
    move = reference.move

    def logged(work, direction, taken):
        # A parameter in several pieces is not logged: the runs here have none.
        for param, whole, ok in zip(work.params, work.stack.whole(direction), taken, strict=True):
            log.setdefault(param, []).append(whole.double().numpy().copy() if ok else None)
        return move(work, direction, taken)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "move", logged)
        yield log


def wide(x):
    return x if x.shape[0] <= x.shape[1] else x.T


def nuclear(x):
    return np.linalg.svd(x, compute_uv=False).sum()


def norm_bound(values, exponent=2**14):
    """(Σσ^4N)^(1/4N), N = 2¹²: the upper bound of ‖G‖_op that needs no decomposition."""
    top = values.max(initial=0.0)
    return top and top * np.sum((values / top) ** exponent) ** (1 / exponent)


def certified(gradients, directions, *, discount, smoothing, gradient_bound, alpha=1.0, beta=1.0):
    """(regret, bound, largest) of one matrix after its rounds: G_t answers X_t = −P_{t−1}, X_1 = 0.

    The bound is Theorem 3.2's with √m‖G_1‖_F for ‖G_1‖_*, or ‖G_1‖_F where it enters negatively,
    and min{√m‖G‖_F(1 − h/u), m(u − h)} for the part of G above h, u from `norm_bound`.
    """
    total = loss = first = excess = largest = 0.0
    gram, action = 0.0, None
    for gradient, direction in zip(gradients, directions, strict=True):
        g = wide(np.asarray(gradient, dtype=np.float64))
        m = g.shape[0]
        total, gram = discount * total + g, discount**2 * gram + g @ g.T
        loss = discount * loss + (0.0 if action is None else (g * action).sum())
        action = -wide(direction)
        frobenius, u = np.linalg.norm(g), norm_bound(np.linalg.svd(g, compute_uv=False))
        first = discount * first if largest > 0 else frobenius
        above = max(0.0, u - gradient_bound)
        part = min(math.sqrt(m) * frobenius * above / u, m * above) if u else 0.0
        excess, largest = discount * excess + part, max(largest, u)
    eta = smoothing**-0.5
    squares = np.linalg.eigvalsh(gram).clip(min=0) + (gradient_bound / discount) ** 2
    start = (1 - beta * eta) * first * (math.sqrt(m) if beta * eta < 1 else 1.0)
    bound = (beta * eta + alpha / eta) * np.sqrt(squares).sum() + start + 2 * excess
    return loss + nuclear(total), bound, largest
