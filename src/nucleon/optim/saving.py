"""How the state of an optimizer is saved and loaded, and what is refused.

What is kept of each parameter is in `state`.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.optim.engines import ledger
from nucleon.optim.engines.work import State
from nucleon.optim.matrices import axes, shards
from nucleon.optim.matrices.parameters import Infos, canonical, globs
from nucleon.optim.state import VERSION, encoded


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


def recast(state: State, name: str, param: Tensor, own: State, group: Mapping[str, Any]) -> State:
    """The state of a parameter that was cast to another dtype; `own` is a new one of that dtype."""
    found = loaded(param, state, own, group)
    for entry, value in found.items():
        if not shards.local(value).isfinite().all():
            raise ValueError(
                f"{name} is {param.dtype} now, which cannot hold its {entry!r}; cast the model "
                f"before the optimizer is made"
            )
    return found


def check_state_dict(
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    templates: Mapping[Tensor, Mapping[str, Tensor]],
    infos: Infos,
    defaults: Mapping[str, Any],
    fixed: Sequence[str],
) -> None:
    """Raise unless a saved state fits these groups; of options only the `fixed` are compared."""
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
            raise _damaged(saved["certified"])
        for option in (name for name in fixed if name in group):
            if saved[option] != group[option]:
                raise ValueError(
                    f"state_dict was saved with {option}={saved[option]!r}, this optimizer has "
                    f"{option}={group[option]!r}; construct it alike"
                )
    kept = [
        (param, found)
        for saved, group in zip(given["param_groups"], groups, strict=True)
        for key, param in zip(saved["params"], group["params"], strict=True)
        if (found := given["state"].get(key))  # a parameter that was frozen has none
    ]
    then = {infos[p].name: _decoded(found["axes"]) for p, found in kept if "axes" in found}
    now = {info.name: info.axes or axes.default(p.ndim) or "" for p, info in infos.items()}
    of_adamw = [p for group in groups if group["rule"] == "adamw" for p in group["params"]]
    _check_axes(then, now | {infos[p].name: "" for p in of_adamw})
    for param, found in kept:
        _check_saved(infos[param].name, param, found, templates[param])


def _check_axes(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise where the axes of a name differ, with what makes all of them what they were.

    What has no saved state goes with those that have its axes now: it may be a frozen layer.
    """
    differ = [name for name, spec in then.items() if spec != now[name]]
    if not differ:
        return
    overrides: dict[str, dict[str, str]] = {}
    for spec in dict.fromkeys(then[name] for name in differ):
        alike = [name for name in differ if then[name] == spec]
        changed = {now[name] for name in alike}
        taken = [n for n in now if (then[n] == spec if n in then else now[n] in changed)]
        others = [name for name in now if name not in taken]
        chosen = globs(alike, others) if len(alike) > 1 else alike
        overrides |= {glob: {"axes": spec} for glob in chosen}
    first, more = differ[0], f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
    remedy = "with these axes" if first.isdigit() else f"overrides={overrides}"
    raise ValueError(
        f"state_dict was saved with axes={then[first]!r} for parameter {first}, this optimizer has "
        f"axes={now[first]!r}{more}; construct it alike, {remedy}"
    )


def _damaged(note: object) -> ValueError:
    return ValueError(
        f"state_dict holds certified={note!r:.60}, which no run writes; it is damaged: load an "
        f"earlier one"
    )


def _check_saved(
    name: str, param: Tensor, found: Mapping[str, Any], expected: Mapping[str, Tensor]
) -> None:
    """Raise unless a saved state has the entries, shapes and kinds of numbers of `expected`."""
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
        _check_entry(name, param, entry, found[entry], own)


_NONNEGATIVE = ("step", "skipped", "quiet", "exp_avg_sq", "first", "excess", "outside")


def _check_entry(name: str, param: Tensor, entry: str, saved: object, own: Tensor) -> None:
    """Raise unless a saved tensor can take the place of `own`: its kind, shape and values."""
    kinds = (Tensor.is_floating_point, Tensor.is_complex)
    if not isinstance(saved, Tensor) or any(kind(saved) != kind(own) for kind in kinds):
        kind = saved.dtype if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"state_dict holds {entry!r} of type {kind} for {name}, expected {own.dtype}; it is "
            f"damaged"
        )
    if saved.shape != own.shape:
        raise ValueError(
            f"state_dict holds {entry!r} of shape {tuple(saved.shape)} for {name}, expected "
            f"{tuple(own.shape)}; the models differ"
        )
    value = saved.to(_checks.work_dtype(param.dtype) if entry == "total" else own.dtype)
    if not shards.local(value).isfinite().all():
        remedy = "it is damaged: load an earlier one"
        if shards.local(saved).isfinite().all():
            remedy = f"they are in {saved.dtype}: load it into parameters of that"
        raise ValueError(
            f"state_dict holds {entry!r} with values that are not finite in {value.dtype} for "
            f"{name}; {remedy}"
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


def _decoded(value: object) -> str:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return repr(value)
    return bytes(value.tolist()).decode(errors="replace")


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
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    infos: Infos,
    game: Sequence[str],
) -> dict[str, Any]:
    """A saved state in the terms of this version; what is wrong with it is found later.

    `game` are the options that a certificate depends on.
    """
    missing = {"param_groups", "state"} - set(given)
    if missing:
        raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
    saved: list[dict[str, Any]] = [dict(group) for group in given["param_groups"]]
    for group in saved:
        _unpack(group)
    specs = _specs(saved)
    saved = _with_frozen(saved, groups, infos)
    sizes, ours = ([len(g["params"]) for g in found] for found in (saved, groups))
    if sizes != ours:
        raise ValueError(
            f"state_dict has groups of {sizes} parameters, this optimizer of {ours}; the models "
            f"differ, or what is frozen: a state that lacks frozen parameters is loaded while the "
            f"same ones are frozen, which may be undone afterwards, or by the names that you write "
            f"into its groups: group['param_names'] = [...], in the order of group['params']"
        )
    states: dict[Any, Any] = dict(given["state"])
    for key, found in states.items():
        if not isinstance(found, Mapping):
            raise ValueError(
                f"state_dict holds {type(found).__name__} as the state of {key!r}, expected a "
                f"dict; it is damaged: load an earlier one"
            )
    for group, own in zip(saved, groups, strict=True):
        tag = str(group.get("nucleon"))
        if tag.endswith("/2"):
            group["nucleon"] = f"{tag[:-1]}{VERSION}"
            _upgrade(group, game)
            for key, param in zip(group["params"], own["params"], strict=True):
                found = states.get(key)
                if isinstance(found, Mapping) and isinstance(found.get("stream"), Tensor):
                    spec = specs.get(key, infos[param].axes) or axes.default(param.ndim)
                    states[key] = _upgraded_state(found, param, spec or "", group)
        for option in _RETIRED:
            group.pop(option, None)
    return {**given, "param_groups": saved, "state": states}


def _specs(saved: Sequence[Mapping[str, Any]]) -> dict[Any, str | None]:
    """What the groups of version 2 say of axes, by the keys of their parameters."""
    pairs = (zip(g["params"], g.get("axes") or (), strict=False) for g in saved)
    return {key: spec for group in pairs for key, spec in group}


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


def _upgrade(group: dict[str, Any], game: Sequence[str]) -> None:
    """Give a group of version 2 the options of version 3, and its note on the game."""
    if group.get("placement") == "gram":  # its states are whole, as those of "local"
        group["placement"] = "local"
    if group.get("cautious"):
        warnings.warn(
            "state_dict was saved with cautious=True, which is no option; the run goes on without",
            stacklevel=2,
        )
    noted = _older_game(group.get("certified") or "[]")
    names = ("momentum", "beta2", "nesterov", "smoothing_scale", "gradient_bound")
    now = [group[name] for name in names if name in group]
    if noted == []:
        group["certified"] = ""
    elif noted != now:
        group["certified"] = f"{ledger.CHANGED}an option"
    elif "axes" not in group:  # torch asked for what version 3 has: `largest` is not in the states
        group["certified"] = f"{ledger.CHANGED}the version"
    else:
        group["certified"] = ledger.options_of(group, game)


def _upgraded_state(
    found: Mapping[str, Tensor], param: Tensor, spec: str, group: Mapping[str, Any]
) -> State:
    """The state of a matrix parameter of version 2 with the entries of version 3."""
    state, stream = {**found, "axes": encoded(spec)}, found["stream"]
    if "skipped" in state:
        state["quiet"] = torch.zeros_like(stream)
    if "largest" in state or "excess" in state:  # the one of version 2, the other of torch's asking
        none = torch.zeros_like(stream, dtype=widest(stream.device))
        state["excess"] = _excess(state.pop("largest", none), param, group)
        state["outside"] = torch.zeros_like(stream)
    return state


def _excess(largest: Tensor, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The most that gradients of these norms can have above their bound, see `ledger.new_state`.

    Σγ^{t-s}‖E_s‖_* ≤ m(max‖G_s‖_op − bound)/(1 − γ), and m×n matrices have at least m² entries.
    """
    side, eps = math.sqrt(param.numel()), torch.finfo(_checks.work_dtype(param.dtype)).eps
    above = largest * (1 + 64 * side * eps) - group.get("gradient_bound", math.inf)
    most = side / (1 - group.get("momentum", 0.0)) * above
    return most.clamp(0.0, torch.finfo(most.dtype).max)


def _older_game(note: object) -> list[object] | None:
    """The note of version 2 on a group: a list of the options, null once one of them changed."""
    try:
        game = json.loads(cast(str, note))
    except (ValueError, TypeError) as error:
        raise _damaged(note) from error
    if game is not None and not isinstance(game, list):
        raise _damaged(note)
    return cast(list[object] | None, game)
