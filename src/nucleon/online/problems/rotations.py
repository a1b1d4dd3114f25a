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
from nucleon.certificate import Certificate
from nucleon.linalg.norms import nuclear_norm
from nucleon.online.learners import FAML, Learner
from nucleon.online.regret import Ledger

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
        if len(x) and sigma[0] > 1 + rounding:
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
        d = det UVᵀ: a heuristic, off by `special_bias`. No draw from SO(n) has mean X in general;
        where X is a rotation it is exact.

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

    @property
    def special_bias(self) -> Tensor:
        """‖E[R] − X‖_op of the draws with determinant 1: |d·σ_1⋯σ_{n-1} − σ_n|."""
        return (self.special_signs(self.sigma) - self.sigma)[-1].abs()


class OnlineRotations:
    """An online learner of orthogonal matrices from pairs (u, v), by any learner of the unit ball.

    Its whole state is that of `learner`, which saves and loads it.

    Args:
        dimension: n.
        learner: builds the learner from the shape (n, n) (default FAML). With a discount γ it
            weighs a pair of s rounds ago by γ^s, for rotations that drift.
        options: of the learner, such as `discount` or `dtype`.
    """

    def __init__(
        self, dimension: int, learner: Callable[..., Learner] = FAML, **options: Any
    ) -> None:
        self.dimension = _checks.count("dimension", dimension)
        self.learner = learner((dimension, dimension), **options)
        if self.learner.radius != 1:
            raise ValueError(
                f"radius must be 1, the orthogonal matrices' own, got {self.learner.radius!r}; "
                f"leave it out"
            )

    @property
    def ledger(self) -> Ledger:
        """The learner's: its loss is Σγ^{T-t}⟨G_t, X_t⟩."""
        return self.learner.ledger

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
        u, v = self._units("u", u), self._units("v", v)
        if u.shape != v.shape:
            raise ValueError(
                f"u and v must come in pairs, got {len(u)} and {len(v)} vectors; drop those "
                f"without a partner"
            )
        action, gradient = self.learner.play(), -(v.mT @ u) / len(u)
        self.learner.observe(gradient, oblivious=oblivious)
        return 1 + (gradient.double() * action).sum()

    def best(self) -> Tensor:
        """Return the orthogonal matrix of the least loss so far, polar(Σγ^{T-t}vuᵀ), float64."""
        left, _, right = torch.linalg.svd(-self.ledger.total)
        return left @ right

    @property
    def loss(self) -> Tensor:
        """Σγ^{T-t}(1 − vᵀX_tu), float64: the expected loss of the rotations drawn."""
        return self._weight + self.ledger.loss

    @property
    def best_loss(self) -> Tensor:
        """Σγ^{T-t} − ‖Σγ^{T-t}vuᵀ‖_*, that of `best`."""
        return self._weight - nuclear_norm(self.ledger.total)

    def regret(self) -> Tensor:
        """Return loss − best loss, exactly."""
        return self.ledger.regret()

    def certificate(self) -> Certificate:
        """Return the regret beside the learner's bound."""
        return self.learner.certificate()

    @property
    def _weight(self) -> float:
        discount, rounds = self.learner.discount, self.ledger.rounds
        return float(rounds) if discount == 1 else (1 - discount**rounds) / (1 - discount)

    def _units(self, name: str, vectors: Tensor) -> Tensor:
        """Return vectors (k, n) normalized to length one; a single one becomes k = 1."""
        if isinstance(vectors, Tensor) and vectors.ndim == 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            vectors = vectors.unsqueeze(0)
        vectors = _checks.matrix(name, vectors)
        _checks.same(name, vectors, "the learner", self.learner.play())
        if vectors.ndim != 2 or not len(vectors) or vectors.shape[1] != self.dimension:
            raise ValueError(
                f"{name} must be a vector ({self.dimension},) or k ≥ 1 of them, "
                f"(k, {self.dimension}), got shape {tuple(vectors.shape)}"
            )
        length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        error = (length - 1).abs()
        if error.max() > _rounding(self.dimension, vectors.dtype):
            row = int(error.argmax())
            size = length[row].item()
            remedy = "drop its pair" if size == 0 else f"divide {name} by its length"
            raise ValueError(
                f"{name} must hold unit vectors, number {row} has length {size:.9g}; {remedy}"
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
        seed: ≥ 0 (default 0).
        dtype: float32 or float64 (default float64).
    """

    dimension: int = 3
    points: int = 16
    noise: float = 0.2
    outliers: float = 0.1
    drift: float = 0.0
    markers: bool = False
    symmetric: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        _checks.count("dimension", self.dimension, minimum=2)
        _checks.count("points", self.points)
        _checks.nonnegative("noise", self.noise)
        _checks.fraction("outliers", self.outliers, closed="01")
        _checks.nonnegative("drift", self.drift)
        _checks.count("seed", self.seed, minimum=0)
        if self.dtype not in _checks.FULL_DTYPES:
            raise TypeError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")

    def rotation(self, t: int) -> Tensor:
        """Return Q_t for t ≥ 1, orthogonal, float64."""
        _checks.count("t", t)
        frame = torch.linalg.qr(self._normal(_FRAME, 0, self.dimension)).Q
        angle = self.drift * t + math.pi * (self.symmetric and t % 2 == 0)
        turn = torch.eye(self.dimension, dtype=torch.float64)
        turn[:2, :2] = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
            dtype=torch.float64,
        )
        return frame @ turn

    def pairs(self, t: int) -> tuple[Tensor, Tensor]:
        """Return the t-th scan, t ≥ 1: u and v, (k, n) each, of unit length."""
        _checks.count("t", t)
        u = _unit(self._normal(_CLOUD, 0 if self.markers else t, self.points))
        error = self._normal(_ERRORS, t, self.points) * (self.noise / math.sqrt(self.dimension))
        v = u @ self.rotation(t).mT + error
        uniform = noise.uniform(
            (self.points, 1), seed=self.seed ^ _NOISE_SEED, stream=_CHOICE, step=t
        )
        v = torch.where(uniform <= self.outliers, self._normal(_WRONG, t, self.points), v)
        return u.to(self.dtype), _unit(v).to(self.dtype)

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
