"""Which matrices take a step: what is not finite is skipped, what has no gradient comes to rest.

Three rules, each a mask with one entry per matrix, decided on the device:

    skipped   a gradient, a moment, Λ or the direction is not finite: weights and state stay
    faded     ‖Ĝ‖_F² and Tr M̂ are both below tiny/eps: Ĝ and M̂ become zero, together
    resting   the gradient has been exactly zero for more than 1/ln(1/β₁) steps, about 1/(1−β₁):
              P = 0 until it returns; the moments decay as ever, and so do the weights by
              `weight_decay`

Without a gradient Ĝ falls as β₁ᵏ and M̂ as β₁²ᵏ, so polar(Ĝ) and (ĜĜᵀ + M̂)^(-1/2)Ĝ stay as long as
they were. SGD with momentum would move on by Σ β₁ᵏ = 1/(1−β₁) times its last step; a matrix that
comes to rest after as many steps of full length moves on as far. With a `gradient_bound` G > 0
Leon's direction falls as β₁ᵏ by itself, as the theorem has it, and nothing rests; Pion's samples
stay as long as they were.

Below tiny/eps, 1e-31 in float32, entries of M̂ are subnormal and their rounding is no longer small
beside them. M̂ alone set to zero would leave a step of full length in its place.
"""

import math

import torch
from torch import Tensor

NEVER = 2**31 - 1
"""Steps without a gradient that no run has."""


def faded(total: Tensor, gram: Tensor) -> Tensor:
    """Where Ĝ and M̂ are both too small to be told from rounding, (b,); M̂ may be empty."""
    limits = torch.finfo(total.dtype)
    least = limits.tiny / limits.eps
    gone = torch.linalg.vector_norm(total, dim=(-2, -1)) < math.sqrt(least)
    if gram.numel():
        gone = gone & (gram.diagonal(dim1=-2, dim2=-1).sum(-1) < least)
    return gone


def quiet_steps(before: Tensor, gradient: Tensor) -> Tensor:
    """For how many steps each gradient has been exactly zero, (b,) int64."""
    largest = torch.linalg.vector_norm(gradient, ord=torch.inf, dim=(-2, -1))
    return torch.where(largest == 0, before + 1, 0)


def resting(quiet: Tensor, longest: int) -> Tensor:
    """Which matrices rest, (b,): their gradient has been zero for more than `longest` steps."""
    return quiet > longest


def longest_quiet(momentum: float, *, settles: bool) -> int:
    """After how many steps without a gradient the next one rests: β₁ᵏ ≥ 1/e for k up to it.

    Never where the direction `settles` by itself.
    """
    if settles:
        return NEVER
    return int(-1 / math.log(momentum)) if momentum else 0


def all_finite(*matrices: Tensor) -> Tensor:
    """Which matrices (b, …) have finite entries alone, in all of these stacks; (b,)."""
    found = [
        torch.linalg.vector_norm(x, ord=torch.inf, dim=(-2, -1)).isfinite()
        for x in matrices
        if x.numel()
    ]
    return torch.stack(found).all(dim=0)


def kept(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where the mask, (b,), says so, and 0 elsewhere; an empty stack as it is."""
    return torch.where(mask[:, None, None], x, 0.0) if x.numel() else x
