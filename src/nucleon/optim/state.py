"""The state of each parameter.

All entries belong to a parameter, none to its group, so that a state can be split and joined by
parameter. A matrix parameter has

    step, stream        0-d and (b,) int64: the number of the step, the identity of each matrix
    axes                uint8: the text of its axes
    skipped, quiet      (b,) int64: skipped steps; consecutive steps with a zero gradient
    total               Ĝ, shaped like the parameter
    gram, gram.0 …      M̂ of each matrix, (b, m, m), short side first, one for each section
    ledger.…            sums for a certificate, see `engines.ledger`

A parameter of AdamW has step, skipped, exp_avg and exp_avg_sq. A parameter that another rank owns
has step, stream and axes only.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.optim.engines import ledger
from nucleon.optim.engines.work import State
from nucleon.optim.matrices import axes, shards, stacks
from nucleon.optim.matrices.parameters import ParameterInfo, blocks

VERSION = 4
SLICES = 1 << 20  # streams are parameter·2²⁰ + matrix


def new_matrix_state(
    param: Tensor,
    info: ParameterInfo,
    step: Tensor | None,
    group: Mapping[str, Any],
    *,
    has_gram: bool,
    owned: bool = True,
) -> State:
    """Return the state of a parameter with zero moments and the step `step`, or 0."""
    parts = blocks(param, info.axes)
    wide, device = _checks.work_dtype(param.dtype), param.device
    matrices = torch.arange(sum(block.count for block in parts), device=device)
    state: State = {
        "step": torch.zeros((), dtype=torch.int64, device=device)
        if step is None
        else step.to(device, copy=True),
        "stream": matrices + number(info) * SLICES,
        "axes": encoded(info.axes or axes.default(param.ndim) or "").to(device),
    }
    if not owned:
        return state
    state["skipped"] = torch.zeros_like(matrices)
    state["quiet"] = torch.zeros_like(matrices)
    state["total"] = shards.zeros(param, group["momentum_dtype"] or wide)
    for block in parts if has_gram else ():
        short = min(block.rows, block.columns)
        shape = (block.count, short, short)
        state[stacks.gram_key(block)] = torch.zeros(shape, device=device, dtype=wide)
    return state | (ledger.new_state(param, parts) if group["certify"] else {})


def number(info: ParameterInfo) -> int:
    """Return the number below 2⁴⁰ that keys the noise of a parameter, from its name or index.

    By names, a stage of a pipeline draws the noise that the whole model would draw.
    """
    if info.name.isdigit():
        return info.index
    return int.from_bytes(hashlib.blake2b(info.name.encode(), digest_size=5).digest(), "big")


def new_adamw_state(param: Tensor) -> State:
    """Return `step` and `skipped` (0-d int64), `exp_avg` m and `exp_avg_sq` v, all zero."""
    wide = _checks.work_dtype(param.dtype)
    zero = torch.zeros((), dtype=torch.int64, device=param.device)
    return {
        "step": zero,
        "skipped": zero.clone(),
        "exp_avg": torch.zeros_like(param, dtype=wide).detach(),
        "exp_avg_sq": torch.zeros_like(param, dtype=wide).detach(),
    }


def fits(state: State, param: Tensor, group: Mapping[str, Any]) -> bool:
    """Return True if the moments have the dtype of the parameter's step.

    They do not after a cast of the model. Ĝ may also have `momentum_dtype` or bfloat16.
    """
    wide = _checks.work_dtype(param.dtype)
    of_total = (wide, group["momentum_dtype"], torch.bfloat16)
    return all(
        value.dtype in of_total if name == "total" else value.dtype == wide
        for name, value in state.items()
        if name.startswith(("total", "gram", "exp_avg"))
    )


def encoded(text: str) -> Tensor:
    """Return text as a uint8 tensor, which every format of checkpoints can store."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
