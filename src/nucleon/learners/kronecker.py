"""Matrix FTRL with a Kronecker regularizer, the other half of Shampoo (Remark 2.1).

    X_1 = 0,  X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η)

with L_t = (G²I + M_t)^{1/4} and R_t = (G²I + N_t)^{1/4}, so that vec X is regularized by R_t ⊗ L_t.

Its bound, for which the paper sees no analysis:

    Reg_T ≤ D²/(2η)·Σ_i λ_i(L_T)λ_i(R_T) + η√(Tr M_T^{1/2}·Tr N_T^{1/2}) + gaps

with eigenvalues in descending order, and √2·D·√(Tr L_T²·Tr R_T²) at η = D/√2 by Cauchy–Schwarz.
Proof: R_t ⊗ L_t grows with t, so FTRL's regret is at most the last regularizer at the comparator
plus η/2·Σ Tr(G_tᵀL_{t-1}⁻¹G_tR_{t-1}⁻¹) plus the gaps of the actions. The first term: XᵀLX has
eigenvalues at most D²λ_i(L), and von Neumann's trace inequality pairs them with R's. The second:
G²I + M_{t-1} ⪰ M_t, and the same for N; fourth roots keep the order, and so do Kronecker products,
so Lemma C.4 bounds the sum. OGD pays for the drift of its center instead, in Theorem C.1's first
term, with the diameter 2D and the pairs (op, *) in place of these.
"""

import math
from typing import Any, ClassVar, final, get_args

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.learners.base import Learner
from nucleon.learners.shampoo import Roots
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.linalg.projections import Solver, quadratic_projection
from nucleon.regret import Shape


@final
class KroneckerFTRL(Learner):
    """X_{t+1} = argmin ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η) on the ball, L and R fourth roots.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        gradient_bound: G ≥ ‖G_t‖_op; a gradient above it is refused (default 1.0).
        eta: η; None is D/√2 (default None).
        solver: of the quadratic projection (default "projected-gradient").
        tolerance: on its relative gap (default 1e-8); the gap itself is in the bound.
        max_iterations: of the solver (default 5000).
        radius: D (default 1.0).
        dtype: of gradients and actions, float32 or float64 (default: torch's).
        device: of gradients and actions (default: torch's).
        validate: False trusts that gradients have the right shape, are finite and within the bound;
            the certificate says so (default True).
    """

    name: ClassVar[str] = "kronecker-ftrl"
    theorem: ClassVar[str] = "Remark 2.1, by Lemma C.4, and the projection's gaps"
    state_names: ClassVar[tuple[str, ...]] = ("center", "total", "gram", "column_gram", "gaps")

    def __init__(
        self,
        shape: Shape,
        *,
        gradient_bound: float = 1.0,
        eta: float | None = None,
        solver: Solver = "projected-gradient",
        tolerance: float = 1e-8,
        max_iterations: int = 5000,
        radius: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(shape, radius=radius, dtype=dtype, device=device, validate=validate)
        self.gradient_bound = _checks.positive("gradient_bound", gradient_bound)
        self.eta = self.radius / math.sqrt(2) if eta is None else _checks.positive("eta", eta)
        _checks.choice("solver", solver, get_args(Solver))
        self.solver: Solver = solver
        self.tolerance = _checks.positive("tolerance", tolerance)
        self.max_iterations = _checks.count("max_iterations", max_iterations)
        *batch, rows, columns = self.shape
        self.total = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        """S_t."""
        self.center = torch.zeros_like(self.total)
        """X_{t+1}, where the next projection starts."""
        self.gram = self.total.new_zeros(*batch, rows, rows)
        """M_t."""
        self.column_gram = self.total.new_zeros(*batch, columns, columns)
        """N_t."""
        self.gaps = self.total.new_zeros(batch)
        """Σ_t of the gaps to which X_2, …, X_{t+1} solve their problems."""

    def options(self) -> dict[str, Any]:
        """The options that decide what is played, as plain values."""
        names = ("gradient_bound", "eta", "solver", "tolerance", "max_iterations")
        return {name: getattr(self, name) for name in names}

    def bound(self) -> Tensor:
        """D²/(2η)·Σλ_i(L)λ_i(R) + η√(Tr M^{1/2}·Tr N^{1/2}) + gaps."""
        # Descending: the shorter one meets the largest eigenvalues of the longer.
        left, right = (
            torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)
            for gram in (self.gram, self.column_gram)
        )
        short = min(left.shape[-1], right.shape[-1])
        fourth = ((self.gradient_bound**2 + v[..., :short]) ** 0.25 for v in (left, right))
        penalty = self.radius**2 / (2 * self.eta) * math.prod(fourth).sum(-1)
        energy = (left.sqrt().sum(-1) * right.sqrt().sum(-1)).sqrt()
        return penalty + self.eta * energy + self.gaps

    def _act(self) -> Tensor:
        return self.center.to(self.dtype)

    def _check(self, gradient: object) -> None:
        super()._check(gradient)
        norm = float(operator_norm(gradient).max())  # pyright: ignore[reportArgumentType]
        rounding = 8 * math.sqrt(min(self.shape[-2:])) * torch.finfo(self.dtype).eps
        if norm > self.gradient_bound * (1 + rounding):
            raise ValueError(
                f"gradient has operator norm {norm:.9g}, above "
                f"gradient_bound={self.gradient_bound:.9g}; state a larger bound"
            )

    def _absorb(self, gradient: Tensor) -> None:
        gradient = gradient.to(torch.float64)
        gram = moments.accumulate_gram(self.gram, gradient, 1.0)
        column_gram = moments.accumulate_gram(self.column_gram, gradient.mT, 1.0)
        total, epsilon = self.total + gradient, self.gradient_bound**2
        left, right = Roots(gram, epsilon, 0.25).matrix, Roots(column_gram, epsilon, 0.25).matrix
        solution = quadratic_projection(
            total,
            left * (self.radius / self.eta),
            right,
            solver=self.solver,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            start=self.center / self.radius,
        )
        x = self.radius * solution.x
        slope = total + left @ x @ right / self.eta
        gap = (slope * x).sum((-2, -1)) + self.radius * nuclear_norm(slope)
        self.gram, self.column_gram, self.total, self.center = gram, column_gram, total, x
        self.gaps = self.gaps + gap.clamp(min=0)
