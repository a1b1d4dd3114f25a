"""What an optimizer does to each matrix: a flat dict of floats, one synchronization."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nucleon.linalg import coefficients
from nucleon.linalg._precision import exact_products
from nucleon.linalg.norms import operator_norm_bound
from nucleon.linalg.polar import polar_polynomial
from nucleon.optim.options import scale_factor
from nucleon.optim.stacks import parameter_names

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer

QUANTITIES = ("update_norm", "smoothing_share", "cosine_to_muon", "update_ratio", "skipped")


def collect(optimizer: "MatrixOptimizer") -> dict[str, float]:
    """The quantities of `MatrixOptimizer.diagnostics`, measured on device and read back at once."""
    keys: list[str] = []
    factors: list[float] = []
    tables: list[Tensor] = []
    names = parameter_names(optimizer.param_groups)
    for group in optimizer.param_groups:
        for stack, states in optimizer.stacks_of(group) if group["rule"] == "matrix" else ():
            total, smoothing, direction = optimizer.directions(stack, states, group)
            weights = stack.gather(stack.params, total.dtype)
            skipped = stack.gather_own(s["skipped"] for s in states)
            with exact_products(total.device):
                table = _measure(total, smoothing, direction, weights, group["lr"], skipped)
            tables.append(table.flatten().double())
            scale = scale_factor(group["scale"], *stack.shape)
            for piece in stack.pieces:
                for name in piece.names(names[piece.param]):
                    keys += [f"{optimizer.name}/{name}/{quantity}" for quantity in QUANTITIES]
                    factors += [scale if q == "update_ratio" else 1.0 for q in QUANTITIES]
    if not tables:
        return {}
    values: list[float] = torch.cat([t.to(tables[0].device) for t in tables]).tolist()
    return {key: value * f for key, value, f in zip(keys, values, factors, strict=True)}


def _measure(
    total: Tensor,
    smoothing: Tensor,
    direction: Tensor,
    weights: Tensor,
    lr: float | Tensor,
    skipped: Tensor,
) -> Tensor:
    """A table (b, 5) with the columns QUANTITIES, the update ratio without the shape's scale."""
    muon = polar_polynomial(total, coefficients.contracted(coefficients.polar_express(1e-4, 8)))
    signal = total.square().sum(dim=(-2, -1))
    noise = (
        smoothing.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        if smoothing.numel()
        else torch.zeros_like(signal)
    )
    columns = (
        operator_norm_bound(direction),
        _ratio(noise, signal + noise),
        _ratio((direction * muon).sum(dim=(-2, -1)), _norm(direction) * _norm(muon)),
        (lr.reshape(()) if isinstance(lr, Tensor) else lr)
        * _ratio(_norm(direction), _norm(weights)),
        skipped.to(total.dtype),
    )
    return torch.stack(columns, dim=1)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is 0."""
    return torch.where(b > 0, a / b, 0.0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))
