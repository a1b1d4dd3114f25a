"""The ranks that hold the parameters of a group, and the owner of each."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from nucleon.optim.engines.ranks import wire
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import Infos, blocks

T = TypeVar("T")


def world(params: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the ranks that have these parameters; (0,) in a single process."""
    layout = next((shards.of(p) for p in params if shards.sharded(p)), None)
    if layout is not None:
        return layout.ranks
    if dist.is_available() and dist.is_initialized():
        return tuple(range(dist.get_world_size()))
    return (0,)


def owned(group: Mapping[str, Any]) -> bool:
    """Return True if each parameter of a group has one rank that keeps its state and steps it."""
    requested = group["placement"] == "owner" and group["route"] == "matrix"
    return requested and world(group["params"]) != (0,)


def owners(group: Mapping[str, Any], infos: Infos) -> list[int | None]:
    """Return the rank that owns each parameter of a group; None for placement="local"."""
    params: Sequence[Tensor] = group["params"]
    if not owned(group):
        return [None] * len(params)
    ranks = world(params)
    sections = [blocks(param, infos[param].axes) for param in params]
    sizes = tuple(tuple((b.count, b.rows, b.columns) for b in parts) for parts in sections)
    return [ranks[i] for i in shares(sizes, len(ranks))]


def kept(group: Mapping[str, Any], infos: Infos) -> list[tuple[Tensor, bool]]:
    """Return the parameters of a group, each with True if this rank keeps its state."""
    pairs = zip(group["params"], owners(group, infos), strict=True)
    return [(param, owner is None or owner == dist.get_rank()) for param, owner in pairs]


@lru_cache(maxsize=64)
def shares(sizes: tuple[tuple[tuple[int, int, int], ...], ...], parts: int) -> tuple[int, ...]:
    """Assign parameters, equal shapes together, to `parts` runs of about equal cost m²n + m³.

    Each size has a (count, rows, columns) for every block of the parameter. No run costs more than
    the mean plus the most expensive parameter.
    """
    costs = [sum(b * min(r, c) ** 2 * (r + c) for b, r, c in blocks) for blocks in sizes]
    total = sum(costs) or 1
    share, before = [0] * len(sizes), 0
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], sizes[i], i)):
        share[i] = min(parts - 1, (2 * before + costs[i]) * parts // (2 * total))
        before += costs[i]
    return tuple(share)


def merged(mine: dict[str, T], groups: Sequence[Mapping[str, Any]], what: str) -> dict[str, T]:
    """Return the entries of all ranks, in the order of the ranks, if one rank keeps some state."""
    parts = wire.gather_objects(mine, what) if any(map(owned, groups)) else [mine]
    return {name: entry for part in parts for name, entry in part.items()}


def check(group: Mapping[str, Any], infos: Infos) -> None:
    """Check that the placement of a group supports its parameters."""
    if group["placement"] == "local" or group["route"] != "matrix":
        return
    params: Sequence[Tensor] = group["params"]
    for param in params:
        shards.check_supported(infos[param].name, param)
    meshes = {world([param]) for param in params}
    if len(meshes) > 1:
        raise ValueError(
            f"the parameters of one group are on different ranks ({sorted(meshes)}); make one "
            f"group for each mesh"
        )
