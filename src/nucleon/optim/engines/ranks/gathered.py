"""placement="local" of DTensors: gradients are gathered, every rank computes every matrix."""

import torch

from nucleon.optim.engines import reference
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import shards


def step(work: Matrices) -> None:
    """One step of matrices that are cut alike; all ranks of their mesh take part."""
    first = work.params[0]
    assert shards.sharded(first)
    flags = [float(p.grad is not None) for p in work.params]
    there = torch.tensor(flags).to(first.device, torch.float32)
    wire.add_up(there, shards.mesh_groups(first), "gradients")
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.params]
    gradients = [wire.gather(gradient) for gradient in found]
    stack = work.stack
    direction, taken = work.computer.advance(work, gradients, stack.per_matrix(there > 0))
    reference.move_boxes(work, stack.boxes(direction.to(stack.work_dtype)), taken)
