"""What an optimizer keeps of each parameter, and which parameters it takes.

A matrix parameter has, every fact with the parameter and none in a list of its group, so that a
state can be cut and joined by parameter:

    step, stream        0-d and (b,) int64: the number of the step, the identity of each matrix
    axes                uint8: the text of its axes
    skipped, quiet      (b,) int64: steps that were skipped; steps in a row with a zero gradient
    total               Ĝ, shaped like the parameter
    gram, gram.0 …      M̂ of each matrix, (b, m, m), short side first, one for each section
    played …            what a certificate needs, see `engines.ledger`

A parameter for AdamW has step, skipped, exp_avg and exp_avg_sq. What another rank owns has step,
stream and axes alone.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim import options
from nucleon.optim.engines import ledger
from nucleon.optim.matrices import axes, shards, stacks
from nucleon.optim.matrices.parameters import ParameterInfo, blocks, canonical, root_of

VERSION = 3
SLICES = 1 << 20  # streams are parameter·2²⁰ + matrix

Infos = Mapping[Tensor, ParameterInfo]
State = dict[str, Tensor]


# ------------------------------------------------------------------ parameters of a group


def as_groups(params: Any, axes: Mapping[str, Any], optimizer: str) -> Any:
    """`params` as groups that carry the axes given for all of them."""
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


def named(group: Mapping[str, Any], first: int) -> tuple[list[tuple[str, Tensor]], bool]:
    """The parameters of a group with their names, or numbers, checked; whether they had names."""
    params = group["params"]
    if isinstance(params, nn.Module):
        raise TypeError("params is a module, which only an optimizer made by for_model routes")
    if isinstance(params, Set):
        raise TypeError("params must be ordered, got a set; pass a list")
    items = [params] if isinstance(params, Tensor) else list(params)
    if len({isinstance(item, tuple) for item in items}) > 1:
        raise ValueError("params has some parameters with names and some without; name all or none")
    found: list[tuple[str, Tensor]] = []
    for index, item in enumerate(items, start=first):
        name, param = item if isinstance(item, tuple) else (str(index), item)
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} of params must be a tensor, got {type(param).__name__}")
        found.append((name, param))
    if "reasons" not in group:  # routing has seen all names of the model
        root = root_of(name for name, _ in found)
        found = [(canonical(name, root), param) for name, param in found]
    _check_params(found, group["lr"], complex_too=group["rule"] == "adamw")
    options.check_momentum_dtype(found, group)
    options.check_range(found, group)
    return found, any(isinstance(item, tuple) for item in items)


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
    seen: set[int] = set()
    for name, param in named:
        dtype = param.dtype.to_real() if complex_too and param.is_complex() else param.dtype
        if dtype not in _checks.REAL_DTYPES:
            raise TypeError(
                f"{name} has dtype {param.dtype}; float16, bfloat16, float32 and float64 are "
                f"supported, and complex ones by AdamW"
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


# ------------------------------------------------------------------ new states


def new_matrix_state(
    param: Tensor,
    info: ParameterInfo,
    number: int,
    step: Tensor | None,
    group: Mapping[str, Any],
    *,
    has_gram: bool,
    owned: bool = True,
) -> State:
    """Zero moments of parameter `number`, which counts its steps from `step`, or from 0."""
    found = blocks(param, info.axes)
    wide, device = _checks.work_dtype(param.dtype), param.device
    matrices = torch.arange(sum(block.count for block in found), device=device)
    state: State = {
        "step": torch.zeros((), dtype=torch.int64, device=device)
        if step is None
        else step.to(device, copy=True),
        "stream": matrices + number * SLICES,
        "axes": encoded(info.axes or axes.default(param.ndim) or "").to(device),
    }
    if not owned:
        return state
    state["skipped"] = torch.zeros_like(matrices)
    state["quiet"] = torch.zeros_like(matrices)
    state["total"] = shards.zeros(param, group["momentum_dtype"] or wide)
    for block in found if has_gram else ():
        short = min(block.rows, block.columns)
        shape = (block.count, short, short)
        state[stacks.gram_key(block)] = torch.zeros(shape, device=device, dtype=wide)
    return state | (ledger.new_state(param, len(matrices), wide) if group["certify"] else {})


def number(name: str, index: int) -> int:
    """What the noise of a parameter is drawn by, below 2⁴⁰: its name, or its index without one.

    So it is the same in a stage of a model as in the whole, and no other stage draws it.
    """
    if name.isdigit():
        return index
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=5).digest(), "big")


def numbers(states: Iterable[Mapping[str, Tensor]]) -> frozenset[int]:
    """The numbers of parameters that the streams of these states were made of; synchronizes."""
    streams = [s["stream"] for s in states if "stream" in s and s["stream"].numel()]
    return frozenset(int(stream[0]) // SLICES for stream in streams)


def new_adamw_state(param: Tensor) -> State:
    """`step` and `skipped` (0-d int64), `exp_avg` m and `exp_avg_sq` v, all zero."""
    wide = _checks.work_dtype(param.dtype)
    zero = torch.zeros((), dtype=torch.int64, device=param.device)
    return {
        "step": zero,
        "skipped": zero.clone(),
        "exp_avg": torch.zeros_like(param, dtype=wide).detach(),
        "exp_avg_sq": torch.zeros_like(param, dtype=wide).detach(),
    }


def fits(state: State, param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether moments are of the dtype that a run of the parameter works in.

    They are not where a model was cast from float32 to float64 or back after they were made. Ĝ may
    be of `momentum_dtype`, and a bfloat16 one was so when it was made.
    """
    wide = _checks.work_dtype(param.dtype)
    of_total = (wide, group["momentum_dtype"], torch.bfloat16)
    return all(
        value.dtype in of_total if name == "total" else value.dtype == wide
        for name, value in state.items()
        if name.startswith(("total", "gram", "exp_avg", "played"))
    )


def encoded(text: str) -> Tensor:
    """Text as a state keeps it: uint8."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
