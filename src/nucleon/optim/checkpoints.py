"""Checkpoints of an optimizer whose state is divided among several ranks.

`state_dict()` returns on each rank, by the placement of a group:

    "local"   everything, the same on every rank
    "owner"   everything of the parameters that the rank owns, of the others step, stream and axes

Distributed Checkpoint saves either, by the names that `get_optimizer_state_dict` gives to
parameters, and loads it under any other placement, on any number of ranks, or cut into the stages
of a pipeline.
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
    """Return the whole state, on the CPU of rank 0; {} on the others, which must call it too.

    It is the `state_dict()` of a single process: `torch.save` it, and load it with
    `load_state_dict` on every rank, under any placement. One parameter's state is gathered at a
    time.
    """
    packed = optimizer.state_dict()
    here = not dist.is_initialized() or dist.get_rank() == 0
    layouts = _layouts(packed) if dist.is_initialized() else [{}]
    state: dict[Any, dict[str, Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        owners = placement.owners(group, optimizer.infos)
        for param, key, owner in zip(group["params"], saved["params"], owners, strict=True):
            found = packed["state"].get(key, {})
            if owner:  # another rank than 0
                found = _sent_to_first(found, layouts[owner].get(key, {}), owner, param.device)
            whole = {name: shards.full(value) for name, value in found.items()}
            if here and whole:
                state[key] = {name: v.detach().cpu().clone() for name, v in whole.items()}
    return {**packed, "state": state} if here else {}


_Layout = dict[Any, dict[str, tuple[torch.Size, torch.dtype]]]


def _layouts(packed: dict[str, Any]) -> list[_Layout]:
    """Return for each rank the shapes and dtypes of its state of each parameter."""
    mine: _Layout = {
        key: {name: (v.shape, v.dtype) for name, v in state.items()}
        for key, state in packed["state"].items()
    }
    return wire.gather_objects(mine, "state")


def _sent_to_first(
    found: dict[str, Tensor],
    layout: dict[str, tuple[torch.Size, torch.dtype]],
    owner: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Send the state of a parameter from its owner to rank 0; the others return what they have."""
    for name, (shape, dtype) in layout.items():
        if dist.get_rank() == owner:
            wire.exchange([(0, found[name].contiguous())], [], "state")()
        elif dist.get_rank() == 0:
            value = torch.empty(shape, dtype=dtype, device=device)
            wire.exchange([], [(owner, value)], "state")()
            found = {**found, name: value}
    return found
