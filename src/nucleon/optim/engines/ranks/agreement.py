"""Checks that all ranks train the same thing: parameters and options, and on demand their updates.

Where a step exchanges something, the ranks compare parameters and options once, in one collective
at the first step, and again after a group was added; each says what differs. A rank that exchanges
where others do not waits for them until the timeout of its process group.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
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
    """Return whether a step of a group talks to other ranks."""
    if world(group["params"]) == (0,):
        return False
    sharded = any(map(shards.sharded, group["params"]))
    return bool(owned(group) or sharded)


def check_start(groups: Groups, infos: Infos, options: Sequence[str]) -> None:
    """Raise on every rank, saying what differs, unless all have the same parameters and options."""
    mine, what = _description(groups, infos, options), "parameters and options"
    everyone = _everyone([group for group in groups if exchanges(group)])
    if len(set(wire.gather_objects(wire.digest(mine), what, everyone))) == 1:
        return
    (base, first), *others = wire.gather_objects((dist.get_rank(), mine), what, everyone)
    said = [
        f"{key}: rank {base} has {first.get(key, 'none')}, rank {rank} {other.get(key, 'none')}"
        for rank, other in others
        for key in {**first, **other}
        if first.get(key) != other.get(key)
    ]
    more = f"\n… and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    raise RuntimeError(
        "the ranks differ in parameters or options; every rank must have the same ones, in the "
        "same order:\n" + "\n".join(said[:SHOWN]) + more
    )


def check_ranks(optimizer: Optimizer) -> None:
    """Raise on every rank unless all have updated alike; every rank must call it.

    Compares hashes of the learning rates, of the weights that every rank has whole, and with
    placement="local" of the momenta Ĝ. Waits for the device.

    Args:
        optimizer: of this library, after any of its steps.
    """
    states = optimizer.state
    chosen = [group for group in optimizer.param_groups if world(group["params"]) != (0,)]
    if not chosen:
        return
    found: list[object] = []
    for group in chosen:
        whole = [p for p in group["params"] if not shards.sharded(p)]
        if group["placement"] == "local":
            whole += [s["total"] for p in group["params"] if "total" in (s := states.get(p, {}))]
        found.append((float(group["lr"]), [wire.fingerprint(x) for x in whole]))
    wire.check_same(found, "updates", _everyone(chosen))


def _everyone(groups: Groups) -> wire.ProcessGroups:
    """The process groups that reach the most ranks, one after the other."""
    widest = max(groups, key=lambda g: len(world(g["params"])))
    held = next((p for p in widest["params"] if shards.sharded(p)), None)
    return [None] if held is None else shards.mesh_groups(held)


def _description(groups: Groups, infos: Infos, options: Sequence[str]) -> dict[str, str]:
    """Everything that is compared, as text by what it is called; parameters before options."""
    found: dict[str, str] = {}
    for index, group in enumerate(groups):
        for place, param in enumerate(group["params"]):
            name, axes = infos[param].name, infos[param].axes or "default"
            found[f"parameter {place} of group {index}"] = (
                f"{name} {tuple(param.shape)} {param.dtype}, axes {axes}"
            )
    for index, group in enumerate(groups):
        for option in options:
            if option in group:
                found[f"{option} of group {index}"] = _text(group[option])
    return found


def _text(value: object) -> str:
    """An option as text; a rate may be a tensor on a device, or a number of NumPy's."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, cast(Sequence[object], value)))})"
    if isinstance(value, bool | str | torch.dtype | None):
        return repr(value)
    if isinstance(value, Real):
        return repr(int(value) if isinstance(value, Integral) else float(value))
    return type(value).__name__
