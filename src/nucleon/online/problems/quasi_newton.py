"""Online learning for quasi-Newton methods (Appendix A; after Jiang, Jin and Mokhtari 2023).

A learner of the unit ball plays X_t, and with c = (μ+L)/2 and r = (L−μ)/2

    B_t = cI + r·(X_t + X_tᵀ)/2,   μI ⪯ B_t ⪯ LI,   ℓ_t(B) = ‖y − Bs‖²/(2‖s‖²)

for the pairs s = x⁺ − x and y = ∇f(x⁺) − ∇f(x). The symmetric part of X_t stays in the ball, and
against a symmetric gradient it costs what X_t costs. ∇ℓ_t in X is r times the symmetric part of
−(y − Bs)sᵀ/‖s‖²; y = Hs for some H in the set, so its norm is at most 2r², by which it is divided
before it is fed: the gradient bound of every learner is 1, its default.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Certificate
from nucleon.online.learners import FAML, Learner

RUNNING_FAML = partial(FAML, gradient_bound=None)
"""FAML with the largest gradient so far for its bound: early on 1 is far too large."""

_TOLERATED = 1e-6  # relative violation of the constants that a pair may show


class CurvatureLearner:
    """Learns B_t, μI ⪯ B_t ⪯ LI, from pairs (s, y) by any learner of the unit ball.

    Args:
        dimension: n.
        mu: μ > 0.
        L: above μ.
        learner: builds the learner from the shape (n, n) (default FAML, with the running maximum of
            the gradients for its bound).
        options: of the learner, such as `discount` or `dtype`.
    """

    def __init__(
        self,
        dimension: int,
        *,
        mu: float,
        L: float,
        learner: Callable[..., Learner] = RUNNING_FAML,
        **options: Any,
    ) -> None:
        self.mu, self.L = _checks.positive("mu", mu), _checks.positive("L", L)
        if self.mu >= self.L:
            raise ValueError(
                f"mu must be below L, got mu={mu!r} and L={L!r}; they are the least and the "
                f"largest eigenvalue of the Hessian"
            )
        self.center, self.half = (self.mu + self.L) / 2, (self.L - self.mu) / 2
        self.learner = learner((dimension, dimension), **options)
        """The learner of X_t; its losses are in units of (L−μ)²/2."""
        self.loss = self.learner.zeros()
        """Σγ^{T-t}ℓ_t(B_t), float64; at most the regret above `loss_of` any B of the set."""
        self._outer, self._cross = (self.learner.zeros(dimension, dimension) for _ in range(2))
        self._square = self.learner.zeros()

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """Return B_t; B_1 = (μ+L)/2·I."""
        x = self._action()
        return self.half * x + self.center * torch.eye(len(x), dtype=x.dtype, device=x.device)

    @torch.no_grad()
    def observe(self, s: Tensor, y: Tensor, *, rounding: float = 0.0) -> Tensor:
        """Enter a pair y ≈ Hs and return ℓ_t(B_t), float64; on an error nothing changes.

        μI ⪯ H ⪯ LI exists exactly where ‖y − cs‖ ≤ r‖s‖. A pair that misses this by rounding is
        drawn back to it; one that misses it by more refutes μ or L.

        Args:
            s: difference of two points, (n,), not zero.
            y: difference of their gradients, of the same shape.
            rounding: absolute error that y may have (default 0.0).
        """
        length = torch.linalg.vector_norm(s)
        if length == 0:
            raise ValueError("s must not be zero: a pair needs two points; skip it")
        direction = s / length
        slope = y / length - self.center * direction
        size = torch.linalg.vector_norm(slope).item()
        if size > self.half + _TOLERATED * self.L + rounding / length.item():
            raise ValueError(
                f"y contradicts mu={self.mu:.6g} and L={self.L:.6g}: ‖y − (mu+L)/2·s‖/‖s‖ is "
                f"{size:.6g}, above (L−mu)/2 = {self.half:.6g}; state a smaller mu or a larger L"
            )
        slope = slope * min(1.0, self.half / size) if size > 0 else slope
        return self._enter(direction, slope)

    def loss_of(self, matrix: Tensor) -> Tensor:
        """Return Σγ^{T-t}ℓ_t(B) of one `matrix` B in hindsight, float64."""
        matrix = matrix.to(self._outer)
        bent = matrix @ self._outer - 2 * self._cross
        return ((matrix * bent).sum() + self._square).clamp(min=0) / 2

    def certificate(self) -> Certificate:
        """Return the regret beside the learner's bound, in the units of the losses ℓ_t.

        The regret is Σγ^{T-t}⟨∇ℓ_t(B_t), B_t − B⟩ for the worst B of the set. The gradients depend
        on the actions, so no learner that needs an oblivious stream has a bound.
        """
        certificate, unit = self.learner.certificate(), self._unit
        names = ("regret", "bound", "lower", "excess")
        scaled = {n: x for n in names if (x := getattr(certificate, n)) is not None}
        return replace(certificate, **{name: unit * value for name, value in scaled.items()})

    @property
    def _unit(self) -> float:
        return 2 * self.half**2

    def _action(self) -> Tensor:
        x = self.learner.play()
        return (x + x.mT) / 2

    def _enter(self, direction: Tensor, slope: Tensor) -> Tensor:
        """Play the round of the pair (u, cu + slope), u a unit vector."""
        x = self._action()
        residual = slope - self.half * (x @ direction)  # y − Bs for ‖s‖ = 1
        gradient = -torch.outer(residual, direction) / (2 * self.half)
        gradient = (gradient + gradient.mT) / 2
        self.learner.observe(gradient)
        loss, discount = residual.double().square().sum() / 2, self.learner.discount
        u, target = direction.double(), (self.center * direction + slope).double()
        self.loss = discount * self.loss + loss
        self._outer = discount * self._outer + torch.outer(u, u)
        self._cross = discount * self._cross + torch.outer(target, u)
        self._square = discount * self._square + target.square().sum()
        return loss


class Minimum(NamedTuple):
    """Result of a minimization."""

    x: Tensor
    """The last point."""
    history: tuple[float, ...]
    """‖∇f‖₂ at the start and after every step; the last is at most the tolerance, unless rounding
    or `max_iterations` ended the descent."""
    evaluations: int
    """Gradients computed."""
    fallbacks: int
    """Steps that were gradient descent's, after a trial that failed."""
    curvature: CurvatureLearner
    """The learner with its whole game."""


@torch.no_grad()
def online_quasi_newton(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    mu: float,
    L: float,
    learner: Callable[..., Learner] = RUNNING_FAML,
    tolerance: float = 1e-8,
    max_iterations: int = 10_000,
    **options: Any,
) -> Minimum:
    """Minimize f, μI ⪯ ∇²f ⪯ LI, by trial steps x⁺ = x − B_t^{-1}∇f(x) with B_t learned online.

    For the trial's pair y − B_ts = ∇f(x⁺), so ‖∇f(x⁺)‖ = √(2ℓ_t(B_t))·‖s‖ ≤ √(2ℓ_t)/μ·‖∇f(x)‖:
    the learner's losses are the rates of convergence, and a sum of T of them that stays below C
    makes the product of those rates at most (2C/(μ²T))^{T/2}. A trial whose gradient norm does not
    shrink by ρ = (L−μ)/(L+μ) is not taken; the step 2/(μ+L)·∇f(x) is, which always does. So it is
    never slower than gradient descent's guarantee, at twice the gradients, and needs no values of
    f, whose differences drown in rounding long before the gradients do. Every pair, taken or not,
    is fed.

    Args:
        gradient: x ↦ ∇f(x), vectors (n,).
        start: (n,), float32 or float64.
        mu: μ > 0.
        L: above μ.
        learner: builds the learner of B_t (default as for `CurvatureLearner`).
        tolerance: stop at ‖∇f(x)‖₂ ≤ `tolerance`, or where rounding ends the descent (default
            1e-8).
        max_iterations: (default 10 000).
        options: of the learner.
    """
    begin = {"dtype": start.dtype, "device": start.device, **options}
    learned = CurvatureLearner(len(start), mu=mu, L=L, learner=learner, **begin)
    x, slope = start, _checks.finite("gradient(start)", gradient(start))
    norm = torch.linalg.vector_norm(slope).item()
    history, evaluations, fallbacks = [norm], 1, 0
    noise = 1e4 * torch.finfo(x.dtype).eps  # of gradients: sums of terms far larger than they

    def look(step: Tensor) -> tuple[Tensor, float]:
        """Return ∇f(x + step), and enter the pair unless f overflows there."""
        trial = gradient(x + step)
        size = torch.linalg.vector_norm(trial).item()
        if math.isfinite(size):
            scale = history[0] + L * torch.linalg.vector_norm(x).item()
            learned.observe(step, trial - slope, rounding=noise * scale)
        return trial, size

    while norm > tolerance and len(history) <= max_iterations:
        factor, failed = torch.linalg.cholesky_ex(learned.matrix())
        if failed:
            raise ValueError(
                f"B_t is not positive definite at L/mu = {L / mu:.3g}; take a learner that stays "
                f"in the unit ball, such as FAML, and float64 where L/mu is large"
            )
        step = -torch.cholesky_solve(slope[:, None], factor).squeeze(-1)
        trial, size = look(step)
        evaluations += 1
        if not size <= norm * (L - mu) / (L + mu):
            step = -slope / learned.center
            trial, size = look(step)
            evaluations, fallbacks = evaluations + 1, fallbacks + 1
            if not size < norm:  # what exact gradients cannot do
                break
        x, slope, norm = x + step, trial, size
        history.append(norm)
    return Minimum(x, tuple(history), evaluations, fallbacks, learned)
