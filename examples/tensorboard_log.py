"""TensorBoard: diagnostics after every tenth step; the same flat dict is what W&B logs."""

import tempfile

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import nucleon
from nucleon.integrations.tensorboard import DiagnosticsWriter

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = nucleon.create("leon", model, lr=0.02, head="2")
x = torch.randn(64, 8)
with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as board:
    with DiagnosticsWriter(optimizer, board, every=10):
        for step in range(31):
            loss = (model(x).squeeze() - x[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    for name, value in optimizer.diagnostics().items():  # wandb.log(optimizer.diagnostics())
        print(f"{name}: {value:.4g}")
