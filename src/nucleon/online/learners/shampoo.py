"""Shampoo, one-sided Shampoo (ASGO) and Kronecker FTRL, with the projection that bounds need.

    OGD    X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨G_t, X⟩ + Tr((X − X_t)ᵀL_t(X − X_t)R_t)/(2η)
    FTRL   X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η)

with X_1 = 0 and roots of εI + M and εI + N, M = ΣG_sG_sᵀ and N = ΣG_sᵀG_s. Shampoo is OGD
(equation (2)) with L = (εI + M)^{1/4}, R = (εI + N)^{1/4}, the one-sided one with
L = (εI + M)^{1/2}, R = I: online gradient descent on vec X in the metric R_t ⊗ L_t.

Early on M and N are singular. With ε = 0, the default, a root is zero on the kernel, where G_t is
zero too: the minimum exists, any minimizer serves the proof of Proposition C.2, and the step
without the constraint uses the pseudo-inverses. ε > 0 makes the roots invertible and adds its own
terms to the bound. Neither needs to know a bound on the gradients.

Kronecker FTRL is the other half of Shampoo (Remark 2.1), with ε = G². The paper misses an analysis
of it in earlier work and has one for R = I only; this bound is ours (proof in docs/theory.md):

    Reg_T ≤ D²/(2η)·Σ_i λ_i(L_T)λ_i(R_T) + η√(Tr M_T^{1/2}·Tr N_T^{1/2}) + gaps

with eigenvalues in descending order, and √2·D·√(Tr L_T²·Tr R_T²) at η = D/√2 by Cauchy–Schwarz.
"""

import math
from typing import Any, ClassVar, Literal, Unpack, final, get_args

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.linalg.norms import operator_norm
from nucleon.linalg.projections import Solver, quadratic_projection
from nucleon.online import theory
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.metric import Root
from nucleon.online.regret import Shape

Projection = Literal["quadratic", "none"]


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


class ShampooOptions(ProjectionOptions, total=False):
    """Keyword options of both Shampoo learners; η is √2·D by default."""

    epsilon: float
    """ε ≥ 0 in the preconditioners (default 0.0, the pseudo-inverse)."""
    projection: Projection
    """"quadratic": the minimizer over the ball, in the metric of the step (default). "none": the
    step without the constraint, as commonly run; it leaves the ball, and nothing is certified."""


class ProjectedLearner(Learner):
    """Learner whose state `center` is X_{t+1}, with the Gram matrices and the solver's gaps."""

    plays_discounted: ClassVar[bool] = False
    powers: ClassVar[tuple[float, float]] = (0.25, 0.25)
    """Powers of εI + M and εI + N that are L and R; 0 is the identity."""
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
        epsilon: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        self.eta = self.default_eta * self.radius if eta is None else _checks.positive("eta", eta)
        _checks.choice("solver", solver, get_args(Solver))
        self.solver: Solver = solver
        self.tolerance = _checks.positive("tolerance", tolerance)
        self.max_iterations = _checks.count("max_iterations", max_iterations)
        self.epsilon = _checks.nonnegative("epsilon", epsilon)
        (short, long), (_, right) = self.sides, self.powers
        self.center, self.gaps = self.zeros(short, long), self.zeros()
        """X_{t+1}, and Σ of the gaps to which X_2, …, X_{t+1} solve their problems."""
        self.gram = self.zeros(short, short)
        self.column_gram = self.zeros(long, long) if right else self.zeros(0, 0)
        """M_t, and N_t where R is not the identity."""

    def action(self) -> Tensor:
        """Return X_t."""
        return self.center

    def _roots(self, gradient: Tensor) -> tuple[Root, Root | None]:
        """Enter G_t into the Gram matrices; return L_t and R_t, None for the identity."""
        left, right = self.powers
        self.gram = moments.accumulate_gram(self.gram, gradient, 1.0)
        if not right:
            return Root(self.gram, self.epsilon, left), None
        self.column_gram = moments.accumulate_gram(self.column_gram, gradient.mT, 1.0)
        return Root(self.gram, self.epsilon, left), Root(self.column_gram, self.epsilon, right)

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


class _Descent(ProjectedLearner):
    """Online gradient descent, with the projection or without."""

    default_eta: ClassVar[float] = math.sqrt(2)

    def __init__(self, shape: Shape, **options: Unpack[ShampooOptions]) -> None:
        projection = options.pop("projection", "quadratic")
        _checks.choice("projection", projection, get_args(Projection))
        super().__init__(shape, **options)
        self.projection: Projection = projection

    def update(self, gradient: Tensor) -> None:
        """Descend along G_t, and project."""
        left, right = self._roots(gradient)
        if self.projection == "none":
            step = left.solve(gradient)
            step = step if right is None else right.solve(step.mT).mT  # L⁺GR⁺
            self.center = self.center - self.eta * step
            return
        rows, columns = left.matrix, None if right is None else right.matrix
        bent = rows @ self.center if columns is None else rows @ self.center @ columns
        self.center, gap = self._minimize(gradient - bent / self.eta, rows, columns)
        self.gaps = self.gaps + gap

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret; None with the projection."""
        if self.projection == "none":
            return "without the projection the actions leave the ball, and no bound is known"
        return super().refusal(oblivious=oblivious, delta=delta)

    def bound(self) -> Tensor:
        """Return the theorem's bound with the gaps; infinite without the projection."""
        if self.projection == "none":
            return torch.full_like(self.gaps, torch.inf)
        game = {"radius": self.radius, "eta": self.eta, "epsilon": self.epsilon}
        if self.powers[1]:
            return theory.shampoo_bound(self.gram, self.column_gram, **game, gaps=self.gaps)
        return theory.one_sided_shampoo_bound(self.gram, **game, gaps=self.gaps)


@final
class OneSidedShampoo(_Descent):
    """One-sided Shampoo or ASGO: L = (εI + M)^{1/2} on the short side, R = I."""

    name: ClassVar[str] = "one-sided-shampoo"
    theorem: ClassVar[str] = "Table 1, one-sided Shampoo, and the projection's gaps"
    powers: ClassVar[tuple[float, float]] = (0.5, 0.0)


@final
class Shampoo(_Descent):
    """Shampoo: L = (εI + M)^{1/4}, R = (εI + N)^{1/4}."""

    name: ClassVar[str] = "shampoo"
    theorem: ClassVar[str] = "Theorem C.1 with its lemmas' constants, and the projection's gaps"


@final
class KroneckerFTRL(ProjectedLearner):
    """X_{t+1} = argmin ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η) on the ball, L and R fourth roots.

    Args:
        gradient_bound: G ≥ ‖G_t‖_op; a gradient above it raises an error (default 1.0).
        options: see `ProjectionOptions`; η is D/√2 by default.
    """

    name: ClassVar[str] = "kronecker-ftrl"
    theorem: ClassVar[str] = "Remark 2.1, by Lemma C.4, and the projection's gaps"
    default_eta: ClassVar[float] = math.sqrt(0.5)

    def __init__(
        self, shape: Shape, *, gradient_bound: float = 1.0, **options: Unpack[ProjectionOptions]
    ) -> None:
        self.gradient_bound = _checks.positive("gradient_bound", gradient_bound)
        super().__init__(shape, epsilon=self.gradient_bound**2, **options)
        self.total = torch.zeros_like(self.center)
        """S_t."""
        self.excess = self.zeros()
        """Σ‖E_t‖_* of the parts above G."""

    def update(self, gradient: Tensor) -> None:
        """Enter G_t into the sums, and minimize."""
        self._refuse_above("operator norm", operator_norm(gradient), self.gradient_bound)
        left, right = self._roots(gradient)
        assert right is not None
        self.total = self.total + gradient
        self.center, gap = self._minimize(self.total, left.matrix, right.matrix)
        self.gaps = self.gaps + gap
        self.excess = self.excess + theory.spectral_excess(gradient, self.gradient_bound)

    def bound(self) -> Tensor:
        """Return D²/(2η)·Σλ_i(L)λ_i(R) + η√(Tr M^{1/2}·Tr N^{1/2}) + gaps + 2D·excess."""
        left, right = (
            torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)
            for gram in (self.gram, self.column_gram)
        )
        short = left.shape[-1]
        pairs = (self.epsilon + left) ** 0.25 * (self.epsilon + right[..., :short]) ** 0.25
        energy = (left.sqrt().sum(-1) * right.sqrt().sum(-1)).sqrt()
        exact = self.radius**2 / (2 * self.eta) * pairs.sum(-1) + self.eta * energy
        return exact + self.gaps + self._bounded()[1]

    def _bounded(self) -> tuple[Tensor, Tensor]:
        bound = torch.full_like(self.excess, self.gradient_bound)
        return bound, 2 * self.radius * self.excess
