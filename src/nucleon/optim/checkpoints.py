"""The state of an optimizer whose parts lie on several ranks, for checkpoints.

What `state_dict()` returns on a rank, by the placement of a group:

    "local"   everything, the same on every rank
    "owner"   everything of the parameters that the rank owns, of the others `step` and `stream`
    "gram"    `total` as a DTensor cut like its parameter; `gram` whole, summed over the ranks

Distributed Checkpoint takes each of them, under the names that `get_optimizer_state_dict` gives to
parameters, and loads it under any other placement, on any number of ranks.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim import grams, placement, shards, wire

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


def pack(optimizer: Any, packed: dict[str, Any]) -> None:
    """Make what torch packed fit to be saved; with Gram matrices every rank must take part.

    They become whole. `certified` becomes a list of one length, which full_state_dict=True needs,
    with something empty in it, which it drops.
    """
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        saved["certified"] = (json.dumps(saved["certified"], default=float), ())
        for param, key in zip(group["params"], saved["params"], strict=True):
            state = packed["state"][key]
            if group["placement"] == "gram" and shards.sharded(param) and "gram" in state:
                whole = grams.whole_gram(param, state["gram"])
                packed["state"][key] = {**state, "gram": whole}


def unpack(given: dict[str, Any]) -> None:
    """Put back what `pack` has put elsewhere.

    full_state_dict=True fills in new state for what is missing: raise where another rank had some.
    """
    groups: list[dict[str, Any]] = []
    for group in given.get("param_groups", ()):
        match group.get("certified"):
            case [str(game), *rest]:
                if not rest and group.get("placement") == "owner":
                    raise ValueError(
                        "full_state_dict=True takes what one rank owns for the whole state; use "
                        "nucleon.optim.consolidate, or Distributed Checkpoint without that option"
                    )
                groups.append({**group, "certified": json.loads(game) or ()})
            case _:
                groups.append(group)
    if groups:
        given["param_groups"] = groups


@torch.no_grad()
def consolidate(optimizer: "MatrixOptimizer") -> dict[str, Any]:
    """The whole state in one dict, on the CPU of rank 0; {} on the others, which must call it too.

    It is what `state_dict()` returns in a single process: `torch.save` it, and load it with
    `load_state_dict` on every rank, under any placement. Only one parameter's state is gathered at
    a time.
    """
    packed = optimizer.state_dict()
    here = not dist.is_initialized() or dist.get_rank() == 0
    layouts = _layouts(packed) if dist.is_initialized() else [{}]
    state: dict[Any, dict[str, Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        keys = zip(group["params"], saved["params"], placement.owners(group), strict=True)
        for param, key, owner in keys:
            found = packed["state"][key]
            if owner:  # another rank than 0
                found = _sent_to_first(found, layouts[owner][key], owner, param.device)
            whole = {name: shards.full(value) for name, value in found.items()}
            if here:
                state[key] = {name: v.detach().cpu().clone() for name, v in whole.items()}
    return {**packed, "state": state} if here else {}


_Layout = dict[Any, dict[str, tuple[torch.Size, torch.dtype]]]


def _layouts(packed: dict[str, Any]) -> list[_Layout]:
    """For each rank, what it has of the state of each parameter: shapes and dtypes."""
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
    """The state of a parameter from its owner to rank 0; the others keep what they have."""
    for name, (shape, dtype) in layout.items():
        if dist.get_rank() == owner:
            wire.exchange([(0, found[name].contiguous())], [], "state")()
        elif dist.get_rank() == 0:
            value = torch.empty(shape, dtype=dtype, device=device)
            wire.exchange([], [(owner, value)], "state")()
            found = {**found, name: value}
    return found
