"""Stacks too small to fill a GPU side by side, each on one of a few streams.

A network of many shapes, as a convolutional one, is hundreds of kernels of a few microseconds that
leave most of the device idle. The first stack of a lane waits for what the caller's stream has
done so far, the caller's stream in the end for all lanes, so nothing outside of a step can tell. A
graph that the caller captures has the lanes as its branches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import cycle

import torch

from nucleon.optim.engines.work import Matrices, Work
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.stacks import Stack

COUNT = 8
TILE, LARGEST = 128, 64
"""A stack with more tiles in the triangles of its m×m products is alone: it fills the device."""

Lane = Callable[[Work], AbstractContextManager[None]]


def assign(works: Sequence[Work]) -> None:
    """Give the small stacks of a list their lanes, in turns.

    They have the same at every step: a graph is replayed where it was captured, beside none that
    shares its memory.
    """
    turns = cycle(range(COUNT))
    for work in works:
        if isinstance(work, Matrices) and _small(work.stack):
            work.lane = next(turns)


@contextmanager
def opened() -> Iterator[Lane]:
    """What puts the launches of a piece of work on its lane; all are joined in the end."""
    used: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    @contextmanager
    def lane(work: Work) -> Iterator[None]:
        if work.lane is None:
            yield
            return
        device = work.params[0].device
        stream = _streams(device)[work.lane]
        if stream not in used:
            used[stream] = torch.cuda.current_stream(device)
            stream.wait_stream(used[stream])
        with torch.cuda.stream(stream):
            yield

    try:
        yield lane
    finally:
        for stream, caller in used.items():
            caller.wait_stream(stream)


def _small(stack: Stack) -> bool:
    """Whether it leaves room on a GPU; not what is gathered from other ranks, in an order."""
    first, across = stack.params[0], -(-min(stack.shape) // TILE)
    if first.device.type != "cuda" or shards.sharded(first):
        return False
    return stack.count * across * (across + 1) // 2 <= LARGEST


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(COUNT)]
