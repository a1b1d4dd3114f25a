"""Plain PyTorch: torch.compile, bfloat16 autocast, clipping and a schedule, in one loop."""

import torch
from torch import nn

import nucleon

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
optimizer = nucleon.Leon.for_model(model, lr=0.02, aux_lr=1e-3, head="3")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
print(optimizer.explain())

compiled = torch.compile(model, backend="aot_eager")  # omit it with a compiler
x = torch.randn(256, 16)
y = x.roll(1, dims=1)
for step in range(61):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
