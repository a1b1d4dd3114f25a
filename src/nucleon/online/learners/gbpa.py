"""The gradient-based prediction algorithm: one learner, any potential (Sections 3 to 5).

    X_1 = 0,  X_{t+1} = −D ∇Ψ(S_t; Λ_t),  Λ_t = (G²I + M_t)/η²,  η = √(α/β)

with S_t = ΣG_s and M_t = ΣG_sG_sᵀ. The discounted game is the plain one on γ^{-t}G_t with the bound
Gγ^{-(t+1)}; where ∇Ψ does not change with S and Λ^{1/2} scaled alike, it is played on the sums
Ĝ_t = Σγ^{t-s}G_s and M̂_t = Σγ^{2(t-s)}G_sG_sᵀ with Λ̂_t = (G²γ^{-2}I + M̂_t)/η², which never
overflow. The sums, Λ and ∇Ψ are float64 whatever the dtype of the game.
"""

from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.linalg.augmented import AugmentedMethod, augmented_definite
from nucleon.linalg.kernels import add_to_diagonal
from nucleon.linalg.norms import nuclear_norm, operator_norm, surely_within
from nucleon.linalg.polar import Method as PolarMethod
from nucleon.linalg.projections import Solver, truncated
from nucleon.online import theory
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.potentials import Hyperbolic, Nuclear, Potential, Regularized
from nucleon.online.regret import Shape

OnExcess = Literal["raise", "clip", "grow"]


class GameOptions(LearnerOptions, total=False):
    """Keyword options of every GBPA learner."""

    gradient_bound: float | Tensor | None
    """G ≥ ‖G_t‖_op, one for all games or one for each, (b,). None if unknown, see `on_excess`
    (default 1.0)."""
    discount: float
    """γ in (0, 1] (default 1.0, the plain game)."""
    eta: float | None
    """η; None is √(α/β) of the potential, 1 where it has no constants (default None)."""
    on_excess: OnExcess | None
    """Treatment of a gradient above the bound. "raise": raise an error (default for a stated
    bound). "clip": project it onto the ball of the bound; with gradient_bound=None the bound is the
    largest norm of the earlier rounds (Remark B.1, after Cutkosky 2019). "grow": use its norm as
    the bound from now on (default for None: the running maximum). In each case the regret bound
    grows by 2D·Σγ^{T-t}‖E_t‖_*, E_t the part above the bound in force; with "raise" E_t is only
    rounding to the dtype."""


class GBPA(Learner):
    """X_{t+1} = −D ∇Ψ(S_t; Λ_t) for any potential Ψ, with `GameOptions`.

    FTL, FTRL, FTPL and FAML are four of it. A random potential is redrawn every round by
    `Potential.redrawn`; its theorem is then on the mean over the noise, see `certificate`.
    """

    name: ClassVar[str] = "gbpa"
    theorem: ClassVar[str] = "Theorem 3.2 with the potential's constants"

    redraw: bool = True
    """True if every round has noise of its own, where there is any."""

    def __init__(
        self,
        shape: Shape,
        potential: Potential,
        *,
        gradient_bound: float | Tensor | None = 1.0,
        eta: float | None = None,
        on_excess: OnExcess | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(potential, Potential):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"potential must be an object such as Hyperbolic(), got {potential!r}")
        super().__init__(shape, **options)
        short, long = self.sides
        self.potential = potential
        self.constants = potential.admissibility(short, long)
        theory_eta = 1.0 if self.constants is None else self.constants.eta
        self.eta = theory_eta if eta is None else _checks.positive("eta", eta)
        if on_excess is None:
            on_excess = "grow" if gradient_bound is None else "raise"
        _checks.choice("on_excess", on_excess, ("raise", "clip", "grow"))
        if gradient_bound is None and on_excess == "raise":
            raise ValueError(
                "on_excess='raise' needs a gradient_bound; pass one, or on_excess='grow' or 'clip'"
            )
        self.on_excess: OnExcess = on_excess
        self.total, self.gram = self.zeros(short, long), self.zeros(short, short)
        self.level = self.zeros()
        """The bound in force, G of Λ."""
        self.stated_bound = None
        if gradient_bound is not None:
            stated = torch.as_tensor(gradient_bound, dtype=torch.float64, device=self.device)
            _checks.broadcastable("gradient_bound", stated.shape, "shape", self.level.shape)
            if not bool(((stated > 0) & stated.isfinite()).all()):
                raise ValueError(f"gradient_bound must be finite and > 0, got {gradient_bound!r}")
            self.level = self.stated_bound = self.level + stated.detach()
        self.excess = self.zeros()
        """Σγ^{T-t}‖E_t‖_*, the nuclear norms of the parts above the bound in force."""
        self.first_nuclear = self.zeros()
        """γ^{T-s}‖G_s‖_* of the first nonzero gradient; before it X = 0 and the regret is 0."""
        self.nuclear_sum, self.nuclear_square = self.zeros(), self.zeros()
        """Σγ^{T-t}‖G_t‖_* and Σγ^{2(T-t)}‖G_t‖_*² of the actions that were drawn, else 0."""

    # ------------------------------------------------------------------ the algorithm

    def action(self) -> Tensor:
        """Return −D ∇Ψ(S; Λ), and 0 in the first round."""
        if self.rounds == 0:
            return torch.zeros_like(self.total)
        return -self.radius * self._direction(self.total, self.smoothing())

    def smoothing(self) -> Tensor:
        """Return Λ_t = (G²γ^{-2}I + M̂_t)/η² of the rounds so far, on the short side, float64."""
        return add_to_diagonal(self.gram / self.eta**2, self._least(self.level))

    def update(self, gradient: Tensor) -> None:
        """Enter G_t into the sums, clipped if asked for, and what exceeds the bound in force."""
        begun, discount = self._begun, self.discount
        fed, self.level, excess = self._within_bound(gradient)
        self.total = moments.accumulate_total(self.total, fed, discount)
        self.gram = moments.accumulate_gram(self.gram, fed, discount)
        self.excess = discount * self.excess + excess
        self.first_nuclear = discount * self.first_nuclear
        if not begun.all():
            self.first_nuclear = torch.where(begun, self.first_nuclear, nuclear_norm(fed))
        if self.is_random:
            drawn = nuclear_norm(gradient) if self.rounds else 0.0  # X_1 = 0 is no draw
            self.nuclear_sum = discount * self.nuclear_sum + drawn
            self.nuclear_square = discount**2 * self.nuclear_square + drawn**2

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        """Return ∇Ψ(S; Λ) from float64 moments."""
        return self.potential.redrawn(self.rounds).gradient(total, smoothing)

    def _least(self, level: Tensor) -> Tensor:
        """Return G²γ^{-2}/η², a lower bound of the eigenvalues of Λ."""
        return (level / self.discount / self.eta) ** 2

    # ------------------------------------------------------------------ the bound on the gradients

    @property
    def _begun(self) -> Tensor:
        """True for the games that have had a nonzero gradient in an earlier round."""
        return self.ledger.largest > 0

    def _within_bound(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return G_t, clipped if asked for, the new bound in force, and ‖E_t‖_* above the old."""
        begun = self._begun
        if bool(begun.all()) and surely_within(gradient, self.level):
            return gradient, self.level, torch.zeros_like(self.excess)
        norm = operator_norm(gradient)
        if self.on_excess == "raise":
            remedy = "state a larger bound, or pass on_excess='clip' or 'grow'"
            self._refuse_above("operator norm", norm, self.level, remedy=remedy)
        fixed = self.on_excess != "grow" and self.stated_bound is not None
        # The first gradient of a game answers X_1 = 0, so it enters L_1 whole at no extra cost.
        limit = torch.where(begun, self.level, self.level if fixed else norm)
        level = self.level if fixed else torch.maximum(self.level, norm)
        if bool((norm <= limit).all()):
            return gradient, level, torch.zeros_like(self.excess)
        excess = theory.spectral_excess(gradient, limit)
        fed = truncated(gradient, limit.unsqueeze(-1)) if self.on_excess == "clip" else gradient
        return fed, level, excess

    def _bounded(self) -> tuple[Tensor, Tensor]:
        return self.level, 2 * self.radius * self.excess

    # ------------------------------------------------------------------ the bound on the regret

    def bound(self) -> Tensor:
        """Return Theorem 3.2 with (α, β), η, the bound in force and what exceeded it."""
        if self.constants is None:
            return torch.full_like(self.excess, torch.inf)
        return theory.gbpa_bound(
            # With "clip" the theorem is on the clipped gradients, else on those of the ledger.
            self.gram if self.on_excess == "clip" else self.ledger.gram,
            radius=self.radius,
            gradient_bound=self.level,
            alpha=self.constants.alpha,
            beta=self.constants.beta,
            first_nuclear=self.first_nuclear,  # discounted already
            discount=self.discount,
            rounds=1,
            eta=self.eta,
            excess=self.excess,
        )

    @property
    def is_random(self) -> bool:
        """True if actions are drawn and the bound is on their mean."""
        return self.potential.is_random

    @property
    def samples_drawn(self) -> int:
        """Independent samples that an action is the mean of."""
        return 1

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret of a game; None if one does."""
        if self.constants is None:
            return f"{type(self.potential).__name__} has no constants (α, β) for this shape"
        if self.is_random and not oblivious and delta is None:
            return (
                "the gradients may depend on the noise that was drawn; pass delta for a bound "
                "against them that holds with probability 1 − delta"
            )
        return super().refusal(oblivious=oblivious, delta=delta)

    def _theorem(self, oblivious: bool, delta: float | None) -> str:
        theorem = self.theorem
        if self.discount < 1 and not self.potential.homogeneous:
            kind = type(self.potential).__name__
            theorem += f", provided that {kind} is homogeneous: ∇Ψ(cS; c²Λ) = ∇Ψ(S; Λ)"
        if not self.is_random:
            return theorem
        if delta is None:
            return f"{theorem}, in the mean over the noise, of which this is one draw"
        against = "" if oblivious else " against gradients that see the actions, linear in T"
        return f"{theorem}, with probability at least {1 - delta:g}{against}"

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        if not self.is_random or self.rounds < 2:
            return 0.0
        shared: dict[str, Any] = {
            "radius": self.radius,
            "samples": self.samples_drawn,
            "delta": delta / self.excess.numel(),
        }
        if oblivious:
            length = self.nuclear_square.sqrt() if self.redraw else self.nuclear_sum
            return theory.ftpl_oblivious_deviation(length.unsqueeze(-1), **shared)
        (rows, columns), sums = self.sides, self.nuclear_sum.unsqueeze(-1)
        size = {"rows": rows, "columns": columns, "rounds": self.rounds}
        return theory.ftpl_adaptive_deviation(sums, **size, **shared)

    def options(self) -> dict[str, Any]:
        """Return the options that decide what is played, as plain values."""
        bound = None if self.stated_bound is None else self.stated_bound.tolist()
        kind = {"potential": type(self.potential).__name__, **self.potential.options()}
        return {"gradient_bound": bound, **kind, **super().options()}


@final
class FTL(GBPA):
    """Follow the leader, Ψ = ‖S‖_*: X_{t+1} = −D·polar(S_t). Its regret can be linear.

    Args:
        method: of the polar factor (default "svd").
    """

    name: ClassVar[str] = "ftl"
    theorem: ClassVar[str] = "none"

    def __init__(
        self, shape: Shape, *, method: PolarMethod = "svd", **options: Unpack[GameOptions]
    ) -> None:
        super().__init__(shape, Nuclear(method), **options)

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret."""
        return "the nuclear norm is not smooth, and following the leader can lose linearly"


@final
class FTRL(GBPA):
    """Follow the regularized leader: X_{t+1} = D·argmin ⟨S, X⟩ + ½Tr XᵀΛ^{1/2}X on the unit ball.

    Each round is solved from the previous solution to a duality (Frank–Wolfe) gap g, and

        Reg_T ≤ √2·D·Tr√(G²I + M_T) + (1 − 1/√2)·D·‖G_1‖_* + D·Σγ^{T-t}g_t

    Mere suboptimality is not enough. Proof: f(X) = −⟨S, X⟩ − ½Tr XᵀAX with A = Λ^{1/2} has
    f(X) ≤ f(X̃) + g − ½‖X − X̃‖²_A on the ball, so the round's term is at most ½‖G‖²_{A^{-1}} + g:
    g more than with the exact action. (The paper drops D before ‖G_1‖_*.)

    Args:
        solver: solver of the quadratic projection (default "projected-gradient").
        tolerance: relative gap to reach (default 1e-8).
        max_iterations: most iterations of the solver (default 5000).
    """

    name: ClassVar[str] = "ftrl"
    theorem: ClassVar[str] = "Theorem 3.2 with Proposition 3.3, and the solver's gaps"
    potential: Regularized

    def __init__(
        self,
        shape: Shape,
        *,
        solver: Solver = "projected-gradient",
        tolerance: float = 1e-8,
        max_iterations: int = 5000,
        **options: Unpack[GameOptions],
    ) -> None:
        super().__init__(shape, Regularized(solver, tolerance, max_iterations), **options)
        self.start = torch.zeros_like(self.total)
        """The solution of the previous round, where the next one starts."""
        self.gap = torch.zeros_like(self.excess)
        """Frank–Wolfe gap of X_t, which awaits G_t."""
        self.gaps = torch.zeros_like(self.excess)
        """Σγ^{T-t+1}·gap of X_t, over the rounds observed."""

    def bound(self) -> Tensor:
        """Return Theorem 3.2 with α = ½, β = 1, plus D times the solver's gaps."""
        return super().bound() + self.radius * self.gaps

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        solution = self.potential.solve(total, smoothing, self.start)
        self.start, self.gap = solution.x, solution.frank_wolfe_gap
        return solution.x

    def update(self, gradient: Tensor) -> None:
        """Enter G_t, and the gap of X_t."""
        super().update(gradient)
        # X_t solves the problem of S_{t-1}, which is one discount older than the gradient.
        self.gaps = self.discount * (self.gaps + self.gap)
        self.gap = torch.zeros_like(self.gap)


@final
class FAML(GBPA):
    """Follow the augmented matrix leader: X_{t+1} = −D(S_tS_tᵀ + Λ_t)^{-1/2} S_t.

    Args:
        method: of the augmented polar factor (default "eigh", the reference).
    """

    name: ClassVar[str] = "faml"
    theorem: ClassVar[str] = "Theorem 3.2 with the constants of Theorem 4.2"
    potential: Hyperbolic

    def __init__(
        self, shape: Shape, *, method: AugmentedMethod = "eigh", **options: Unpack[GameOptions]
    ) -> None:
        super().__init__(shape, Hyperbolic(method), **options)

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        if self.potential.method != "eigh":
            return self.potential.gradient(total, smoothing)
        return augmented_definite(total, smoothing, self._least(self.level))
