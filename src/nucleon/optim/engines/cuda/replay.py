"""Launches as CUDA graphs, and small stacks side by side: one launch instead of thirty.

A graph contains the addresses of its capture. So all data that may move or change is an `Input`, a
small tensor at a fixed address: the addresses of gradients and states, the mask of gradients, and
the rates. The arguments of the launches are part of the graph, and compared in every step. If they
change in every step, as with a schedule of the momentum, nothing is captured.

A network of many shapes, such as a convolutional one, launches hundreds of kernels of a few
microseconds that leave most of the device idle. So stacks too small to fill it run side by side on
a few streams, the lanes. The first stack of a lane waits for the present work of the caller's
stream, and at the end of the step the caller's stream waits for all lanes. In a graph that the
caller captures, the lanes are branches.

The graphs of an optimizer share pools of memory, which it keeps: one as large as its largest stack
needs, and a small one for each lane. Stacks with large products are not captured: their kernels
take longer than the launches, and between steps their memory is free for others.
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
    """A tensor that a graph reads in place, with its value if the host knows it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.known: object = None

    def set(self, value: object, write: Callable[[], object]) -> None:
        """Call `write`, which stores the value in the tensor, unless the tensor contains it."""
        if self.known != value:
            write()
            self.known = value

    def fill(self, *numbers: float | Tensor) -> None:
        """Store numbers in the tensor."""
        known = None if any(isinstance(number, Tensor) for number in numbers) else numbers
        if known is None or self.known != known:
            for target, number in zip(self.tensor.view(-1), numbers, strict=True):
                target.copy_(number) if isinstance(number, Tensor) else target.fill_(number)
            self.known = known


class Replay:
    """Repeated launches: run one by one first, then captured, then replayed."""

    def __init__(self) -> None:
        self.arguments: object = None
        """The arguments of the last launches, and of the graph."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fails = False
        """True after a failed capture; the launches themselves then raise the error."""

    def run(
        self,
        arguments: object,
        launch: Callable[[], None],
        pools: Pools | None,
        device: torch.device,
    ) -> None:
        """Launch, capture or replay; without `pools`, the memory of graphs, nothing is captured.

        The graph is only replayed while the `arguments` of `launch` are unchanged.
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
    """Capture launches that have run before; return the graph, or None if that fails.

    Unlike `torch.cuda.graph` it does not synchronize or empty the cache. Other threads may use the
    device meanwhile, to pin memory or to watch communication.
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

    Small stacks are assigned to lanes in turn, and keep them: graphs of one lane, which share
    memory, never run at once.
    """

    def __init__(self, works: Sequence[Matrices]) -> None:
        self.pools: Pools = {}
        self.used: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        """The streams of this step, each with that of its caller."""
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
        """Make the caller's streams wait for the lanes in use."""
        for stream, caller in self.used.items():
            caller.wait_stream(stream)
        self.used.clear()


def _small(stack: Stack) -> bool:
    """Return True if a stack leaves room on a GPU; False if it is gathered from ranks."""
    first, across = stack.params[0], -(-min(stack.shape) // TILE)
    if first.device.type != "cuda" or shards.sharded(first):
        return False
    return stack.count * across * (across + 1) // 2 <= LARGEST


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]
