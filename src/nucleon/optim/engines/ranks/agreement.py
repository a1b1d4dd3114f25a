"""Whether all ranks train the same thing: parameters and options, and later their updates.

Where a step exchanges something, the ranks compare parameters and options once, in one collective
at the first step, and each says what differs. Ranks with different placements wait for each other
until the timeout of their process group.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor

from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.ranks.placement import Infos, process_groups, world
from nucleon.optim.matrices import shards

Groups = Sequence[Mapping[str, Any]]
SHOWN = 5
"""Differences that an error lists."""


def exchanges(groups: Groups) -> bool:
    """Whether a step of these groups talks to other ranks."""
    return any(
        world(g["params"]) != (0,)
        and (
            (g["placement"] == "owner" and g["rule"] == "matrix")
            or g["consistency_every"]
            or any(map(shards.sharded, g["params"]))
        )
        for g in groups
    )


def check_start(groups: Groups, infos: Infos, options: Sequence[str]) -> None:
    """Raise on every rank, saying what differs, unless all have the same parameters and options."""
    mine = _description(groups, infos, options)
    found = wire.gather_objects(mine, "parameters and options", _everyone(groups))
    first, said = found[0], list[str]()
    for rank, other in enumerate(found):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                has = f"rank 0 has {first.get(key, 'none')}, rank {rank} {other.get(key, 'none')}"
                said.append(f"{key}: {has}")
    if said:
        more = f"\n… and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
        raise RuntimeError(
            "the ranks differ in parameters or options; every rank must have the same ones, in "
            "the same order:\n" + "\n".join(said[:SHOWN]) + more
        )


def check_update(groups: Groups, states: Mapping[Tensor, Mapping[str, Tensor]], step: int) -> None:
    """Every `consistency_every` steps, raise on all ranks unless they have updated alike.

    Compared are the learning rates, and the new weights and moments that every rank has whole.
    """
    chosen = [g for g in groups if g["consistency_every"] and not step % g["consistency_every"]]
    chosen = [g for g in chosen if world(g["params"]) != (0,)]
    if not chosen:
        return
    found: list[object] = []
    for group in chosen:
        whole = [p for p in group["params"] if not shards.sharded(p)]
        if group["placement"] == "local":
            whole += [s["total"] for p in group["params"] if "total" in (s := states.get(p, {}))]
        found.append((float(group["lr"]), [wire.fingerprint(x) for x in whole]))
    wire.check_same(found, "updates", _everyone(chosen))


def _everyone(groups: Groups) -> wire.Groups:
    """The process groups that reach the most ranks."""
    widest = max(groups, key=lambda g: len(world(g["params"])))
    return process_groups(widest["params"])


def _description(groups: Groups, infos: Infos, options: Sequence[str]) -> dict[str, str]:
    """Everything that is compared, as text by what it is called."""
    found: dict[str, str] = {}
    for index, group in enumerate(groups):
        for option in options:
            if option in group:
                found[f"{option} of group {index}"] = _text(group[option])
        for place, param in enumerate(group["params"]):
            name, axes = infos[param].name, infos[param].axes or "default"
            found[f"parameter {place} of group {index}"] = (
                f"{name} {tuple(param.shape)} {param.dtype}, axes {axes}"
            )
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
