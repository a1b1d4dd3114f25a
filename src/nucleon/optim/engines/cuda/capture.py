"""Launches recorded as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(
    run: Callable[[], None], stream: torch.cuda.Stream, pool_of: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph | None:
    """The launches of `run` as a graph, with the memory of another; None where that fails.

    It captures on `stream`, without the synchronization and the emptied cache of
    `torch.cuda.graph`. Other threads may go on using the device: loaders pin memory, and
    communication is watched.
    """
    graph = torch.cuda.CUDAGraph()
    pool: Any = None if pool_of is None else pool_of.pool()
    collecting = gc.isenabled()
    gc.disable()  # a graph that dies now would end the capture
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    except Exception:
        return None
    finally:
        if collecting:
            gc.enable()
    return graph
