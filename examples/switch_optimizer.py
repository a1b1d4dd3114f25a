"""Switch a running job from Muon and AdamW to Leon: momentum and Gram are converted."""

import torch
from torch import nn

import nucleon

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 16))
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01, weight_decay=0.0)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)
optimizers = [muon, adamw]
x = torch.randn(256, 16)
y = x.roll(1, dims=1).tanh()
for step in range(81):
    if step == 40:
        optimizers = [nucleon.converted(optimizers, model, nucleon.Leon, head=None)]
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
