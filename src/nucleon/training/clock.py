"""What share of a training step is the optimizer's, measured without making the device wait."""

import time

import torch

WARM = 3
"""Steps that are not counted: in the first ones things are compiled and captured."""


class Clock:
    """Marks in the steps of a loop: begin, optimizer, end.

    On CUDA the marks are events, which the device passes when it gets there and the host reads when
    it has waited for the device anyhow; elsewhere they are times of the host.

    Args:
        device: that the steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.whole = self.own = 0.0
        self.steps = 0
        self._marks: list[_Mark] = []

    def mark(self) -> None:
        """Called three times in a step: where it begins, before and after the optimizer's part."""
        self._marks.append(_Mark(self.device))

    def read(self) -> None:
        """Add up the steps since the last call, but for the first `WARM` of all; waits for them."""
        for begin, middle, end in zip(*(iter(self._marks),) * 3, strict=True):
            self.steps += 1
            if self.steps > WARM:
                self.whole += begin.until(end)
                self.own += middle.until(end)
        self._marks.clear()

    @property
    def share(self) -> float | None:
        """Of the optimizer in the steps so far; None where too few are done to tell."""
        self.read()
        return self.own / self.whole if self.whole > 0 else None


class _Mark:
    """A moment."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        self.time = time.perf_counter()

    def until(self, later: "_Mark") -> float:
        """Milliseconds."""
        if self.event is None or later.event is None:
            return 1e3 * (later.time - self.time)
        later.event.synchronize()
        return self.event.elapsed_time(later.event)
