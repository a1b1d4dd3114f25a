"""Checkpoints of an optimizer whose state is divided among several ranks.

`state_dict()` returns on each rank, by the placement of a group:

    "local"   the whole state
    "owner"   the states of the parameters that the rank owns; step, stream and axes of the others

Distributed Checkpoint saves either, by the names that `get_optimizer_state_dict` assigns to the
parameters. It loads them under any placement, on any number of ranks, or split into the stages of a
pipeline.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.matrices import shards


@torch.no_grad()
def consolidate(optimizer: MatrixOptimizer) -> dict[str, Any]:
    """Return the whole state on the CPU of rank 0; other ranks must call it too and return {}.

    The result equals the `state_dict()` of a single process: save it by `torch.save`, and load it
    by `load_state_dict` on every rank, under any placement. The state of one parameter at a time is
    gathered.
    """
    packed = optimizer.state_dict()
    rank = dist.get_rank() if dist.is_initialized() else 0
    here = rank == 0
    state: dict[Any, dict[str, Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        owners = placement.owners(group, optimizer.infos)
        for key, owner in zip(saved["params"], owners, strict=True):
            whole = {n: shards.full(x) for n, x in packed["state"].get(key, {}).items()}
            kept = whole if here or rank == owner else {}
            message = [{name: value.detach().cpu().clone() for name, value in kept.items()}]
            if owner and rank in (0, owner):  # another rank than 0
                with wire.exchanging("state"):
                    if here:
                        dist.recv_object_list(message, src=owner)
                    else:
                        dist.send_object_list(message, dst=0)
            if here and message[0]:
                state[key] = message[0]
    return {**packed, "state": state} if here else {}
