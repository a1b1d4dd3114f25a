"""placement="gram": matrices cut along their long side, one m×m all-reduce a step, no gather.

Rank i holds the columns Ĝ_i (m×n_i) of Ĝ and a part M̂_i of M̂ = Σ_i M̂_i. With

    R = Σ_i (Ĝ_iĜ_iᵀ + c·M̂_i) + c·G²β₁⁻² I         (summed over the ranks)

every rank computes the same Q(R) ≈ R^(-1/2) and its own columns P_i = Q Ĝ_i of the direction. R is
symmetric: little more than one triangle of it is sent.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon import _checks, moments
from nucleon.linalg.kernels import add_to_diagonal, quintic_factor
from nucleon.linalg.roots import coupled_inverse_sqrt, floor
from nucleon.optim import shards, stacks, weights, wire
from nucleon.optim.polynomials import polynomials
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


def check(name: str, param: Tensor, spec: str | None) -> None:
    """Raise, by name, on a DTensor that is not one matrix cut along its long side."""
    if not shards.sharded(param):
        return
    blocks = stacks.blocks(param, spec)
    if param.ndim != 2 or sum(block.count for block in blocks) > 1:
        raise ValueError(
            f"{name} is not one 2-D matrix, which placement='gram' is for; use placement='owner'"
        )
    cut = {axis for p in param.placements if (axis := shards.axis_cut(p)) is not None}
    if cut - {_long_axis(param)}:
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} is cut along axis {min(cut)}; placement='gram' "
            f"is for the long side, and for the columns of a square: use placement='owner'"
        )


def update(optimizer: "MatrixOptimizer", stack: Stack, group: dict[str, Any]) -> None:
    """One step of matrices of one shape, cut alike; all ranks of their mesh take part."""
    states = [optimizer.state[p] for p in stack.params]
    dtype = _checks.work_dtype(stack.params[0].dtype)
    momentum: float = group["momentum"]
    there = torch.tensor([float(p.grad is not None) for p in stack.params], dtype=dtype)
    gradient = _columns(stack, [p.grad for p in stack.params], dtype)  # (b, m, n_i)
    if group["maximize"]:
        gradient = -gradient
    old = _columns(stack, [s["total"] for s in states], dtype)
    total = moments.accumulate_total(old, gradient, momentum)
    old_gram = gram = torch.cat([s["gram"] for s in states]) if optimizer.has_gram else old
    if optimizer.has_gram:
        discount = momentum if group["beta2"] is None else math.sqrt(group["beta2"])
        gram = moments.accumulate_gram(old_gram, gradient, discount)
    ahead = momentum * total + gradient if group["nesterov"] else total

    m, n = sorted(stack.shape)
    scale = optimizer.smoothing_scale(group, m, n) if optimizer.has_gram else 0.0
    part = ahead @ ahead.mT + (scale * gram if optimizer.has_gram else 0.0)
    # A value that is not finite spreads to the sum, so every rank skips the same matrices.
    r, present = _sum(stack, part, there.to(part.device))
    finite = r.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
    taken = finite & (present > 0)
    keep = taken[:, None, None]
    if scale:
        add_to_diagonal(r, scale * (group["gradient_bound"] / (momentum or 1.0)) ** 2)
    r = torch.where(keep, r, torch.eye(m, dtype=r.dtype, device=r.device))
    at = Situation(group, stack, states)
    q = factor(r, group["method"], group["iterations"])
    direction = q @ torch.where(keep, ahead, 0.0)

    _write(stack, torch.where(keep, total, old), [s["total"] for s in states])
    for state, skip in zip(states, (~finite & (present > 0)).long().split(1), strict=True):
        state["skipped"].add_(skip)
    if optimizer.has_gram:
        for state, new in zip(states, torch.where(keep, gram, old_gram).split(1), strict=True):
            state["gram"].copy_(new)
    weights.apply_boxes(stack, _natural(stack, direction), taken, at)
    optimizer.agree(stack, q, group)


def factor(r: Tensor, method: str, iterations: int) -> Tensor:
    """Q ≈ R^(-1/2) with QS in the unit ball, S Sᵀ ⪯ R, by the method's polynomials; no sync."""
    if method in ("eigh", "svd"):
        values, vectors = torch.linalg.eigh(r.double())
        cut = r.shape[-1] * torch.finfo(r.dtype).eps * values[..., -1:].clamp_min(0)
        root = torch.where(values > cut, values.clamp_min(0).rsqrt(), 0.0)
        return ((vectors * root.unsqueeze(-2)) @ vectors.mT).to(r.dtype)
    if method == "coupled":
        return coupled_inverse_sqrt(r, 3 * iterations)
    # Without restarts rounding errors grow with each step: five are safe in float32.
    wide = r.double() if iterations > 5 else r
    trace = wide.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    trace = trace.clamp_min(torch.finfo(wide.dtype).tiny)
    b = wide / trace
    add_to_diagonal(b, floor(wide.dtype) * torch.linalg.matrix_norm(b))
    q = None
    sequence = polynomials(method, iterations)
    for i, polynomial in enumerate(sequence):
        t = quintic_factor(b, *polynomial)
        q = t if q is None else t @ q
        if i + 1 < len(sequence):
            b = t @ b @ t
    assert q is not None
    return (q / trace.sqrt()).to(r.dtype)


def whole_gram(param: Tensor, gram: Tensor) -> Tensor:
    """M̂ = Σ_i M̂_i over the ranks that hold the parameter; a new tensor, every rank takes part."""
    return wire.add_up(gram.clone(), _groups(param), "Gram matrices")


def is_first(param: Tensor) -> bool:
    """Whether this rank keeps the whole of a Gram matrix that is loaded; the others keep 0."""
    return all(dist.get_rank(group) == 0 for group in _groups(param))


def _groups(param: Tensor) -> list[dist.ProcessGroup]:
    return shards.sharded_groups(param, _long_axis(param)) if shards.sharded(param) else []


def _long_axis(param: Tensor) -> int:
    return 0 if param.shape[0] > param.shape[1] else 1


def _sum(stack: Stack, matrices: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric matrices and flags summed over the ranks that hold the columns, in one message."""
    m = matrices.shape[-1]
    parts = [matrices[:, a:b, a:] for a, b in strips(m)]
    flat = torch.cat([*(part.reshape(-1) for part in parts), flags])
    wire.add_up(flat, _groups(stack.params[0]), "Gram matrices")
    *sums, flags = flat.split([*(part.numel() for part in parts), len(flags)])
    whole = torch.empty_like(matrices)
    for (a, b), part, total in zip(strips(m), parts, sums, strict=True):
        whole[:, a:b, a:] = total.view(part.shape)
        whole[:, b:, a:b] = whole[:, a:b, b:].mT
    return whole, flags


def strips(m: int) -> list[tuple[int, int]]:
    """Rows a…b of a symmetric matrix, of which the columns from a on are sent: 9/16 of it all."""
    step = -(-m // 8)
    return [(a, min(a + step, m)) for a in range(0, m, step)]


def _columns(stack: Stack, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """What this rank holds of tensors like the parameters → (b, m, n_i); 0 where there is none."""
    parts = [
        torch.zeros_like(shards.local(p)) if t is None else shards.local(t)
        for p, t in zip(stack.params, tensors, strict=True)
    ]
    return _long_side_last(stack, torch.stack(parts).to(dtype))


def _natural(stack: Stack, columns: Tensor) -> list[Tensor]:
    """(b, m, n_i) → tensors shaped like what this rank holds of each parameter."""
    return list(_long_side_last(stack, columns).unbind())


def _write(stack: Stack, columns: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, _natural(stack, columns), strict=True):
        shards.local(tensor).copy_(part)


def _long_side_last(stack: Stack, x: Tensor) -> Tensor:
    """Swap rows and columns where the whole parameter is tall, whatever a shard looks like."""
    return x.mT if _long_axis(stack.params[0]) == 0 else x
