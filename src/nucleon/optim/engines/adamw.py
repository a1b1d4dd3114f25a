"""AdamW for the parameters that are not matrices, inside the same optimizer.

For each parameter W with the gradient G, at its own step t,

    m ← β₁m + (1−β₁)G          v ← β₂v + (1−β₂)G²          (averages, as `torch.optim.AdamW`)
    W ← (1 − lr·`weight_decay`)W − lr·m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)

The moments of half-precision parameters are float32: in bf16, v would not change at β₂ = 0.999.
A parameter whose gradient or its square is not finite keeps its weights, moments and t. A complex
parameter is updated as pairs of real numbers, as in torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.optim.engines import rest
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Settings, State, Work
from nucleon.optim.matrices import shards


def step(work: Work, settings: Settings) -> None:
    """Update the parameters that have a gradient; no host synchronization.

    The step is elementwise, so each rank updates its shard of a DTensor. All ranks of a mesh must
    call it, since they skip together and count the same steps. A gradient that is missing on some
    ranks is 0 there; if all lack it, the parameter is unchanged.
    """
    for bucket in buckets(work.params):
        states = [work.states[i] for i in bucket]
        update([work.params[i] for i in bucket], states, settings.group)


def buckets(params: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of parameters of one device, dtype and mesh, the same on all ranks."""
    buckets_by_key: dict[object, list[int]] = {}
    for index, param in enumerate(params):
        mesh = param.device_mesh if shards.sharded(param) else None
        buckets_by_key.setdefault((param.device, param.dtype, mesh), []).append(index)
    return list(buckets_by_key.values())


def update(params: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any]) -> None:
    """Update the parameters of one bucket."""
    pairs = zip(params, states, strict=True)
    active = [(p, s) for p, s in pairs if p.grad is not None or shards.sharded(p)]
    if not active:
        return
    params, states = zip(*active, strict=True)
    dtype = _checks.work_dtype(shards.real(params[0]).dtype)
    beta1, beta2 = group["betas"]
    wide = widest(params[0].device)
    lr = group["lr"].reshape(()).to(wide) if isinstance(group["lr"], Tensor) else group["lr"]
    weights = [*map(shards.real, params)]
    gradients = [
        torch.zeros_like(w, dtype=dtype) if p.grad is None else shards.real(p.grad).to(dtype)
        for w, p in zip(weights, params, strict=True)
    ]
    present, finite = _flags(params, gradients)
    first, second = ([shards.real(s[k]) for s in states] for k in ("exp_avg", "exp_avg_sq"))

    # Skipping is arithmetic, not a branch: rates of −0 and 1 change nothing, not even a −0, since
    # −0 + −0 = −0 but −0 + 0 = 0. On a CPU a step that skips none needs no masks.
    skipped, finite = present & ~finite, present & finite
    masks = None if rest.everywhere(finite) else finite.unbind()
    if masks is not None:
        gradients = [torch.where(ok, g, 0.0) for ok, g in zip(masks, gradients, strict=True)]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_add_([s["step"] for s in states], list(finite.long().unbind()))
    torch._foreach_add_([s["skipped"] for s in states], list(skipped.long().unbind()))

    step = torch.stack([s["step"] for s in states]).to(wide)

    def factors(value: float | Tensor, skipped: float) -> list[Tensor]:
        """Return a 0-d factor per parameter: `value`, or `skipped` if its step is skipped."""
        return list(torch.where(finite, torch.zeros_like(step) + value, skipped).to(dtype).unbind())

    torch._foreach_lerp_(first, gradients, factors(1 - beta1, -0.0))
    torch._foreach_mul_(second, factors(beta2, 1.0))
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    denominator = list(torch._foreach_sqrt(second))
    torch._foreach_div_(denominator, factors(_complement(beta2, step).sqrt(), 1.0))
    torch._foreach_add_(denominator, factors(group["eps"], 1.0))
    change = list(torch._foreach_mul(first, factors(-(lr / _complement(beta1, step)), 0.0)))
    torch._foreach_div_(change, denominator)
    if not group["eps"]:  # an entry without a gradient so far, v = 0, does not move
        masks = [ok & (d > 0) for ok, d in zip(finite.unbind(), denominator, strict=True)]
    if masks is not None:
        change = [torch.where(ok, c, -0.0) for ok, c in zip(masks, change, strict=True)]

    moved = [weight.to(dtype) for weight in weights]  # copies only of half-precision weights
    if group["weight_decay"]:
        torch._foreach_mul_(moved, factors(1 - lr * group["weight_decay"], 1.0))
    torch._foreach_add_(moved, change)
    if moved[0] is not weights[0]:
        torch._foreach_copy_(weights, moved)


def _complement(beta: float, step: Tensor) -> Tensor:
    """Return 1 − βᵗ for t ≥ 1; for β = 0.999 a plain difference loses four digits in float32."""
    if step.dtype == torch.float64:
        return 1 - beta**step
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _flags(params: Sequence[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return masks of the gradients that exist on some rank and have finite squares on all."""
    # All squares are finite if the largest is. A shard may be empty.
    some = [g if g.numel() else g.new_zeros(1) for g in gradients]
    finite = torch.stack(torch._foreach_norm(some, ord=torch.inf)).square().isfinite()
    if not shards.sharded(params[0]):
        return torch.ones_like(finite), finite
    present = torch.tensor([p.grad is not None for p in params]).to(finite)
    counts = torch.stack([present, ~finite]).float()
    present, bad = (wire.add_up(counts, shards.mesh_groups(params[0]), "gradients") > 0).unbind()
    return present, ~bad
