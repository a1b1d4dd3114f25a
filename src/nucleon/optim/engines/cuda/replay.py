"""Launches as CUDA graphs, and small stacks side by side: one launch instead of thirty.

A graph holds the addresses it was captured with, so everything that may move or change is an
`Input`, a small tensor that stays where it is: the addresses of gradients and states, the mask of
gradients that are there, and the rates. The arguments of the launches are baked in and compared at
every step; where they change from step to step, as with a schedule of the momentum, nothing is
captured.

A network of many shapes, as a convolutional one, is hundreds of kernels of a few microseconds that
leave most of the device idle, so stacks too small to fill it go side by side on a few streams. The
first stack of a lane waits for the present work of the caller's stream, the caller's stream in the
end for all lanes, so nothing outside of a step can tell. A graph that the caller captures has the
lanes as its branches.

The graphs of an optimizer share pools of memory, which it keeps: one of the largest stack among
them, and a small one for each lane. Stacks with large products are not captured: their kernels take
longer than the launches, and between the steps their memory is free for others.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.stacks import Stack

LANES = 8
TILE, LARGEST = 128, 64
"""A stack with more tiles in the triangles of its m×m products is alone: it fills the device."""

Pools = dict[torch.cuda.Stream, tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]]
"""For each stream that replays, the stream that captures, and the first graph with the pool."""


class Input:
    """A tensor that a graph reads in place, with its value where the host knows it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.known: object = None

    def set(self, value: object, write: Callable[[], object]) -> None:
        """Call `write`, which stores the value in the tensor, unless it is known to be there."""
        if self.known != value:
            write()
            self.known = value

    def fill(self, *numbers: float | Tensor) -> None:
        """Store numbers in the tensor, those on the device by a copy."""
        known = None if any(isinstance(number, Tensor) for number in numbers) else numbers
        if known is None or self.known != known:
            for target, number in zip(self.tensor.view(-1), numbers, strict=True):
                target.copy_(number) if isinstance(number, Tensor) else target.fill_(number)
            self.known = known


class Replay:
    """Repeated launches: made one by one first, then captured, then replayed."""

    def __init__(self) -> None:
        self.arguments: object = None
        """The arguments that are baked in."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fails = False
        """True if no graph could be made: the launches show what is wrong."""

    def run(
        self,
        arguments: object,
        launch: Callable[[], None],
        pools: Pools | None,
        device: torch.device,
    ) -> None:
        """Launch, capture or replay; without `pools`, the memory of graphs, nothing is captured.

        `launch` bakes the `arguments` in, which are compared with those of the last time.
        """
        if self.arguments != arguments:
            self.arguments, self.graph, self.fails = arguments, None, False
        elif self.graph is None and not self.fails and pools is not None and device.type == "cuda":
            self.graph = _captured(launch, pools, device)
            self.fails = self.graph is None
        launch() if self.graph is None else self.graph.replay()


def _captured(
    launch: Callable[[], None], pools: Pools, device: torch.device
) -> torch.cuda.CUDAGraph | None:
    """Return launches as a graph, or None where that fails; they were compiled and tuned before.

    It captures without the synchronization and the emptied cache of `torch.cuda.graph`. Other
    threads may go on using the device: loaders pin memory, and communication is watched.
    """
    # A pool dies with the last graph in it, so the first one is kept as long as the worklist.
    # Graphs that share a pool must not run at once: one pool for each stream they are replayed on.
    caller = torch.cuda.current_stream(device)
    stream, first = pools.get(caller) or (torch.cuda.Stream(device), None)
    graph = torch.cuda.CUDAGraph()
    pool: Any = None if first is None else first.pool()
    collecting = gc.isenabled()
    gc.disable()  # a graph that dies now would end the capture
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    except Exception:
        return None
    finally:
        if collecting:
            gc.enable()
    pools.setdefault(caller, (stream, graph))
    return graph


class Lanes:
    """The streams of a list of work, and the memory that its graphs share.

    Small stacks get their lanes in turns, the same at every step: a graph is replayed where
    it was captured, beside none that shares its memory.
    """

    def __init__(self, works: Sequence[Matrices]) -> None:
        self.pools: Pools = {}
        self.used: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        """The streams of this step, each with that of the caller."""
        turns = cycle(range(LANES))
        for work in works:
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
    """Return whether a stack leaves room on a GPU; False for those gathered from ranks in turn."""
    first, across = stack.params[0], -(-min(stack.shape) // TILE)
    if first.device.type != "cuda" or shards.sharded(first):
        return False
    return stack.count * across * (across + 1) // 2 <= LARGEST


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]
