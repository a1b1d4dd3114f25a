"""FSDP2 over NCCL with one rank: gathered matrices and local AdamW go through the same kernels."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nucleon
from nucleon.optim.engines.cuda import adamw, engine
from nucleon.optim.engines.ranks import owners
from nucleon.optim.engines.work import Matrices


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


def trained(model, optimizer, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(64, (32,), generator=generator).cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    return optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon])
def test_fsdp2_over_nccl_is_the_plain_run(mesh, cls, placement):
    from torch.distributed.fsdp import fully_shard

    plain = network()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=mesh)
    options = {"head": "3", "weight_decay": 0.1}
    expected = trained(plain, cls.for_model(plain, **options))
    optimizer = trained(model, cls.for_model(model, placement=placement, **options))
    works = optimizer._runtime.worklist.works
    assert adamw in {work.engine for work in works}
    stacks = [work for work in works if isinstance(work, Matrices)]
    for work in works:
        if work.engine is owners:
            stacks += [task.work for tasks in work.rounds for task in tasks]
    assert stacks and all(work.computer is engine for work in stacks)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=1e-6)

    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    trained(model, optimizer)
    trained(plain, expected)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=1e-6)
