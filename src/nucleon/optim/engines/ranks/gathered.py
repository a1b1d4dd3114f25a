"""placement="local" of DTensors: gradients are gathered, every rank computes every matrix."""

from dataclasses import dataclass

import torch

from nucleon.optim.engines import reference
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Matrices, Settings, Work
from nucleon.optim.matrices import shards


@dataclass
class Gathered(Work):
    """Matrices that are cut alike, and on every rank whole for the time of a step."""

    whole: Matrices


def step(work: Gathered, settings: Settings) -> None:
    """One step of matrices that are cut alike; all ranks of their mesh take part."""
    first, whole = work.params[0], work.whole
    assert shards.sharded(first)
    flags = [float(p.grad is not None) for p in work.params]
    there = torch.tensor(flags).to(first.device, torch.float32)
    wire.add_up(there, shards.mesh_groups(first), "gradients")
    held = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.params]
    gradients = [wire.gather(gradient) for gradient in held]
    stack = whole.stack
    mask = stack.per_matrix(there > 0)
    direction, taken = whole.engine.advance(whole, settings, gradients, mask)
    boxes = stack.boxes(direction.to(stack.work_dtype))
    reference.move_boxes(whole, settings, boxes, taken)
