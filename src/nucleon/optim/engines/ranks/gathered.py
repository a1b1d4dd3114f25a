"""placement="local" of DTensors: gradients are gathered, every rank computes every matrix."""

from dataclasses import dataclass

import torch

from nucleon.optim.engines import reference
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Matrices, Settings, Work
from nucleon.optim.matrices import shards


@dataclass
class Gathered(Work):
    """Equally sharded matrices, which every rank gathers for a step."""

    whole: Matrices


def step(work: Gathered, settings: Settings) -> None:
    """Update equally sharded matrices; all ranks of their mesh must call it."""
    first, whole = work.params[0], work.whole
    assert shards.sharded(first)
    flags = [float(p.grad is not None) for p in work.params]
    present = torch.tensor(flags).to(first.device, torch.float32)
    wire.add_up(present, shards.mesh_groups(first), "gradients")
    gradients_or_zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.params]
    gradients = [wire.gather(gradient) for gradient in gradients_or_zeros]
    stack = whole.stack
    mask = stack.per_matrix(present > 0)
    direction, stepped = whole.engine.advance(whole, settings, gradients, mask)
    boxes = stack.boxes(direction.to(stack.work_dtype))
    reference.move_boxes(whole, settings, boxes, stepped)
