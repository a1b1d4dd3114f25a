"""Continue a running job of AdamW or another Muon with Muon, Pion or Leon.

Other optimizers store averages, nucleon stores sums. With m the average of gradients, v the average
of their squares (corrected for its start), and β₁, β₂ of the new optimizer,

    Ĝ = m/(1−β₁)
    M̂ = (mmᵀ + diag(Σ_j max(0, v_ij − m_ij²)))/(1−β₂)       from AdamW
    M̂ = ĜĜᵀ·(1−β₁²)/(1−β₂)                                  from Muon, which keeps no squares

The first M̂ has exactly the diagonal of the mean GGᵀ, and equals it if the rows of the noise are
uncorrelated. The second is the expectation of M̂ if the gradients are noise around zero. If they are
all signal, it is (1+β₁)/(1−β₁) times too large; the first steps are then shorter, and the excess
decays in about 1/(1−β₂) steps.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon import _checks
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.work import gram_decay
from nucleon.optim.matrices import stacks
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import blocks
from nucleon.optim.routing.routing import param_groups

M = TypeVar("M", bound=MatrixOptimizer)
Old = tuple[dict[str, Any], Mapping[str, Any]]
"""The group and the state of a parameter in its old optimizer."""
_RATES = ("lr", "max_lr", "min_lr")
_CYCLED = ("base_momentum", "max_momentum")
"""Entries that schedulers of torch write into groups, besides `initial_lr`."""


@torch.no_grad()
def converted(
    optimizer: Optimizer | Sequence[Optimizer], model: nn.Module, kind: type[M], /, **options: Any
) -> M:
    """Return a new optimizer of a model with the hyperparameters and moments of its old ones.

    The states of `torch.optim.AdamW` are copied to the AdamW of the new optimizer; its matrices
    keep its rate by `scale="match-adamw"`. `torch.optim.Muon` and the plain Muon script (Keller
    Jordan's present one, with or without its AdamW) keep their rate and scale. Parameters without a
    suitable state start from zero.

    If a scheduler has changed the rates, pass its initial rates here, and continue with a new
    scheduler with `last_epoch=old_scheduler.last_epoch - 1`.

    Args:
        optimizer: the old optimizer, or several with different parameters.
        model: the model that they train.
        kind: `nucleon.Muon`, `nucleon.Leon`, `nucleon.Pion`, or a subclass.
        options: arguments of `for_model`, which replace those of the old optimizers. With
            `average`, the average starts with the first step of the new optimizer.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    old: dict[Tensor, Old] = {
        param: (_checked(each, group), each.state.get(param) or {})
        for each in optimizers
        for group in each.param_groups
        for param in group["params"]
    }
    if not any(old[p][1] for p in model.parameters() if p in old):
        raise ValueError(
            "the old optimizer has no state of any parameter of the model; pass optimizers of this "
            "model, after at least one step"
        )
    for name, param in model.named_parameters():
        for key, value in old[param][1].items() if param in old else ():
            if isinstance(value, Tensor):  # a NaN would make every step skip the matrix
                _checks.finite(f"{key} of {name}", value)
    new = kind.for_model(model, **_options(model, old, options))
    if any(group["certify"] for group in new.param_groups):
        raise ValueError("certify=True needs a run from its start; convert without it")
    steps = max(int(state.get("step", 0)) for _, state in old.values())
    for group in new.param_groups:
        carried = [p for p in group["params"] if p in old]
        if carried:
            _follow_schedule(group, old[carried[0]][0])
        for param in group["params"]:
            state = new.state.get(param)
            if state is None:  # frozen
                continue
            old_group, entries = old.get(param, ({}, {}))
            if group["route"] == "matrix":
                state["step"].fill_(steps)
                if param in old and "total" in state:  # else another rank owns it
                    parts = blocks(param, new.infos[param].axes)
                    _fill_matrices(state, old_group, entries, parts, group)
            elif "exp_avg_sq" in entries:
                state["exp_avg"].copy_(entries["exp_avg"])
                state["exp_avg_sq"].copy_(entries["exp_avg_sq"])
                state["step"].fill_(int(entries["step"]))
    return new


def _checked(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with plain numbers; raise on an optimizer that cannot be converted."""
    supported = isinstance(optimizer, torch.optim.Adam | torch.optim.Muon)
    names = set(group) - {"params", "param_names", "use_muon", "initial_lr", *_RATES, *_CYCLED}
    if not supported and names not in (
        {"momentum", "weight_decay"},
        {"betas", "eps", "weight_decay"},
    ):
        raise ValueError(
            f"{type(optimizer).__name__} with the options {sorted(names)} cannot be converted; "
            f"pass torch.optim.AdamW, torch.optim.Muon, or a Muon with groups of lr, momentum and "
            f"weight_decay and whose momentum_buffer is an average of gradients"
        )
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise ValueError(
            f"Adam with weight_decay={group['weight_decay']} adds it to the gradient, and here "
            f"decay is decoupled; set group['weight_decay'] = 0.0 and pass weight_decay=…"
        )
    if group.get("amsgrad"):
        raise ValueError("AdamW has no amsgrad here; set group['amsgrad'] = False to drop it")
    return {name: _number(value) for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_number(each) for each in cast(Sequence[Any], value))
    return value


# --------------------------------------------------------------------------- hyperparameters


def _options(
    model: nn.Module, old: Mapping[Tensor, Old], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `for_model`: the old hyperparameters, updated by `options`.

    The commonest values of a route become options, the others overrides.
    """
    routing = {name: options[name] for name in ("head", "overrides") if name in options}
    with warnings.catch_warnings():  # for_model repeats them
        warnings.simplefilter("ignore", UserWarning)
        groups = param_groups(model, **routing)
    aux_lr = {"lr": options["aux_lr"]} if "aux_lr" in options else {}
    explicit = {"matrix": options, "adamw": {**(options.get("aux") or {}), **aux_lr}}
    usual: dict[str, dict[str, Any]] = {}
    unusual: dict[Tensor, dict[str, Any]] = {}
    for route, names in explicit.items():
        values = {
            param: {k: x for k, x in _translated(old[param][0], route).items() if k not in names}
            for group in groups
            for _, param in group["params"]
            if group["route"] == route and param in old
        }
        counts = Counter(tuple(each.items()) for each in values.values() if each)
        usual[route] = dict(counts.most_common(1)[0][0]) if counts else {}
        common = usual[route].items()
        for param, options_of_it in values.items():
            unusual[param] = {k: x for k, x in options_of_it.items() if (k, x) not in common}
    aux = {**usual["adamw"], **explicit["adamw"]}
    arguments = {**usual["matrix"], **options}
    arguments |= {"aux_lr": aux.pop("lr")} if "lr" in aux else {}

    def override(name: str, module: nn.Module, param: Tensor) -> Mapping[str, Any] | None:
        return unusual.get(param, {})

    return arguments | {"aux": aux, "overrides": (override, options.get("overrides") or {})}


def _translated(group: Mapping[str, Any], route: str) -> dict[str, Any]:
    """Return the hyperparameters of an old group as options of a route."""
    options = {
        "lr": group.get("initial_lr", group["lr"]),
        "weight_decay": group["weight_decay"],
        **({"maximize": True} if group.get("maximize") else {}),
    }
    if "betas" in group:
        if route == "adamw":
            return options | {"betas": group["betas"], "eps": group["eps"]}
        return options | {"momentum": group["betas"][0], "scale": "match-adamw"}
    if route == "adamw":  # the old rate is for matrices
        return {}
    matched = group.get("adjust_lr_fn") == "match_rms_adamw"
    return options | {
        "momentum": group["momentum"],
        "nesterov": group.get("nesterov", True),  # the plain script has no option for it
        "iterations": group.get("ns_steps", 5),
        "scale": "match-adamw" if matched else "spectral",
    }


def _follow_schedule(group: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Scale the rates of a new group by the scheduler's factor of its old group."""
    if isinstance(group["lr"], Tensor) or not old.get("initial_lr"):
        return
    group["initial_lr"] = group["lr"]
    factor = group["initial_lr"] / old["initial_lr"]
    group.update({name: factor * old[name] for name in _RATES if name in old})
    group.update({name: old[name] for name in _CYCLED if name in old})


# ----------------------------------------------------------------------------------- moments


def _fill_matrices(
    state: Mapping[str, Tensor],
    old_group: Mapping[str, Any],
    old: Mapping[str, Any],
    parts: Iterable[Block],
    group: Mapping[str, Any],
) -> None:
    moment, squares = old.get("exp_avg", old.get("momentum_buffer")), old.get("exp_avg_sq")
    if moment is None or (squares is not None and int(old["step"]) == 0):
        return  # its steps were all skipped
    beta1, beta2 = float(group["momentum"]), gram_decay(group)
    state["total"].copy_(moment / (1 - beta1))
    for block in parts:
        gram = state.get(stacks.gram_key(block))
        if gram is None:
            continue
        average = stacks.short_side_first(block.matrices(moment.to(gram)))
        product = average @ average.mT
        if squares is None:
            product = product * ((1 + beta1) / (1 - beta1))  # ĜĜᵀ(1−β₁²), of the average
        else:
            corrected = squares.to(gram) / (1 - old_group["betas"][1] ** int(old["step"]))
            second = stacks.short_side_first(block.matrices(corrected))
            noise = (second - average.square()).clamp_min(0).sum(-1)
            product = product + torch.diag_embed(noise)
        gram.copy_(product / (1 - beta2))
