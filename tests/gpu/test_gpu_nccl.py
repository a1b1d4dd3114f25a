"""FSDP2 over NCCL with one rank: gathered matrices and local AdamW go through the same kernels."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nucleon
from nucleon.optim.engines.cuda import adamw, engine
from nucleon.optim.engines.ranks import owners
from nucleon.optim.engines.ranks.gathered import Gathered
from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import shards


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 96), nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 64)]
    return nn.Sequential(*layers).cuda()


def stepped(model, optimizer, start, steps=5):
    """Draw gradients that are equal for any model: AdamW would enlarge the noise of a backward."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator).cuda()
            p.grad = gradient if not hasattr(p, "device_mesh") else shards.like(gradient, p)
        optimizer.step()


def losses(model, optimizer, steps=20):
    found, tokens = [], torch.arange(64).cuda()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon])
def test_fsdp2_over_nccl_is_the_plain_run(mesh, cls, placement):
    from torch.distributed.fsdp import fully_shard

    plain = network()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=mesh)
    options = {"head": "3", "weight_decay": 0.1, "aux_lr": 3e-3}
    expected = cls.for_model(plain, **options)
    optimizer = cls.for_model(model, placement=placement, **options)
    stepped(plain, expected, 0)
    stepped(model, optimizer, 0)
    works = optimizer._worklist.works
    assert adamw in {work.engine for work in works}
    stacks = [work for work in works if isinstance(work, Matrices)]
    stacks += [work.whole for work in works if isinstance(work, Gathered)]
    for work in works:
        if work.engine is owners:
            stacks += [task.work for tasks in work.rounds for task in tasks]
    assert stacks and all(work.engine is engine for work in stacks)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(plain, expected, 5)
    stepped(model, optimizer, 5)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=1e-6)
    found = losses(model, cls.for_model(model, placement=placement, **options))
    assert found[-1] < 0.8 * found[0]
