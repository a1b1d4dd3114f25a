"""What an optimizer keeps of each parameter, how it is saved, and what is refused.

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

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.optim import options
from nucleon.optim.engines import ledger
from nucleon.optim.matrices import axes, shards, stacks
from nucleon.optim.matrices.parameters import ParameterInfo, blocks, canonical

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
        found.append((canonical(name), param))
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
    index: int,
    step: Tensor | None,
    group: Mapping[str, Any],
    *,
    has_gram: bool,
    owned: bool = True,
) -> State:
    """Zero moments of parameter number `index`, which counts its steps from `step`, or from 0."""
    found = blocks(param, info.axes)
    wide, device = _checks.work_dtype(param.dtype), param.device
    matrices = torch.arange(sum(block.count for block in found), device=device)
    state: State = {
        "step": torch.zeros((), dtype=torch.int64, device=device)
        if step is None
        else step.to(device, copy=True),
        "stream": matrices + index * SLICES,
        "axes": _encoded(info.axes or axes.default(param.ndim) or "").to(device),
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


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _decoded(value: object) -> str:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return repr(value)
    return bytes(value.tolist()).decode(errors="replace")


# ------------------------------------------------------------------ saved states


def pack(_: Any, packed: dict[str, Any]) -> None:
    """Make what torch packed fit to be saved.

    `certified` becomes a pair with something empty in it, which full_state_dict=True drops.
    """
    for group in packed["param_groups"]:
        group["certified"] = (group["certified"], ())


def _unpack(group: dict[str, Any]) -> None:
    """Put back what `pack` has put elsewhere.

    full_state_dict=True fills in new state for what is missing: raise where another rank had some.
    """
    match group.get("certified"):
        case [str(told), *rest]:
            if not rest and group.get("placement") == "owner":
                raise ValueError(
                    "full_state_dict=True takes what one rank owns for the whole state; use "
                    "nucleon.optim.consolidate, or Distributed Checkpoint without that option"
                )
            group["certified"] = told
        case _:
            pass


def loaded(
    param: Tensor,
    found: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> State:
    """The state of a parameter from a saved one, of which each rank keeps what it has to.

    It has the dtypes that a run under the options of its group gives it, and lies in memory as its
    own did.
    """
    state, momentum_dtype = dict(own), group["momentum_dtype"]
    for name in own:
        if name not in found:
            continue
        value = found[name]
        dtype = own[name].dtype
        if name == "total":
            dtype = momentum_dtype or _checks.work_dtype(param.dtype)
        dtype = widest(param.device) if dtype == torch.float64 else dtype
        if shards.sharded(own[name]):
            value = value if shards.sharded(value) else shards.like(value, param)
            state[name] = value.to(param.device, dtype, copy=True)
        else:
            state[name] = torch.empty_like(own[name], dtype=dtype).copy_(shards.full(value))
    return state


def check_state_dict(
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    templates: Mapping[Tensor, Mapping[str, Tensor]],
    infos: Infos,
    defaults: Mapping[str, Any],
) -> None:
    """Raise unless a saved state fits these groups; the values of its options are not looked at."""
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
        if not ledger.is_note(saved.get("certified", "")):
            raise ValueError(
                f"state_dict holds certified={saved['certified']!r:.60}, which no run writes; it "
                f"is damaged: load an earlier one"
            )
        for option in ("rule", "certify"):
            if saved[option] != group[option]:
                raise ValueError(
                    f"state_dict was saved with {option}={saved[option]!r}, this optimizer has "
                    f"{option}={group[option]!r}; construct it alike"
                )
        for key, param in zip(saved["params"], group["params"], strict=True):
            found = given["state"].get(key, {})
            if found:  # a parameter that was frozen has none
                _check_saved(infos[param].name, param, found, templates[param])


def _check_saved(
    name: str, param: Tensor, found: Mapping[str, Any], expected: Mapping[str, Tensor]
) -> None:
    """Raise unless a saved state has the entries, shapes and kinds of numbers of `expected`."""
    given, wanted = (_decoded(x["axes"]) if "axes" in x else "" for x in (found, expected))
    if given != wanted:
        raise ValueError(
            f"state_dict was saved with axes={given!r} for parameter {name}, this optimizer has "
            f"axes={wanted!r}; construct it alike, overrides={{{name!r}: {{'axes': {given!r}}}}}"
        )
    name = f"parameter {name}"
    strange = set(found) ^ set(expected)
    if "total" not in expected and "stream" in expected:  # another rank owns it, here or when saved
        strange = set()
        expected = {entry: own for entry, own in expected.items() if entry in found}
    if "total" in strange and "stream" in found:
        raise ValueError(
            f"state_dict has no state of {name}, which another rank owned when it was saved; save "
            f"what nucleon.optim.consolidate returns, or use Distributed Checkpoint"
        )
    for entry in sorted(strange):
        raise ValueError(
            f"state_dict {'lacks' if entry in expected else 'has an unknown'} {entry!r} for "
            f"{name}; it is damaged or of another version"
        )
    for entry, own in expected.items():
        value = found[entry]
        kinds = (Tensor.is_floating_point, Tensor.is_complex)
        if not isinstance(value, Tensor) or any(kind(value) != kind(own) for kind in kinds):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"state_dict holds {entry!r} of type {kind} for {name}, expected {own.dtype}; it "
                f"is damaged"
            )
        if value.shape != own.shape:
            raise ValueError(
                f"state_dict holds {entry!r} of shape {tuple(value.shape)} for {name}, expected "
                f"{tuple(own.shape)}; the models differ"
            )
        value = value.to(_checks.work_dtype(param.dtype) if entry == "total" else own.dtype)
        if not shards.local(value).isfinite().all():
            raise ValueError(
                f"state_dict holds {entry!r} with values that are not finite for {name}; it is "
                f"damaged: load an earlier one"
            )
        held = shards.local(value)
        held = torch.view_as_real(held) if held.is_complex() else held
        if entry in _NONNEGATIVE and (held < 0).any():
            raise ValueError(
                f"state_dict holds {entry!r} with values below 0 for {name}; it is damaged: load "
                f"an earlier one"
            )
        if entry.startswith("gram") and not _like_a_gram(value):
            raise ValueError(
                f"state_dict holds {entry!r} for {name}, which is no sum of GGᵀ; it is damaged: "
                f"load an earlier one"
            )


_NONNEGATIVE = ("step", "skipped", "quiet", "exp_avg_sq", "first", "excess", "outside")


def _like_a_gram(value: Tensor) -> bool:
    """Whether matrices (…, m, m) are symmetric with |M_ij|² ≤ M_ii·M_jj, rounding apart.

    A sum of n products rounds by n·eps at most, 2⁻⁷ for n = 2¹⁶ in float32, and loses terms that
    leave the normal numbers: as many times `tiny`.
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
    apart = (value - value.mT).abs() <= 2.0**-7 * allowed
    return bool((apart & (value.abs() <= (1 + 2.0**-7) * allowed)).all())


# ------------------------------------------------------------------ older versions

_RETIRED = ("axes", "param_names", "reasons", "cautious")
"""What groups of version 2 have and those of version 3 have not."""


def upgraded(
    given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], infos: Infos
) -> dict[str, Any]:
    """A saved state in the terms of this version; what is wrong with it is found later."""
    missing = {"param_groups", "state"} - set(given)
    if missing:
        raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
    saved: list[dict[str, Any]] = [dict(group) for group in given["param_groups"]]
    states: dict[Any, Any] = dict(given["state"])
    for group in saved:
        _unpack(group)
        tag = str(group.get("nucleon"))
        if tag.endswith("/2"):
            group["nucleon"] = f"{tag[:-1]}{VERSION}"
            _upgrade(group, states)
    saved = _with_frozen(saved, groups, infos)
    sizes, ours = ([len(g["params"]) for g in found] for found in (saved, groups))
    if sizes != ours:
        raise ValueError(
            f"state_dict has groups of {sizes} parameters, this optimizer of {ours}; the models "
            f"differ, or what is frozen: a state that lacks frozen parameters is loaded while the "
            f"same ones are frozen, which may be undone afterwards, or by the names that you write "
            f"into its groups: group['param_names'] = [...], in the order of group['params']"
        )
    for group in saved:
        for option in _RETIRED:
            group.pop(option, None)
    return {**given, "param_groups": saved, "state": states}


def _with_frozen(
    saved: list[dict[str, Any]], groups: Sequence[Mapping[str, Any]], infos: Infos
) -> list[dict[str, Any]]:
    """Saved groups that lack frozen parameters, with a key for each of them, and no state.

    Parameters are matched by name where the groups have names, which those of version 3 have not;
    there the saved ones are those that are not frozen now, in order.
    """
    if [len(g["params"]) for g in saved] == [len(g["params"]) for g in groups]:
        return saved
    rest, found = list(saved), list[dict[str, Any]]()
    for own in groups:
        names = [infos[p].name for p in own["params"]]
        if rest and "param_names" in rest[0]:
            had = [canonical(name) for name in rest[0]["param_names"]]
        else:
            had = [infos[p].name for p in own["params"] if p.requires_grad]
        fits = rest and had and {*had} <= {*names} and len(had) == len(rest[0]["params"])
        group = dict(rest.pop(0)) if fits else {**own, "params": []}  # or frozen as a whole
        keys = dict(zip(had, group["params"], strict=True)) if fits else {}
        group["params"] = [keys.get(name, ("absent", name)) for name in names]
        found.append(group)
    return saved if rest else found


def _upgrade(group: dict[str, Any], states: dict[Any, Any]) -> None:
    """Give the states of a group of version 2 what its lists said, and what version 3 adds."""
    group["consistency_every"] = group.get("consistency_every") or 0
    if group.get("placement") == "gram":  # its states are whole, as those of "local"
        group["placement"] = "local"
    if group.get("cautious"):
        warnings.warn(
            "state_dict was saved with cautious=True, which is no option; the run goes on without",
            stacklevel=2,
        )
    # Version 2 has a list of these options, null once one of them changed.
    game = json.loads(group.get("certified") or "[]")
    names = ("momentum", "beta2", "nesterov", "smoothing_scale", "gradient_bound")
    now = [group[name] for name in names if name in group]
    group["certified"] = ""
    if game != []:
        kept = game == now
        group["certified"] = ledger.options_of(group) if kept else f"{ledger.CHANGED}an option"
    if group.get("rule") != "matrix":
        return
    for key, spec in zip(group["params"], group.get("axes") or [], strict=False):
        state = states.get(key)
        if not isinstance(state, Mapping) or "stream" not in state:
            continue
        state = dict(cast(Mapping[str, Tensor], state))
        total = state.get("total")
        known = spec or (axes.default(total.ndim) if isinstance(total, Tensor) else None)
        state["axes"] = _encoded(known or "")
        if "skipped" in state:
            state["quiet"] = torch.zeros_like(state["skipped"])
        if "largest" in state:  # of the gradients: one above the bound ends the game
            largest = state.pop("largest")
            state["excess"] = torch.zeros_like(largest)
            state["outside"] = torch.zeros_like(state["skipped"])
            if largest.max() > group["gradient_bound"]:
                group["certified"] = f"{ledger.CHANGED}gradient_bound"
        states[key] = state
