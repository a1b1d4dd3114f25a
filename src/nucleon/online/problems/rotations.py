"""Learning rotations online (Appendix A): the unit ball is the convex hull of the orthogonal group.

At round t the learner plays X_t, ‖X_t‖_op ≤ 1, observes unit vectors u and v and pays

    ½‖v − Ru‖² = 1 − vᵀRu   for the orthogonal R that it drew,   1 − vᵀX_tu   in the mean,

as R has mean X_t. That is linear in X_t with gradient −vuᵀ, so every learner of matrices plays it,
against the best orthogonal matrix in hindsight, whose loss is T − ‖Σvuᵀ‖_*.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.online.learners import FAML, Learner

_NOISE_SEED = 0x726F746174696F6E
_FRAME, _CLOUD, _ERRORS, _WRONG, _CHOICE = range(5)


@dataclass(frozen=True, eq=False)
class SignRounding:
    """R = U diag(s) Vᵀ for X = UΣVᵀ with independent signs, P(s_i = 1) = (1 + σ_i)/2: E[R] = X."""

    left: Tensor
    """U, (n, n), float64."""
    sigma: Tensor
    """σ, (n,), descending, in [0, 1]: the means of the signs."""
    right: Tensor
    """Vᵀ."""

    @classmethod
    def of(cls, x: Tensor) -> "SignRounding":
        """Return the rounding of the square matrix `x` of the unit ball."""
        x = _checks.matrix("x", x, dtypes=_checks.FULL_DTYPES)
        if x.ndim != 2 or x.shape[0] != x.shape[1]:
            raise ValueError(f"x must be one square matrix (n, n), got shape {tuple(x.shape)}")
        left, sigma, right = torch.linalg.svd(x.double())
        rounding = _rounding(len(x), x.dtype)
        if sigma[0] > 1 + rounding:
            raise ValueError(
                f"x must lie in the unit ball, its operator norm is {sigma[0].item():.9g}; project "
                f"it with linalg.project_operator_ball(x)"
            )
        return cls(left, sigma.clamp(max=1.0), right)

    def matrix(self, signs: Tensor) -> Tensor:
        """Return U diag(signs) Vᵀ, float64; with `sigma` for the signs it is the mean, X."""
        return (self.left * signs) @ self.right

    def draw(self, generator: torch.Generator | None = None, *, special: bool = False) -> Tensor:
        """Return an orthogonal matrix with mean X or, if `special`, one of determinant 1.

        A determinant of −1 is mended by the sign of the smallest singular value. So that sign is
        decided by the others, and the mean is X with σ_n replaced by d·σ_1⋯σ_{n-1}, where
        d = det UVᵀ: a heuristic, off by |d·σ_1⋯σ_{n-1} − σ_n|. No draw from SO(n) has mean X in
        general; where X is a rotation it is exact.

        Args:
            generator: of the signs (default: torch's).
            special: whether to stay in SO(n) (default False).
        """
        uniform = torch.rand(
            len(self.sigma), dtype=torch.float64, device=self.sigma.device, generator=generator
        )
        signs = 1.0 - 2.0 * (uniform >= (1 + self.sigma) / 2)
        return self.matrix(self.special_signs(signs) if special else signs)

    def special_signs(self, signs: Tensor) -> Tensor:
        """Return the signs with the last one such that det U diag(s) Vᵀ = 1."""
        determinant = torch.linalg.det(self.left).sign() * torch.linalg.det(self.right).sign()
        others = signs[..., :-1]
        return torch.cat([others, determinant * others.prod(-1, keepdim=True)], -1)


class OnlineRotations:
    """An online learner of orthogonal matrices from pairs (u, v), by any learner of the unit ball.

    `learner` has the whole state, the regret and the certificate.

    Args:
        dimension: n.
        learner: builds the learner from the shape (n, n) (default FAML). With a discount γ it
            weighs a pair of s rounds ago by γ^s, for rotations that drift.
        options: of the learner, such as `discount` or `dtype`.
    """

    def __init__(
        self, dimension: int, learner: Callable[..., Learner] = FAML, **options: Any
    ) -> None:
        self.learner = learner((dimension, dimension), **options)

    def matrix(self) -> Tensor:
        """Return X_t, the mean of the draws of `rotation`; X_1 = 0."""
        return self.learner.play()

    def rotation(
        self, generator: torch.Generator | None = None, *, special: bool = False
    ) -> Tensor:
        """Draw an orthogonal matrix with mean X_t; `special` keeps it in SO(n)."""
        drawn = SignRounding.of(self.matrix()).draw(generator, special=special)
        return drawn.to(self.learner.dtype)

    @torch.no_grad()
    def observe(self, u: Tensor, v: Tensor, *, oblivious: bool = False) -> Tensor:
        """Enter the pair v ≈ Ru, or k pairs as one round of mean loss; return the loss of X_t.

        Args:
            u: unit vector (n,), or k of them (k, n), of the learner's dtype and device.
            v: of the same shape, the i-th belonging to the i-th of u.
            oblivious: True says that the pairs were fixed before the game (default False).
        """
        u, v = _units("u", u), _units("v", v)
        action, gradient = self.learner.play(), -(v.mT @ u) / len(u)
        self.learner.observe(gradient, oblivious=oblivious)
        return 1 + (gradient.double() * action).sum()


def _units(name: str, vectors: Tensor) -> Tensor:
    """Return vectors (k, n) normalized to length one; a single one becomes k = 1."""
    vectors = torch.atleast_2d(vectors)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    if ((length - 1).abs() > _rounding(vectors.shape[-1], vectors.dtype)).any():
        raise ValueError(
            f"{name} must hold unit vectors, got lengths from {length.min().item():.9g} to "
            f"{length.max().item():.9g}; divide them by their lengths, and drop zeros with their "
            f"partners"
        )
    return vectors / length


def _rounding(dimension: int, dtype: torch.dtype) -> float:
    """Return a bound on the change of a norm of one by the rounding of n entries."""
    return 8 * math.sqrt(dimension) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Registration:
    """Scans of a turning cloud: pairs (u, v) with v = Q_tu + noise, all scaled to unit length.

    Q_t = Q_0 P(drift·t), where Q_0 is a random orthogonal matrix and P(θ) turns the plane of the
    first two axes by θ. Every scan is a function of the seed and t alone.

    Args:
        dimension: n ≥ 2 (default 3).
        points: k, pairs of a scan (default 16).
        noise: length of the error of v relative to v, root mean square (default 0.2).
        outliers: share of the pairs whose v is a random direction (default 0.1).
        drift: radians a round, ≥ 0 (default 0.0).
        markers: every scan shows the same points of the cloud (default False).
        symmetric: every other scan is matched to the cloud after half a turn, as happens with an
            object that looks alike from both sides (default False).
        seed: (default 0).
    """

    dimension: int = 3
    points: int = 16
    noise: float = 0.2
    outliers: float = 0.1
    drift: float = 0.0
    markers: bool = False
    symmetric: bool = False
    seed: int = 0

    def rotation(self, t: int) -> Tensor:
        """Return Q_t for t ≥ 1, orthogonal, float64."""
        frame = torch.linalg.qr(self._normal(_FRAME, 0, self.dimension)).Q
        angle = self.drift * t + math.pi * (self.symmetric and t % 2 == 0)
        turn = torch.eye(self.dimension, dtype=torch.float64)
        turn[:2, :2] = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
            dtype=torch.float64,
        )
        return frame @ turn

    def pairs(self, t: int) -> tuple[Tensor, Tensor]:
        """Return the t-th scan, t ≥ 1: u and v, (k, n) each, of unit length, float64."""
        u = _unit(self._normal(_CLOUD, 0 if self.markers else t, self.points))
        error = self._normal(_ERRORS, t, self.points) * (self.noise / math.sqrt(self.dimension))
        v = u @ self.rotation(t).mT + error
        uniform = noise.uniform(
            (self.points, 1), seed=self.seed ^ _NOISE_SEED, stream=_CHOICE, step=t
        )
        v = torch.where(uniform <= self.outliers, self._normal(_WRONG, t, self.points), v)
        return u, _unit(v)

    def _normal(self, stream: int, t: int, rows: int) -> Tensor:
        return noise.normal(
            (rows, self.dimension),
            seed=self.seed ^ _NOISE_SEED,
            stream=stream,
            step=t,
            dtype=torch.float64,
        )


def _unit(vectors: Tensor) -> Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
