"""Masks of a step: matrices that are not finite are skipped, those without gradients come to rest.

Three rules, each a mask with one entry per matrix, decided on the device:

    skipped   a gradient, a moment, Λ or the direction is not finite: nothing changes but the
              counts; `reference.advance` decides, on CUDA `kernels.verdict` and `kernels.skip`
    faded     ‖Ĝ‖_F² and Tr M̂ are both below tiny/eps: Ĝ and M̂ become zero, together
    resting   the gradient has been exactly zero for more than 1/ln(1/β₁) steps, about 1/(1−β₁):
              P = 0 until a gradient returns; the moments decay as before, and so do the weights by
              `weight_decay`

Without a gradient Ĝ decays as β₁ᵏ and M̂ as β₁²ᵏ, so polar(Ĝ) and (ĜĜᵀ + M̂)^(-1/2)Ĝ keep their
norms. SGD with momentum would move on by Σ β₁ᵏ = 1/(1−β₁) times its last step. A matrix that rests
after that many steps of full length moves as far. Leon with a valid `gradient_bound` G > 0 does not
rest, as in the theorem: ‖P‖_op ≤ β₁‖Ĝ‖_op/(√c·G) decays as β₁ᵏ. Pion's samples keep their norms.

Below tiny/eps, 1e-31 in float32, entries of M̂ are subnormal and their relative rounding is large.
Setting M̂ alone to zero would leave a direction of full length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rest:
    """The rule by which a matrix without gradients comes to rest."""

    longest: int
    """Most steps with a zero gradient in which a matrix moves, the largest k with β₁ᵏ ≥ 1/e."""
    settled: float
    """A matrix with ‖Ĝ‖_F below β₁ᵏ times this after k such steps does not rest, since its P decays
    with Ĝ. −1 if P does not decay."""
    momentum: float
    """β₁."""

    @classmethod
    def of(cls, momentum: float, rows: int, *, settling_bound: float) -> "Rest":
        """Return the rule for m×n matrices; with `settling_bound` G > 0, P decays as Ĝ.

        Gradients within G give ‖Ĝ‖_op ≤ G/(1−β₁), and β₁ᵏ of that after k zero gradients. If ‖Ĝ‖_F
        exceeds 2√m times this, which allows for rounding, G is no bound of the gradients, and the
        rule is that without a bound. Both sides decay alike, so a resting matrix keeps resting.
        """
        longest = int(-1 / math.log(momentum)) if 0 < momentum < 1 else 0
        if not settling_bound or momentum >= 1:
            return cls(longest, -1.0, momentum)
        return cls(longest, 2 * math.sqrt(rows) * settling_bound / (1 - momentum), momentum)


def faded(size: Tensor, gram: Tensor) -> Tensor:
    """Return the mask of matrices with Ĝ, by ‖Ĝ‖_F, and M̂ both below rounding, (b,)."""
    limits = torch.finfo(size.dtype)
    least = limits.tiny / limits.eps
    small = size < math.sqrt(least)
    if gram.numel():
        small = small & (gram.diagonal(dim1=-2, dim2=-1).sum(-1) < least)
    return small


def quiet_steps(before: Tensor, gradient: Tensor) -> Tensor:
    """Return the number of steps for which each gradient has been exactly zero, (b,) int64."""
    return torch.where(largest(gradient) == 0, before + 1, 0)


def resting(quiet: Tensor, size: Tensor, rule: Rest) -> Tensor:
    """Return the mask of matrices that rest, (b,), after `quiet` steps without a gradient."""
    late = quiet > rule.longest
    if rule.settled < 0:
        return late
    return late & ~(size < rule.settled * rule.momentum ** quiet.to(size.dtype))


def frobenius(matrices: Tensor) -> Tensor:
    """Return ‖X‖_F of each matrix, (b,), or inf if its square overflows."""
    return torch.linalg.vector_norm(matrices, dim=(-2, -1))


def largest(matrices: Tensor) -> Tensor:
    """Return the largest |entry| of each matrix, (b,), finite only if all entries are."""
    # Two vectorized passes are faster than the infinity norm.
    return torch.maximum(matrices.amax(dim=(-2, -1)), -matrices.amin(dim=(-2, -1)))


def masked(mask: Tensor, x: Tensor) -> Tensor:
    """Return `x` where the mask, (b,), is True and 0 elsewhere; an empty stack is returned."""
    return torch.where(mask[:, None, None], x, 0.0) if x.numel() else x


def everywhere(mask: Tensor) -> bool:
    """Return True if a mask on a CPU is True everywhere; on other devices False, without a sync."""
    return mask.is_cpu and bool(mask.all())
