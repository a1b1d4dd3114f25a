"""A Lipschitz, nonsmooth, nonconvex finite sum whose constants are known exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import noise
from nucleon.linalg.norms import operator_norm

DEPTH, FREQUENCY = 0.25, 3.0
STEEPEST = 1 + DEPTH
"""max |h'|."""

_NOISE_SEED = 0x6B696E6B73
_MEASUREMENTS, _BATCHES = 0, 1


@dataclass(frozen=True, eq=False)
class Kinks:
    """L(W) = mean over k of h(r_k), h(r) = |r| + ¼|sin 3r|/3, with the residuals r_k = ⟨A_k, W⟩.

    Arcs that bend downward meet in kinks, at r = 0 and all over the slopes. The infimum 0 is
    attained at W = 0. The stochastic gradient is that of one summand, drawn uniformly.

    Args:
        measurements: the matrices A_k, (k, m, n).
    """

    measurements: Tensor

    def value(self, w: Tensor) -> Tensor:
        """Return L(W) of each matrix: (…, m, n) → (…)."""
        residual = self._residuals(w)
        ripple = (DEPTH / FREQUENCY) * torch.sin(FREQUENCY * residual).abs()
        return (residual.abs() + ripple).mean(-1)

    def gradient(self, w: Tensor) -> Tensor:
        """Return ∇L(W) of each matrix; at a kink the subgradient with sign(0) = 0."""
        slopes = self._slopes(self._residuals(w))
        return torch.einsum("...k,kmn->...mn", slopes, self.measurements) / len(self.measurements)

    def draws(self, rounds: int, runs: int, *, seed: int) -> Tensor:
        """Return the summand of each round and run, (rounds, runs), by (seed, round, run)."""
        uniform = noise.uniform(
            (rounds, runs),
            seed=seed ^ _NOISE_SEED,
            stream=torch.arange(runs),
            step=torch.arange(rounds)[:, None],
            sample=_BATCHES,
            dtype=torch.float64,
        )
        return (uniform * len(self.measurements)).ceil().long() - 1

    def sample(self, w: Tensor, draw: Tensor) -> Tensor:
        """Return the stochastic gradients h'(r_k)A_k of matrices (b, m, n), k = `draw`, (b,)."""
        drawn = self.measurements[draw]
        return self._slopes((drawn * w).sum((-2, -1)))[:, None, None] * drawn

    @property
    def gradient_bound(self) -> float:
        """G = max|h'|·max‖A_k‖_op."""
        return STEEPEST * operator_norm(self.measurements).max().item()

    @property
    def q_nuclear(self) -> float:
        """‖Q‖_* of Q² = max|h'|²·mean A_kA_kᵀ, which bounds E[GGᵀ] at every W."""
        gram = (self.measurements @ self.measurements.mT).mean(0)
        return STEEPEST * torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum().item()

    def _residuals(self, w: Tensor) -> Tensor:
        return torch.einsum("kmn,...mn->...k", self.measurements, w)

    def _slopes(self, residual: Tensor) -> Tensor:
        phase = FREQUENCY * residual
        return residual.sign() + DEPTH * torch.cos(phase) * torch.sin(phase).sign()


def random_kinks(seed: int, *, shape: tuple[int, int] = (2, 8)) -> Kinks:
    """Draw 16 measurements A_k = I + N_k/10 of similar direction, N_k standard normal, float64."""
    normal = noise.normal(
        (16, *shape), seed=seed ^ _NOISE_SEED, sample=_MEASUREMENTS, dtype=torch.float64
    )
    return Kinks(torch.eye(*shape, dtype=torch.float64) + 0.1 * normal)
