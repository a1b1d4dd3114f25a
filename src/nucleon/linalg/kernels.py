"""The products that the iterations are made of, fused where torch can; no checks, no sync."""

import torch
from torch import Tensor


def add_product(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """βC + αAB for stacks (…, m, n) that share their leading dimensions, in one pass."""
    if c.ndim == 2:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    count = c.shape[:-2].numel()
    flat = (x.reshape(count, *x.shape[-2:]) for x in (c, a, b))
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).reshape(c.shape)


def add_to_diagonal(a: Tensor, value: float | Tensor) -> Tensor:
    """A + value·I in place; a tensor has one entry a matrix, (…)."""
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(value.unsqueeze(-1) if isinstance(value, Tensor) and value.ndim else value)
    return a


def quintic_factor(b: Tensor, c1: float, c3: float, c5: float) -> Tensor:
    """T = c₁I + c₃B + c₅B², the factor that one odd polynomial puts on X, B = XXᵀ."""
    t = add_product(b, b, b, beta=c3, alpha=c5) if c5 else c3 * b
    return add_to_diagonal(t, c1)
