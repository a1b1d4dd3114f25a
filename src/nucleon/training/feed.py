"""Batches on their way to the device: on CUDA drawn ahead and copied without waiting."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from nucleon.training.data import Batch


def feed(
    batches: Callable[[int], Batch], first: int, end: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Batches `first`, …, `end` − 1 on the device; closing it ends the thread.

    On CUDA the host waits for no copy: while one batch is trained on, a thread draws the next one
    into pinned memory. Elsewhere each is drawn when it is asked for.
    """
    if device.type != "cuda":
        for index in range(first, end):
            inputs, targets = batches(index)
            yield inputs.to(device), targets.to(device)
        return

    def pinned(index: int) -> Batch:
        inputs, targets = batches(index)
        return _pinned(inputs), _pinned(targets)

    # A thread begins on device 0, and pinning would make a context there.
    with ThreadPoolExecutor(1, initializer=lambda: torch.cuda.set_device(device)) as worker:
        for inputs, targets in ahead(pinned, first, end, worker):
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def ahead(
    draw: Callable[[int], Batch], first: int, end: int, worker: ThreadPoolExecutor
) -> Iterator[Batch]:
    """draw(first), …, draw(end − 1), each drawn by the worker while the one before is used."""
    waiting = worker.submit(draw, first) if first < end else None
    for following in range(first + 1, end + 1):
        assert waiting is not None
        batch = waiting.result()
        if following < end:
            waiting = worker.submit(draw, following)
        yield batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
