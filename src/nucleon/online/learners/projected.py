"""The base of learners with a quadratic projection: the projection, its gap, and matrix roots."""

import math
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.quadratic import Solver, quadratic_projection
from nucleon.linalg.roots import psd_eigh
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.regret import Shape


class ProjectionOptions(LearnerOptions, total=False):
    """Keyword options of every learner with a quadratic projection."""

    eta: float | None
    """η; None is the one of the smallest bound (default None)."""
    solver: Solver
    """Solver of the quadratic projection (default "projected-gradient")."""
    tolerance: float
    """Relative gap to reach (default 1e-8); the gap itself is in the bound."""
    max_iterations: int
    """Most iterations of the solver (default 5000)."""


class ProjectedLearner(Learner):
    """Learner whose state `center` is X_{t+1}, float64; tall matrices are transposed."""

    state_names: ClassVar[tuple[str, ...]] = ("center", "gram", "gaps")
    option_names: ClassVar[tuple[str, ...]] = ("eta", "solver", "tolerance", "max_iterations")
    plays_discounted: ClassVar[bool] = False
    default_eta: ClassVar[float]
    """η/D."""

    def __init__(
        self,
        shape: Shape,
        *,
        eta: float | None = None,
        solver: Solver = "projected-gradient",
        tolerance: float = 1e-8,
        max_iterations: int = 5000,
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        self.eta = self.default_eta * self.radius if eta is None else _checks.positive("eta", eta)
        _checks.choice("solver", solver, get_args(Solver))
        self.solver: Solver = solver
        self.tolerance = _checks.positive("tolerance", tolerance)
        self.max_iterations = _checks.count("max_iterations", max_iterations)
        *batch, rows, columns = self.shape
        self.tall = rows > columns
        short, long = sorted((rows, columns))
        self.center = torch.zeros(*batch, short, long, dtype=torch.float64, device=self.device)
        """X_{t+1}."""
        self.gram = self.center.new_zeros(*batch, short, short)
        """M_t."""
        self.gaps = self.center.new_zeros(batch)
        """Σ of the gaps to which X_2, …, X_{t+1} solve their problems."""

    def _act(self) -> Tensor:
        action = self.center.to(self.dtype)
        return action.mT if self.tall else action

    def _entered(self, gradient: Tensor) -> Tensor:
        """Return the gradient in float64, on the short side."""
        gradient = gradient.mT if self.tall else gradient
        return gradient.to(torch.float64).contiguous()

    def _minimize(
        self, linear: Tensor, left: Tensor, right: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return X̃ ≈ argmin_{‖X‖ ≤ D} F(X) = ⟨linear, X⟩ + Tr(XᵀLXR)/(2η), with its gap.

        The gap is max_{‖X‖ ≤ D} ⟨∇F(X̃), X̃ − X⟩, which the proofs need.
        """
        # With X = DY this is D times ⟨linear, Y⟩ + D/(2η)·Tr YᵀLYR on the unit ball.
        solution = quadratic_projection(
            linear,
            left * (self.radius / self.eta),
            right,
            solver=self.solver,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            start=self.center / self.radius,
        )
        return self.radius * solution.x, self.radius * solution.frank_wolfe_gap


def squarable(name: str, value: float) -> float:
    """Return `value` if it is a finite number > 0 with a square in the range of float64."""
    number, info = _checks.positive(name, value), torch.finfo(torch.float64)
    if not math.sqrt(info.tiny) <= number <= math.sqrt(info.max):
        raise ValueError(
            f"{name} must have a square that float64 can hold, got {value!r}; rescale the gradients"
        )
    return number


class Root:
    """(εI + A)^power of a Gram matrix A (…, m, m), and its pseudo-inverse.

    Eigenvalues of A under m·eps·‖A‖ are rounding, and count as zero.
    """

    def __init__(self, gram: Tensor, *, epsilon: float, power: float) -> None:
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
