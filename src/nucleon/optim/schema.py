"""What the state of an optimizer holds, and what is refused: parameters, groups, saved states."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.optim import certify, grams, shards, stacks

VERSION = 2
SLICES = 1 << 20  # streams are parameter·2²⁰ + matrix

LATER = {"quiet"}
"""Entries that states of the same version may lack: they begin at zero."""
SETTLED = ("rule", "axes", "certify")
"""Options that the state of a group is made by: they cannot change under it."""


def parameters(group: Mapping[str, Any]) -> list[Any]:
    """The parameters of a group, or (name, parameter) pairs, checked."""
    params = group["params"]
    if isinstance(params, Set):
        raise TypeError("params must be ordered, got a set; pass a list")
    found = [params] if isinstance(params, Tensor) else list(params)
    _check_params(found, group["lr"])
    _check_momentum_dtype(found, group)
    _check_range(found, group)
    return found


def specs(axes: object, count: int) -> list[str | None]:
    """One axes spec, or None, for each of `count` parameters."""
    if axes is None or isinstance(axes, str):
        return [axes] * count
    if not isinstance(axes, Sequence) or not all(a is None or isinstance(a, str) for a in axes):
        raise TypeError(f"axes must be a spec, None, or a list of them, got {axes!r}")
    if len(axes) != count:
        raise ValueError(
            f"axes has {len(axes)} specs for {count} parameters; give one for each, or one for all"
        )
    return list(cast(Sequence[str | None], axes))


def check_matrices(params: Iterable[object], axes: Sequence[str | None]) -> None:
    """Raise, by name, on a parameter that its axes do not make matrices of."""
    for item, spec in zip(params, axes, strict=True):
        name, param = item if isinstance(item, tuple) else ("params", item)
        try:
            stacks.blocks(cast(Tensor, param), spec)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def new_state(
    param: Tensor,
    spec: str | None,
    index: int,
    step: Tensor | None,
    group: Mapping[str, Any],
    *,
    has_gram: bool,
    owned: bool = True,
) -> dict[str, Tensor]:
    """Zero moments of a parameter that counts its steps from `step`, or from 0.

    Where another rank owns it, only what every rank must know: `step` and `stream`.
    """
    blocks = stacks.blocks(param, spec)
    wide, device = _checks.work_dtype(param.dtype), param.device
    matrices = torch.arange(sum(block.count for block in blocks), device=device)
    state: dict[str, Tensor] = {
        "step": torch.zeros((), dtype=torch.int64, device=device)
        if step is None
        else step.to(device, copy=True),
        "stream": matrices + index * SLICES,
    }
    if not owned:
        return state
    dtype = group["momentum_dtype"] or wide
    state["skipped"] = torch.zeros_like(matrices)
    state["quiet"] = torch.zeros_like(matrices)
    # Where each rank keeps its own part, it is cut like the parameter.
    part = group["placement"] == "gram" and shards.sharded(param)
    state["total"] = (
        torch.zeros_like(param, dtype=dtype).detach() if part else shards.zeros(param, dtype)
    )
    for block in blocks if has_gram else ():
        short = min(block.rows, block.columns)
        shape = (block.count, short, short)
        state[stacks.gram_key(block)] = torch.zeros(shape, device=device, dtype=wide)
    return state | (certify.new_state(param, len(matrices), wide) if group["certify"] else {})


def loaded(
    param: Tensor, found: Mapping[str, Tensor], own: Mapping[str, Tensor], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a parameter from a saved one, of which each rank keeps what it has to."""
    state = dict(own)
    for name in own:
        if name not in found:
            continue
        value, wide = found[name], widest(param.device)
        dtype = wide if value.dtype == torch.float64 else value.dtype
        value = value.to(param.device, dtype, copy=True)
        if shards.sharded(own[name]) and not shards.sharded(value):
            value = shards.like(value, param)
        elif not shards.sharded(own[name]):
            value = shards.full(value)
        if group["placement"] == "gram" and name == "gram" and not grams.is_first(param):
            value = torch.zeros_like(value)
        state[name] = value
    return state


def check_state_dict(
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    defaults: Mapping[str, Any],
) -> None:
    """Raise unless a saved state fits these groups; the values of its options are not looked at."""
    missing = {"param_groups", "state"} - set(given)
    if missing:
        raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
    sizes = [len(g["params"]) for g in given["param_groups"]]
    if sizes != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"state_dict has groups of {sizes} parameters, this optimizer of "
            f"{[len(g['params']) for g in groups]}; the models differ"
        )
    tag = defaults["nucleon"]
    for saved, group in zip(given["param_groups"], groups, strict=True):
        if saved.get("nucleon") != tag:
            raise ValueError(
                f"state_dict is of {saved.get('nucleon', 'another optimizer')!r}, this is "
                f"{tag!r}; load it into the optimizer that wrote it, or convert it"
            )
        # torch itself adds "differentiable" to the defaults the first time a state is loaded.
        absent = sorted(set(defaults) - set(saved) - {"differentiable"})
        if absent:
            raise ValueError(f"state_dict lacks the options {absent}; it is damaged")
        for option in SETTLED:
            if saved[option] != group[option]:
                raise ValueError(
                    f"state_dict was saved with {option}={saved[option]!r}, this optimizer has "
                    f"{option}={group[option]!r}; construct it alike"
                )
        for key, param in zip(saved["params"], group["params"], strict=True):
            _check_saved(key, given["state"].get(key, {}), state[param])


def _check_saved(key: object, found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Raise unless a saved state has the entries, shapes and kinds of numbers of `expected`."""
    strange = (set(found) ^ set(expected)) - LATER
    expected = {name: own for name, own in expected.items() if name in found or name not in LATER}
    if "total" not in expected:  # another rank owns it, here or in the run that saved it
        strange = set()
        expected = {name: own for name, own in expected.items() if name in found}
    if "total" in strange and "stream" in found:
        raise ValueError(
            f"state_dict has no state of parameter {key}, which another rank owned when it was "
            f"saved; save what nucleon.optim.consolidate returns, or use Distributed Checkpoint"
        )
    for name in sorted(strange):
        raise ValueError(
            f"state_dict {'lacks' if name in expected else 'has an unknown'} {name!r} for "
            f"parameter {key}; it is damaged or of another version"
        )
    for name, own in expected.items():
        value = found[name]
        if not isinstance(value, Tensor) or value.is_floating_point() != own.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"state_dict holds {name!r} of type {kind} for parameter {key}, expected "
                f"{own.dtype}; it is damaged"
            )
        if not shards.local(value).isfinite().all():
            raise ValueError(
                f"state_dict holds {name!r} with values that are not finite for parameter {key}; "
                f"it is damaged: load an earlier one"
            )
        if value.shape != own.shape:
            raise ValueError(
                f"state_dict holds {name!r} of shape {tuple(value.shape)} for parameter {key}, "
                f"expected {tuple(own.shape)}; the models differ"
            )


def _check_momentum_dtype(params: Sequence[Any], group: Mapping[str, Any]) -> None:
    if group["rule"] != "matrix" or group["momentum_dtype"] != torch.float64:
        return
    for item in params:
        name, param = item if isinstance(item, tuple) else ("params", item)
        if widest(param.device) != torch.float64:
            raise TypeError(
                f"momentum_dtype=torch.float64, but {name} is on {param.device}, where it may not "
                f"exist; pass momentum_dtype=None for float32"
            )


def _check_range(params: Sequence[Any], group: Mapping[str, Any]) -> None:
    """Raise on options with which c and cG²β₁⁻² of Λ leave the dtype that a step works in."""
    if group["rule"] != "matrix" or "gradient_bound" not in group:
        return
    scale = group["smoothing_scale"]
    scale = 1.0 if isinstance(scale, str) else float(scale)
    root = float(group["gradient_bound"]) / (group["momentum"] or 1.0)
    for item in params:
        name, param = item if isinstance(item, tuple) else ("params", item)
        limits = torch.finfo(_checks.work_dtype(param.dtype))
        if scale and not limits.tiny <= scale <= limits.max:
            raise ValueError(
                f"smoothing_scale={group['smoothing_scale']!r} is no normal number of "
                f"{limits.dtype}, in which {name} is stepped; pass 0.0 for no smoothing, or a "
                f"number from {limits.tiny:.3g} to {limits.max:.3g}"
            )
        if scale * root * root > limits.max / 2:
            most = math.sqrt(limits.max / 2 / scale) * (group["momentum"] or 1.0)
            raise ValueError(
                f"gradient_bound={group['gradient_bound']!r} enters squared and leaves "
                f"{limits.dtype}, in which {name} is stepped; pass at most {most:.3g}, or scale "
                f"the loss"
            )


def _check_params(params: Iterable[object], lr: float | Tensor) -> None:
    devices: set[torch.device] = set()
    seen: set[int] = set()
    for item in params:
        name, param = (
            cast(tuple[str, object], item) if isinstance(item, tuple) else ("params", item)
        )
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(param).__name__}")
        if param.dtype not in _checks.REAL_DTYPES:
            raise TypeError(
                f"{name} has dtype {param.dtype}; float16, bfloat16, float32 and float64 are "
                f"supported"
            )
        if id(param) in seen:
            raise ValueError(f"{name} is given twice in one group; pass each parameter once")
        seen.add(id(param))
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
