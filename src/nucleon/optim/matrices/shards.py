"""Parts of a parameter on each rank: plain tensors are whole, DTensors in boxes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # the import takes a second, and code with a DTensor has imported it
    from torch.distributed.tensor import DTensor

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Shards:
    """The ranks of a parameter, in the order of their mesh, and the box of each."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[tuple[int, ...], ...]
    """For each rank its place along the axes that replicate. Those with the same place hold a whole
    parameter together."""

    def replica_of(self, rank: int) -> list[int]:
        """Return the ranks that together with `rank` have a whole parameter."""
        mine = self.replicas[self.ranks.index(rank)]
        return [r for r, replica in zip(self.ranks, self.replicas, strict=True) if replica == mine]


def sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, to be read and written."""
    return tensor._local_tensor if sharded(tensor) else tensor


def real(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, a complex one as pairs of real numbers."""
    part = local(tensor)
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered to every rank of its mesh."""
    return tensor.full_tensor() if sharded(tensor) else tensor


def axis_cut(placement: object) -> int | None:
    """Return the axis of a tensor that a placement shards, or None."""
    return getattr(placement, "dim", None)  # is_shard() is False for some placements that shard


def check_supported(name: str, param: Tensor, remedy: str = "use placement='local' for it") -> None:
    """Check that the mesh coordinates determine a box of a DTensor."""
    if not sharded(param):
        return
    placed = list(zip(param.placements, param.device_mesh.shape, strict=True))
    for i, (placement, _) in enumerate(placed):
        kind = type(placement).__name__  # a subclass may be anything
        if kind == "_StridedShard":  # FSDP2 over tensor parallelism, which shards first
            axis = axis_cut(placement)
            inner = [size for p, size in placed[i + 1 :] if axis_cut(p) == axis]
            alone = sum(type(p).__name__ == kind and axis_cut(p) == axis for p, _ in placed) == 1
            fits = alone and cast(Any, placement).split_factor == math.prod(inner)
        else:
            fits = kind in ("Shard", "Replicate")
        if not fits:
            raise ValueError(
                f"{name} is placed as {placement} in {param.placements}; only Shard, Replicate and "
                f"FSDP2 over tensor parallelism are supported: {remedy}"
            )


def of(param: Tensor) -> Shards | None:
    """Return the shards of a DTensor; None for a plain tensor, which is whole on every rank."""
    if not sharded(param):
        return None
    mesh = param.device_mesh
    coordinates = list(product(*(range(size) for size in mesh.shape)))
    replicated = [axis for axis, p in enumerate(param.placements) if p.is_replicate()]
    return Shards(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(_box(param, coordinate) for coordinate in coordinates),
        tuple(tuple(c[axis] for axis in replicated) for c in coordinates),
    )


def _box(param: "DTensor", coordinate: Sequence[int]) -> Box:
    starts, sizes = [0] * param.ndim, list(param.shape)
    placed = zip(param.placements, param.device_mesh.shape, coordinate, strict=True)
    # FSDP2 is the outer axis of the mesh, and shards after tensor parallelism.
    for placement, parts, index in sorted(placed, key=lambda x: hasattr(x[0], "split_factor")):
        if (axis := axis_cut(placement)) is not None:
            step = -(-sizes[axis] // parts)  # as torch.chunk; the last shards may be empty
            start = min(index * step, sizes[axis])
            starts[axis] += start
            sizes[axis] = min(step, sizes[axis] - start)
    return tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))


def box(param: Tensor) -> Box:
    """Return the box of this rank in a parameter; all of a plain tensor."""
    if not sharded(param):
        return tuple(slice(0, n) for n in param.shape)
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None  # a rank outside the mesh holds no such parameter
    return _box(param, coordinate)


def mesh_groups(param: "DTensor") -> list[dist.ProcessGroup]:
    """Return the process groups of all axes of the mesh of a parameter."""
    return [param.device_mesh.get_group(axis) for axis in range(param.device_mesh.ndim)]


def sharding(param: Tensor) -> object:
    """Return the placements and mesh that tensors computed together share; None if plain."""
    return (param.placements, param.device_mesh) if sharded(param) else None


def zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a plain tensor of zeros shaped like the whole parameter."""
    if sharded(param):
        return torch.zeros(param.shape, dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype).detach()


def like(whole: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor, which every rank has whole, like a parameter; no communication."""
    if not sharded(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * param.device_mesh.ndim
    replicated = DTensor.from_local(whole, param.device_mesh, everywhere, run_check=False)
    return replicated.redistribute(placements=param.placements)
