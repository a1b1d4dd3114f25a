"""The update of the weights: W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W, elementwise."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.optim import fused, lists, options, shards
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack

EXPONENTIAL_STREAM, _ROUNDING_SEED = -1, 0x5EED  # matrices have streams ≥ 0


def apply(stack: Stack, direction: Tensor, taken: Tensor, at: Situation) -> None:
    """W ← W − lr·s·scale·P − lr·wd·W for the matrices that are `taken`, (b,)."""
    wide = _checks.work_dtype(stack.params[0].dtype)
    if any(shards.sharded(p) for p in stack.params):
        apply_boxes(stack, stack.boxes(direction.to(wide)), taken, at)
        return
    dither, cautious = _dither(stack, at), at.group["cautious"]
    found = rates(stack, at, direction)
    if dither is None and fused.move(stack, direction, taken, *found, cautious=cautious):
        return
    direction = direction.to(wide)
    reads = at.group["weight_decay"] or dither is not None
    weights = stack.gather(stack.params, direction.dtype) if reads else direction
    change = _change(direction, weights, taken[:, None, None], *found, cautious=cautious)
    if dither is not None:
        stack.scatter(_round(weights - change, dither), stack.params)
    else:
        lists.each("sub_", *stack.regions(stack.params, change))


def apply_boxes(stack: Stack, directions: Sequence[Tensor], taken: Tensor, at: Situation) -> None:
    """The same, to what this rank holds of the parameter of each piece.

    It is elementwise, so each rank can do it to its own; the dither is drawn for the whole.
    """
    dither = _dither(stack, at)
    bits = stack.boxes(dither) if dither is not None else [None] * len(directions)
    # Where a piece is not all of its parameter, the rest of it must stay as it is.
    many = any(math.prod(stack.shape) < p.numel() for p in stack.params)
    each = taken[:, None, None]
    oks = stack.boxes(each.expand(-1, *sorted(stack.shape))) if many else taken.unbind()
    for param, direction, ok, low in zip(stack.params, directions, oks, bits, strict=True):
        weights = shards.local(param)
        found = rates(stack, at, direction)
        change = _change(direction, weights, ok, *found, cautious=at.group["cautious"])
        weights.copy_(_round(weights - change, low))


def rates(stack: Stack, at: Situation, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """lr·s·scale(m, n) and lr·`weight_decay`."""
    lr = at.group["lr"]
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    length = _random_length(at, like) if at.group["steps"] == "exponential" else 1.0
    scale = options.scale_factor(at.group["scale"], *stack.shape)
    decay = at.group["weight_decay"]
    return lr * length * scale, lr * decay if decay else 0.0


def _change(
    direction: Tensor,
    weights: Tensor,
    taken: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
    *,
    cautious: bool,
) -> Tensor:
    change = torch.where(taken > 0, direction * rate, 0.0)  # 0 times what is not finite is not 0
    if not isinstance(decay, Tensor) and decay == 0.0:
        return change
    weights = weights.to(direction.dtype)
    less = torch.where(taken > 0, decay * weights, 0.0)
    return change + (less * (weights * direction > 0) if cautious else less)


def _random_length(at: Situation, like: Tensor) -> Tensor:
    """Draw s ~ Exp(1), one for all matrices of a step: the lemma scales the whole update."""
    return noise.exponential(
        (),
        seed=at.group["seed"],
        stream=EXPONENTIAL_STREAM,
        step=at.step,
        dtype=_checks.work_dtype(like.dtype),
        device=like.device,
    )


def dithered(stack: Stack, group: Mapping[str, Any]) -> bool:
    """Whether the weights are rounded at random."""
    return group["stochastic_rounding"] and stack.params[0].dtype == torch.bfloat16


def _dither(stack: Stack, at: Situation) -> Tensor | None:
    """0 … 65535 for each entry, each as likely; None where nothing is rounded at random."""
    if not dithered(stack, at.group):
        return None
    uniform = noise.uniform(
        (len(at.stream), *sorted(stack.shape)),
        seed=at.group["seed"] ^ _ROUNDING_SEED,
        stream=at.stream,
        step=at.step,
        device=at.stream.device,
        dtype=torch.float32,
    )
    return (uniform * 65536.0).to(torch.int32).clamp_max(65535)


def _round(weights: Tensor, dither: Tensor | None) -> Tensor:
    """float32 → bf16, up or down with probabilities that make the mean exact."""
    if dither is None:
        return weights
    # The bits that bf16 lacks carry with their own probability.
    return ((weights.view(torch.int32) + dither) & -65536).view(torch.float32)
