"""Roots of Gram matrices, and quadratic programs over vectors on the ℓ2 and the ℓ∞ ball.

    argmin ⟨c, x⟩ + ½xᵀHx over ‖x‖₂ ≤ r or ‖x‖_∞ ≤ r,  H = V diag(h) Vᵀ ⪰ 0

which is the projection of −H⁺c in the metric of H, for c in the range of H. On the ℓ2 ball
x = −(H + λI)⁻¹c, with a scalar root λ ≥ 0. On the ℓ∞ ball a diagonal H clips every coordinate, and
a full one leaves a box-constrained program, solved to a gap. Vectors are (…, d) in float64, and no
argument is checked.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nucleon.linalg.roots import psd_eigh

Ball = Literal["l2", "linf"]

_NEWTON_STEPS = 6  # four reach rounding for weights over fourteen orders of magnitude


class Root:
    """(εI + A)^power of a Gram matrix A (…, m, m), and its pseudo-inverse.

    Eigenvalues of A under m·eps·‖A‖ are rounding, and count as zero.
    """

    def __init__(self, gram: Tensor, epsilon: float, power: float) -> None:
        values, self.vectors = psd_eigh(gram)
        cut = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
        self.values = (torch.where(values > cut, values, 0.0) + epsilon) ** power

    @property
    def matrix(self) -> Tensor:
        """The root, (…, m, m), symmetric to the last bit."""
        root = (self.vectors * self.values.unsqueeze(-2)) @ self.vectors.mT
        return (root + root.mT) / 2

    def solve(self, x: Tensor) -> Tensor:
        """Return the pseudo-inverse times x, (…, m, n)."""
        inverse = torch.where(self.values > 0, self.values, torch.inf).reciprocal()
        return self.vectors @ (inverse.unsqueeze(-1) * (self.vectors.mT @ x))


class Metric(NamedTuple):
    """H = V diag(weight) Vᵀ."""

    weight: Tensor
    """The eigenvalues h ≥ 0, (…, d)."""
    basis: Tensor | None = None
    """V, (…, d, d); None is the identity."""

    def apply(self, x: Tensor) -> Tensor:
        """Return Hx."""
        return self._leave(self.weight * self._enter(x))

    def minimize(
        self,
        linear: Tensor,
        ball: Ball,
        radius: float,
        tolerance: float = 1e-8,
        max_iterations: int = 1000,
    ) -> Tensor:
        """Return the minimizer of ⟨linear, x⟩ + ½xᵀHx on the ball, zero where H has no weight.

        `linear` is in the range of H; rounding outside of it is dropped. The last two options are
        those of `minimize_on_box`, the only case that iterates to a gap.
        """
        rotated = torch.where(self.weight > 0, self._enter(linear), 0.0)
        free = -rotated / torch.where(self.weight > 0, self.weight, torch.inf)
        if ball == "l2":
            inside = torch.linalg.vector_norm(free, dim=-1, keepdim=True) <= radius
            border = minimize_on_sphere(rotated, self.weight, radius)
            return self._leave(torch.where(inside, free, border))
        x = self._leave(free).clamp(-radius, radius)
        if self.basis is None:
            return x
        matrix = (self.basis * self.weight.unsqueeze(-2)) @ self.basis.mT
        return minimize_on_box(linear, matrix, radius, x, tolerance, max_iterations)

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.basis is None else (self.basis.mT @ x.unsqueeze(-1)).squeeze(-1)

    def _leave(self, x: Tensor) -> Tensor:
        return x if self.basis is None else (self.basis @ x.unsqueeze(-1)).squeeze(-1)


def dual_norm(x: Tensor, ball: Ball) -> Tensor:
    """Return the maximum of ⟨x, y⟩ over the unit ball: ‖x‖₂ for ℓ2, ‖x‖₁ for ℓ∞; shape (…)."""
    return torch.linalg.vector_norm(x, ord=2 if ball == "l2" else 1, dim=-1)


def minimize_on_sphere(linear: Tensor, weight: Tensor, radius: float) -> Tensor:
    """Return −linear/(weight + λ), λ ≥ 0 such that its norm is the radius where λ = 0 exceeds it.

    Newton's method on 1/‖x(λ)‖, which is concave and increasing, rises to the root from the left
    (Moré and Sorensen 1983). It starts where the largest coordinate is at the radius, so that
    ‖x‖ is at most √d times too large.
    """
    size = linear.abs()
    shift = (size / radius - weight).amax(-1, keepdim=True).clamp(min=0)
    for _ in range(_NEWTON_STEPS):
        x = torch.where(size > 0, size / (weight + shift), 0.0)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        slope = torch.where(size > 0, x * (x / (weight + shift)), 0.0).sum(-1, keepdim=True)
        step = (norm / radius - 1) * norm * (norm / slope)
        shift = shift + torch.where(slope > 0, step, 0.0).clamp(min=0)
    x = -torch.where(size > 0, linear / (weight + shift), 0.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.where(norm > 0, radius / norm, 0.0)


def minimize_on_box(
    linear: Tensor,
    matrix: Tensor,
    radius: float,
    start: Tensor,
    tolerance: float,
    max_iterations: int,
) -> Tensor:
    """Return the minimizer of f(x) = ⟨linear, x⟩ + ½xᵀHx over ‖x‖_∞ ≤ radius, to a relative gap.

    A projected gradient step finds the face, a Newton step minimizes on it (Moré and Toraldo 1991):
    finite where the minimizer is not degenerate. It stops at the gap
    ⟨∇f, x⟩ + radius·‖∇f‖₁ ≤ tolerance·(−f(x)).
    """
    steepest = torch.linalg.eigvalsh(matrix)[..., -1:]
    rate = torch.where(steepest > 0, steepest, torch.inf).reciprocal()

    def gradient(x: Tensor) -> Tensor:
        return linear + (matrix @ x.unsqueeze(-1)).squeeze(-1)

    def value(x: Tensor) -> Tensor:
        return 0.5 * (x * (linear + gradient(x))).sum(-1)

    x = start
    for _ in range(max_iterations):
        slope = gradient(x)
        gap = (slope * x).sum(-1) + radius * slope.abs().sum(-1)
        if bool((gap <= -tolerance * value(x)).all()):
            break
        x = (x - rate * slope).clamp(-radius, radius)
        clipped, stopped = _face_steps(x, matrix, gradient(x), radius)
        better = (value(clipped) < value(stopped)).unsqueeze(-1)
        x = torch.where(better, clipped, stopped)
    return x


def _face_steps(x: Tensor, matrix: Tensor, slope: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Step towards the minimizer on the face of x: clipped to the box, or stopped at its border."""
    pinned = (x.abs() >= radius) & (slope * x < 0)
    free = (~pinned).to(x.dtype)
    face = free.unsqueeze(-1) * matrix * free.unsqueeze(-2)
    move = -(torch.linalg.pinv(face, hermitian=True) @ (free * slope).unsqueeze(-1)).squeeze(-1)
    room = torch.where(move == 0, torch.inf, (radius * move.sign() - x) / move)
    length = room.amin(-1, keepdim=True).clamp(0.0, 1.0)
    return (x + move).clamp(-radius, radius), (x + length * move).clamp(-radius, radius)
