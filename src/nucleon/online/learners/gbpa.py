"""The gradient-based prediction algorithm: one learner, any potential (Sections 3 to 5).

    X_1 = 0,  X_{t+1} = −D ∇Ψ(S_t; Λ_t),  Λ_t = (G²I + M_t)/η²,  η = √(α/β)

with S_t = ΣG_s and M_t = ΣG_sG_sᵀ. The discounted game is the plain one on γ^{-t}G_t with the bound
Gγ^{-(t+1)}; where ∇Ψ does not change with S and Λ^{1/2} scaled alike, it is played on the sums
Ĝ_t = Σγ^{t-s}G_s and M̂_t = Σγ^{2(t-s)}G_sG_sᵀ with Λ̂_t = (G²γ^{-2}I + M̂_t)/η², which never
overflow. The sums are float64 and live on the short side: tall matrices are transposed. So are Λ
and ∇Ψ, whatever the dtype of the game; only the action is rounded to it.
"""

import math
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.linalg.augmented import AugmentedMethod, augmented_definite
from nucleon.linalg.kernels import add_to_diagonal
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.linalg.polar import Method as PolarMethod
from nucleon.linalg.projections import truncated
from nucleon.linalg.quadratic import Solver
from nucleon.online import theory
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.potentials import Hyperbolic, Nuclear, Potential, Regularized
from nucleon.online.regret import Shape

OnExcess = Literal["raise", "clip", "grow"]

_LIMITS = torch.finfo(torch.float64)


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
    """X_{t+1} = −D ∇Ψ(S_t; Λ_t) for any potential Ψ; FTL, FTRL, FTPL and FAML are four of it.

    A random potential is redrawn every round by `Potential.redrawn`; its theorem is then on the
    mean over the noise, see `certificate`.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        potential: Ψ.
        gradient_bound: G ≥ ‖G_t‖_op, see `GameOptions` (default 1.0).
        eta: η; None is √(α/β) of the potential, 1 where it has no constants (default None).
        on_excess: treatment of a gradient above the bound, see `GameOptions`.
        options: see `GameOptions`.
    """

    name: ClassVar[str] = "gbpa"
    theorem: ClassVar[str] = "Theorem 3.2 with the potential's constants"
    state_names: ClassVar[tuple[str, ...]] = (
        *("total", "gram", "level", "excess"),
        *("first_nuclear", "first_round", "nuclear_sum", "nuclear_square"),
    )
    option_names: ClassVar[tuple[str, ...]] = ()
    """Options of a final class; `options` adds those of GBPA and of the potential."""

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
            raise TypeError(
                f"potential must be an instance of a class derived from Potential, got "
                f"{potential!r}; pass for example Hyperbolic()"
            )
        super().__init__(shape, **options)
        *batch, rows, columns = self.shape
        self.tall = rows > columns
        self.potential = potential
        self.constants = potential.admissibility(*sorted((rows, columns)))
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
        zero = torch.zeros(batch, dtype=torch.float64, device=self.device)
        short, long = sorted((rows, columns))
        self.total = zero.new_zeros(*batch, short, long)
        self.gram = zero.new_zeros(*batch, short, short)
        self.stated_bound = None if gradient_bound is None else self._bound_of(gradient_bound, zero)
        self.level = zero if self.stated_bound is None else self.stated_bound
        """The bound in force, G of Λ."""
        self.excess = zero
        """Σγ^{T-t}‖E_t‖_*, the nuclear norms of the parts above the bound in force."""
        self.first_nuclear = zero
        """‖G_1‖_* of the first nonzero gradient; before it X = 0 and the regret is 0."""
        self.first_round = zero.long()
        """The round of that gradient, 0 before."""
        self.nuclear_sum, self.nuclear_square = zero, zero
        """Σγ^{T-t}‖G_t‖_* and Σγ^{2(T-t)}‖G_t‖_*² of the actions that were drawn, else 0."""

    @property
    def is_random(self) -> bool:
        """True if actions are drawn and the bound is on their mean."""
        return self.potential.is_random

    @property
    def samples_drawn(self) -> int:
        """Independent samples that an action is the mean of, as far as is known."""
        return 1

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        """∇Ψ(S; Λ) from float64 moments."""
        return self.potential.redrawn(self.rounds).gradient(total, smoothing)

    def options(self) -> dict[str, Any]:
        """Return the options that decide what is played, as plain values."""
        bound = None if self.stated_bound is None else self.stated_bound.tolist()
        game_options = {"gradient_bound": bound, "eta": self.eta, "on_excess": self.on_excess}
        kind = {"potential": type(self.potential).__name__, **self.potential.options()}
        return {**game_options, **kind, **super().options()}

    def bound(self) -> Tensor:
        """Theorem 3.2 with the constants (α, β), η, the bound in force and what exceeded it."""
        if self.constants is None:
            return torch.full_like(self.excess, torch.inf)
        alpha, beta = self.constants.alpha, self.constants.beta
        return theory.gbpa_bound(alpha=alpha, beta=beta, **self._statistics())

    def _statistics(self) -> dict[str, Any]:
        """Return the arguments of the bounds; the first gradient is discounted already."""
        age = self.rounds - self.first_round
        return {
            # With "clip" the theorem is on the clipped gradients, else on those of the ledger.
            "gram": self.gram if self.on_excess == "clip" else self.ledger.gram,
            "gradient_bound": self.level,
            "radius": self.radius,
            "eta": self.eta,
            "discount": self.discount,
            "rounds": 1,
            "first_nuclear": self.first_nuclear * self.discount ** age.double(),
            "excess": self.excess,
        }

    def smoothing(self) -> Tensor:
        """Λ_t = (G²γ^{-2}I + M̂_t)/η² of the rounds so far, on the short side, float64."""
        return add_to_diagonal(self.gram / self.eta**2, self._least(self.level))

    def _act(self) -> Tensor:
        if self.rounds == 0:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        action = -self.radius * self._direction(self.total, self.smoothing())
        return (action.mT if self.tall else action).to(self.dtype)

    def _absorb(self, gradient: Tensor) -> None:
        gradient = gradient.mT if self.tall else gradient
        gradient = gradient.to(torch.float64).contiguous()
        fed, level, excess = self._within_bound(gradient)
        drawn = nuclear_norm(gradient) if self.is_random and self.rounds else 0.0  # X_1 = 0
        gram = moments.accumulate_gram(self.gram, fed, self.discount)
        if self.validate:
            self._refuse_unrepresentable(gram, level)
        self.total = moments.accumulate_total(self.total, fed, self.discount)
        self.gram, self.level = gram, level
        self.excess = self.discount * self.excess + excess
        self.nuclear_sum = self.discount * self.nuclear_sum + drawn
        self.nuclear_square = self.discount**2 * self.nuclear_square + drawn**2
        if not self._begun:
            fresh = (self.first_round == 0) & (fed != 0).any(-1).any(-1)
            self.first_nuclear = torch.where(fresh, nuclear_norm(fed), self.first_nuclear)
            self.first_round = torch.where(fresh, self.rounds + 1, self.first_round)

    @property
    def _begun(self) -> bool:
        """True if every game has had a nonzero gradient."""
        return bool((self.first_round > 0).all())

    def _within_bound(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return G_t, clipped if asked for, the new bound in force, and ‖E_t‖_* above the old."""
        inside = gradient, self.level, torch.zeros_like(self.excess)
        # ‖G‖_op ≤ ‖G‖_F. Its squares may underflow, which matters only for a level of 0.
        if self._begun and bool((torch.linalg.matrix_norm(gradient) <= self.level).all()):
            return inside
        norm = operator_norm(gradient)
        if self.on_excess == "raise" and self.validate:
            self._refuse_above(norm)
        fixed = self.on_excess != "grow" and self.stated_bound is not None
        # The first gradient of a game answers X_1 = 0, so it enters L_1 whole at no extra cost.
        limit = torch.where(self.first_round > 0, self.level, self.level if fixed else norm)
        excess = theory.spectral_excess(gradient, limit)
        fed = truncated(gradient, limit.unsqueeze(-1)) if self.on_excess == "clip" else gradient
        return fed, self.level if fixed else torch.maximum(self.level, norm), excess

    def _refuse_above(self, norm: Tensor) -> None:
        """Check that norms exceed the bound by rounding to the dtype at most."""
        rounding = 8 * math.sqrt(self.gram.shape[-1]) * torch.finfo(self.dtype).eps
        ratio = norm / self.level
        if bool((ratio > 1 + rounding).any()):
            game = int(ratio.argmax())
            raise ValueError(
                f"gradient has operator norm {norm.flatten()[game].item():.9g}, above "
                f"gradient_bound={self.level.flatten()[game].item():.9g}; state a larger bound, or "
                f"pass on_excess='clip' or 'grow'"
            )

    def _refuse_unrepresentable(self, gram: Tensor, level: Tensor) -> None:
        """Check that Λ neither overflows nor loses digits by underflow."""
        if level is not self.level and not bool((self._fits(level) | (level == 0)).all()):
            raise ValueError(
                f"gradient has operator norm {level.max().item():.3g}, whose square in the Gram "
                f"matrix, over (discount·eta)², float64 cannot hold; rescale the gradients"
            )
        _checks.finite("the Gram matrix of the gradients over eta²", gram / self.eta**2)

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

    def _bounded(self) -> tuple[Tensor, Tensor]:
        return self.level, 2 * self.radius * self.excess

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        if not self.is_random or self.rounds < 2:
            return 0.0
        delta /= self.excess.numel()
        shared: dict[str, Any] = {"radius": self.radius, "samples": self.samples_drawn}
        if oblivious:
            length = self.nuclear_square.sqrt().unsqueeze(-1)
            return theory.ftpl_oblivious_deviation(length, delta=delta, **shared)
        rows, columns = self.total.shape[-2:]
        return theory.ftpl_adaptive_deviation(
            self.nuclear_sum.unsqueeze(-1),
            rows=rows,
            columns=columns,
            rounds=self.rounds,
            delta=delta,
            **shared,
        )

    def _bound_of(self, gradient_bound: float | Tensor, batch: Tensor) -> Tensor:
        """Return G of every game; raise if float64 cannot represent its square in Λ."""
        if isinstance(gradient_bound, Tensor):
            _checks.broadcastable("gradient_bound", gradient_bound.shape, "shape", batch.shape)
            level = gradient_bound.detach().to(batch).expand_as(batch).clone()
        else:
            level = torch.full_like(batch, _checks.positive("gradient_bound", gradient_bound))
        if not bool(self._fits(level).all()):
            raise ValueError(
                f"gradient_bound/(discount·eta) must be > 0 with a square that float64 can hold, "
                f"got gradient_bound={gradient_bound!r}, discount={self.discount!r}, "
                f"eta={self.eta!r}; rescale the gradients or take a larger discount"
            )
        return level

    def _least(self, level: Tensor) -> Tensor:
        """Return G²γ^{-2}/η², a lower bound of the eigenvalues of Λ."""
        return (level / self.discount / self.eta) ** 2

    def _fits(self, level: Tensor) -> Tensor:
        """Return True where G > 0 has a square in Λ of full precision in float64."""
        square = self._least(level)
        return (level > 0) & (square >= _LIMITS.tiny / _LIMITS.eps) & (square <= _LIMITS.max)


@final
class FTL(GBPA):
    """Follow the leader, Ψ = ‖S‖_*: X_{t+1} = −D·polar(S_t). Its regret can be linear.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        method: of the polar factor (default "svd").
        options: see `GameOptions`; the bound only enters the reports.
    """

    name: ClassVar[str] = "ftl"
    theorem: ClassVar[str] = "none"

    def __init__(
        self, shape: Shape, *, method: PolarMethod = "svd", **options: Unpack[GameOptions]
    ) -> None:
        super().__init__(shape, Nuclear(method), **options)

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return that no theorem bounds the regret."""
        return "the nuclear norm is not smooth, and following the leader can lose linearly"


@final
class FTRL(GBPA):
    """Follow the regularized leader: X_{t+1} = D·argmin ⟨S, X⟩ + ½Tr XᵀΛ^{1/2}X on the unit ball.

    Each round is solved to a duality gap from the previous solution; the gaps are in the bound.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        solver: solver of the quadratic projection (default "projected-gradient").
        tolerance: relative gap to reach (default 1e-8).
        max_iterations: most iterations of the solver (default 5000).
        options: see `GameOptions`.
    """

    name: ClassVar[str] = "ftrl"
    theorem: ClassVar[str] = "Theorem 3.2 with Proposition 3.3, and the solver's gaps"
    state_names: ClassVar[tuple[str, ...]] = (*GBPA.state_names, "start", "gap", "gaps")
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
        """Theorem 3.2 with α = ½, β = 1, plus D times the solver's gaps."""
        return theory.ftrl_bound(**self._statistics(), gaps=self.gaps)

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        solution = self.potential.solve(total, smoothing, self.start)
        self.start, self.gap = solution.x, solution.frank_wolfe_gap
        return solution.x

    def _absorb(self, gradient: Tensor) -> None:
        super()._absorb(gradient)
        # X_t solves the problem of S_{t-1}, which is one discount older than the gradient.
        self.gaps = self.discount * (self.gaps + self.gap)
        self.gap = torch.zeros_like(self.gap)


@final
class FAML(GBPA):
    """Follow the augmented matrix leader: X_{t+1} = −D(S_tS_tᵀ + Λ_t)^{-1/2} S_t.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        method: of the augmented polar factor (default "eigh", the reference).
        options: see `GameOptions`.
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
