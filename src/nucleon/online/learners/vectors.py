"""Learners of vectors: a game of rows 1×d (or columns) over the ℓ2 or the ℓ∞ ball.

Both balls are operator-norm balls: ‖x‖₂ is the norm of a row, ‖x‖_∞ that of a diagonal matrix. A
vector is a matrix of shape (1, d) or (d, 1), or (b, 1, d) for b games, and plays every stream. On
the ℓ2 ball its regret is that of the matrix game; on the ℓ∞ ball, where the best fixed action costs
−D‖s‖₁, a `BoxLedger` computes it.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.online.learners.base import Learner
from nucleon.online.metric import Ball
from nucleon.online.regret import Ledger, Shape


class BoxLedger(Ledger):
    """Reg_T = Σ⟨g_t, x_t⟩ + D‖Σg_t‖₁, the regret on the ball ‖x‖_∞ ≤ D; arguments as `Ledger`."""

    def regret(self) -> Tensor:
        """Reg_T of every game, shape () or (b,)."""
        return self.loss + self.radius * self.total.abs().sum((-2, -1))

    def norm(self, action: Tensor) -> Tensor:
        """‖x‖_∞, float64, () or (b,)."""
        return action.abs().amax((-2, -1)).double()

    def _holds(self, action: Tensor) -> bool:
        return not bool((self._outside(action) > self.outside).any())

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "ball": "linf"}


class VectorLearner(Learner):
    """A learner that keeps its next action x_{t+1} as the state `center`, float64, (…, d)."""

    state_names: ClassVar[tuple[str, ...]] = ("center", "gaps")

    def __init__(self, shape: Shape, *, ball: Ball, **options: Any) -> None:
        _checks.choice("ball", ball, ("l2", "linf"))
        self.ball: Ball = ball
        super().__init__(shape, **options)
        *batch, rows, columns = self.shape
        if min(rows, columns) != 1:
            raise ValueError(
                f"shape must be a row (1, d) or a column (d, 1), with b games in front (b, 1, d), "
                f"got {self.shape}; matrices have learners of their own"
            )
        self.dimension = rows * columns
        self.center = torch.zeros(*batch, self.dimension, dtype=torch.float64, device=self.device)
        """x_{t+1}."""
        self.gaps = torch.zeros(batch, dtype=torch.float64, device=self.device)
        """Σ of the gaps to which x_2, …, x_{t+1} solve their problems: rounding, where exact."""

    @abstractmethod
    def _update(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the state after g_t, float64, (…, d); a new value for every name that changes."""

    def _empty_ledger(self) -> Ledger:
        kind = Ledger if self.ball == "l2" else BoxLedger
        return kind(self.shape, radius=self.radius, discount=self.discount, device=self.device)

    def _act(self) -> Tensor:
        return self.center.reshape(self.shape).to(self.dtype)

    def _absorb(self, gradient: Tensor) -> None:
        for name, tensor in self._update(gradient.to(torch.float64).flatten(-2)).items():
            setattr(self, name, tensor)
