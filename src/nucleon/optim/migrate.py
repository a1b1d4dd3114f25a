"""Switch a running job to Muon, Pion or Leon: the old optimizer's moments in the new one's terms.

Others keep averages, here are sums. With m the old average of gradients, v that of their squares
(corrected for its start), and β₁, β₂ those of the new optimizer,

    Ĝ = m/(1−β₁)
    M̂ = (mmᵀ + diag(Σ_j max(0, v_ij − m_ij²)))/(1−β₂)       from AdamW
    M̂ = ĜĜᵀ·(1−β₁²)/(1−β₂)                                  from Muon or SGD, which keep no squares
    M̂ = its own M̂·(1−its β₂)/(1−β₂)                         from Leon or Pion, of the same axes

The first M̂ has the diagonal of the mean GGᵀ exactly, and all of it where the rows of the noise are
not correlated. The second is the expectation of M̂ where gradients are noise around zero; where they
are all signal it is (1+β₁)/(1−β₁) times too large, which makes the first steps shorter, and is
forgotten in about 1/(1−β₂) steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon import _checks
from nucleon.optim import inherit
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.work import gram_decay
from nucleon.optim.inherit import Inheritance, Old
from nucleon.optim.matrices import stacks
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import blocks

Momentum = Literal["auto", "average", "sum"]

_ADAM = (("exp_avg", "exp_avg_sq", "betas"), ("moment1", "moment2", "adamw_betas"))
"""What torch, and Muon of 2024, call m, v and (β₁, β₂)."""


@dataclass(frozen=True)
class _Moments:
    """What an old optimizer knows of a parameter."""

    source: str
    average: Tensor
    """m."""
    squares: Tensor | None
    """The state's v, not corrected; None where there is none."""
    steps: int
    beta2: float
    grams: Mapping[str, Tensor]
    """M̂ by its key in the state; of Pion and Leon only."""


@dataclass(frozen=True)
class Conversion:
    """A new optimizer that goes on where old ones stopped."""

    optimizer: MatrixOptimizer
    options: Mapping[str, Any]
    """With which `for_model` builds it: the old hyperparameters, and those given."""
    groups: Sequence[Inheritance]
    """Every hyperparameter, old → new, for each group."""
    parameters: Mapping[str, str]
    """What became of the state of each parameter."""


@torch.no_grad()
def converted(
    old: Optimizer | Mapping[str, Any] | Sequence[Optimizer] | Sequence[Mapping[str, Any]],
    model: nn.Module,
    make: Callable[..., MatrixOptimizer],
    *,
    momentum: Momentum = "auto",
    **given: Any,
) -> Conversion:
    """A new optimizer with the hyperparameters and the state of old ones, see `optim.inherit`.

    Args:
        old: optimizers of the model, or what their `state_dict()` returned, see `convert` and
            `convert_checkpoint`.
        model: the model of both runs.
        make: as `Leon.for_model`.
        momentum: see `convert` ("auto").
        given: options of `for_model`, which win over the old ones.
    """
    found = _of(old, model)
    moments = _all_moments(found, momentum)
    first = make(model, **given)
    if not isinstance(first, MatrixOptimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"make must return a Muon, Pion or Leon, got {type(first).__name__}")
    options = inherit.options(model, first, found, given)
    new = make(model, **options)
    inherit.keep_first_rates(new, found)
    return Conversion(new, options, inherit.report(new, found), _fill(new, moments))


@torch.no_grad()
def convert(
    old: Optimizer | Sequence[Optimizer], new: MatrixOptimizer, *, momentum: Momentum = "auto"
) -> dict[str, str]:
    """Fill the state of `new` from optimizers of the same parameters; what became of each.

    Understands `torch.optim.AdamW` and `Adam`, `torch.optim.Muon`, Jordan's Muon (the averages of
    today, the sums of 2024), `torch.optim.SGD` with momentum, and others whose state is called like
    theirs; and the ones here. The options of `new` stay as they are; `converted` inherits them.

    Args:
        old: one, or several that share the parameters among them, such as Muon and AdamW.
        new: an optimizer made by `for_model` or over the same parameters.
        momentum: what the `momentum_buffer` of a Muon holds, an "average" (1−β₁)Σβ₁ᵏG or a "sum"
            Σβ₁ᵏG; "auto" tells by the options it was saved with, or raises ("auto").
    """
    optimizers = [old] if isinstance(old, Optimizer) else list(old)
    return _fill(new, _all_moments(_of_optimizers(optimizers), momentum))


@torch.no_grad()
def convert_checkpoint(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    model: nn.Module,
    new: MatrixOptimizer,
    *,
    momentum: Momentum = "auto",
) -> dict[str, str]:
    """Fill the state of `new` from saved states of the optimizers of a model.

    States are matched by the names they were saved with, or, in a single state of a single group,
    by the order of `model.parameters()`. The options of `new` stay; `converted` inherits them.

    Args:
        saved: one or several `state_dict()`.
        model: the model of the old run.
        new: an optimizer of its parameters.
        momentum: see `convert` ("auto").
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    return _fill(new, _all_moments(_of_states(states, model), momentum))


# ------------------------------------------------------------------------------ the old groups


def _of(old: Any, model: nn.Module) -> dict[Tensor, Old]:
    """What old optimizers, or their saved states, hold of each parameter."""
    several: list[Any] = [old] if isinstance(old, Optimizer | Mapping) else list(old)
    if all(isinstance(each, Optimizer) for each in several):
        return _of_optimizers(several)
    if all(isinstance(each, Mapping) for each in several):
        return _of_states(several, model)
    raise TypeError(
        f"old must be optimizers, or what their state_dict() returned, got "
        f"{', '.join(type(each).__name__ for each in several)}"
    )


def _of_optimizers(optimizers: Sequence[Optimizer]) -> dict[Tensor, Old]:
    return {
        param: Old(str(tuple(param.shape)), group, optimizer.state.get(param) or {})
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _of_states(states: Sequence[Mapping[str, Any]], model: nn.Module) -> dict[Tensor, Old]:
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[Tensor, Old] = {}
    for state in states:
        for key in ("state", "param_groups"):
            if key not in state:
                raise ValueError(f"a saved state lacks {key!r}; pass what state_dict() returned")
        names = _saved_names(state["param_groups"], model, alone=len(states) == 1)
        for group, group_names in zip(state["param_groups"], names, strict=True):
            for index, name in zip(group["params"], group_names, strict=True):
                if name not in named:
                    raise ValueError(f"the saved parameter {name!r} is not in the model")
                found[named[name]] = Old(name, group, state["state"].get(index) or {})
    return found


def _saved_names(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, *, alone: bool
) -> list[Sequence[str]]:
    """The names of the parameters of each saved group."""
    if all("param_names" in group for group in groups):
        return [group["param_names"] for group in groups]
    order = [name for name, _ in model.named_parameters()]
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    if alone and len(groups) == 1:
        for names in (order, wanted):
            if len(names) == len(groups[0]["params"]):
                return [names]
    raise ValueError(
        f"the saved state has groups of {[len(g['params']) for g in groups]} parameters without "
        f"names, the model has {len(order)}: which is which cannot be told; build the old "
        f"optimizer as it was, load its state, and call nucleon.optim.convert(old, new)"
    )


# ------------------------------------------------------------------------------ the old state


def _all_moments(found: Mapping[Tensor, Old], momentum: Momentum) -> dict[Tensor, _Moments]:
    """The averages of every parameter whose state has begun, checked against its shape."""
    _checks.choice("momentum", momentum, get_args(Momentum))
    known: dict[Tensor, _Moments] = {}
    for param, old in found.items():
        moments = _moments(old, momentum)
        if moments is None:
            continue
        if moments.average.shape != param.shape:
            raise ValueError(
                f"the saved state of {old.name!r} has shape {tuple(moments.average.shape)}, the "
                f"parameter {tuple(param.shape)}; the models differ, or the order does: use "
                f"nucleon.optim.convert with the old optimizer"
            )
        known[param] = moments
    return known


def _moments(old: Old, momentum: Momentum) -> _Moments | None:
    """The averages in a state; None where it has not begun."""
    name, group, state = old.name, old.group, old.state
    if not set(state) - {"step", "use_muon"}:
        return None
    for average, squares, betas in _ADAM:
        if average in state and squares in state:
            for key in (average, squares):
                _checks.finite(f"{key} of {name}", state[key])
            if (steps := int(state["step"])) == 0:  # every step so far was skipped
                return None
            beta2 = float(group[betas][1])
            return _Moments("AdamW", state[average], state[squares], steps, beta2, {})
    buffer = state.get("momentum_buffer", state.get("total"))
    if not isinstance(buffer, Tensor):
        raise ValueError(
            f"the state of {name} has {sorted(state)}, none of the optimizers that can be "
            f"converted: it needs exp_avg and exp_avg_sq, or momentum_buffer"
        )
    _checks.finite(f"the momentum of {name}", buffer)
    source, scale = _momentum_scale(group, momentum)
    grams = {key: value for key, value in state.items() if key.partition(".")[0] == "gram"}
    steps = int(state.get("step", 0))
    return _Moments(source, buffer * scale, None, steps, gram_decay(group), grams)


def _momentum_scale(group: Mapping[str, Any], told: Momentum) -> tuple[str, float]:
    """Whose momentum buffer it is, and what makes it an average."""
    momentum = float(group["momentum"])
    if "nucleon" in group:
        return group["nucleon"].partition("/")[0], 1 - momentum
    if "adjust_lr_fn" in group:
        return "torch.optim.Muon", 1.0
    if "dampening" in group:
        return "SGD", (1 - momentum) / (1 - group["dampening"])
    if told != "auto":
        return "Muon", 1.0 if told == "average" else 1 - momentum
    if "backend_steps" in group or ("adamw_betas" in group and "weight_decay" not in group):
        return "Muon of 2024", 1 - momentum
    if "ns_steps" in group:
        raise ValueError(
            f"the old Muon has the options {sorted(set(group) - {'params'})}, which versions with "
            f"an average and with a sum of gradients share; pass momentum='average' if its step "
            f"does buffer.lerp_(gradient, 1 - momentum), 'sum' if buffer.mul_(momentum).add_("
            f"gradient)"
        )
    return "Muon", 1.0


# ------------------------------------------------------------------------------ the new state


def _fill(new: MatrixOptimizer, found: Mapping[Tensor, _Moments]) -> dict[str, str]:
    if any(group["certify"] for group in new.param_groups):
        raise ValueError("certify=True keeps the regret from the start of a run; switch it off")
    if not any(param in new.infos for param in found):
        raise ValueError(
            "the old optimizer has no state for any parameter of the new one; pass optimizers of "
            "the same model, the old one after at least a step"
        )
    steps = max(moments.steps for moments in found.values())
    report: dict[str, str] = {}
    for group in new.param_groups:
        for param in group["params"]:
            info, moments, state = new.infos[param], found.get(param), new.state.get(param)
            if state is None:
                report[info.name] = "frozen: its state is made with its first gradient"
                continue
            if group["route"] == "matrix":
                state["step"].fill_(steps)
            if moments is None:
                said = "begins at zero: no old state"
            elif "stream" in state and "total" not in state:
                said = "kept by the rank that owns it"
            elif group["route"] == "matrix":
                said = _fill_matrices(state, moments, blocks(param, info.axes), group)
            else:
                said = _fill_adamw(state, moments)
            report[info.name] = said
    return report


def _fill_adamw(state: Mapping[str, Tensor], moments: _Moments) -> str:
    if moments.squares is None:
        return f"begins at zero: {moments.source} keeps no squares for AdamW"
    state["exp_avg"].copy_(moments.average)
    state["exp_avg_sq"].copy_(moments.squares)
    state["step"].fill_(moments.steps)
    return "kept: moments and step count"


def _fill_matrices(
    state: Mapping[str, Tensor],
    moments: _Moments,
    found: Iterable[Block],
    group: Mapping[str, Any],
) -> str:
    beta1 = float(group["momentum"])
    state["total"].copy_(moments.average / (1 - beta1))
    said = f"momentum of {moments.source}"
    beta2 = gram_decay(group)
    for block in found:
        key = stacks.gram_key(block)
        if key not in state:
            return said
        known = moments.grams.get(key)
        if known is not None and known.shape == state[key].shape:
            state[key].copy_(known * ((1 - moments.beta2) / (1 - beta2)))
            continue
        wide = state[key].dtype
        average = stacks.short_side_first(block.matrices(moments.average.to(state[key])))
        gram = average @ average.mT
        if moments.squares is None:
            gram = gram * ((1 + beta1) / (1 - beta1))  # ĜĜᵀ(1−β₁²), of the average
        else:
            corrected = moments.squares.to(wide) / (1 - moments.beta2**moments.steps)
            squares = stacks.short_side_first(block.matrices(corrected.to(average.device)))
            noise = (squares - average.square()).clamp_min(0).sum(-1)
            gram = gram + torch.diag_embed(noise)
        state[key].copy_(gram / (1 - beta2))
    if moments.grams:
        return f"momentum and Gram of {moments.source}"
    return f"{said}; Gram from {'the momentum' if moments.squares is None else 'the squares'}"
