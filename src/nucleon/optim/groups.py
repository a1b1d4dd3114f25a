"""The parameters of a group: their names and axes, and what of them and their gradients is refused.

Options are checked in `options`.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim import options
from nucleon.optim.engines.work import State
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import Infos, blocks, canonical, root_of


def as_groups(params: Any, axes: Mapping[str, Any], optimizer: str) -> Any:
    """Return `params` as groups that carry the axes given for all of them."""
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
        f"{optimizer}.for_model(model) takes a whole model, its matrices here and the rest to "
        f"AdamW; in a Hugging Face Trainer it is nucleon.integrations.huggingface.factory"
    )


def named(
    group: Mapping[str, Any], first: int
) -> tuple[list[tuple[str, Tensor]], list[str] | None]:
    """Return the parameters of a group with their names, or numbers, and the names as given."""
    params = group["params"]
    if isinstance(params, nn.Module):
        raise TypeError("params is a module, which only an optimizer made by for_model routes")
    if isinstance(params, Set):
        raise TypeError("params must be ordered, got a set; pass a list")
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    written = group.get("param_names") or ()  # of a group of another optimizer
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
    found = [*unique.values()]
    if len(found) < len(items):  # as torch, and of the weights of tied layers
        warnings.warn("params has a parameter group with duplicate parameters", stacklevel=7)
    names = [name for name, _ in found] if any(isinstance(x, tuple) for x in items) else None
    if "reasons" not in group:  # routing has seen all names of the model
        root = root_of(name for name, _ in found)
        found = [(canonical(name, root), param) for name, param in found]
    _check_params(found, group["lr"], complex_too=group["route"] == "adamw")
    options.check_momentum_dtype(found, group)
    options.check_range(found, group)
    return found, names


def specs(given: object, count: int) -> list[str | None]:
    """One axes spec, or None, for each of `count` parameters."""
    if given is None or isinstance(given, str):
        return [given] * count
    if not isinstance(given, Sequence) or not all(a is None or isinstance(a, str) for a in given):
        raise TypeError(f"axes must be a spec, None, or a list of them, got {given!r}")
    if len(given) != count:
        raise ValueError(
            f"axes has {len(given)} specs; give one for each parameter, {count}, or one for all"
        )
    return list(cast(Sequence[str | None], given))


def check_matrices(infos: Infos, optimizer: str) -> None:
    """Raise, by name, on a parameter that its axes do not make matrices of.

    Without axes it is likely one of a whole model, and the error says what takes that.
    """
    for param, info in infos.items():
        try:
            blocks(param, info.axes)
        except ValueError as error:
            more = "" if info.axes else f". {_whole_model(optimizer)}"
            raise ValueError(f"{info.name}: {error}{more}") from None


def _check_params(
    named: Sequence[tuple[str, Tensor]], lr: float | Tensor, *, complex_too: bool
) -> None:
    devices: set[torch.device] = set()
    for name, param in named:
        dtype = param.dtype.to_real() if complex_too and param.is_complex() else param.dtype
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


def check_gradients(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, State],
    infos: Infos,
) -> None:
    """Raise on rates and gradients that the optimizer `name` cannot step with, changing nothing."""
    for group in groups:
        for rate in options.RATES:
            value = group[rate]
            if isinstance(value, Tensor):  # which may be on the device
                continue
            if not isinstance(value, Real) or not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{rate} is {value!r} now; set it to a finite number ≥ 0")
        first = next((s for p in group["params"] if "total" in (s := states.get(p, {}))), None)
        if first is not None and group["certify"] != ("ledger.played" in first):
            raise ValueError(
                f"certify was set to {group['certify']} during the run, so that its regret would "
                f"lack steps; pass certify={group['certify']} when the group is added"
            )
        for param in group["params"]:
            gradient = param.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} takes dense gradients, {infos[param].name} of shape "
                    f"{tuple(param.shape)} has layout {gradient.layout}; use sparse=False or "
                    f"another optimizer for it"
                )
            strict = gradient is not None and group["nonfinite"] == "raise"
            if strict and not torch.isfinite(shards.local(gradient)).all():
                raise ValueError(
                    f"the gradient of {infos[param].name} is not finite; nonfinite='skip' would "
                    f"leave it out of this step"
                )
