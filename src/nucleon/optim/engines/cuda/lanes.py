"""Stacks too small to fill a GPU side by side, each on one of a few streams.

A network of many shapes, as a convolutional one, is hundreds of kernels of a few microseconds that
leave most of the device idle. The first stack of a lane waits for what the caller's stream has
done so far, the caller's stream in the end for all lanes, so nothing outside of a step can tell. A
graph that the caller captures has the lanes as its branches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from typing import Any

import torch

from nucleon.optim.engines.cuda import engine
from nucleon.optim.engines.work import Matrices, Work
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.stacks import Stack

COUNT = 8
TILE, LARGEST = 128, 64
"""A stack with more tiles in the triangles of its m×m products is alone: it fills the device."""


class Lanes:
    """The streams of a list of work, and the memory that its graphs share.

    Small stacks are given their lanes in turns, the same at every step: a graph is replayed where
    it was captured, beside none that shares its memory.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self.pools: dict[Any, Any] = {}
        """See `graphs.Pools`."""
        self.used: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        """The streams of this step, each with that of the caller."""
        turns = cycle(range(COUNT))
        for work in works:
            if isinstance(work, Matrices) and work.engine is engine:
                work.lanes = self
                work.lane = next(turns) if _small(work.stack) else None

    @contextmanager
    def entered(self, work: Matrices) -> Iterator[None]:
        """Put the launches of a piece of work on its lane."""
        if work.lane is None:
            yield
            return
        device = work.params[0].device
        stream = _streams(device)[work.lane]
        if stream not in self.used:
            self.used[stream] = torch.cuda.current_stream(device)
            stream.wait_stream(self.used[stream])
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the caller's streams wait for the lanes that were used."""
        for stream, caller in self.used.items():
            caller.wait_stream(stream)
        self.used.clear()


def _small(stack: Stack) -> bool:
    """Whether it leaves room on a GPU; not what is gathered from other ranks, in an order."""
    first, across = stack.params[0], -(-min(stack.shape) // TILE)
    if first.device.type != "cuda" or shards.sharded(first):
        return False
    return stack.count * across * (across + 1) // 2 <= LARGEST


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(COUNT)]
