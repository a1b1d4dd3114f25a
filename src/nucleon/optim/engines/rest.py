"""Masks of a step: matrices that are not finite are skipped, those without gradients come to rest.

Three rules, each a mask with one entry per matrix, decided on the device:

    skipped   a gradient, a moment, Λ or the direction is not finite: weights and state stay
    faded     ‖Ĝ‖_F² and Tr M̂ are both below tiny/eps: Ĝ and M̂ become zero, together
    resting   the gradient has been exactly zero for more than 1/ln(1/β₁) steps, about 1/(1−β₁):
              P = 0 until it returns; the moments decay as ever, and so do the weights by
              `weight_decay`

Without a gradient Ĝ falls as β₁ᵏ and M̂ as β₁²ᵏ, so polar(Ĝ) and (ĜĜᵀ + M̂)^(-1/2)Ĝ stay as long as
they were. SGD with momentum would move on by Σ β₁ᵏ = 1/(1−β₁) times its last step; a matrix that
comes to rest after as many steps of full length moves on as far. With a `gradient_bound` G > 0
that holds, Leon does what the theorem has it do, and nothing rests: ‖P‖_op ≤ β₁‖Ĝ‖_op/(√c·G), which
falls as β₁ᵏ; Pion's samples stay as long as they were.

Below tiny/eps, 1e-31 in float32, entries of M̂ are subnormal and their rounding is no longer small
beside them. M̂ alone set to zero would leave a step of full length in its place.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rest:
    """The rule by which a matrix without gradients comes to rest."""

    longest: int
    """Steps with a zero gradient up to which it moves: β₁ᵏ ≥ 1/e for k up to it."""
    settled: float
    """A matrix with ‖Ĝ‖_F below β₁ᵏ times this after k such steps does not rest: there P falls with
    Ĝ, and the matrix stops by itself. −1 where P does not fall."""
    momentum: float
    """β₁."""

    @classmethod
    def of(cls, momentum: float, rows: int, *, settling_bound: float) -> "Rest":
        """The rule of m×n matrices; a `settling_bound` G > 0 is one under which P falls as Ĝ.

        Gradients within G make ‖Ĝ‖_op no larger than G/(1−β₁), and after k zero ones β₁ᵏ of that:
        where ‖Ĝ‖_F is beyond 2√m times this, which leaves room for rounding, G is no bound, and the
        rule is that of a matrix without one. Both sides fall alike: what rests does not wake.
        """
        longest = int(-1 / math.log(momentum)) if 0 < momentum < 1 else 0
        if not settling_bound or momentum >= 1:
            return cls(longest, -1.0, momentum)
        return cls(longest, 2 * math.sqrt(rows) * settling_bound / (1 - momentum), momentum)


def faded(size: Tensor, gram: Tensor) -> Tensor:
    """Return which Ĝ, by ‖Ĝ‖_F, and M̂ are both too small to be told from rounding, (b,)."""
    limits = torch.finfo(size.dtype)
    least = limits.tiny / limits.eps
    gone = size < math.sqrt(least)
    if gram.numel():
        gone = gone & (gram.diagonal(dim1=-2, dim2=-1).sum(-1) < least)
    return gone


def quiet_steps(before: Tensor, gradient: Tensor) -> Tensor:
    """Return for how many steps each gradient has been exactly zero, (b,) int64."""
    return torch.where(largest(gradient) == 0, before + 1, 0)


def resting(quiet: Tensor, size: Tensor, rule: Rest) -> Tensor:
    """Return which matrices rest, (b,), after `quiet` steps without a gradient."""
    late = quiet > rule.longest
    if rule.settled < 0:
        return late
    return late & ~(size < rule.settled * rule.momentum ** quiet.to(size.dtype))


def frobenius(matrices: Tensor) -> Tensor:
    """‖X‖_F of each matrix, (b,); inf where its square leaves the dtype."""
    return torch.linalg.vector_norm(matrices, dim=(-2, -1))


def largest(matrices: Tensor) -> Tensor:
    """The largest |entry| of each matrix, (b,); below infinity where all entries are finite."""
    # Two passes that are vectorized are faster than the one of an infinity norm.
    return torch.maximum(matrices.amax(dim=(-2, -1)), -matrices.amin(dim=(-2, -1)))


def kept(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where the mask, (b,), says so, and 0 elsewhere; an empty stack as it is."""
    return torch.where(mask[:, None, None], x, 0.0) if x.numel() else x


def everywhere(mask: Tensor) -> bool:
    """Return whether a mask is known to hold for all: on a CPU, since other devices would wait."""
    return mask.is_cpu and bool(mask.all())
