"""A walk downhill that a bold second row never finishes: built against following the leader."""

import torch
from torch import Tensor


class Resistance:
    """An oracle that answers the last move ΔW = sX of b walkers, each at a height above the goal.

    With u the direction of the second row of ΔW (½e_2 where that row did not move), it returns

        G = a·e_1e_1ᵀ + b·e_2uᵀ  while the height is above 0, afterwards 0,

    and the height changes by ⟨G, ΔW⟩. The first row descends; the second climbs whichever way it
    was moved, by b times its length. A learner that plays the second row as boldly as the first
    never arrives when b ≥ a, and its mean gradient stays at a. Following the leader does: its
    second row is the sign of what alternates.

    The height is a function of the path and not of the point, so this is no fixed loss. But all
    that the proof of Proposition G.1 uses of a loss, the height has: it is bounded below, up to one
    step, and E[L(W_t) − L(W_{t-1})] = E⟨G_t, X_t⟩.

    Args:
        start: W_1, (b, m, n) with m, n ≥ 2.
        height: ΔL, the first height.
        slope: a (default 1.0).
        resistance: b (default 1.25).
    """

    def __init__(
        self, start: Tensor, *, height: float, slope: float = 1.0, resistance: float = 1.25
    ) -> None:
        self.slope, self.resistance = slope, resistance
        self.height = torch.full_like(start[:, 0, 0], height)
        """The height of each walker, (b,)."""
        self.last = start.detach().clone()

    @torch.no_grad()
    def gradient(self, w: Tensor) -> Tensor:
        """Return G_t at W_t, once a step; there is no other noise."""
        moved = w - self.last
        row = moved[:, 1]
        length = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        first = torch.zeros_like(row)
        first[:, 1] = 0.5
        answer = torch.zeros_like(w)
        answer[:, 0, 0] = self.slope
        answer[:, 1] = self.resistance * torch.where(length > 0, row / length, first)
        answer = answer * (self.height > 0)[:, None, None]
        self.height = self.height + (answer * moved).sum((-2, -1))
        self.last = w.detach().clone()
        return answer

    @property
    def gradient_bound(self) -> float:
        """G = max(a, b)."""
        return max(self.slope, self.resistance)

    @property
    def q_nuclear(self) -> float:
        """‖Q‖_* = a + b."""
        return self.slope + self.resistance
