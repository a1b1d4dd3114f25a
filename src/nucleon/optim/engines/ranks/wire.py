"""Messages between ranks: counted, waited for later, with a clear error when a rank is silent."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim.matrices import shards

T = TypeVar("T")


@dataclass
class Traffic:
    """Traffic that this rank has sent since the counters were last set to zero.

    Collectives count as rings: a broadcast is passed on by every rank but the last, an all-reduce
    sends twice all parts of the tensor but one.
    """

    bytes: int = 0
    messages: int = 0

    def count(self, tensor: Tensor, copies: int = 1) -> None:
        """Enter `copies` messages of one tensor."""
        self.bytes += copies * tensor.numel() * tensor.element_size()
        self.messages += copies


TRAFFIC = Traffic()


def nothing() -> None:
    """Wait for nothing, since nothing was sent."""


def exchange(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str
) -> Callable[[], None]:
    """Start sending and receiving flat tensors, (rank, tensor); returns how to wait for it.

    Between two ranks there is one message per call in each direction at most.
    """
    operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    if not operations:
        return nothing
    for _, tensor in sends:
        TRAFFIC.count(tensor)
    with exchanging(what):
        works = dist.batch_isend_irecv(operations)
    return lambda: _wait(works, what)


def broadcast(tensor: Tensor, source: int, what: str) -> Callable[[], None]:
    """Start sending a tensor from one rank to all others; returns how to wait for it."""
    if (dist.get_rank() + 1) % dist.get_world_size() != source:
        TRAFFIC.count(tensor)
    with exchanging(what):
        work = dist.broadcast(tensor, src=source, async_op=True)
    return lambda: _wait([work], what)


def add_up(tensor: Tensor, groups: Sequence[dist.ProcessGroup], what: str) -> Tensor:
    """Sum a tensor in place over process groups, one after the other."""
    for group in groups:
        with exchanging(what):
            dist.all_reduce(tensor, group=group)
        ranks = dist.get_world_size(group)
        TRAFFIC.bytes += 2 * (ranks - 1) * tensor.nbytes // ranks
        TRAFFIC.messages += 2 * (ranks - 1)
    return tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank that holds a part of it."""
    if not shards.sharded(tensor):
        return tensor
    axes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts = math.prod(size for placed, size in axes if shards.axis_cut(placed) is not None)
    TRAFFIC.count(shards.local(tensor), parts - 1)
    with exchanging("gradients"):
        return tensor.full_tensor()


def redistribute(params: Iterable[Tensor]) -> None:
    """Bring gradients into the placements of their parameters; not counted.

    Where DTensor cut the batch, the gradient of a weight that every rank has whole is a sum over
    ranks that is still to be added up. Every rank must take part.
    """
    for param in params:
        if not shards.sharded(param) or param.grad is None or not shards.sharded(param.grad):
            continue
        if param.grad.placements != param.placements:
            with exchanging("gradients"):
                param.grad = param.grad.redistribute(placements=param.placements)


ProcessGroups = Sequence[dist.ProcessGroup | None]
"""Groups of ranks asked one after the other, the axes of a mesh; [None] is all ranks at once."""


def gather_objects(mine: T, what: str, groups: ProcessGroups = (None,)) -> list[T]:
    """The object of every rank, in the order of the ranks, on all of them; not counted."""
    found: list[tuple[int, T]] = [(dist.get_rank(), mine)]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        with exchanging(what):
            dist.all_gather_object(parts, found, group=group)
        found = [entry for part in parts for entry in part]
    return [value for _, value in sorted(found, key=itemgetter(0))]


def merged(mine: Mapping[str, T], what: str) -> dict[str, T]:
    """One dict of the entries of all ranks, the same on each, sorted by rank."""
    return {name: x for part in gather_objects(dict(mine), what) for name, x in part.items()}


def check_same(value: object, what: str, groups: ProcessGroups = (None,)) -> None:
    """Raise on every rank unless all ranks have the same `value`, by its printed form."""
    mine = (dist.get_rank(), digest(value))
    (first, expected), *found = gather_objects(mine, what, groups)
    others = [rank for rank, other in found if other != expected]
    if others:
        raise RuntimeError(
            f"{what} of rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ "
            f"from those of rank {first}; every rank must have the same ones, in the same order"
        )


def digest(value: object) -> str:
    """A hash of the printed form of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def fingerprint(tensor: Tensor) -> int:
    """The sum of the bits of a tensor as whole numbers, modulo 2⁶⁴; synchronizes."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(kinds[tensor.element_size()]).long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device).view(bits.shape)
    return int((bits * places).sum())


def _wait(works: Sequence[Any], what: str) -> None:
    with exchanging(what):
        for work in works:
            work.wait()


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Say what was being exchanged when another rank failed, or did not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not exchange the {what}: another rank failed or did "
            f"not answer within the process group's timeout; look at the output of the others, "
            f"and resume from the last checkpoint"
        ) from error
