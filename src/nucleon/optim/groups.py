"""The parameters of a group: their names, axes and checks; options are checked in `options`."""

import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim.engines.work import State
from nucleon.optim.matrices.axes import default
from nucleon.optim.matrices.parameters import Infos, ParameterInfo, blocks, canonical, root_of


def as_groups(params: Any, axes: object, optimizer: str) -> Any:
    """Return `params` as groups that include the axes of all parameters, if not None."""
    if isinstance(params, nn.Module):
        raise TypeError(f"params must be matrices, got a model. {_whole_model(optimizer)}")
    if axes is None:
        return params
    items = [params] if isinstance(params, Tensor) else list(params)
    if items and isinstance(items[0], dict):
        return [{"axes": axes, **cast(dict[str, Any], group)} for group in items]
    return [{"params": items, "axes": axes}]


def _whole_model(optimizer: str) -> str:
    return (
        f"{optimizer}.for_model(model) takes a whole model and sends parameters that are no "
        f"matrices to AdamW; in a Hugging Face Trainer use nucleon.integrations.huggingface.factory"
    )


def infos(
    group: dict[str, Any],
    first: int,
    axes: str | Sequence[str | None] | None,
    reasons: Sequence[str] | None,
    optimizer: str,
) -> dict[Tensor, ParameterInfo]:
    """Return the facts of each parameter of a group, and remove duplicates from the group.

    torch has moved the names into "param_names". `first` is the index of the first parameter,
    `axes` a spec of all parameters or of each; `reasons` are those of routing, or None.
    """
    names = group.get("param_names") or map(str, itertools.count(first))
    pairs = dict(zip(group["params"], names, strict=False))  # torch has warned of duplicates
    group["params"] = [*pairs]
    if "param_names" in group:
        group["param_names"] = [*pairs.values()]
    # Routing has removed the common prefix already.
    root = root_of(pairs.values()) if reasons is None else ""
    specs = [axes] * len(pairs) if axes is None or isinstance(axes, str) else axes
    reasons = reasons or ["as given"] * len(pairs)
    if len(specs) != len(pairs):
        raise ValueError(f"axes has {len(specs)} specs for {len(pairs)} parameters; pass one each")
    infos: dict[Tensor, ParameterInfo] = {}
    for i, (param, name) in enumerate(pairs.items()):
        spec = specs[i] or default(param.ndim)
        infos[param] = ParameterInfo(
            canonical(name, root), first + i, spec, reasons[i], group["lr"]
        )
    _check_params(infos, group, optimizer)
    return infos


def _check_params(infos: Infos, group: Mapping[str, Any], optimizer: str) -> None:
    for param, info in infos.items():
        complex_too = group["route"] == "adamw" and param.is_complex()
        dtype = param.dtype.to_real() if complex_too else param.dtype
        if dtype not in _checks.REAL_DTYPES:
            raise TypeError(
                f"{info.name} has dtype {param.dtype}; float16, bfloat16, float32 and float64 are "
                f"supported, and complex ones by AdamW"
            )
        if group["route"] == "matrix":
            try:
                blocks(param, info.axes)
            except ValueError as error:
                # A parameter without axes probably belongs to a whole model.
                more = "" if info.axes else f". {_whole_model(optimizer)}"
                raise ValueError(f"{info.name}: {error}{more}") from None
    devices, lr = {param.device for param in infos}, group["lr"]
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
    for state in map(states.get, group["params"]):
        if state and "total" in state and group["certify"] != ("ledger.played" in state):
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
    rates = [
        (group["route"], group["lr"], infos[group["params"][0]].first_rate)
        for group in groups
        if group["params"]
        and group["scale"] != "match-adamw"
        and not isinstance(group["lr"], Tensor)
    ]
    matrix = {rate: first for route, rate, first in rates if route == "matrix"}
    for route, rate, first in rates:
        if route == "adamw" and first < rate and matrix.get(rate, first) != first:
            warn(
                f"AdamW's parameters have the learning rate of the matrices now, {rate:g}; they "
                f"began with {first:g} beside {matrix[rate]:g}. Give the scheduler one rate for "
                f"each group, in the order of param_groups, or make the optimizer with "
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
