"""Lightning: one line in `configure_optimizers`, and a callback that logs the diagnostics."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nucleon
from nucleon.integrations.lightning import DiagnosticsLogger


class Module(pl.LightningModule):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def training_step(self, batch, index):  # noqa: D102
        loss = nn.functional.mse_loss(self.head(self.body(batch[0]).relu()), batch[1])
        print(f"loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):  # noqa: D102
        return nucleon.create("leon", self, lr=0.02, aux_lr=1e-3)


torch.manual_seed(0)
x = torch.randn(256, 16)
batches = DataLoader(TensorDataset(x, x[:, :4].tanh()), batch_size=128)
with tempfile.TemporaryDirectory() as folder:
    logger = CSVLogger(folder)
    trainer = pl.Trainer(max_epochs=20, accelerator="cpu", logger=logger, callbacks=[
        DiagnosticsLogger(every=20)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(), batches)
    print(Path(logger.log_dir, "metrics.csv").read_text())
