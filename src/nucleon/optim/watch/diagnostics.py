"""Diagnostics of the update of each matrix: a flat dict of floats, by one synchronization."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg import coefficients
from nucleon.linalg._precision import exact_products
from nucleon.linalg.norms import operator_norm_bound
from nucleon.linalg.polar import polar_polynomial
from nucleon.optim.engines import reference, rest
from nucleon.optim.engines.ranks import placement
from nucleon.optim.engines.work import HasDirection, Matrices, Settings
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import Infos, blocks

QUANTITIES = ("update_norm", "smoothing_share", "cosine_to_muon", "update_ratio", "skipped")


def collect(
    optimizer: HasDirection,
    works: Sequence[Matrices],
    settings: Sequence[Settings],
) -> dict[str, float]:
    """Measure the quantities of `MatrixOptimizer.diagnostics` and read them at once."""
    groups, infos = optimizer.param_groups, optimizer.infos
    keys: list[str] = []
    tables: list[Tensor] = []
    weights = _weight_norms(groups, infos)
    for work in works:
        stack = work.stack
        options = settings[work.group_index]
        total, smoothing, direction = reference.present_direction(work, options)
        norms = stack.gather_own(weights[p] for p in stack.params).to(total.dtype)
        skipped = stack.gather_own(s["skipped"] for s in work.states)
        with exact_products(total.device):
            rate = options.group["lr"] * options[stack.kind].scale
            table = _measure(total, smoothing, direction, norms, rate, skipped)
        tables.append(table.flatten())
        for piece in stack.pieces:
            for matrix in piece.names(infos[piece.param].name):
                keys += [f"{optimizer.name}/{matrix}/{quantity}" for quantity in QUANTITIES]
    values: list[float] = []
    if tables:
        values = torch.cat([t.to(tables[0].device) for t in tables]).tolist()
    mine = dict(zip(keys, values, strict=True))
    return placement.merged(mine, groups, "diagnostics")


def _weight_norms(groups: Sequence[Mapping[str, Any]], infos: Infos) -> dict[Tensor, Tensor]:
    """Return ‖W‖_F of each matrix of each parameter; ranks gather one parameter at a time."""
    norms: dict[Tensor, Tensor] = {}
    for param in (p for g in groups if g["route"] == "matrix" for p in g["params"]):
        whole = shards.full(param).to(_checks.work_dtype(param.dtype))
        sections = blocks(param, infos[param].axes)
        norms[param] = torch.cat([rest.frobenius(block.matrices(whole)) for block in sections])
    return norms


def _measure(
    total: Tensor,
    smoothing: Tensor,
    direction: Tensor,
    weight_norms: Tensor,
    rate: float | Tensor,
    skipped: Tensor,
) -> Tensor:
    """Return a table (b, 5) with the columns QUANTITIES; `rate` is lr·scale."""
    muon = polar_polynomial(total, coefficients.contracted(coefficients.polar_express(1e-4, 8)))
    size = total.abs().amax(dim=(-2, -1))
    diagonal = smoothing.diagonal(dim1=-2, dim2=-1) if smoothing.numel() else total[..., :0, 0]
    if diagonal.shape[-1]:
        size = torch.maximum(size, diagonal.amax(dim=-1).clamp_min(0.0).sqrt())
    size = size.clamp_min(torch.finfo(size.dtype).tiny)[:, None]  # sums of squares may overflow
    signal = (total / size[..., None]).square().sum(dim=(-2, -1))
    noise = (diagonal / size / size).sum(dim=-1)
    length = rest.frobenius(direction)
    columns = (
        operator_norm_bound(direction),
        _ratio(noise, signal + noise),
        _ratio((direction * muon).sum(dim=(-2, -1)), length * rest.frobenius(muon)),
        (rate.reshape(()) if isinstance(rate, Tensor) else rate) * _ratio(length, weight_norms),
        skipped.to(total.dtype),
    )
    return torch.stack(columns, dim=1)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a/b, or 0 where b is 0."""
    return torch.where(b > 0, a / b, 0.0)
