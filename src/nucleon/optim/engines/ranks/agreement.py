"""Checks that all ranks have the same parameters and options, and on demand the same updates.

If a step communicates, the ranks compare parameters and options in one collective at the first
step, and again after a group was added; the error of each rank lists the differences. A rank that
communicates while others do not waits until the timeout of its process group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.ranks.placement import owned, world
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import Infos

Groups = Sequence[Mapping[str, Any]]
SHOWN = 5
"""Differences that an error lists."""


def exchanges(group: Mapping[str, Any]) -> bool:
    """Return True if a step of a group communicates with other ranks."""
    if world(group["params"]) == (0,):
        return False
    return owned(group) or any(map(shards.sharded, group["params"]))


def check_start(groups: Groups, infos: Infos, options: Sequence[str]) -> None:
    """Check that all ranks have the same parameters and options; raise the differences on each."""
    mine, what = _description(groups, infos, options), "parameters and options"
    everyone = _everyone([group for group in groups if exchanges(group)])
    if len(set(wire.gather_objects(wire.digest(mine), what, everyone))) == 1:
        return
    (base, first), *others = wire.gather_objects((dist.get_rank(), mine), what, everyone)
    differences = [
        f"{key}: rank {base} has {first.get(key, 'none')}, rank {rank} {other.get(key, 'none')}"
        for rank, other in others
        for key in {**first, **other}
        if first.get(key) != other.get(key)
    ]
    more = f"\n… and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    raise RuntimeError(
        "the ranks differ in parameters or options; every rank must have the same ones, in the "
        "same order:\n" + "\n".join(differences[:SHOWN]) + more
    )


def check_ranks(optimizer: Optimizer) -> None:
    """Check that all ranks have equal updates; every rank must call it, and each raises otherwise.

    Compares, after any step, hashes of the learning rates, of the weights that every rank has
    whole, and with placement="local" of the momenta Ĝ; synchronizes.
    """
    states = optimizer.state
    distributed = [group for group in optimizer.param_groups if world(group["params"]) != (0,)]
    if not distributed:
        return
    updates: list[object] = []
    for group in distributed:
        whole = [p for p in group["params"] if not shards.sharded(p)]
        if group["placement"] == "local":
            whole += [s["total"] for p in group["params"] if "total" in (s := states.get(p, {}))]
        updates.append((float(group["lr"]), [wire.fingerprint(x) for x in whole]))
    mine = (dist.get_rank(), wire.digest(updates))
    (first, expected), *digests = wire.gather_objects(mine, "updates", _everyone(distributed))
    others = [str(rank) for rank, digest in digests if digest != expected]
    if others:
        raise RuntimeError(
            f"updates of rank{'s' if len(others) > 1 else ''} {', '.join(others)} differ from "
            f"those of rank {first}; every rank must have the same ones"
        )


def _everyone(groups: Groups) -> wire.ProcessGroups:
    """Return the process groups that together reach the most ranks."""
    widest = max(groups, key=lambda g: len(world(g["params"])))
    sharded = next((p for p in widest["params"] if shards.sharded(p)), None)
    return [None] if sharded is None else shards.mesh_groups(sharded)


def _description(groups: Groups, infos: Infos, options: Sequence[str]) -> dict[str, str]:
    """Return the compared facts as {name: text}, parameters before options."""
    facts: dict[str, str] = {}
    for index, group in enumerate(groups):
        for place, param in enumerate(group["params"]):
            info, shape = infos[param], tuple(param.shape)
            fact = f"{info.name} {shape} {param.dtype}, axes {info.axes}"
            facts[f"parameter {place} of group {index}"] = fact
    for index, group in enumerate(groups):
        for option in options:
            if option in group:
                facts[f"{option} of group {index}"] = _text(group[option])
    return facts


def _text(value: object) -> str:
    """Return an option as text, without the device of a rate or the address of an object."""
    value = value.tolist() if isinstance(value, Tensor) else value
    plain = (bool, int, float, str, torch.dtype, list, tuple, type(None))
    return repr(cast(object, value)) if isinstance(value, plain) else type(value).__name__
