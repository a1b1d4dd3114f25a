"""The hyperparameters of an old run in the terms of Muon, Pion and Leon.

What a group of the old optimizer says of a parameter, by where that parameter goes now:

    old               to the matrix method                           to AdamW
    AdamW, Adam       lr with scale="match-adamw", β₁ → momentum     lr, betas, eps
    torch.optim.Muon  lr, momentum, nesterov, ns_steps → iterations, none: its rate is of matrices
    and Jordan's      adjust_lr_fn → scale
    SGD               momentum, nesterov                             none: its rate is of gradients

Weight decay is decoupled here, W ← (1 − lr·λ)W. It is so in AdamW and Muon; in SGD, where λW enters
the momentum and is summed over 1/(1−β₁) steps, it becomes the λ of the same decay per step; Adam
divides λW by √v, which no decoupled λ equals: the number stays.
"""

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.options import OF_ADAMW, Override
from nucleon.optim.routing.explanation import counted

_ENGINE = {"params", "param_names", "foreach", "capturable", "differentiable", "fused", "use_muon"}
"""What a group holds beside hyperparameters."""


@dataclass(frozen=True)
class Old:
    """What an old optimizer holds of a parameter."""

    name: str
    group: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One hyperparameter, and the option that it becomes; None where there is no such option."""

    old: str
    value: Any
    option: str | None = None
    new: Any = None
    why: str = ""


@dataclass(frozen=True)
class Inheritance:
    """What a group of the new optimizer has from a group of an old one."""

    rule: str
    source: str
    parameters: int
    changes: Sequence[Change]
    """With the values that the new group has."""

    def lines(self) -> list[str]:
        """A line for the group, and one for each hyperparameter, old → new."""
        head = f"{self.rule}: {counted(self.parameters, 'parameter')} of {self.source}"
        return [head, *(f"  {_line(change)}" for change in self.changes)]


def _line(change: Change) -> str:
    new = "none" if change.option is None else f"{change.option} {change.new!r}"
    return f"{change.old} {change.value!r} → {new}{f' ({change.why})' if change.why else ''}"


# ------------------------------------------------------------------------------ of one group


def translated(
    old: Old, rule: str, new: MatrixOptimizer, rate: float = 1.0
) -> tuple[str, tuple[Change, ...]]:
    """Whose group it is, and what its hyperparameters become under `rule` at the new `rate`."""
    group = {name: _plain(value) for name, value in old.group.items() if name not in _ENGINE}
    if "nucleon" in group and group["route"] == rule:
        return group["nucleon"].partition("/")[0], _own(group, rule, new)
    if _adam_inside(old, rule):
        group = _inner(group)
    rates = [(name, group[name]) for name in ("lr", "initial_lr") if name in group]
    found = [Change("maximize", True, "maximize", True)] if group.get("maximize") else []
    if "betas" in group and ("nucleon" not in group or group["route"] == "adamw"):
        coupled = group.get("decoupled_weight_decay") is False
        found += [Change(name, value, name, value) for name, value in rates]
        found += _of_adam(group, rule)
        why = "there divided by √v, which no number here equals" if coupled else ""
        found += _decay(group, group.get("weight_decay", 0.0), why)
        return "Adam" if coupled else "AdamW", tuple(found)
    if "dampening" in group:
        why = "there the step is as long as the gradient"
        found += [Change(name, value, why=why) for name, value in rates]
        gain = (1 - group["dampening"]) / (1 - group["momentum"])
        kept = group["lr"] * group["weight_decay"] * gain / rate if rate else 0.0
        found += _of_momentum(group) if rule == "matrix" else []
        found += _decay(group, kept, "the same decay per step")
        return "SGD", tuple(found)
    source = "torch.optim.Muon" if "adjust_lr_fn" in group else "Muon"
    if rule == "adamw":
        why = "of matrices, the parameter goes to AdamW now"
        return source, tuple(Change(name, value, why=why) for name, value in group.items())
    found += [Change(name, value, name, value) for name, value in rates]
    found += [*_of_momentum(group), *_of_muon(group)]
    decay = group.get("weight_decay", group.get("wd", 0.0))
    return source, (*found, *_decay(group, decay, ""))


def _plain(value: Any) -> Any:
    """A hyperparameter as numbers, where it is a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in cast(Sequence[Any], value))
    return value


def _own(group: Mapping[str, Any], rule: str, new: MatrixOptimizer) -> tuple[Change, ...]:
    """The options of Muon, Pion or Leon that the new optimizer has too, the run's own excepted."""
    same = group["nucleon"] == new.defaults["nucleon"]
    known = {
        name
        for name, option in new.declared.all.items()
        if not (option.fixed or option.run or (name in ("method", "smoothing_scale") and not same))
    }
    known = OF_ADAMW if rule == "adamw" else known | {"lr", "momentum"}
    known = known | {"initial_lr"}
    return tuple(Change(name, value, name, value) for name, value in group.items() if name in known)


def _adam_inside(old: Old, rule: str) -> bool:
    """Whether a group of Muon of 2024 holds the parameter for its own Adam."""
    if "adamw_betas" not in old.group:
        return False
    begun = bool(set(old.state) - {"step", "use_muon"})
    return "moment1" in old.state if begun else not old.state.get("use_muon", rule == "matrix")


def _inner(group: Mapping[str, Any]) -> dict[str, Any]:
    """The Adam inside of Muon of 2024, under torch's names."""
    ratio = group.get("adamw_lr_ratio", 1.0)
    rates = {name: group[name] * ratio for name in ("lr", "initial_lr") if name in group}
    return {
        **rates,
        **({"lr": group["adamw_lr"]} if "adamw_lr" in group else {}),
        "betas": group["adamw_betas"],
        "eps": group["adamw_eps"],
        "weight_decay": group.get("adamw_wd", group.get("weight_decay", group.get("wd", 0.0))),
    }


def _of_adam(group: Mapping[str, Any], rule: str) -> list[Change]:
    betas = group["betas"]
    missing = [Change("amsgrad", True)] if group.get("amsgrad") else []
    if rule == "adamw":
        kept = [Change(name, group[name], name, group[name]) for name in ("betas", "eps")]
        return [*kept, *missing]
    return [
        Change("betas[0]", betas[0], "momentum", betas[0], "there an average, here a sum"),
        Change("betas[1]", betas[1], why="M̂ is discounted by momentum², or by beta2"),
        Change("eps", group["eps"], why="the smoothing Λ plays its part"),
        Change("step", "by entry", "scale", "match-adamw", "AdamW's rate serves"),
        *missing,
    ]


def _of_momentum(group: Mapping[str, Any]) -> list[Change]:
    # Muon of today has Nesterov's momentum always, and no word on it.
    nesterov = group.get("nesterov", True)
    why = "" if "dampening" in group else "here a sum, to which the state is converted"
    return [
        Change("momentum", group["momentum"], "momentum", group["momentum"], why),
        Change("nesterov", nesterov, "nesterov", nesterov),
    ]


def _of_muon(group: Mapping[str, Any]) -> list[Change]:
    counts = [name for name in ("ns_steps", "backend_steps") if name in group]
    kernel = [name for name in ("ns_coefficients", "eps") if name in group]
    adjust = group.get("adjust_lr_fn")
    matched = adjust == "match_rms_adamw" or "wd" in group  # the latter is Moonlight's
    return [
        *(Change(name, group[name], "iterations", group[name]) for name in counts),
        Change("adjust_lr_fn", adjust, "scale", "match-adamw" if matched else "spectral"),
        *(Change(name, group[name], why="of its iteration, here see method") for name in kernel),
    ]


def _decay(group: Mapping[str, Any], kept: float, why: str) -> list[Change]:
    name = "wd" if "wd" in group else "weight_decay"
    given = group.get(name, 0.0)
    return [Change(name, given, "weight_decay", kept, why if given else "")]


# ------------------------------------------------------------------------------ of all groups


def options(
    model: nn.Module, new: MatrixOptimizer, old: Mapping[Tensor, Old], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What to pass to `for_model`, so that it goes on with the old hyperparameters.

    What most parameters of a route share becomes an option, the rest overrides; those given win.

    Args:
        model: the model of both runs.
        new: an optimizer of it by the options given, which shows where each parameter goes.
        old: what the old optimizers hold of each parameter.
        given: options of `for_model` that the user chose.
    """
    rate = {"lr": given["aux_lr"]} if "aux_lr" in given else {}
    chosen = {"matrix": given, "adamw": {**(given.get("aux") or {}), **rate}}
    shared: dict[str, dict[str, Any]] = {}
    apart: dict[str, dict[str, Any]] = {}
    for rule, own in chosen.items():
        values = {
            param: {name: x for name, x in found.items() if name not in own}
            for param, found in _values(new, old, rule).items()
        }
        shared[rule] = _most_common(values.values())
        apart |= overrides(model, values, shared[rule])
    apart = with_wishes(apart, given.get("overrides"))
    rest = {**shared["adamw"], **chosen["adamw"]}
    found = {**shared["matrix"], **given}
    found |= {"aux_lr": rest.pop("lr")} if "lr" in rest else {}
    found |= {"aux": rest} if rest else {}
    return found | ({"overrides": apart} if apart else {})


def report(new: MatrixOptimizer, old: Mapping[Tensor, Old]) -> list[Inheritance]:
    """What each group of the new optimizer has from each group of the old ones."""
    found: list[Inheritance] = []
    for group in new.param_groups:
        rate = float(group["lr"])
        of = [
            (old[p], translated(old[p], group["route"], new, rate))
            for p in group["params"]
            if p in old
        ]
        counts = Counter((id(each.group), said[0]) for each, said in of)
        seen = {(id(each.group), said[0]): said for each, said in of}
        for key, (source, changes) in seen.items():
            now = [replace(c, new=group.get(c.option)) if c.option else c for c in changes]
            found.append(Inheritance(group["route"], source, counts[key], now))
    return found


def keep_first_rates(new: MatrixOptimizer, old: Mapping[Tensor, Old]) -> None:
    """Give the groups the `initial_lr` of schedulers, where the old groups have one."""
    for group in new.param_groups:
        said = [translated(old[p], group["route"], new)[1] for p in group["params"] if p in old]
        rates = [c.new for changes in said for c in changes if c.option == "initial_lr"]
        if rates:
            group["initial_lr"] = Counter(rates).most_common(1)[0][0]


def _values(
    new: MatrixOptimizer, old: Mapping[Tensor, Old], rule: str
) -> dict[Tensor, dict[str, Any]]:
    """The options that the old hyperparameters of each parameter of a route become."""
    found: dict[Tensor, dict[str, Any]] = {}
    for group in new.param_groups:
        for param in group["params"] if group["route"] == rule else ():
            if param in old:
                changes = translated(old[param], rule, new, float(group["lr"]))[1]
                found[param] = {
                    c.option: c.new for c in changes if c.option and c.option != "initial_lr"
                }
    return found


def _most_common(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counts = Counter(tuple(each.items()) for each in values if each)
    return dict(counts.most_common(1)[0][0]) if counts else {}


def overrides(
    model: nn.Module, values: Mapping[Tensor, Mapping[str, Any]], shared: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """{glob: options} for the parameters whose options are not the shared ones."""
    names = [(name, p) for name, p in model.named_parameters(remove_duplicate=False)]
    wishes = {
        param: {name: x for name, x in own.items() if name not in shared or shared[name] != x}
        for param, own in values.items()
    }

    def alike(pattern: str, wish: Mapping[str, Any]) -> bool:
        return all(wishes.get(p) == wish for name, p in names if fnmatchcase(name, pattern))

    found: dict[str, dict[str, Any]] = {}
    for name, param in names:
        if wish := wishes.get(param):
            # One glob for the same parameter of all layers, where they agree.
            layers = [re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=count) for count in (0, 1)]
            globs = [pattern for pattern in layers if alike(pattern, wish)]
            found[globs[0] if globs else glob.escape(name)] = wish
    return found


def with_wishes(
    found: Mapping[str, Mapping[str, Any]], wishes: Mapping[str, Override] | None
) -> dict[str, dict[str, Any]]:
    """Overrides that were found, then those that a user wishes, which win key by key."""
    merged = {pattern: dict(own) for pattern, own in found.items()}
    for pattern, wish in (wishes or {}).items():
        wish = {"route": wish} if isinstance(wish, str) else wish
        merged[pattern] = {**merged.pop(pattern, {}), **wish}
    return merged
