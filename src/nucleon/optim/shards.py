"""Which part of a parameter lies on which rank: plain tensors are whole, DTensors in boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # it takes a second to import, and whoever has a DTensor has imported it
    from torch.distributed.tensor import DTensor

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Shards:
    """The ranks that hold a parameter, in the order of their mesh, and the box that each holds."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    """Ranks of one number hold a whole parameter together."""

    def mine(self) -> Box:
        """The box of this rank."""
        return self.boxes[self.ranks.index(dist.get_rank())]

    def replica_of(self, rank: int) -> list[int]:
        """The ranks that hold a whole parameter together with `rank`."""
        number = self.replicas[self.ranks.index(rank)]
        return [
            r for r, replica in zip(self.ranks, self.replicas, strict=True) if replica == number
        ]


def sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, to be read and written."""
    return tensor._local_tensor if sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered to every rank of its mesh."""
    return tensor.full_tensor() if sharded(tensor) else tensor


def supported(name: str, param: Tensor) -> None:
    """Raise on a DTensor whose parts cannot be told apart by mesh coordinates alone."""
    for placement in param.placements if sharded(param) else ():
        if type(placement).__name__ not in ("Shard", "Replicate"):  # not a subclass of them
            raise ValueError(
                f"{name} is placed as {placement} on its mesh; placement='owner' and 'gram' take "
                f"Shard and Replicate, use placement='local' for it"
            )


def of(param: Tensor) -> Shards | None:
    """The shards of a DTensor; None for a plain tensor, which every rank holds whole."""
    if not sharded(param):
        return None
    mesh = param.device_mesh
    coordinates = list(product(*(range(size) for size in mesh.shape)))
    replicated = [axis for axis, p in enumerate(param.placements) if p.is_replicate()]
    numbers: dict[tuple[int, ...], int] = {}
    replicas = [
        numbers.setdefault(tuple(c[axis] for axis in replicated), len(numbers)) for c in coordinates
    ]
    return Shards(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(_box(param, coordinate) for coordinate in coordinates),
        tuple(replicas),
    )


def _box(param: "DTensor", coordinate: Sequence[int]) -> Box:
    """The entries at one coordinate of the mesh: each Shard cuts what the ones before it left."""
    starts, sizes = [0] * param.ndim, list(param.shape)
    placed = zip(param.placements, param.device_mesh.shape, coordinate, strict=True)
    for placement, parts, index in placed:
        if placement.is_shard():
            axis: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
            step = -(-sizes[axis] // parts)  # as torch.chunk cuts: the last ones may be empty
            start = min(index * step, sizes[axis])
            starts[axis] += start
            sizes[axis] = min(step, sizes[axis] - start)
    return tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))


def mesh_groups(param: "DTensor") -> list[dist.ProcessGroup]:
    """The process groups of all axes of the mesh of a parameter."""
    return [param.device_mesh.get_group(axis) for axis in range(param.device_mesh.ndim)]


def sharded_groups(param: "DTensor", axis: int) -> list[dist.ProcessGroup]:
    """The process groups across which an axis of a parameter is cut."""
    return [
        param.device_mesh.get_group(mesh_axis)
        for mesh_axis, p in enumerate(param.placements)
        if p.is_shard(axis)
    ]


def kind(param: Tensor) -> object:
    """What tensors must share to be computed together: how they are cut, and over which ranks."""
    return (param.placements, param.device_mesh) if sharded(param) else None


def zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor of zeros shaped like the whole parameter."""
    if sharded(param):
        return torch.zeros(param.shape, dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype).detach()


def like(whole: Tensor, param: Tensor) -> Tensor:
    """A tensor that every rank has whole, cut like a parameter; nothing is sent."""
    if not sharded(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * param.device_mesh.ndim
    found = DTensor.from_local(whole, param.device_mesh, everywhere, run_check=False)
    return found.redistribute(placements=param.placements)
