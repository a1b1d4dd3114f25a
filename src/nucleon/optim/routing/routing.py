"""Routing of a whole model: each parameter is routed by its module.

Matrices (Linear, convolutions, attention, experts) go to the matrix optimizer; embeddings, the
output head, norms, biases and scalars to AdamW. Unknown parameters raise an error with overrides to
paste. An unknown layout of q, k, v, or a missing head, is one warning.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.linalg.coefficients import custom, largest
from nucleon.optim import options
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine as cuda
from nucleon.optim.engines.work import HasDirection, State, facts_of
from nucleon.optim.groups import warn
from nucleon.optim.matrices import axes, shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import ParameterInfo, blocks
from nucleon.optim.options import OF_ADAMW, Head, Overrides
from nucleon.optim.polar_methods import chosen_method
from nucleon.optim.routing import notices, roles
from nucleon.optim.routing import overrides as wishes
from nucleon.optim.routing.explanation import ParameterRow
from nucleon.optim.routing.heads import last_map, output_heads
from nucleon.optim.routing.places import Parameter, parameters_of
from nucleon.optim.routing.roles import Role

AUX_LR = 1e-3
"""Default learning rate of the parameters that go to AdamW."""
FROZEN = "frozen, its state is made with its first gradient"
NO_HEAD = 'no output head was found; pass head="NAME", a glob over module names, if there is one'


@dataclass(frozen=True)
class Routed:
    """The routed parameters of a model."""

    parameters: "Sequence[Parameter]"
    note: str
    """A remark for the user."""

    @property
    def left_out(self) -> tuple[ParameterRow, ...]:
        """The parameters that are not optimized, for `explain`."""
        return tuple(
            ParameterRow(p.name, tuple(p.param.shape), None, "frozen", p.reason, 0, "")
            for p in self.parameters
            if p.route == "frozen"
        )

    def groups(self, matrix: Mapping[str, Any], adamw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the groups of parameters, each route with its options."""
        groups = _groups("matrix", self.parameters, matrix)
        groups += _groups("adamw", self.parameters, adamw)
        if not groups:
            raise ValueError("the model has no parameter to optimize; all are left out")
        return groups


def routed(
    model: nn.Module,
    *,
    aux: Mapping[str, Any] | None,
    head: Head,
    overrides: Overrides | None,
    matrix_options: set[str],
    only: Collection[Tensor] | None = None,
) -> Routed:
    """Route the parameters of a model; see `MatrixOptimizer.for_model`.

    Args:
        model: a model; parameters of unknown modules must be overridden.
        aux: options of the parameters that go to AdamW, except their rate.
        head: the output head, see `nucleon.optim.routing.heads`.
        overrides: {glob over parameter names: route or options}, or a function.
        matrix_options: the options that a matrix may have.
        only: the parameters to be routed (None: all).
    """
    every = parameters_of(model)
    wishes.apply(every, overrides)
    heads = output_heads(model, head)
    routed_parameters = [p for p in every if only is None or p.param in only]
    problems = [problem for p in routed_parameters if (problem := _decide(p, heads)) is not None]
    if unknown := [p for p in routed_parameters if p.route == "unknown"]:
        problems.append(notices.unknown(unknown, every))
    if problems:
        raise ValueError("\n".join(problems))
    check_names("aux", aux or {}, OF_ADAMW - {"lr"}, "; its lr is aux_lr")
    for parameter in routed_parameters:
        if parameter.route != "frozen":
            allowed = OF_ADAMW if parameter.route == "adamw" else matrix_options
            if not parameter.param.requires_grad:  # frozen parameters never raise
                parameter.wish = {k: x for k, x in parameter.wish.items() if k in allowed}
            check_names(
                parameter.name, parameter.wish, allowed, "; an override has route and axes too"
            )
    if unsure := [p for p in routed_parameters if p.layouts is not None and p.asks]:
        warn(notices.ambiguous(unsure, every))
    if head != "auto" or heads:
        return Routed(routed_parameters, "")
    last = last_map(model)
    if any(last in p.owners for p in routed_parameters if p.route == "matrix" and p.asks):
        warn(notices.no_head(str(last)))
    return Routed(routed_parameters, NO_HEAD)


def param_groups(
    model: nn.Module,
    lr: float | Tensor | None = None,
    *,
    aux_lr: float | Tensor = AUX_LR,
    aux: Mapping[str, Any] | None = None,
    head: Head = "auto",
    overrides: Overrides | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of `for_model` without an optimizer, for factories that need groups.

    `Leon(param_groups(model), lr=0.02)` takes the steps of `Leon.for_model(model, lr=0.02)`. The
    options of the constructor concern the matrices; AdamW's options are arguments here.

    Args:
        model: its parameters are routed by the module that contains them.
        lr: learning rate of the matrices (None: that of the constructor).
        aux_lr: learning rate of the parameters that go to AdamW (1e-3).
        aux: their other options, see `AdamWOptions` (None).
        head: the output head, as in `for_model` ("auto").
        overrides: a route or options of single parameters, as in `for_model` (None).
    """
    matrix_options = options.of_matrices(options.OWN_OPTIONS)
    every = routed(model, aux=aux, head=head, overrides=overrides, matrix_options=matrix_options)
    return every.groups({} if lr is None else {"lr": lr}, {**(aux or {}), "lr": aux_lr})


def rows(
    optimizer: HasDirection,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, State],
    infos: Mapping[Tensor, ParameterInfo],
) -> list[ParameterRow]:
    """Return a row for each parameter of an optimizer."""
    rows: list[ParameterRow] = []
    for group in groups:
        matrix = group["route"] == "matrix"
        for param in group["params"]:
            info, state = infos[param], states.get(param, {}).values()
            spec = (info.axes or axes.default(param.ndim)) if matrix else None
            rows.append(
                ParameterRow(
                    name=info.name,
                    shape=tuple(param.shape),
                    axes=spec,
                    route=group["route"],
                    reason=info.reason if param.requires_grad else f"{info.reason}; {FROZEN}",
                    state_bytes=sum(t.numel() * t.element_size() for t in state),
                    optimizer=_stepped_by(optimizer, group, param, spec),
                )
            )
    return rows


def _stepped_by(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, spec: str | None
) -> str:
    """Return the name of an optimizer, with the choice of "auto" for the matrices of a parameter.

    A user's `direction` has the name alone, since it may ignore `method`. On CUDA the text includes
    the reason if torch's slower path steps them.
    """
    if spec is None:
        refusal = cuda_adamw.refusal(param) if param.is_cuda else None
        return f"adamw (torch: {refusal})" if refusal else "adamw"
    texts = dict.fromkeys(_how(optimizer, group, param, block) for block in blocks(param, spec))
    return ", ".join(texts)


def _how(optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block) -> str:
    text = optimizer.name
    if facts_of(optimizer).kernel is not None:
        chosen = chosen_method(group, block.rows, block.columns, param.device, param.dtype)
        text += f"/{chosen}"
        if chosen == "coefficients":
            most = largest(custom(group["coefficients"], group["iterations"]))
            text += f" (‖P‖_op ≤ {math.ceil(1000 * most - 1e-6) / 1000:g})"
    refusal = cuda.refusal(optimizer, group, param, block) if param.is_cuda else None
    return f"{text} (torch: {refusal})" if refusal else text


# ------------------------------------------------------------------------- for each parameter


def _decide(parameter: Parameter, heads: Mapping[nn.Module, str]) -> str | None:
    """Set route, axes and reason of a parameter; return a problem to raise, or None.

    A frozen parameter, which may train later, goes to AdamW if its role is unknown.
    """
    if parameter.param.requires_grad:
        return _route(parameter, heads)
    if not _can_train(parameter.param):
        parameter.route, parameter.reason = "frozen", "requires_grad is False, quantized"
        return None
    try:
        problem = _route(parameter, heads)
        if parameter.route == "matrix":
            blocks(parameter.param, parameter.axes)
    except ValueError as error:
        problem = str(error)
    if problem is not None or parameter.route == "unknown":
        parameter.route, parameter.axes = "adamw", None
        parameter.reason = f"not known in {parameter.places[0].kind}"
    return None


def _can_train(param: Tensor) -> bool:
    """Return True if a frozen parameter may have a gradient later: a plain tensor of real numbers.

    Quantized weights are integers, float8, or classes that look like half precision.
    """
    plain = nn.Parameter in type(param).__mro__ or shards.sharded(param)
    return plain and param.dtype in _checks.REAL_DTYPES


def _route(parameter: Parameter, heads: Mapping[nn.Module, str]) -> str | None:
    """Set route, axes and reason of a parameter; return a problem to raise, or None."""
    wish = parameter.wish
    route, spec = wish.pop("route", None), wish.pop("axes", None)
    parameter.told = route is not None or spec is not None
    if route in ("adamw", "frozen"):
        if spec is not None:
            return f"{parameter.name} is overridden with axes and route={route!r}; leave one out"
        parameter.route, parameter.reason = route, "override"
        return None
    if spec is not None:
        parameter.route, parameter.axes, parameter.reason = "matrix", spec, "override"
        return None
    try:
        role = _role(parameter, heads, route)
    except roles.RoleError as error:
        return str(error)
    if route == "matrix" and (role is None or role.route != "matrix"):
        parameter.route, parameter.reason = "matrix", "override"
    elif role is None:
        parameter.route = "unknown"
    else:
        parameter.route, parameter.axes, parameter.reason = role.route, role.axes, role.reason
        parameter.layouts = role.layouts
    return None


def _role(parameter: Parameter, heads: Mapping[nn.Module, str], route: str | None) -> Role | None:
    """Return the role of a parameter, the same in all its places; None if it is unknown.

    A weight that is shared with the output head has the role of the head.
    """
    by_place: dict[str, Role] = {}
    by_head = heads if route is None and parameter.param.ndim >= 2 else {}
    is_head = any(place.module in by_head for place in parameter.places)
    for place in parameter.places:
        if place.module in by_head:
            by_place[place.name] = Role("adamw", by_head[place.module])
        elif (role := roles.role(place)) is not None:
            by_place[place.name] = Role("adamw", role.reason) if is_head else role
    if not by_place:
        return None
    first = next(iter(by_place.values()))
    candidates = [r for r in by_place.values() if route is None or r.route == route] or [first]
    if len({(r.route, r.axes) for r in candidates}) > 1:
        listed = ", ".join(f"{n} ({r.route}: {r.reason})" for n, r in by_place.items())
        raise roles.RoleError(
            f"one parameter has several roles: {listed}; pass overrides={{{parameter.name!r}: "
            f"'adamw'}} or 'matrix', or head= if one of them is the output head"
        )
    if len(by_place) == 1:
        return candidates[0]
    reasons = " and ".join(dict.fromkeys(r.reason for r in candidates))
    return replace(candidates[0], reason=f"{reasons}, shared by {len(by_place)} modules")


# ------------------------------------------------------------------------------ to the groups


def _groups(
    route: str, parameters: Sequence[Parameter], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return one group for each device and each set of overrides."""
    buckets: dict[tuple[torch.device, tuple[str, ...]], list[Parameter]] = {}
    for parameter in parameters:
        if parameter.route == route:
            buckets.setdefault((parameter.param.device, parameter.overridden_by), []).append(
                parameter
            )
    return [
        {
            "params": [(p.name, p.param) for p in members],
            "route": route,
            "axes": [p.axes for p in members],
            "reasons": [p.reason for p in members],
            **shared,
            **members[0].wish,
        }
        for members in buckets.values()
    ]


def check_names(of: str, options_of: Mapping[str, Any], names: set[str], more: str = "") -> None:
    """Check that the options of `of` are known."""
    wishes.check_mapping(of, options_of)
    if unknown := sorted(set(options_of) - names):
        raise options.unknown(of, unknown, names, more)
