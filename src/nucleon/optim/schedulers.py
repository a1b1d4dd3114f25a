"""Warnings of rates that a scheduler, or a callback of a trainer, gives to the wrong groups.

A whole model has two kinds of rates, the matrices' and AdamW's, and schedulers are made for one.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from torch import Tensor

from nucleon.optim.runtime import Runtime

LIFTED = 1.01
"""How far above its first a rate is lifted before it is said: farther than rounding takes it."""


def warn_of_one_rate(runtime: Runtime, groups: Sequence[Mapping[str, Any]]) -> None:
    """Say once that a scheduler gives AdamW the rate of the matrices, or lifts it towards that.

    It gives it where an AdamW group was added with a smaller rate of its own and now has, or is to
    reach, that of a matrix group. Nothing is said of schedulers that multiply, which keep the ratio
    of the two, of those that fall to one small rate, below AdamW's first, and of groups with
    scale="match-adamw", where one rate serves both. For lifting see `_lifted`.
    """
    if runtime.warned:
        return
    if said := _lifted(groups) or _one_rate(runtime.rates, groups):
        runtime.warned = True
        warnings.warn(said, stacklevel=3)


def _one_rate(rates: Mapping[Tensor, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """What to say where AdamW has the rate of the matrices, with the list to pass instead."""
    aims, firsts = [_aim(g) for g in groups], [_first(rates, g) for g in groups]
    matrix: dict[tuple[str, float], float] = {}
    for group, aim, first in zip(groups, aims, firsts, strict=True):
        if group["route"] == "matrix" and group["scale"] != "match-adamw":
            matrix[aim] = max(first, matrix.get(aim, 0.0))
    for group, (name, rate), own in zip(groups, aims, firsts, strict=True):
        first = matrix.get((name, rate), 0.0)
        if group["route"] != "adamw" or not (0 < own < rate and 0 < first != own):
            continue
        wanted = [
            aim[1] * kept / first if kept and aim == (name, rate) else aim[1]
            for aim, kept in zip(aims, firsts, strict=True)
        ]
        listed = f"[{', '.join(f'{x:.4g}' for x in wanted)}]"
        whole = "a list for each rate it takes, as CyclicLR takes base_lr and max_lr"
        return (
            f"a scheduler has given AdamW's parameters the {name} of the matrices, {rate:g}, where "
            f"they began with {own:g} beside {first:g}; pass it one rate for each group, "
            f"{f'{whole}, here {listed}' if name == 'lr' else f'{name}={listed}'}, or make the "
            f'optimizer with scale="match-adamw" if one rate is to serve both'
        )
    return ""


def warn_unfrozen(
    runtime: Runtime, groups: Sequence[Mapping[str, Any]], unfrozen: set[Tensor]
) -> None:
    """Say under a BaseFinetuning of Lightning at which rates the unfrozen train.

    Its unfreeze_and_add_param_group leaves out what an optimizer has, and the rate with it. What
    has a rate by an override is as it was meant.
    """
    given = runtime.later.given["overrides"] if runtime.later else None
    wishes = given.items() if isinstance(given, Mapping) else ()
    rated = [glob for glob, wish in wishes if isinstance(wish, Mapping) and "lr" in wish]
    names = {param: runtime.infos[param].name for param in unfrozen}
    new = {p for p, name in names.items() if not any(fnmatchcase(name, g) for g in rated)}
    if not new or not _lightning_unfreezes():
        return
    rates = [f"{float(g['lr']):g}" for g in groups if new.intersection(g["params"])]
    tops = sorted({names[param].partition(".")[0] for param in new})
    overrides = {f"{top}.*": {"lr": ...} for top in tops}
    warnings.warn(
        f"what was frozen in {', '.join(tops)} trains from now on at the rates of its groups, "
        f"{' and '.join(dict.fromkeys(rates))}: unfreeze_and_add_param_group of Lightning hands no "
        f"rate to an optimizer that has the parameters; give it to for_model or create, as "
        f"overrides={repr(overrides).replace('Ellipsis', '…')}",
        stacklevel=5,
    )


def _lightning_unfreezes() -> bool:
    """Whether a Trainer that calls has a callback that unfreezes."""
    frame = sys._getframe()
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        for callback in callbacks if isinstance(callbacks, list) else ():
            if any(base.__name__ == "BaseFinetuning" for base in type(callback).__mro__):
                return True
        frame = frame.f_back
    return False


def _lifted(groups: Sequence[Mapping[str, Any]]) -> str:
    """What to say where a scheduler lifts one group above its first rate and another falls to it.

    So does CosineAnnealingLR with an eta_min above AdamW's rate, the same number for every group.
    A schedule for each group may do so too; once the lifted rate passes the other, it is one.
    """
    rated = [
        (g["initial_lr"], g["lr"], "AdamW's" if g["route"] == "adamw" else "the matrices'")
        for g in groups
        if "initial_lr" in g and "swa_lr" not in g  # which is given for each group
        if not isinstance(g["lr"], Tensor)
    ]
    falls = [(first, rate, whose) for first, rate, whose in rated if rate < first]
    rises = [(first, rate, whose) for first, rate, whose in rated if rate > LIFTED * first > 0]
    for (low, raised, whose), (high, lowered, others) in product(rises, falls):
        if low < high and raised <= LIFTED * lowered:
            return (
                f"a scheduler lifts {whose} rate, {low:g} → {raised:.4g}, while {others} falls, "
                f"{high:g} → {lowered:.4g}. If it was told one rate for all groups, as eta_min of "
                f"CosineAnnealingLR is, pass eta_min={low:g} or less, or a schedule that "
                f"multiplies: LambdaLR(optimizer, lambda step: low + (1 - low) * (1 + math.cos("
                f"math.pi * min(1, step / STEPS))) / 2), where low is the last rate over the "
                f"first; if you gave each group a schedule of its own, all is as you wrote it"
            )
    return ""


def _first(rates: Mapping[Tensor, Any], group: Mapping[str, Any]) -> float:
    """The rate a group was added with; 0 for a tensor, whose value may be on the device."""
    rate = rates.get(group["params"][0], 0.0) if group["params"] else 0.0
    return 0.0 if isinstance(rate, Tensor) else float(rate)


def _aim(group: Mapping[str, Any]) -> tuple[str, float]:
    """The rate that a scheduler takes a group to, and what it is called there."""
    for name in ("swa_lr", "max_lr", "lr"):  # of SWALR, of OneCycleLR, of the others
        if name in group and not isinstance(group[name], Tensor):
            return name, float(group[name])
    return "lr", 0.0
