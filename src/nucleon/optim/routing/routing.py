"""Routing of a whole model: each parameter is routed by its module.

Matrices (Linear, convolutions, attention, experts) go to the matrix optimizer; embeddings, the
output head, norms, biases and scalars to AdamW. Unknown parameters raise an error with overrides to
paste. An unknown layout of q, k, v, or a missing head, is one warning.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim import options
from nucleon.optim.groups import warn
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import blocks, globs
from nucleon.optim.options import OF_ADAMW, Head, Overrides
from nucleon.optim.routing import roles
from nucleon.optim.routing.heads import last_map, output_heads
from nucleon.optim.routing.places import Parameter, Role, parameters_of

AUX_LR = 1e-3
"""Default learning rate of the parameters that go to AdamW."""
ROUTES = ("matrix", "adamw", "frozen")
GRAMMAR = (
    "Of axes, r are outputs, c inputs and b count matrices, see nucleon.optim.matrices.axes; "
    "nucleon.optim.register_module teaches a class once."
)


def routed(
    model: nn.Module,
    *,
    aux: Mapping[str, Any] | None,
    head: Head,
    overrides: Overrides | None,
    matrix_options: set[str],
) -> Sequence[Parameter]:
    """Return the parameters of a model with their roles; see `MatrixOptimizer.for_model`.

    `matrix_options` are those that an override of a matrix may contain.
    """
    parameters = parameters_of(model)
    _apply_overrides(parameters, overrides)
    heads = output_heads(model, head)
    problems: list[str] = []
    unknown: list[Parameter] = []
    for parameter in parameters:
        try:
            role = _role(parameter, heads)
        except roles.RoleError as error:
            problems.append(str(error))
            continue
        if role is None:
            unknown.append(parameter)
        else:
            parameter.role = role
    if unknown:
        problems.append(_unknown(unknown, parameters))
    if problems:
        raise ValueError("\n".join(problems))
    options.check_names("aux", aux or {}, OF_ADAMW - {"lr"}, "; its lr is aux_lr")
    for parameter in parameters:
        if parameter.role.route != "frozen":
            allowed = OF_ADAMW if parameter.role.route == "adamw" else matrix_options
            if not parameter.param.requires_grad:  # frozen parameters never raise
                parameter.options = {k: x for k, x in parameter.options.items() if k in allowed}
            more = "; an override has route and axes too"
            options.check_names(parameter.name, parameter.options, allowed, more)
    if ambiguous := [p for p in parameters if p.role.layouts is not None and p.may_warn]:
        warn(_ambiguous(ambiguous, parameters))
    if head == "auto" and not heads and (last := last_map(model)) is not None:
        name, module = last
        of_last = [p for p in parameters if module in [place.module for place in p.places]]
        if any(p.role.route == "matrix" and p.may_warn for p in of_last):
            warn(
                f"no output head was found, and the last map of the model is stepped as a matrix; "
                f"pass head={name!r}, or another glob over module names, to give the head to "
                f"AdamW, or head=None if there is none"
            )
    return parameters


def groups(
    parameters: Sequence[Parameter], matrix: Mapping[str, Any], adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a group for each route, device and set of options, with the options of a route."""
    members: dict[object, list[Parameter]] = {}
    for parameter in sorted(parameters, key=lambda p: p.role.route != "matrix"):
        if parameter.role.route != "frozen":
            # A tensor counts by its identity, since a schedule may change it.
            written = (
                (name, id(x) if isinstance(x, Tensor) else repr(x))
                for name, x in sorted(parameter.options.items())
            )
            key = parameter.role.route, parameter.param.device, *written
            members.setdefault(key, []).append(parameter)
    if not members:
        raise ValueError("the model has no parameter to optimize; all are left out")
    return [
        {
            "params": [(p.name, p.param) for p in group],
            "route": group[0].role.route,
            "axes": [p.role.axes for p in group],
            "reasons": [p.role.reason for p in group],
            **(matrix if group[0].role.route == "matrix" else adamw),
            **group[0].options,
        }
        for group in members.values()
    ]


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
    matrix_options = {"lr", *options.SHARED, *options.OWN_OPTIONS} - {"route", "axes"}
    every = routed(model, aux=aux, head=head, overrides=overrides, matrix_options=matrix_options)
    return groups(every, {} if lr is None else {"lr": lr}, {**(aux or {}), "lr": aux_lr})


# ------------------------------------------------------------------------- overrides


def _apply_overrides(parameters: Sequence[Parameter], overrides: Overrides | None) -> None:
    """Write the overrides into each parameter; a later override replaces an earlier one."""
    if isinstance(overrides, tuple):
        for each in overrides:
            _apply_overrides(parameters, each)
    elif callable(overrides):
        for parameter in parameters:
            for name, place in zip(parameter.names, parameter.places, strict=True):
                override = overrides(name, place.module, cast(nn.Parameter, parameter.param))
                if override is not None:
                    parameter.options |= _options(f"what overrides return for {name!r}", override)
    elif overrides is not None and not isinstance(overrides, Mapping):  # pyright: ignore
        raise TypeError(f"overrides must be a function or a dict, got {overrides!r}")
    else:
        for glob, override in (overrides or {}).items():
            options = _options(f"the override {glob!r}", override)
            for parameter in _matched(parameters, glob):
                parameter.options |= options


def _options(name: str, override: object) -> Mapping[str, Any]:
    options = {"route": override} if isinstance(override, str) else override
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} must be one of {ROUTES} or a dict, got {override!r}")
    options = cast(Mapping[str, Any], options)
    if "route" in options:
        _checks.choice(f"the route of {name}", options["route"], ROUTES)
    return options


def _matched(parameters: Sequence[Parameter], glob: str) -> list[Parameter]:
    """Return the parameters whose canonical name matches, else those whose wrapped name does."""
    matched = [p for p in parameters if any(fnmatchcase(name, glob) for name in p.names)] or [
        p for p in parameters if any(fnmatchcase(place.name, glob) for place in p.places)
    ]
    if not matched:
        names = [name for p in parameters for name in p.names]
        near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
        raise ValueError(
            f"the override {glob!r} matches no parameter; it is a glob over the names of "
            f"model.named_parameters(), such as {near[0] if near else 'head.weight'!r}"
        )
    return matched


# ------------------------------------------------------------------------- for each parameter


def _role(parameter: Parameter, heads: Mapping[nn.Module, str]) -> Role | None:
    """Return the role of a parameter, None for an unknown one; raise if it has several.

    A frozen parameter, which may train later, goes to AdamW if its role is unknown.
    """
    if parameter.param.requires_grad:
        return _overridden(parameter, heads)
    if not _can_train(parameter.param):
        return Role("frozen", "requires_grad is False, quantized")
    try:
        role = _overridden(parameter, heads)
        if role is not None and role.route == "matrix":
            blocks(parameter.param, role.axes)
    except ValueError:
        role = None
    return role or Role("adamw", f"not known in {parameter.places[0].kind}")


def _can_train(param: Tensor) -> bool:
    """Return True if a frozen parameter may have a gradient later: a plain tensor of real numbers.

    Quantized weights are integers, float8, or classes that look like half precision.
    """
    plain = nn.Parameter in type(param).__mro__ or shards.sharded(param)
    return plain and param.dtype in _checks.REAL_DTYPES


def _overridden(parameter: Parameter, heads: Mapping[nn.Module, str]) -> Role | None:
    """Return the role of a parameter by its override, or else by its places."""
    route, axes = (parameter.options.pop(name, None) for name in ("route", "axes"))
    parameter.overridden = route is not None or axes is not None
    if axes is not None and route in ("adamw", "frozen"):
        raise roles.RoleError(
            f"{parameter.name} is overridden with axes and route={route!r}; leave one out"
        )
    if axes is not None or route in ("adamw", "frozen"):
        return Role(route or "matrix", "override", axes)
    role = _role_of_places(parameter, heads, route)
    if route == "matrix" and (role is None or role.route != "matrix"):
        return Role("matrix", "override")
    return role


def _role_of_places(
    parameter: Parameter, heads: Mapping[nn.Module, str], route: str | None
) -> Role | None:
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


# -------------------------------------------------------------------------------- messages


def _unknown(parameters: Sequence[Parameter], every: Sequence[Parameter]) -> str:
    """Return the error on parameters of unknown modules, with overrides that fit all of them."""
    listed = [
        f"{p.name} ({'×'.join(map(str, p.param.shape))}, {p.places[0].kind})" for p in parameters
    ]
    linear = {p.name: {"axes": _axes(p.param.ndim, "r", "c")} for p in parameters}
    crosswise = {p.name: {"axes": _axes(p.param.ndim, "c", "r")} for p in parameters}
    lines = [
        _line(linear, every, "matrices of (outputs, inputs), as in F.linear(x, W) = x @ W.T"),
        _line(crosswise, every, "matrices of (inputs, outputs), as in x @ W"),
        _line({p.name: "adamw" for p in parameters}, every, "no matrices: looked up or added"),
    ]
    start = f"the modules of these parameters are not known here: {_short(listed)}; pass one of"
    return "\n".join([start, *lines, GRAMMAR])


def _axes(ndim: int, first: str, second: str) -> str:
    """Return the axes of a weight, of a stack of weights, or of a weight with taps."""
    return f"b {first} {second}" if ndim == 3 else " ".join([first, second, *(ndim - 2) * "c"])


def _ambiguous(parameters: Sequence[Parameter], every: Sequence[Parameter]) -> str:
    """Return the warning about weights with `layouts`, each treated as one matrix."""
    ways: dict[str, dict[str, Any]] = {
        "one matrix, without this warning": {p.name: {"axes": p.role.axes} for p in parameters}
    }
    for parameter in parameters:
        for meaning, axes in (parameter.role.layouts or {}).items():
            ways.setdefault(meaning, {})[parameter.name] = {"axes": axes}
    lines = [_line(values, every, meaning) for meaning, values in ways.items()]
    start = "treated as one matrix, but named as several maps, in a layout not known here"
    listed = _short([p.name for p in parameters])
    return "\n".join([f"{start}: {listed}; pass one of", *lines, GRAMMAR])


def _line(values: Mapping[str, Any], every: Sequence[Parameter], meaning: str) -> str:
    """Return an override that assigns these values, and matches no other parameter of `every`."""
    same: dict[str, list[str]] = {}
    for name, value in values.items():
        same.setdefault(repr(value), []).append(name)
    overrides = {
        glob: values[names[0]]
        for names in same.values()
        for glob in globs(names, [n for p in every if p.name not in names for n in p.names])
    }
    return f"  overrides={overrides}  # {meaning}"


def _short(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
