"""Save and load the state of an optimizer; `nucleon.optim.state` lists its entries."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.optim.engines import ledger
from nucleon.optim.engines.work import State
from nucleon.optim.matrices import axes, shards
from nucleon.optim.matrices.parameters import Infos, canonical, globs, root_of
from nucleon.optim.options import FIXED


def pack(_: Any, packed: dict[str, Any]) -> None:
    """Mark the groups that `state_dict()` returns, for `_check_tag`.

    The mark contains an empty tuple, which full_state_dict=True drops.
    """
    for group in packed["param_groups"]:
        group["nucleon"] = (group["nucleon"], ())


def aligned(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], infos: Infos, tag: str
) -> dict[str, Any]:
    """Return a saved state in the order of these groups; raise on another optimizer's.

    Parameters of a numbered state are matched by name if its names are those of these parameters,
    apart from parameters frozen when it was saved. Otherwise they are matched by position, as in
    torch; Distributed Checkpoint has matched them by name before.
    """
    missing = {"param_groups", "state"} - set(state_dict)
    if missing:
        raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
    saved: list[dict[str, Any]] = [dict(group) for group in state_dict["param_groups"]]
    for group in saved:
        _check_tag(group, tag)
        group["nucleon"] = tag
    if any(isinstance(key, str) for group in saved for key in group["params"]):
        for group in saved:
            group.pop("param_names", None)  # in the order of the saved parameters
    names = _names_in(saved, groups, infos)
    saved = saved if names is None else _by_name(saved, names, groups, infos)
    sizes, ours = ([len(g["params"]) for g in each] for each in (saved, groups))
    if sizes != ours:
        raise ValueError(
            f"state_dict has groups of {sizes} parameters, this optimizer of {ours}; the models "
            f"or their frozen parameters differ: freeze the parameters that were frozen when it "
            f"was saved, or add names to its groups: group['param_names'] = [...], in the order "
            f"of group['params']"
        )
    for key, state in state_dict["state"].items():
        if not isinstance(state, Mapping):
            raise ValueError(
                f"state_dict holds {type(state).__name__} as the state of {key!r}, expected a "
                f"dict; it is damaged: load an earlier one"
            )
    return {**state_dict, "param_groups": saved}


def _check_tag(group: Mapping[str, Any], tag: str) -> None:
    """Check that a group was saved by this optimizer and version, with all its entries."""
    mark: Any = group.get("nucleon")
    saved, *complete = mark if isinstance(mark, list | tuple) and mark else [mark]
    if saved == tag and isinstance(mark, list | tuple):
        # full_state_dict=True replaces the states of other ranks by new ones.
        if not complete and group.get("placement") == "owner":
            raise ValueError(
                "full_state_dict=True loses the states that other ranks own; use "
                "nucleon.optim.consolidate, or Distributed Checkpoint without that option"
            )
    elif not isinstance(saved, str) or saved == tag:
        raise ValueError(
            f"state_dict is of another optimizer, this is {tag!r}; nucleon.optim.converted "
            f"converts the moments of torch's AdamW and of Muon"
        )
    elif saved.partition("/")[0] == tag.partition("/")[0]:
        raise ValueError(
            f"state_dict is of {saved!r}, this version reads {tag!r}; load it with the version "
            f"of nucleon that wrote it"
        )
    else:
        raise ValueError(
            f"state_dict is of {saved!r}, this optimizer is {tag!r}; load it into the optimizer "
            f"that wrote it"
        )


def _names_in(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], infos: Infos
) -> list[list[str]] | None:
    """Return the names to match saved groups by, or None to match them by position."""
    written: list[list[str]] = [list(group.get("param_names", ())) for group in saved]
    if all(len(n) == len(g["params"]) for n, g in zip(written, saved, strict=True)):
        root = root_of(name for names in written for name in names)
        names = [[canonical(name, root) for name in names] for names in written]
        every = [name for group in names for name in group]
        ours = {infos[p].name for group in groups for p in group["params"]}
        return names if len({*every}) == len(every) and ours.issuperset(every) else None
    if [len(g["params"]) for g in saved] == [len(g["params"]) for g in groups]:
        return None
    unfrozen = ([infos[p].name for p in g["params"] if p.requires_grad] for g in groups)
    names = [nonempty for nonempty in unfrozen if nonempty]
    return names if [*map(len, names)] == [len(g["params"]) for g in saved] else None


def _by_name(
    saved: Sequence[dict[str, Any]],
    names: Sequence[list[str]],
    groups: Sequence[Mapping[str, Any]],
    infos: Infos,
) -> list[dict[str, Any]]:
    """Return saved groups in the order of these, with a key for each parameter.

    A group without saved parameters is returned unchanged. A parameter that was not saved has a key
    without a state.
    """
    rest, aligned = list(zip(names, saved, strict=True)), list[dict[str, Any]]()
    for mine in groups:
        ours = [infos[p].name for p in mine["params"]]
        match = next((x for x in rest if {*x[0]} <= {*ours} and (x[0] or not ours)), None)
        if match is not None:
            rest.remove(match)
        then, group = match or ([], {**mine, "params": []})
        keys = dict(zip(then, group["params"], strict=True))
        group = {name: x for name, x in group.items() if name != "param_names"}
        aligned.append({**group, "params": [keys.get(name, ("absent", name)) for name in ours]})
    if unmatched := [name for then, _ in rest for name in then]:
        raise ValueError(
            f"state_dict groups {', '.join(unmatched[:3])} with parameters that this optimizer has "
            f"in other groups; construct it with the same groups"
        )
    return aligned


def loaded(
    param: Tensor,
    saved: Mapping[str, Tensor],
    template: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> State:
    """Return the state of a parameter from a saved one, sharded like `template`.

    Its dtypes are those of a run with the options of its group.
    """
    state, momentum_dtype = dict(template), group["momentum_dtype"]
    for name in template:
        if name not in saved:
            continue
        value = saved[name]
        dtype = template[name].dtype
        if name == "total":
            dtype = momentum_dtype or _checks.work_dtype(param.dtype)
        dtype = widest(param.device) if dtype == torch.float64 else dtype
        if shards.sharded(template[name]):
            value = value if shards.sharded(value) else shards.like(value, param)
            state[name] = value.to(param.device, dtype, copy=True)
        else:
            state[name] = torch.empty_like(template[name], dtype=dtype).copy_(shards.full(value))
    return state


def recast(
    state: State, name: str, param: Tensor, template: State, group: Mapping[str, Any]
) -> State:
    """Return the state of a parameter that was cast; `template` has its present dtype."""
    new = loaded(param, state, template, group)
    for entry, value in new.items():
        if not shards.local(value).isfinite().all():
            raise ValueError(
                f"{name} is {param.dtype} now, which cannot hold its {entry!r}; cast the model "
                f"before the optimizer is made"
            )
    return new


def check_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    templates: Mapping[Tensor, Mapping[str, Tensor]],
    infos: Infos,
    defaults: Mapping[str, Any],
) -> None:
    """Check that a saved state fits these groups and agrees in their fixed options."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        # torch itself adds "differentiable" to the defaults the first time a state is loaded.
        absent = sorted(set(defaults) - set(saved) - {"differentiable"})
        if absent:
            raise ValueError(f"state_dict lacks the options {absent}; it is damaged")
        for option in (name for name in FIXED if name in group):
            if saved[option] != group[option]:
                raise ValueError(
                    f"state_dict was saved with {option}={saved[option]!r}, this optimizer has "
                    f"{option}={group[option]!r}; construct it with {option}={saved[option]!r}"
                )
    states = [
        (param, state)
        for saved, group in zip(state_dict["param_groups"], groups, strict=True)
        for key, param in zip(saved["params"], group["params"], strict=True)
        if (state := state_dict["state"].get(key))  # frozen parameters have none
    ]
    then = {infos[p].name: _decoded(state["axes"]) for p, state in states if "axes" in state}
    now = {info.name: info.axes or axes.default(p.ndim) or "" for p, info in infos.items()}
    of_adamw = [p for group in groups if group["route"] == "adamw" for p in group["params"]]
    _check_axes(then, now | {infos[p].name: "" for p in of_adamw})
    for param, state in states:
        _check_saved(infos[param].name, param, state, templates[param])


def _check_axes(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise if the axes of a name differ, with the overrides that restore all of them."""
    differ = [name for name, spec in then.items() if spec != now[name]]
    if not differ:
        return
    overrides: dict[str, dict[str, str]] = {}
    for spec in dict.fromkeys(then[name] for name in differ):
        alike = [name for name in differ if then[name] == spec]
        others = [name for name in now if name not in alike]
        patterns = globs(alike, others) if len(alike) > 1 else alike
        overrides |= {glob: {"axes": spec} for glob in patterns}
    first, more = differ[0], f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    remedy = "the saved axes" if first.isdigit() else f"overrides={overrides}"
    raise ValueError(
        f"state_dict was saved with axes={then[first]!r} for parameter {first}, this optimizer has "
        f"axes={now[first]!r}{more}; construct it with {remedy}"
    )


def _check_saved(
    name: str, param: Tensor, saved: Mapping[str, Any], expected: Mapping[str, Tensor]
) -> None:
    """Check that a saved state has the entries of `expected`, of the same kind and shape."""
    name = f"parameter {name}"
    strange = set(saved) ^ set(expected)
    if "total" not in expected and "stream" in expected:  # another rank owns it, here or when saved
        strange = set()
        expected = {entry: template for entry, template in expected.items() if entry in saved}
    if "total" in strange and "stream" in saved:
        raise ValueError(
            f"state_dict has no state of {name}, which another rank owned when it was saved; save "
            f"the result of nucleon.optim.consolidate(optimizer), or use Distributed Checkpoint"
        )
    for entry in sorted(strange):
        raise ValueError(
            f"state_dict {'lacks' if entry in expected else 'has an unknown'} {entry!r} for "
            f"{name}; it is damaged: load an earlier one"
        )
    for entry, template in expected.items():
        _check_entry(name, param, entry, saved[entry], template)


_NONNEGATIVE = ("step", "skipped", "averaged", "quiet", "exp_avg_sq", *ledger.NONNEGATIVE)


def _check_entry(name: str, param: Tensor, entry: str, saved: object, template: Tensor) -> None:
    """Check kind, shape and values of a saved tensor against `template`."""

    def refused(fault: str, remedy: str = "it is damaged: load an earlier one") -> ValueError:
        return ValueError(f"state_dict holds {entry!r} {fault} for {name}; {remedy}")

    kinds = (Tensor.is_floating_point, Tensor.is_complex)
    if not isinstance(saved, Tensor) or any(kind(saved) != kind(template) for kind in kinds):
        kind = saved.dtype if isinstance(saved, Tensor) else type(saved).__name__
        raise refused(f"of type {kind} instead of {template.dtype}")
    if saved.shape != template.shape:
        shapes = f"of shape {tuple(saved.shape)} instead of {tuple(template.shape)}"
        raise refused(shapes, "the models differ")
    value = saved.to(_checks.work_dtype(param.dtype) if entry == "total" else template.dtype)
    part = shards.local(value)
    if not part.isfinite().all():
        fault = f"with values that are not finite in {value.dtype}"
        if not shards.local(saved).isfinite().all():
            raise refused(fault)
        raise refused(fault, f"they are in {saved.dtype}: load it into parameters of that dtype")
    part = torch.view_as_real(part) if part.is_complex() else part
    if entry in _NONNEGATIVE and (part < 0).any():
        raise refused("with values below 0")
    if entry.removeprefix(ledger.PREFIX).startswith("gram") and not _like_a_gram(value):
        raise refused("that is no sum of GGᵀ")


def _decoded(value: object) -> str:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return repr(value)
    return bytes(value.tolist()).decode(errors="replace")


def _like_a_gram(value: Tensor) -> bool:
    """Return True if matrices (…, m, m) are symmetric with |M_ij|² ≤ M_ii·M_jj up to rounding.

    A sum of n products rounds by n·eps at most, 2⁻⁷ for n = 2¹⁶ in float32, and loses at most
    n·`tiny` of subnormal terms.
    """
    if shards.sharded(value):
        return True
    value = value.to(_checks.work_dtype(value.dtype))
    lost = 2.0**16 * torch.finfo(value.dtype).tiny
    diagonal = value.diagonal(dim1=-2, dim2=-1)
    if (diagonal < 0).any():
        return False
    root = (diagonal + lost).sqrt()
    allowed = root[..., :, None] * root[..., None, :]
    symmetric = (value - value.mT).abs() <= 2.0**-7 * allowed
    return bool((symmetric & (value.abs() <= (1 + 2.0**-7) * allowed)).all())
