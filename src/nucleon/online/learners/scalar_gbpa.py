"""GBPA with a scalar parameter, the baseline of Section 3 (after Abernethy et al. 2016)."""

import math
from typing import ClassVar, Unpack, final

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.augmented import augmented_polar
from nucleon.online import theory
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.regret import Shape


@final
class ScalarGBPA(Learner):
    """FAML with a multiple of the identity: X_{t+1} = −D(S_tS_tᵀ + (ℓ_t/η)²I)^{-1/2}S_t.

    ℓ_t² = G² + Σ‖G_s‖_F². Its bound is of order √m·D·√Σ‖G_t‖_F², never below D·Tr√M.

    Args:
        gradient_bound: G ≥ ‖G_t‖_F, the Frobenius norm; one above raises an error (default 1.0).
        eta: η; None is √m, m the shorter side (default None).
    """

    name: ClassVar[str] = "scalar-gbpa"
    theorem: ClassVar[str] = "Theorem 3.2 with L_t a multiple of the identity"
    plays_discounted: ClassVar[bool] = False

    def __init__(
        self,
        shape: Shape,
        *,
        gradient_bound: float = 1.0,
        eta: float | None = None,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(shape, **options)
        self.gradient_bound = _checks.positive("gradient_bound", gradient_bound)
        short, long = self.sides
        self.eta = math.sqrt(short) if eta is None else _checks.positive("eta", eta)
        self.total = self.zeros(short, long)
        """S_t."""
        self.square_sum, self.first_frobenius = self.zeros(), self.zeros()
        """Σ‖G_s‖_F², and ‖G_1‖_F of the first gradient that is not zero."""
        self.excess = self.zeros()
        """Σ(‖G_t‖_F − G)_+, the parts above the bound."""

    def action(self) -> Tensor:
        """Return −D(SSᵀ + (ℓ/η)²I)^{-1/2}S."""
        level = (self.gradient_bound**2 + self.square_sum) / self.eta**2
        eye = torch.eye(self.sides[0], dtype=torch.float64, device=self.device)
        return -self.radius * augmented_polar(self.total, level[..., None, None] * eye)

    def update(self, gradient: Tensor) -> None:
        """Enter G_t into both sums."""
        square = gradient.square().sum((-2, -1))
        norm, unseen = square.sqrt(), self.square_sum == 0
        self._refuse_above("Frobenius norm", norm, self.gradient_bound)
        self.first_frobenius = torch.where(unseen, norm, self.first_frobenius)
        self.total, self.square_sum = self.total + gradient, self.square_sum + square
        self.excess = self.excess + (norm - self.gradient_bound).clamp(min=0)

    def bound(self) -> Tensor:
        """Return D((η + m/η)ℓ_T + (√m − η)‖G_1‖_F + 2√m·excess), with FAML's α = β = 1.

        The part E of a gradient above G has ‖E‖_* ≤ √m‖E‖_F and costs 2D‖E‖_* (`theory.gbpa`).
        """
        exact = theory.scalar_gbpa_bound(
            self.square_sum,
            rows=self.sides[0],
            radius=self.radius,
            gradient_bound=self.gradient_bound,
            alpha=1.0,
            beta=1.0,
            first_frobenius=self.first_frobenius,
            eta=self.eta,
        )
        return exact + self._bounded()[1]

    def _bounded(self) -> tuple[Tensor, Tensor]:
        added = 2 * self.radius * math.sqrt(self.sides[0]) * self.excess
        return torch.full_like(self.excess, self.gradient_bound), added
