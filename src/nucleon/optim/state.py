"""The state of each parameter, how it is saved and loaded.

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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.optim.engines import ledger
from nucleon.optim.engines.work import State
from nucleon.optim.matrices import shards, stacks
from nucleon.optim.matrices.parameters import (
    Infos,
    ParameterInfo,
    blocks,
    canonical,
    globs,
    root_of,
)

VERSION = 4
SLICES = 1 << 20  # streams are parameter·2²⁰ + matrix
FIXED = ("route", "certify")
"""Options in which a loaded state must agree with the optimizer."""


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
        "axes": encoded(info.axes or "").to(device),
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


# ------------------------------------------------------------------ saving and loading


def pack(_: Any, packed: dict[str, Any]) -> None:
    """Mark the groups that `state_dict()` returns, for `_check_tag`.

    The mark contains an empty tuple, which full_state_dict=True drops.
    """
    for group in packed["param_groups"]:
        group["nucleon"] = (group["nucleon"], ())


def aligned(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], infos: Infos, tag: str
) -> dict[str, Any]:
    """Return a saved state in the order of these groups; raise if it is of other ones.

    Parameters are matched by name if the names are the same, and by position otherwise, as in
    torch. Distributed Checkpoint has matched them by name before, and uses names as keys.
    """
    if missing := {"param_groups", "state"} - set(state_dict):
        raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
    saved: list[dict[str, Any]] = [dict(group) for group in state_dict["param_groups"]]
    for group in saved:
        _check_tag(group, tag)
        group["nucleon"] = tag
        if any(isinstance(key, str) for key in group["params"]):
            group.pop("param_names", None)  # in the order of the saved parameters
    saved = _by_name(saved, groups, infos) or saved
    sizes, ours = ([len(g["params"]) for g in each] for each in (saved, groups))
    if sizes != ours:
        raise ValueError(
            f"state_dict has groups of {sizes} parameters, this optimizer of {ours}; the models "
            f"differ, or parameters were left out of one of them: construct it with the same, and "
            f"freeze the others by requires_grad_(False)"
        )
    for before, group in zip(saved, groups, strict=True):
        for option in FIXED:
            if before[option] != group[option]:
                raise ValueError(
                    f"state_dict was saved with {option}={before[option]!r}, this optimizer has "
                    f"{option}={group[option]!r}; construct it with {option}={before[option]!r}"
                )
    aligned = {**state_dict, "param_groups": saved}
    _check_axes(aligned, groups, infos)
    return aligned


def _check_tag(group: Mapping[str, Any], tag: str) -> None:
    """Check that a group was saved by this optimizer and version, with all its entries."""
    mark: Any = group.get("nucleon")
    saved, *complete = mark if isinstance(mark, list | tuple) and mark else [mark]
    if saved != tag:
        raise ValueError(
            f"state_dict is of {saved or 'another optimizer'}, this optimizer is {tag}; load it "
            f"into the optimizer and version of nucleon that wrote it. nucleon.optim.converted "
            f"converts the moments of torch's AdamW and of Muon"
        )
    # full_state_dict=True replaces the states of other ranks by new ones.
    if not complete and group.get("placement") == "owner":
        raise ValueError(
            "full_state_dict=True loses the states that other ranks own; use "
            "nucleon.optim.consolidate, or Distributed Checkpoint without that option"
        )


def _by_name(
    saved: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]], infos: Infos
) -> list[dict[str, Any]] | None:
    """Return saved groups in the order of these, matched by name; None if the names differ."""
    written = [(group, name) for group in saved for name in group.get("param_names", ())]
    keys = [key for group in saved for key in group["params"]]
    ours = [[infos[param].name for param in group["params"]] for group in groups]
    root = root_of(name for _, name in written)
    names = [canonical(name, root) for _, name in written]
    if not all(ours) or sorted(names) != sorted({name for row in ours for name in row}):
        return None
    of_name = {n: (k, g) for n, k, (g, _) in zip(names, keys, written, strict=True)}
    matched: list[dict[str, Any]] = []
    for row in ours:
        group = of_name[row[0]][1]
        if any(of_name[name][1] is not group for name in row):
            raise ValueError(
                f"state_dict has {', '.join(row[:3])} in several groups, this optimizer in one; "
                f"construct it with the same groups"
            )
        options = {option: x for option, x in group.items() if option != "param_names"}
        matched.append({**options, "params": [of_name[name][0] for name in row]})
    return matched


def _check_axes(
    aligned: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], infos: Infos
) -> None:
    """Raise if saved axes are others, with the overrides that restore them."""
    now = {info.name: info.axes or "" for info in infos.values()}
    differ: dict[str, str] = {}
    for saved, group in zip(aligned["param_groups"], groups, strict=True):
        for key, param in zip(saved["params"], group["params"], strict=True):
            state = aligned["state"].get(key) or {}
            then = bytes(state["axes"].tolist()).decode() if "axes" in state else None
            if then is not None and then != now[infos[param].name]:
                differ[infos[param].name] = then
    if differ:
        overrides = {
            glob: {"axes": spec}
            for spec in dict.fromkeys(differ.values())
            for glob in globs(
                [name for name in differ if differ[name] == spec],
                [name for name in now if differ.get(name) != spec],
            )
        }
        raise ValueError(
            f"state_dict was saved with other axes of {', '.join([*differ][:3])}; construct the "
            f"optimizer with overrides={overrides}"
        )


def loaded(
    name: str,
    param: Tensor,
    saved: Mapping[str, Tensor],
    template: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> State:
    """Return the saved state of a parameter in the dtypes of a run, sharded like `template`.

    Raise if it lacks an entry other than the average, has another shape, or is not finite.
    """
    state = dict(template)
    if missing := template.keys() - saved.keys() - {"average", "averaged"}:
        raise ValueError(
            f"state_dict lacks {sorted(missing)} of parameter {name}; if another rank owned it, "
            f"save nucleon.optim.consolidate(optimizer), or use Distributed Checkpoint"
        )
    for entry, like in template.items():
        if entry not in saved:
            continue
        value = saved[entry]
        if value.shape != like.shape:
            raise ValueError(
                f"state_dict has {entry!r} of shape {tuple(value.shape)} for parameter {name}, "
                f"this optimizer of {tuple(like.shape)}; the models differ"
            )
        dtype = like.dtype
        if entry == "total":
            dtype = group["momentum_dtype"] or _checks.work_dtype(param.dtype)
        if shards.sharded(like):
            value = value if shards.sharded(value) else shards.like(value, param)
            state[entry] = value.to(param.device, dtype, copy=True)
        else:
            state[entry] = torch.empty_like(like, dtype=dtype).copy_(shards.full(value))
        if not shards.local(state[entry]).isfinite().all():
            raise ValueError(
                f"{entry!r} of parameter {name}, saved in {value.dtype}, is not finite in {dtype}; "
                f"use parameters of the saved dtype, or an earlier state"
            )
    return state
