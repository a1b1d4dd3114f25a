"""Asynchronous messages between ranks, with a clear error if a rank does not answer."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim.matrices import shards

T = TypeVar("T")


def exchange(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str
) -> Callable[[], None]:
    """Start sending and receiving flat tensors, (rank, tensor); return a function that waits.

    A call may have at most one message in each direction between two ranks.
    """
    operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    if not operations:
        return lambda: None
    with exchanging(what):
        works = dist.batch_isend_irecv(operations)
    return lambda: _wait(works, what)


def broadcast(tensor: Tensor, source: int, what: str) -> Callable[[], None]:
    """Start sending a tensor from one rank to all others; return a function that waits."""
    with exchanging(what):
        work = dist.broadcast(tensor, src=source, async_op=True)
    return lambda: _wait([work], what)


def add_up(tensor: Tensor, groups: Sequence[dist.ProcessGroup], what: str) -> Tensor:
    """Sum a tensor in place over process groups, one after the other."""
    for group in groups:
        with exchanging(what):
            dist.all_reduce(tensor, group=group)
    return tensor


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on every rank of its mesh."""
    with exchanging("gradients"):
        return shards.full(tensor)


def redistribute(params: Iterable[Tensor]) -> None:
    """Bring gradients into the placements of their parameters.

    If DTensor has sharded the batch, the gradient of a replicated weight is a partial sum that must
    still be reduced. Every rank must call it.
    """
    for param in params:
        if not shards.sharded(param) or param.grad is None or not shards.sharded(param.grad):
            continue
        if param.grad.placements != param.placements:
            with exchanging("gradients"):
                param.grad = param.grad.redistribute(placements=param.placements)


ProcessGroups = Sequence[dist.ProcessGroup | None]
"""Process groups of the axes of a mesh, used one after the other; [None] is all ranks."""


def gather_objects(mine: T, what: str, groups: ProcessGroups = (None,)) -> list[T]:
    """Return the object of every rank, in the order of the ranks, on all of them."""
    objects: list[tuple[int, T]] = [(dist.get_rank(), mine)]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        with exchanging(what):
            dist.all_gather_object(parts, objects, group=group)
        objects = [entry for part in parts for entry in part]
    return [value for _, value in sorted(objects, key=itemgetter(0))]


def digest(value: object) -> str:
    """Return a hash of the printed form of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def fingerprint(tensor: Tensor) -> int:
    """Return a weighted sum of the entries' bits as integers, modulo 2⁶⁴; synchronizes."""
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
    """Name the exchange in the error if another rank fails, or does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not exchange the {what}: another rank failed or did "
            f"not answer within the process group's timeout; look at the output of the others, "
            f"then resume from the last checkpoint"
        ) from error
