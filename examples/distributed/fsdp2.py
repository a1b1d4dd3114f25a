"""FSDP2: weights in shards; each matrix is computed by one rank, which keeps its state.

torchrun --nproc-per-node 2 examples/distributed/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import nucleon

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3))
model = nn.Sequential(*blocks, nn.Linear(64, 16)).to(device)
for module in (*model, model):
    fully_shard(module)
optimizer = nucleon.Leon.for_model(model, lr=0.02, aux_lr=3e-3, head="3", placement="owner")

for step in range(31):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))[rank::world].to(device)
    loss = nn.functional.mse_loss(model(x), x[:, :16].roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
