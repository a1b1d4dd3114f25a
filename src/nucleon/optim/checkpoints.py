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
    here = not dist.is_initialized() or dist.get_rank() == 0
    layouts = _layouts(packed) if dist.is_initialized() else [{}]
    state: dict[Any, dict[str, Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        owners = placement.owners(group, optimizer.infos)
        for param, key, owner in zip(group["params"], saved["params"], owners, strict=True):
            entries = packed["state"].get(key, {})
            if owner:  # another rank than 0
                entries = _sent_to_first(entries, layouts[owner].get(key, {}), owner, param.device)
            whole = {name: shards.full(value) for name, value in entries.items()}
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
    entries: dict[str, Tensor],
    layout: dict[str, tuple[torch.Size, torch.dtype]],
    owner: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the state of a parameter, sent from its owner to rank 0; others return their own."""
    for name, (shape, dtype) in layout.items():
        if dist.get_rank() == owner:
            wire.exchange([(0, entries[name].contiguous())], [], "state")()
        elif dist.get_rank() == 0:
            value = torch.empty(shape, dtype=dtype, device=device)
            wire.exchange([], [(owner, value)], "state")()
            entries = {**entries, name: value}
    return entries
