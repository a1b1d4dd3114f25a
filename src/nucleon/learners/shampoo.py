"""Shampoo and one-sided Shampoo (ASGO), with the projection that their regret bounds need.

    X_1 = 0,  X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨G_t, X⟩ + Tr((X − X_t)ᵀL_t(X − X_t)R_t)/(2η)

(equation (2)), with L = (εI + M)^{1/4}, R = (εI + N)^{1/4}, or L = (εI + M)^{1/2}, R = I, for
M = ΣG_sG_sᵀ and N = ΣG_sᵀG_s. It is online gradient descent on vec X in the metric R_t ⊗ L_t.

Early on M and N are singular. With ε = 0, the default, a root is zero on the kernel, where G_t is
zero too: the minimum exists, any minimizer serves the proof of Proposition C.2, and the step
without the constraint takes the pseudo-inverses. ε > 0 makes the roots invertible and adds its own
terms to the bound. Eigenvalues under m·eps·‖M‖ are rounding, and count as zero.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal, TypedDict, Unpack, final, get_args

import torch
from torch import Tensor

from nucleon import _checks, moments, theory
from nucleon.learners.base import Learner
from nucleon.linalg.norms import nuclear_norm
from nucleon.linalg.projections import Solver, quadratic_projection
from nucleon.linalg.roots import psd_eigh
from nucleon.regret import Shape

Projection = Literal["quadratic", "none"]


class ShampooOptions(TypedDict, total=False):
    """Keyword options of both Shampoo learners."""

    radius: float
    """D of the ball ‖X‖_op ≤ D (default 1.0)."""
    eta: float | None
    """η; None is √2·D (default None)."""
    epsilon: float
    """ε ≥ 0 in the preconditioners (default 0.0, the pseudo-inverse)."""
    projection: Projection
    """"quadratic": the minimizer over the ball, in the metric of the step (default). "none": the
    step without the constraint, as commonly run; it leaves the ball, and nothing is certified."""
    solver: Solver
    """Of the quadratic projection (default "projected-gradient")."""
    tolerance: float
    """On its relative gap (default 1e-8); the gap itself is in the bound."""
    max_iterations: int
    """Of the solver (default 5000)."""
    dtype: torch.dtype | None
    """Of gradients and actions, float32 or float64 (default: torch's)."""
    device: torch.device | str | None
    """Of gradients and actions (default: torch's)."""
    validate: bool
    """False trusts that gradients have the right shape and are finite; the certificate says so
    (default True)."""


class _Preconditioned(Learner):
    """The descent step and its projection, for preconditioners that a final class chooses."""

    state_names: ClassVar[tuple[str, ...]] = ("center", "gram", "gaps")

    def __init__(
        self,
        shape: Shape,
        *,
        eta: float | None = None,
        epsilon: float = 0.0,
        projection: Projection = "quadratic",
        solver: Solver = "projected-gradient",
        tolerance: float = 1e-8,
        max_iterations: int = 5000,
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        self.eta = math.sqrt(2) * self.radius if eta is None else _checks.positive("eta", eta)
        self.epsilon = _checks.nonnegative("epsilon", epsilon)
        _checks.choice("projection", projection, get_args(Projection))
        _checks.choice("solver", solver, get_args(Solver))
        self.projection: Projection = projection
        self.solver: Solver = solver
        self.tolerance = _checks.positive("tolerance", tolerance)
        self.max_iterations = _checks.count("max_iterations", max_iterations)
        *batch, rows, columns = self.shape
        self.tall = rows > columns
        short, long = sorted((rows, columns))
        self.center = torch.zeros(*batch, short, long, dtype=torch.float64, device=self.device)
        """X_{t+1}, on the short side: tall matrices are transposed."""
        self.gram = self.center.new_zeros(*batch, short, short)
        """M_t."""
        self.gaps = self.center.new_zeros(batch)
        """Σ_t max_{‖X‖ ≤ D} ⟨∇F_t(X_{t+1}), X_{t+1} − X⟩, which is 0 for exact projections."""

    @abstractmethod
    def _preconditioners(self, grams: dict[str, Tensor]) -> tuple["Roots", "Roots | None"]:
        """L and R of these Gram matrices, R = None for the identity."""

    def options(self) -> dict[str, Any]:
        """The options that decide what is played, as plain values."""
        names = ("eta", "epsilon", "projection", "solver", "tolerance", "max_iterations")
        return {name: getattr(self, name) for name in names}

    def _bound_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("radius", "eta", "epsilon", "gaps")}

    def _refusal(self, oblivious: bool) -> str | None:
        if self.projection == "none":
            return "without the projection the actions leave the ball, and no bound is known"
        return None

    def _act(self) -> Tensor:
        action = self.center.to(self.dtype)
        return action.mT if self.tall else action

    def _grams(self, gradient: Tensor) -> dict[str, Tensor]:
        """The Gram matrices with one more gradient."""
        return {"gram": moments.accumulate_gram(self.gram, gradient, 1.0)}

    def _absorb(self, gradient: Tensor) -> None:
        gradient = gradient.mT if self.tall else gradient
        gradient = gradient.to(torch.float64).contiguous()
        grams = self._grams(gradient)
        if self.validate:
            for gram in grams.values():
                _checks.finite("the Gram matrix of the gradients", gram)
        left, right = self._preconditioners(grams)
        if self.projection == "none":
            step = left.solve(gradient)
            step = step if right is None else right.solve(step.mT).mT
            center, gap = self.center - self.eta * step, torch.zeros_like(self.gaps)
        else:
            center, gap = self._project(gradient, left.matrix, right and right.matrix)
        for name, gram in grams.items():
            setattr(self, name, gram)
        self.center, self.gaps = center, self.gaps + gap

    def _project(
        self, gradient: Tensor, left: Tensor, right: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """X_{t+1} and its gap, which the solver's own may undercut: the proof needs this one."""

        def metric(x: Tensor) -> Tensor:
            return left @ x / self.eta if right is None else left @ x @ right / self.eta

        # With X = DY the problem is D times ⟨G − LX_tR/η, Y⟩ + D/(2η)·Tr YᵀLYR on the unit ball.
        solution = quadratic_projection(
            gradient - metric(self.center),
            left * (self.radius / self.eta),
            right,
            solver=self.solver,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            start=self.center / self.radius,
        )
        x = self.radius * solution.x
        slope = gradient + metric(x - self.center)
        gap = (slope * x).sum((-2, -1)) + self.radius * nuclear_norm(slope)
        return x, gap.clamp(min=0)


@final
class OneSidedShampoo(_Preconditioned):
    """One-sided Shampoo or ASGO: L = (εI + M)^{1/2} on the short side, R = I.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        options: see `ShampooOptions`.
    """

    name: ClassVar[str] = "one-sided-shampoo"
    theorem: ClassVar[str] = "Table 1, one-sided Shampoo, and the projection's gaps"

    def __init__(self, shape: Shape, **options: Unpack[ShampooOptions]) -> None:
        super().__init__(shape, **options)

    def bound(self) -> Tensor:
        """(2D²/η) Tr L + η(Tr L − m√ε) + gaps, by Proposition C.2 and Lemma C.3."""
        if self.projection == "none":
            return torch.full_like(self.gaps, torch.inf)
        return theory.one_sided_shampoo_bound(self.gram, **self._bound_options())

    def _preconditioners(self, grams: dict[str, Tensor]) -> tuple["Roots", None]:
        return Roots(grams["gram"], self.epsilon, 0.5), None


@final
class Shampoo(_Preconditioned):
    """Shampoo: L = (εI + M)^{1/4}, R = (εI + N)^{1/4}.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        options: see `ShampooOptions`.
    """

    name: ClassVar[str] = "shampoo"
    theorem: ClassVar[str] = "Theorem C.1 with its lemmas' constants, and the projection's gaps"
    state_names: ClassVar[tuple[str, ...]] = (*_Preconditioned.state_names, "column_gram")

    def __init__(self, shape: Shape, **options: Unpack[ShampooOptions]) -> None:
        super().__init__(shape, **options)
        side = self.center.shape[-1]
        self.column_gram = self.center.new_zeros(*self.center.shape[:-2], side, side)
        """N_t."""

    def bound(self) -> Tensor:
        """Theorem C.1: (2D²/η)(‖L‖Tr R + Tr L‖R‖) + η√(Tr L²·Tr R²) at ε = 0, + gaps."""
        if self.projection == "none":
            return torch.full_like(self.gaps, torch.inf)
        return theory.shampoo_bound(self.gram, self.column_gram, **self._bound_options())

    def _grams(self, gradient: Tensor) -> dict[str, Tensor]:
        columns = moments.accumulate_gram(self.column_gram, gradient.mT, 1.0)
        return {**super()._grams(gradient), "column_gram": columns}

    def _preconditioners(self, grams: dict[str, Tensor]) -> tuple["Roots", "Roots"]:
        left, right = grams["gram"], grams["column_gram"]
        return Roots(left, self.epsilon, 0.25), Roots(right, self.epsilon, 0.25)


class Roots:
    """(εI + A)^power of a Gram matrix A (…, m, m), and its pseudo-inverse."""

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
        """The pseudo-inverse times x, (…, m, n)."""
        inverse = torch.where(self.values > 0, self.values, torch.inf).reciprocal()
        return self.vectors @ (inverse.unsqueeze(-1) * (self.vectors.mT @ x))
