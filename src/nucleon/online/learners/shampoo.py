"""Shampoo and one-sided Shampoo (ASGO), with the projection that their regret bounds need.

    X_1 = 0,  X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨G_t, X⟩ + Tr((X − X_t)ᵀL_t(X − X_t)R_t)/(2η)

(equation (2)), with L = (εI + M)^{1/4}, R = (εI + N)^{1/4}, or L = (εI + M)^{1/2}, R = I, for
M = ΣG_sG_sᵀ and N = ΣG_sᵀG_s. It is online gradient descent on vec X in the metric R_t ⊗ L_t.

Early on M and N are singular. With ε = 0, the default, a root is zero on the kernel, where G_t is
zero too: the minimum exists, any minimizer serves the proof of Proposition C.2, and the step
without the constraint takes the pseudo-inverses. ε > 0 makes the roots invertible and adds its own
terms to the bound. Neither needs to know a bound on the gradients.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Unpack, final, get_args

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.online import theory
from nucleon.online.learners.projected import ProjectedLearner, ProjectionOptions, Root
from nucleon.online.regret import Shape

Projection = Literal["quadratic", "none"]


class ShampooOptions(ProjectionOptions, total=False):
    """Keyword options of both Shampoo learners; η is √2·D by default."""

    epsilon: float
    """ε ≥ 0 in the preconditioners (default 0.0, the pseudo-inverse)."""
    projection: Projection
    """"quadratic": the minimizer over the ball, in the metric of the step (default). "none": the
    step without the constraint, as commonly run; it leaves the ball, and nothing is certified."""


class _Descent(ProjectedLearner):
    """The step and its projection, for preconditioners that a final class chooses."""

    option_names: ClassVar[tuple[str, ...]] = (
        *ProjectedLearner.option_names,
        *("epsilon", "projection"),
    )
    default_eta: ClassVar[float] = math.sqrt(2)

    def __init__(
        self,
        shape: Shape,
        *,
        epsilon: float = 0.0,
        projection: Projection = "quadratic",
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        self.epsilon = _checks.nonnegative("epsilon", epsilon)
        _checks.choice("projection", projection, get_args(Projection))
        self.projection: Projection = projection

    @abstractmethod
    def _grams(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the Gram matrices with one more gradient, by their names in the state."""

    @abstractmethod
    def _roots(self, grams: dict[str, Tensor]) -> tuple[Root, Root | None]:
        """Return L and R of these Gram matrices, R = None for the identity."""

    @abstractmethod
    def _theorem_bound(self, **options: Any) -> Tensor:
        """Return the bound of the learner with the projection."""

    def bound(self) -> Tensor:
        """Return the theorem's bound with the gaps; infinite without the projection."""
        if self.projection == "none":
            return torch.full_like(self.gaps, torch.inf)
        return self._theorem_bound(
            radius=self.radius, eta=self.eta, epsilon=self.epsilon, gaps=self.gaps
        )

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret; None with the projection."""
        if self.projection == "none":
            return "without the projection the actions leave the ball, and no bound is known"
        return super().refusal(oblivious=oblivious, delta=delta)

    def _absorb(self, gradient: Tensor) -> None:
        gradient = self._entered(gradient)
        grams = self._grams(gradient)
        if self.validate:
            for gram in grams.values():
                _checks.finite("the Gram matrix of the gradients", gram)
        left, right = self._roots(grams)
        if self.projection == "none":
            step = left.solve(gradient)
            step = step if right is None else right.solve(step.mT).mT  # L⁺GR⁺
            center, gap = self.center - self.eta * step, 0.0
        else:
            rows, columns = left.matrix, None if right is None else right.matrix
            bent = rows @ self.center if columns is None else rows @ self.center @ columns
            center, gap = self._minimize(gradient - bent / self.eta, rows, columns)
        for name, gram in grams.items():
            setattr(self, name, gram)
        self.center, self.gaps = center, self.gaps + gap


@final
class OneSidedShampoo(_Descent):
    """One-sided Shampoo or ASGO: L = (εI + M)^{1/2} on the short side, R = I.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        options: see `ShampooOptions`.
    """

    name: ClassVar[str] = "one-sided-shampoo"
    theorem: ClassVar[str] = "Table 1, one-sided Shampoo, and the projection's gaps"

    def __init__(self, shape: Shape, **options: Unpack[ShampooOptions]) -> None:
        super().__init__(shape, **options)

    def _grams(self, gradient: Tensor) -> dict[str, Tensor]:
        return {"gram": moments.accumulate_gram(self.gram, gradient, 1.0)}

    def _roots(self, grams: dict[str, Tensor]) -> tuple[Root, None]:
        return Root(grams["gram"], epsilon=self.epsilon, power=0.5), None

    def _theorem_bound(self, **options: Any) -> Tensor:
        return theory.one_sided_shampoo_bound(self.gram, **options)


@final
class Shampoo(_Descent):
    """Shampoo: L = (εI + M)^{1/4}, R = (εI + N)^{1/4}.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        options: see `ShampooOptions`.
    """

    name: ClassVar[str] = "shampoo"
    theorem: ClassVar[str] = "Theorem C.1 with its lemmas' constants, and the projection's gaps"
    state_names: ClassVar[tuple[str, ...]] = (*_Descent.state_names, "column_gram")

    def __init__(self, shape: Shape, **options: Unpack[ShampooOptions]) -> None:
        super().__init__(shape, **options)
        side = self.center.shape[-1]
        self.column_gram = self.center.new_zeros(*self.center.shape[:-2], side, side)
        """N_t."""

    def _grams(self, gradient: Tensor) -> dict[str, Tensor]:
        rows = moments.accumulate_gram(self.gram, gradient, 1.0)
        columns = moments.accumulate_gram(self.column_gram, gradient.mT, 1.0)
        return {"gram": rows, "column_gram": columns}

    def _roots(self, grams: dict[str, Tensor]) -> tuple[Root, Root]:
        left, right = grams["gram"], grams["column_gram"]
        return (
            Root(left, epsilon=self.epsilon, power=0.25),
            Root(right, epsilon=self.epsilon, power=0.25),
        )

    def _theorem_bound(self, **options: Any) -> Tensor:
        return theory.shampoo_bound(self.gram, self.column_gram, **options)
