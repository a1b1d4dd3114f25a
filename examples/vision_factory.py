"""A factory as vision libraries have it: the optimizer by name, from a configuration."""

import torch
from torch import nn

import nucleon

CONFIG = {"opt": "leon", "lr": 0.02, "aux_lr": 1e-3, "weight_decay": 0.01, "aux": {"eps": 1e-6}}


def create_optimizer(config: dict, model: nn.Module) -> torch.optim.Optimizer:
    """Any name of `nucleon.optim.OPTIMIZERS`, every other entry an option."""
    options = dict(config)
    return nucleon.create(options.pop("opt"), model, **options)


torch.manual_seed(0)
model = nn.Sequential()
model.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
model.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.ReLU())
model.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
model.head = nn.Linear(16, 2)
optimizer = create_optimizer(CONFIG, model)
print(optimizer.explain())
x = torch.randn(64, 3, 8, 8)
y = (x[:, 0].mean((1, 2)) > 0).long()
for step in range(41):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
