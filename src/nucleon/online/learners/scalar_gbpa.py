"""GBPA with a scalar parameter, the baseline of Section 3 (after Abernethy et al. 2016)."""

import math
from typing import ClassVar, final

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.augmented import augmented_polar
from nucleon.online import theory
from nucleon.online.learners.base import Learner
from nucleon.online.learners.projected import squarable
from nucleon.online.regret import Shape


@final
class ScalarGBPA(Learner):
    """FAML with a multiple of the identity: X_{t+1} = −D(S_tS_tᵀ + (ℓ_t/η)²I)^{-1/2}S_t.

    ℓ_t² = G² + Σ‖G_s‖_F². Its bound is of order √m·D·√Σ‖G_t‖_F², never below D·Tr√M.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        gradient_bound: G ≥ ‖G_t‖_F, the Frobenius norm; one above is refused (default 1.0).
        eta: η; None is √m, m the shorter side (default None).
        radius: D (default 1.0).
        dtype: of gradients and actions, float32 or float64 (default: torch's).
        device: of gradients and actions (default: torch's).
        validate: False does not refuse a gradient above the bound, see `LearnerOptions` (default
            True).
    """

    name: ClassVar[str] = "scalar-gbpa"
    theorem: ClassVar[str] = "Theorem 3.2 with L_t a multiple of the identity"
    state_names: ClassVar[tuple[str, ...]] = ("total", "square_sum", "first_frobenius", "excess")
    option_names: ClassVar[tuple[str, ...]] = ("gradient_bound", "eta")

    def __init__(
        self,
        shape: Shape,
        *,
        gradient_bound: float = 1.0,
        eta: float | None = None,
        radius: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(shape, radius=radius, dtype=dtype, device=device, validate=validate)
        self.gradient_bound = squarable("gradient_bound", gradient_bound)
        self.eta = math.sqrt(self.short) if eta is None else _checks.positive("eta", eta)
        self.total = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        """S_t."""
        self.square_sum = self.total.new_zeros(self.shape[:-2])
        """Σ‖G_s‖_F²."""
        self.first_frobenius = torch.zeros_like(self.square_sum)
        """‖G_1‖_F of the first gradient that is not zero."""
        self.excess = torch.zeros_like(self.square_sum)
        """Σ(‖G_t‖_F − G)_+, what rounding left above the bound."""

    @property
    def short(self) -> int:
        """m, the shorter side."""
        return min(self.shape[-2:])

    def bound(self) -> Tensor:
        """Return D((η + m/η)ℓ_T + (√m − η)‖G_1‖_F + 2√m·excess), with FAML's α = β = 1.

        The part E of a gradient above G has ‖E‖_* ≤ √m‖E‖_F and costs 2D‖E‖_* (`theory.gbpa`).
        """
        exact = theory.scalar_gbpa_bound(
            self.square_sum,
            rows=self.short,
            radius=self.radius,
            gradient_bound=self.gradient_bound,
            alpha=1.0,
            beta=1.0,
            first_frobenius=self.first_frobenius,
            eta=self.eta,
        )
        return exact + 2 * self.radius * math.sqrt(self.short) * self.excess

    def _bounded(self) -> tuple[Tensor, Tensor]:
        bound = torch.full_like(self.excess, self.gradient_bound)
        scale = 2 * self.radius * math.sqrt(self.short)
        return bound, scale * self.excess

    def _act(self) -> Tensor:
        level = (self.gradient_bound**2 + self.square_sum) / self.eta**2
        eye = torch.eye(self.shape[-2], dtype=torch.float64, device=self.device)
        return -self.radius * augmented_polar(self.total, level[..., None, None] * eye).to(
            self.dtype
        )

    def _check(self, gradient: object) -> None:
        super()._check(gradient)
        norm = float(torch.linalg.matrix_norm(gradient.double()).max())  # pyright: ignore
        if norm > self.gradient_bound * (1 + 8 * torch.finfo(self.dtype).eps):
            raise ValueError(
                f"gradient has Frobenius norm {norm:.9g}, above "
                f"gradient_bound={self.gradient_bound:.9g}; state a larger bound"
            )

    def _absorb(self, gradient: Tensor) -> None:
        gradient = gradient.to(torch.float64)
        square = gradient.square().sum((-2, -1))
        unseen = self.square_sum == 0
        self.first_frobenius = torch.where(unseen, square.sqrt(), self.first_frobenius)
        self.total, self.square_sum = self.total + gradient, self.square_sum + square
        self.excess = self.excess + (square.sqrt() - self.gradient_bound).clamp(min=0)
