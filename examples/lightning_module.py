"""Lightning: one line in `configure_optimizers`, and a callback that logs the diagnostics."""

import lightning.pytorch as pl
import torch
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
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):  # noqa: D102
        return nucleon.create("leon", self, lr=0.02, aux_lr=1e-3)


torch.manual_seed(0)
x = torch.randn(256, 16)
batches = DataLoader(TensorDataset(x, x[:, :4].tanh()), batch_size=32)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
for epochs in (1, 5):
    torch.manual_seed(0)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", enable_checkpointing=False,
                         callbacks=[DiagnosticsLogger(every=8)], **quiet)  # fmt: skip
    trainer.fit(Module(), batches)
    print(f"{epochs} epochs: loss {trainer.callback_metrics['loss'].item():.4f}")
