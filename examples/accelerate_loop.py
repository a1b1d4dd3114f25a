"""Accelerate: prepared like any torch optimizer, with gradients accumulated over two batches."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nucleon

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = nucleon.create("leon", model, lr=0.02, aux_lr=1e-3, head="2")
x = torch.randn(256, 16)
batches = DataLoader(TensorDataset(x, x[:, :4].tanh()), batch_size=32)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for epoch in range(5):
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
