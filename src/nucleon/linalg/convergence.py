"""What an iterative method reached, so that "converged" and "ran out of steps" differ."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Convergence:
    """The residual an iteration reached beside the tolerance that was asked of it."""

    residual: Tensor
    """One residual per matrix, shape (…), float64."""
    tolerance: float
    """What `converged` is judged by."""
    steps: int
    """Steps taken."""

    @property
    def converged(self) -> Tensor:
        """True, per matrix, where the residual is within the tolerance."""
        return self.residual <= self.tolerance
