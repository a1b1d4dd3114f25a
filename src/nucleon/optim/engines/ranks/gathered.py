"""placement="local" of DTensors: gradients are gathered, every rank computes every matrix."""

import torch

from nucleon import _checks
from nucleon.optim.engines import reference
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Matrices, has_gradient
from nucleon.optim.matrices import shards


def step(work: Matrices) -> None:
    """One step of matrices that are cut alike; all ranks of their mesh take part."""
    first = work.params[0]
    assert shards.sharded(first)
    there = torch.tensor(has_gradient(work), dtype=torch.float32).to(first.device)
    wire.add_up(there, shards.mesh_groups(first), "gradients")
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.params]
    gradients = [wire.gather(gradient) for gradient in found]
    direction, taken = work.computer.advance(work, gradients, reference.per_matrix(work, there > 0))
    boxes = work.stack.boxes(direction.to(_checks.work_dtype(first.dtype)))
    reference.move_boxes(work, boxes, taken)
