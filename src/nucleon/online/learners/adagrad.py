"""AdaGrad on vectors: OGD and FTRL, scalar, diagonal and full (Appendix B, Table 2).

    OGD       x_{t+1} = argmin ⟨g_t, x⟩ + ‖x − x_t‖²_{H_t}/(2η)
    FTRL      x_{t+1} = argmin ⟨s_t, x⟩ + ‖x‖²_{H_t}/(2η)
    proximal  x_{t+1} = argmin ⟨s_t, x⟩ + Σ_s ‖x − x_s‖²_{H_s − H_{s-1}}/(2η)

over the ball, s_t = Σg_s, H_t = δI + √Σ‖g_s‖²·I, √diag Σg_sg_sᵀ or √Σg_sg_sᵀ. Each minimizes
⟨c, x⟩ + ½xᵀH_tx: c = ηg_t − H_tx_t, ηs_t, or ηs_t − p_t with p_t = Σ(H_s − H_{s-1})x_s. That is
the projection of −H_t⁺c in the metric of H_t. The pseudo-inverse of a singular H_t loses nothing:
its range contains every g_s, s ≤ t, and so c.

Both balls are operator-norm balls: ‖x‖₂ is the norm of a row, ‖x‖_∞ that of a diagonal matrix. A
vector is a matrix of shape (1, d) or (d, 1), or (b, 1, d) for b games, and plays every stream. On
the ℓ2 ball its regret is that of the matrix game; on the ℓ∞ ball, where the best fixed action costs
−D‖s‖₁, a `BoxLedger` computes it.

An action that solves its problem up to the gap g = max_x ⟨∇F(x_t), x_t − x⟩ adds g to the regret in
all three: F(x) ≥ F(x_t) − g + ‖x − x_t‖²_H/(2η) on the ball is all that their proofs use of it.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack, final, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.online import theory
from nucleon.online.learners.base import Learner, LearnerOptions, dimension_of
from nucleon.online.metric import Ball, Metric, Root, dual_norm
from nucleon.online.regret import BoxLedger, Ledger, Shape
from nucleon.online.theory.adagrad import Preconditioner, ball_radius

Offset = Literal["stated", "clip", "scale-free", "proximal"]


class AdaGradOptions(LearnerOptions, total=False):
    """Keyword options of both AdaGrad learners."""

    preconditioner: Preconditioner
    """"scalar", "diagonal" (default) or "full"."""
    ball: Ball
    """"l2" or "linf" (default "linf")."""
    eta: float | None
    """η; None is what makes the bound smallest (default None)."""
    tolerance: float
    """Relative gap of the box program, which "full" on "linf" needs (default 1e-8)."""
    max_iterations: int
    """Iterations of the box program (default 1000)."""


class _AdaGrad(Learner):
    """Base of both AdaGrad learners, whose state `center` is the next action x_{t+1}, (…, d)."""

    plays_discounted: ClassVar[bool] = False

    def __init__(
        self,
        shape: Shape,
        *,
        preconditioner: Preconditioner = "diagonal",
        ball: Ball = "linf",
        eta: float | None = None,
        tolerance: float = 1e-8,
        max_iterations: int = 1000,
        **options: Any,
    ) -> None:
        _checks.choice("ball", ball, get_args(Ball))
        self.ball: Ball = ball
        super().__init__(shape, **options)
        _checks.choice("preconditioner", preconditioner, get_args(Preconditioner))
        self.preconditioner: Preconditioner = preconditioner
        dimension = dimension_of(shape)
        self.eta = self._default_eta() if eta is None else _checks.positive("eta", eta)
        self.tolerance = _checks.positive("tolerance", tolerance)
        self.max_iterations = _checks.count("max_iterations", max_iterations)
        self.center, self.gaps = self.zeros(dimension), self.zeros()
        """x_{t+1}, and Σ of the gaps of x_2, …, x_{t+1}: rounding, where they are exact."""
        self.moment = self.zeros(*(dimension,) * (2 if preconditioner == "full" else 1))
        """Σg_{s,i}², or Σg_sg_sᵀ for the full preconditioner."""

    @abstractmethod
    def _default_eta(self) -> float:
        """Return the η of the smallest bound."""

    def action(self) -> Tensor:
        """Return x_t as a row."""
        return self.center.unsqueeze(-2)

    def _empty_ledger(self) -> Ledger:
        kind = Ledger if self.ball == "l2" else BoxLedger
        return kind(self.shape, radius=self.radius, discount=self.discount, device=self.device)

    @property
    def _reach(self) -> float:
        """D_p."""
        return ball_radius(self.preconditioner, self.ball, self.radius, self.sides[1])

    def _accumulated(self, gradient: Tensor) -> Tensor:
        """Return the moment with one more gradient."""
        if self.preconditioner == "full":
            return self.moment + gradient.unsqueeze(-1) * gradient.unsqueeze(-2)
        return self.moment + gradient.square()

    def _metric(self, moment: Tensor, delta: Tensor) -> Metric:
        """Return H = δI + the root of the moment, δ of every game (…)."""
        offset = delta.unsqueeze(-1)
        if self.preconditioner == "scalar":
            return Metric(offset + moment.sum(-1, keepdim=True).sqrt().expand_as(moment))
        if self.preconditioner == "diagonal":
            return Metric(offset + moment.sqrt())
        root = Root(moment, 0.0, 0.5)
        return Metric(offset + root.values, root.vectors)

    def _stated(self, theorem: Callable[..., Tensor], **options: Any) -> Tensor:
        """Return a bound of Table 2 plus the gaps."""
        game = {"ball": self.ball, "radius": self.radius, "eta": self.eta}
        return (
            theorem(self.moment, preconditioner=self.preconditioner, **game, **options) + self.gaps
        )

    def _solve(self, linear: Tensor, metric: Metric) -> None:
        """Set the next action to the minimizer of ⟨linear, x⟩ + ½xᵀHx, and add its gap."""
        x = metric.minimize(linear, self.ball, self.radius, self.tolerance, self.max_iterations)
        slope = (linear + metric.apply(x)) / self.eta
        gap = (slope * x).sum(-1) + self.radius * dual_norm(slope, self.ball)
        self.center, self.gaps = x, self.gaps + gap.clamp(min=0)


@final
class AdaGradOGD(_AdaGrad):
    """x_{t+1} = argmin ⟨g_t, x⟩ + ‖x − x_t‖²_{H_t}/(2η); it needs no bound on the gradients.

    Args:
        delta: δ ≥ 0 in H_t (default 0.0, the pseudo-inverse).
        options: see `AdaGradOptions`; η is √2·D_p by default, D_p the radius of the ball in ℓ∞ for
            "diagonal", else in ℓ2.
    """

    name: ClassVar[str] = "adagrad-ogd"
    theorem: ClassVar[str] = "Table 2, AdaGrad-OGD, and the projection's gaps"

    def __init__(
        self, shape: Shape, *, delta: float = 0.0, **options: Unpack[AdaGradOptions]
    ) -> None:
        self.delta = _checks.nonnegative("delta", delta)
        super().__init__(shape, **options)

    def bound(self) -> Tensor:
        """Return (R²/(2η) + η)·Tr H + δR₂²/(2η) + gaps, with the diameter R = 2D_p (Table 2)."""
        return self._stated(theory.adagrad_bound, update="ogd", delta=self.delta)

    def _default_eta(self) -> float:
        return math.sqrt(2) * self._reach

    def update(self, gradient: Tensor) -> None:
        """Descend along g_t."""
        gradient = gradient.squeeze(-2)
        self.moment = self._accumulated(gradient)
        metric = self._metric(self.moment, torch.full_like(self.gaps, self.delta))
        self._solve(self.eta * gradient - metric.apply(self.center), metric)


@final
class AdaGradFTRL(_AdaGrad):
    """x_{t+1} = argmin ⟨s_t, x⟩ + ‖x‖²_{H_t}/(2η), with δ or without.

    FTRL needs δ ≥ max‖g_t‖ (ℓ2; for "diagonal" ℓ∞), since H_t weighs g_{t+1} before observing it.
    `offset` chooses δ (Remark B.1):

    - "stated": `delta`; a gradient above it by more than rounding raises an error.
    - "clip": the largest norm so far, and gradients are clipped to that of the earlier rounds. The
      part e_t above it adds 2D_p‖e_t‖ to the bound.
    - "scale-free": δ = 0, for "scalar" and "diagonal"; the largest norm is in the bound.
    - "proximal": δ = 0 and a regularizer centered at the actions played, for twice the constant.

    Args:
        offset: see above (default "stated").
        delta: δ > 0 of "stated" (default 1.0).
        options: see `AdaGradOptions`; η is D_p/√2 by default, √2·D_p if proximal and D_p/2^{3/4} if
            scale-free, D_p the radius of the ball in ℓ∞ for "diagonal", else in ℓ2.
    """

    name: ClassVar[str] = "adagrad-ftrl"
    theorem: ClassVar[str] = "Table 2, AdaGrad-FTRL, with Remark B.1 and the projection's gaps"

    def __init__(
        self,
        shape: Shape,
        *,
        offset: Offset = "stated",
        delta: float | None = None,
        **options: Unpack[AdaGradOptions],
    ) -> None:
        _checks.choice("offset", offset, get_args(Offset))
        if offset != "stated" and delta is not None:
            raise ValueError(f"offset={offset!r} sets its own delta, got {delta!r}; leave it out")
        if (offset, options.get("preconditioner")) == ("scale-free", "full"):
            raise ValueError(
                "offset='scale-free' has a bound for the scalar and the diagonal preconditioner "
                "only, got 'full'; take another offset, e.g. 'proximal'"
            )
        self.offset: Offset = offset
        self.delta = _checks.positive("delta", 1.0 if delta is None else delta)
        """δ of "stated"."""
        super().__init__(shape, **options)
        self.total = torch.zeros_like(self.center)
        """s_t, of the gradients after clipping."""
        self.pull = torch.zeros_like(self.center)
        """p_t = Σ(H_s − H_{s-1})x_s, of the proximal form only."""
        self.peak = self.zeros(self.sides[1] if self.preconditioner == "diagonal" else 1)
        """max_t |g_{t,i}| for "diagonal", else max_t ‖g_t‖₂."""
        self.excess = torch.zeros_like(self.gaps)
        """Σ‖e_t‖ of the parts above the bound in force, in ℓ1 for "diagonal", else in ℓ2."""

    def bound(self) -> Tensor:
        """Return the bound of Table 2 with δ and the excess, or of Remark B.1, plus the gaps."""
        if self.offset == "scale-free":
            return self._stated(theory.scale_free_adagrad_bound, peak=self.peak.sum(-1))
        update = "proximal" if self.offset == "proximal" else "ftrl"
        delta, excess = self._delta(), self.excess
        return self._stated(theory.adagrad_bound, update=update, delta=delta, excess=excess)

    def _default_eta(self) -> float:
        factor = {"scale-free": 2**-0.75, "proximal": math.sqrt(2)}
        return self._reach * factor.get(self.offset, math.sqrt(0.5))

    def _delta(self) -> Tensor:
        """Return δ of every game after the gradients so far."""
        if self.offset == "stated":
            return torch.full_like(self.gaps, self.delta)
        return self.peak.amax(-1) * (self.offset == "clip")

    def update(self, gradient: Tensor) -> None:
        """Enter g_t into the sums, and minimize."""
        gradient = gradient.squeeze(-2)
        size = gradient.abs()
        if self.preconditioner != "diagonal":
            size = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        fed, excess = self._fed(gradient, size)
        if self.offset == "proximal":  # −H_t x_t here and H_{t+1} x_t below are its share of p
            self.pull = self.pull - self._metric(self.moment, self._delta()).apply(self.center)
        self.peak = torch.maximum(self.peak, size)
        self.moment, self.total = self._accumulated(fed), self.total + fed
        self.excess = self.excess + excess
        metric = self._metric(self.moment, self._delta())
        if self.offset == "proximal":
            self.pull = self.pull + metric.apply(self.center)
        self._solve(self.eta * self.total - self.pull, metric)

    def _fed(self, gradient: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Return g_t, clipped for "clip", and ‖e_t‖ of the part above the δ of earlier rounds."""
        if self.offset == "stated":
            kind = "ℓ∞ norm" if self.preconditioner == "diagonal" else "ℓ2 norm"
            remedy = "state a larger delta, or pass offset='clip', 'scale-free' or 'proximal'"
            self._refuse_above(kind, size.amax(-1), self.delta, name="delta", remedy=remedy)
            return gradient, (size - self.delta).clamp(min=0).sum(-1)
        if self.offset != "clip":
            return gradient, torch.zeros_like(self.excess)
        level = self.peak.amax(-1, keepdim=True)
        # Until the first gradient that is not zero x = 0 whatever H, so it may be weighed by its
        # own norm in the analysis, and costs nothing more.
        over = torch.where(level > 0, (size - level).clamp(min=0), 0.0)
        return torch.where(over > 0, gradient * (level / size), gradient), over.sum(-1)
