"""The parameters of a group: their names, axes and checks; options are checked in `options`."""

import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim import options
from nucleon.optim.engines.work import State
from nucleon.optim.matrices.parameters import Infos, blocks, canonical, root_of


def as_groups(params: Any, axes: Mapping[str, Any], optimizer: str) -> Any:
    """Return `params` as groups that include the axes of all parameters."""
    if not isinstance(params, Iterable):
        raise TypeError(
            f"params must be parameters, (name, parameter) pairs or groups, got {params!r}; "
            f"write {optimizer}([weight]), or {optimizer}.for_model(model)"
        )
    if isinstance(params, nn.Module):
        raise TypeError(f"params must be matrices, got a model. {_whole_model(optimizer)}")
    if not axes:
        return params
    items = [params] if isinstance(params, Tensor) else list(params)
    if items and isinstance(items[0], dict):
        return [{**axes, **cast(dict[str, Any], group)} for group in items]
    return [{"params": items, **axes}]


def _whole_model(optimizer: str) -> str:
    return (
        f"{optimizer}.for_model(model) takes a whole model and sends parameters that are no "
        f"matrices to AdamW; in a Hugging Face Trainer use nucleon.integrations.huggingface.factory"
    )


def check_route(group: Mapping[str, Any], *, routed: bool) -> None:
    """Check that a group added to a routed optimizer has a route."""
    if isinstance(group, nn.Module) or isinstance(group.get("params"), nn.Module):
        raise TypeError(
            "a parameter group was given as a module; add the groups that "
            "nucleon.optim.param_groups(module) returns"
        )
    if routed and "route" not in group:
        raise ValueError(
            'a group added to an optimizer of for_model needs a route, as in {"params": '
            '[("extra.weight", parameter)], "route": "adamw"}, or "matrix"; '
            "nucleon.optim.param_groups(module) returns the groups of a module"
        )


def check_seeds(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that all groups have one seed, since all matrices share the length of a step."""
    seeds = [group["seed"] for group in groups]
    if any(seed != seeds[0] for seed in seeds):
        raise ValueError(
            f"the groups have the seeds {', '.join(map(str, dict.fromkeys(seeds)))}; seed is an "
            f"option of the run, since all matrices share one random length: pass it to the "
            f"constructor, and to no group"
        )


def named(
    group: Mapping[str, Any], first: int
) -> tuple[list[tuple[str, Tensor]], list[str] | None]:
    """Return the parameters of a group with names or numbers, and the user's names, if any."""
    params = group["params"]
    if isinstance(params, Set):
        raise TypeError("params must be ordered, got a set; pass a list")
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    written = group.get("param_names") or ()  # in a group of another optimizer
    if len(written) == len(items) and isinstance(items[0], Tensor):
        items = list(zip(written, items, strict=True))
    if len({isinstance(item, tuple) for item in items}) > 1:
        raise ValueError("params has some parameters with names and some without; name all or none")
    unique: dict[int, tuple[str, Tensor]] = {}
    for index, item in enumerate(items, start=first):
        name, param = item if isinstance(item, tuple) else (str(index), item)
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} of params must be a tensor, got {type(param).__name__}")
        unique.setdefault(id(param), (name, param))
    pairs = [*unique.values()]
    if len(pairs) < len(items):  # torch warns too; tied layers share weights
        warn("params has a parameter group with duplicate parameters; each is stepped once")
    names = [name for name, _ in pairs] if any(isinstance(x, tuple) for x in items) else None
    if "reasons" not in group:  # routing has removed the common prefix already
        root = root_of(name for name, _ in pairs)
        pairs = [(canonical(name, root), param) for name, param in pairs]
    _check_params(pairs, group)
    options.check_momentum_dtype(pairs, group)
    options.check_range(pairs, group)
    return pairs, names


def specs(axes: object, count: int) -> list[str | None]:
    """Return an axes spec, or None, for each of `count` parameters."""
    if axes is None or isinstance(axes, str):
        return [axes] * count
    if not isinstance(axes, Sequence) or not all(a is None or isinstance(a, str) for a in axes):
        raise TypeError(f"axes must be a spec, None, or a list of them, got {axes!r}")
    if len(axes) != count:
        raise ValueError(
            f"axes has {len(axes)} specs; give one for each parameter, {count}, or one for all"
        )
    return list(cast(Sequence[str | None], axes))


def check_matrices(infos: Infos, optimizer: str) -> None:
    """Check that the axes of each parameter describe matrices.

    A parameter without axes probably belongs to a whole model, so the error names `for_model`.
    """
    for param, info in infos.items():
        try:
            blocks(param, info.axes)
        except ValueError as error:
            more = "" if info.axes else f". {_whole_model(optimizer)}"
            raise ValueError(f"{info.name}: {error}{more}") from None


def _check_params(named: Sequence[tuple[str, Tensor]], group: Mapping[str, Any]) -> None:
    devices, lr = set[torch.device](), group["lr"]
    for name, param in named:
        complex_too = group["route"] == "adamw" and param.is_complex()
        dtype = param.dtype.to_real() if complex_too else param.dtype
        if dtype not in _checks.REAL_DTYPES:
            raise TypeError(
                f"{name} has dtype {param.dtype}; float16, bfloat16, float32 and float64 are "
                f"supported, and complex ones by AdamW"
            )
        devices.add(param.device)
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of one group are on several devices ({sorted(map(str, devices))}); "
            f"make one group per device"
        )
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and devices - {lr.device}:
        raise ValueError(
            f"lr is on {lr.device}, the parameters are on {sorted(map(str, devices))}; move lr "
            f"there or to the CPU"
        )


def check_certify(group: Mapping[str, Any], states: Mapping[Tensor, State]) -> None:
    """Check that certify has not changed since the states of a group were created."""
    with_moments = (states[p] for p in group["params"] if "total" in states.get(p, {}))
    first = next(with_moments, None)
    if first is not None and group["certify"] != ("ledger.played" in first):
        raise ValueError(
            f"certify was set to {group['certify']} during the run, and its regret would lack "
            f"steps; pass certify={group['certify']} when the group is added"
        )


def warn_of_equal_rates(groups: Sequence[Mapping[str, Any]], infos: Infos) -> bool:
    """Warn, and return True, if AdamW's groups have risen to the rate of the matrices.

    A scheduler with one rate for all groups causes this. There is no warning if the rates were
    equal from the start, if AdamW's rate fell, or with scale="match-adamw", where one rate suits
    both.
    """
    firsts = [
        (group, group["lr"], infos[group["params"][0]].first_rate)
        for group in groups
        if group["params"] and not isinstance(group["lr"], Tensor)
    ]
    firsts = [(group, rate, x) for group, rate, x in firsts if not isinstance(x, Tensor)]
    matrix = {
        rate: first
        for group, rate, first in firsts
        if group["route"] == "matrix" and group["scale"] != "match-adamw"
    }
    for group, rate, first in firsts:
        if group["route"] == "adamw" and first < rate and matrix.get(rate, first) != first:
            other = matrix[rate]
            warn(
                f"AdamW's parameters have the learning rate of the matrices now, {rate:g}; they "
                f"began with {first:g} beside {other:g}. Give the scheduler one rate for each "
                f"group, in the order of param_groups, or make the optimizer with "
                f'scale="match-adamw" if one rate is to serve both'
            )
            return True
    return False


def warn(message: str) -> None:
    """Warn at the innermost line of the user's code, outside this package and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


_PASSED = ("nucleon", "torch")


def described(name: str, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> str:
    """Return a summary of an optimizer: the rate and changed options of each group."""
    lines = [f"{name} ("]
    for index, group in enumerate(groups):
        adamw, params = group["route"] == "adamw", group["params"]
        usual = {**defaults, **(options.ADAMW_DEFAULTS if adamw else {})}
        names = options.OF_ADAMW if adamw else {*defaults} - {"route"}
        changed = [k for k in sorted(names - {"lr"}) if k in group and group[k] != usual[k]]
        settings = (f"{k}={group[k]!r}" for k in ("lr", *changed))
        count = f"{len(params)} parameter{'s' * (len(params) != 1)}"
        text = f"group {index}: {group['route']}, {count}, {', '.join(settings)}"
        lines += textwrap.wrap(text, 98, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([*lines, ")"])
