"""DDP: each rank computes its share of the matrices, and keeps their state.

torchrun --nproc-per-node 2 examples/distributed/ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import nucleon
from nucleon.training import GPT, GPTConfig, loss, read, text

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

data = text(read(None, 100_000), context=64)
torch.manual_seed(0)
model = GPT(GPTConfig(data.tokenizer.size, context=64, layers=2, heads=2, width=64)).to(device)
optimizer = nucleon.Leon.for_model(model, lr=0.02, aux_lr=3e-3, placement="owner")
parallel = DistributedDataParallel(model)

for step in range(31):
    inputs, targets = data.batch(step, 16, seed=0, rank=rank, world=world)
    found = loss(parallel, inputs.to(device), targets.to(device))
    found.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: loss {found.item():.4f}")
dist.destroy_process_group()
