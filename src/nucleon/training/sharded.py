"""Checkpoints of a run on several ranks: each writes its own part, all of them count or none.

The files are those of `torch.distributed.checkpoint`, in a folder of `Checkpoints`: hidden until
every rank has written, sealed with hashes, renamed at once. A run may go on on another number of
ranks, in another layout, under another placement.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from nucleon.training.checkpoint import Checkpoints, verify


def save(checkpoints: Checkpoints, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Keep weights, optimizer and the generator of each rank; every rank must call it."""
    with ExitStack() as stack:
        draft = stack.enter_context(checkpoints.draft(step)) if dist.get_rank() == 0 else None
        state_dict_saver.save(
            {**_state(model, optimizer), _generator(): torch.get_rng_state()},
            checkpoint_id=_from_first(draft),
        )
    dist.barrier()  # no rank goes on from a checkpoint that is not there yet


def load(
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: Optimizer,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Go back to the newest complete checkpoint; the number of its step, 0 if there is none.

    Every rank must call it. A rank that had no part in the saved run keeps its own generator.

    Args:
        checkpoints: of the run.
        model: the same, in any layout.
        optimizer: the same, under any placement.
        say: is told, on rank 0, of each damaged one that was passed over (nobody is).
    """
    step = _from_first(_newest(checkpoints, say) if dist.get_rank() == 0 else 0)
    if step == 0:
        return 0
    for group in optimizer.param_groups:  # what `train` adds must be there, or it is not loaded
        group.setdefault("initial_lr", group["lr"])
    reader = FileSystemReader(checkpoints.path(step))
    state = _state(model, optimizer)
    if _generator() in reader.read_metadata().state_dict_metadata:
        state[_generator()] = torch.get_rng_state()
    state_dict_loader.load(state, storage_reader=reader)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    torch.set_rng_state(state.get(_generator(), torch.get_rng_state()))
    return step


def _newest(checkpoints: Checkpoints, say: Callable[[str], None]) -> int:
    found = checkpoints.newest_by(lambda step: verify(checkpoints.path(step), ".metadata"), say)
    return 0 if found is None else found[0]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _generator() -> str:
    return f"generator of rank {dist.get_rank()}"


def _from_first(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
