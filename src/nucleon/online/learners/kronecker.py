"""Matrix FTRL with a Kronecker regularizer, the other half of Shampoo (Remark 2.1).

    X_1 = 0,  X_{t+1} = argmin_{‖X‖_op ≤ D} ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η)

with L_t = (G²I + M_t)^{1/4} and R_t = (G²I + N_t)^{1/4}, so that vec X is regularized by R_t ⊗ L_t.

The paper misses an analysis of it in earlier work and gives one for R = I only; this bound is ours:

    Reg_T ≤ D²/(2η)·Σ_i λ_i(L_T)λ_i(R_T) + η√(Tr M_T^{1/2}·Tr N_T^{1/2}) + gaps

with eigenvalues in descending order, and √2·D·√(Tr L_T²·Tr R_T²) at η = D/√2 by Cauchy–Schwarz.
Proof: R_t ⊗ L_t grows with t, so FTRL's regret is at most the last regularizer at the comparator
plus η/2·Σ Tr(G_tᵀL_{t-1}⁻¹G_tR_{t-1}⁻¹) plus the gaps of the actions. The first term: XᵀLX has
eigenvalues at most D²λ_i(L), and von Neumann's trace inequality pairs them with R's. The second:
G²I + M_{t-1} ⪰ M_t, and the same for N; fourth roots keep the order, and so do Kronecker products,
so Lemma C.4 bounds the sum. A gradient above G by what rounding explains, split as Ḡ + E with
‖Ḡ‖_op ≤ G, adds ⟨E, X − X_t⟩ ≤ 2D‖E‖_* to its round, and ḠḠᵀ ⪯ GGᵀ leaves the sum as it is. OGD
pays for the drift of its center instead, in Theorem C.1's first term, with the diameter 2D and the
pairs (op, *) in place of these.
"""

import math
from typing import ClassVar, Unpack, final

import torch
from torch import Tensor

from nucleon import moments
from nucleon.linalg.norms import operator_norm
from nucleon.online import theory
from nucleon.online.learners.projected import ProjectedLearner, ProjectionOptions, Root, squarable
from nucleon.online.regret import Shape


@final
class KroneckerFTRL(ProjectedLearner):
    """X_{t+1} = argmin ⟨S_t, X⟩ + Tr(XᵀL_tXR_t)/(2η) on the ball, L and R fourth roots.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        gradient_bound: G ≥ ‖G_t‖_op; a gradient above it is refused (default 1.0).
        options: see `ProjectionOptions`; η is D/√2 by default.
    """

    name: ClassVar[str] = "kronecker-ftrl"
    theorem: ClassVar[str] = "Remark 2.1, by Lemma C.4, and the projection's gaps"
    state_names: ClassVar[tuple[str, ...]] = (
        *ProjectedLearner.state_names,
        "total",
        "column_gram",
        "excess",
    )
    option_names: ClassVar[tuple[str, ...]] = (*ProjectedLearner.option_names, "gradient_bound")
    default_eta: ClassVar[float] = math.sqrt(0.5)

    def __init__(
        self, shape: Shape, *, gradient_bound: float = 1.0, **options: Unpack[ProjectionOptions]
    ) -> None:
        super().__init__(shape, **options)
        self.gradient_bound = squarable("gradient_bound", gradient_bound)
        self.total = torch.zeros_like(self.center)
        """S_t."""
        side = self.center.shape[-1]
        self.column_gram = self.center.new_zeros(*self.center.shape[:-2], side, side)
        """N_t."""
        self.excess = torch.zeros_like(self.gaps)
        """Σ‖E_t‖_* of what lay above G."""

    def bound(self) -> Tensor:
        """Return D²/(2η)·Σλ_i(L)λ_i(R) + η√(Tr M^{1/2}·Tr N^{1/2}) + gaps + 2D·excess."""
        left, right = (
            torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)
            for gram in (self.gram, self.column_gram)
        )
        square, short = self.gradient_bound**2, left.shape[-1]
        pairs = ((square + left) * (square + right[..., :short])) ** 0.25
        energy = (left.sqrt().sum(-1) * right.sqrt().sum(-1)).sqrt()
        exact = self.radius**2 / (2 * self.eta) * pairs.sum(-1) + self.eta * energy
        return exact + self.gaps + 2 * self.radius * self.excess

    def _bounded(self) -> tuple[Tensor, Tensor]:
        bound = torch.full_like(self.excess, self.gradient_bound)
        return bound, 2 * self.radius * self.excess

    def _check(self, gradient: object) -> None:
        super()._check(gradient)
        norm = float(operator_norm(gradient.double()).max())  # pyright: ignore
        rounding = 8 * math.sqrt(self.gram.shape[-1]) * torch.finfo(self.dtype).eps
        if norm > self.gradient_bound * (1 + rounding):
            raise ValueError(
                f"gradient has operator norm {norm:.9g}, above "
                f"gradient_bound={self.gradient_bound:.9g}; state a larger bound"
            )

    def _absorb(self, gradient: Tensor) -> None:
        gradient = self._entered(gradient)
        gram = moments.accumulate_gram(self.gram, gradient, 1.0)
        column_gram = moments.accumulate_gram(self.column_gram, gradient.mT, 1.0)
        total, square = self.total + gradient, self.gradient_bound**2
        left, right = (Root(g, epsilon=square, power=0.25).matrix for g in (gram, column_gram))
        center, gap = self._minimize(total, left, right)
        self.excess = self.excess + theory.spectral_excess(gradient, self.gradient_bound)
        self.gram, self.column_gram, self.total = gram, column_gram, total
        self.center, self.gaps = center, self.gaps + gap
