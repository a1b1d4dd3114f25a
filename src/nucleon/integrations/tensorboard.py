"""TensorBoard: diagnostics of an optimizer every N steps, without a line in the training loop."""

from typing import Any, Self

from torch.optim import Optimizer

from nucleon import _checks
from nucleon.integrations.quantities import quantities
from nucleon.optim.base import MatrixOptimizer


class DiagnosticsWriter:
    """Write diagnostics and certificates to TensorBoard after every N-th step of the optimizer.

    The tags are the keys, "leon/{parameter}/{quantity}". Use as a context, or call `close()` to
    stop writing; the writer stays open.

    Args:
        optimizer: Muon, Pion or Leon.
        writer: a `SummaryWriter`; None on ranks that do not write. With a `placement` they must
            still call `diagnostics()`.
        every: N (100); each time synchronizes with the device once.
        start: steps taken before, in a resumed run (0).
    """

    def __init__(
        self,
        optimizer: MatrixOptimizer,
        writer: Any,
        every: int = 100,
        *,
        start: int = 0,
    ) -> None:
        self.optimizer, self.writer = optimizer, writer
        self.every = _checks.count("every", every)
        self.steps = start
        self._hook = optimizer.register_step_post_hook(self._after)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.write()

    def write(self) -> None:
        """Write now."""
        numbers = quantities(self.optimizer)  # on every rank
        if self.writer is not None:
            for tag, value in numbers.items():
                self.writer.add_scalar(tag, value, self.steps)

    def close(self) -> None:
        """Stop writing."""
        self._hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
