"""Lightning: a callback that logs diagnostics of the optimizers."""

from typing import Any

import lightning.pytorch as pl

from nucleon import _checks
from nucleon.integrations.quantities import quantities
from nucleon.optim.base import MatrixOptimizer


class DiagnosticsLogger(pl.Callback):
    """Send the `quantities` of the optimizers to the loggers every N optimizer steps.

    Args:
        every: N (100); each time synchronizes with the device once.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = _checks.count("every", every)
        self.last = 0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log once after each N-th step, also if a step takes several batches."""
        step = trainer.global_step
        if step == self.last or step % self.every:
            return
        self.last = step
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                numbers = quantities(optimizer)
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=step)
