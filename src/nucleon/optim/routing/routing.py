"""One optimizer for a whole model: each parameter goes where its module says, and `explain` why.

Matrices (Linear, convolutions, attention, experts) go to the matrix method; embeddings, the output
head, norms, biases and scalars to AdamW. What no table knows raises, with one override for all of
it; what is only doubtful, an unknown order of q, k, v or a missed head, is one warning each.
"""

import difflib
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from nucleon import _checks
from nucleon.optim import options
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine as cuda
from nucleon.optim.engines.work import HasDirection, State, facts_of
from nucleon.optim.matrices import axes, shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import ParameterInfo, blocks, canonical, root_of
from nucleon.optim.options import OF_ADAMW, Head, Override
from nucleon.optim.polar_methods import chosen_method
from nucleon.optim.routing import cuts, fused, notices, roles
from nucleon.optim.routing.explanation import Row
from nucleon.optim.routing.heads import doubtful, missed, output_heads
from nucleon.optim.routing.roles import Place, Role

AUX_LR = 1e-3
"""Learning rate of the parameters that go to AdamW, where none is given."""
ROUTES = ("matrix", "adamw", "frozen")
FROZEN = "frozen, its state is made with its first gradient"
NO_HEAD = 'no output head was found; pass head="NAME", a glob over module names, if there is one'


@dataclass
class _Parameter:
    """A parameter, everywhere it stands, and what is decided on it."""

    param: Tensor
    places: list[Place]
    root: str = ""
    """What a wrapper of the whole model puts before the names."""
    wish: dict[str, Any] = field(default_factory=dict[str, Any])
    globs: tuple[str, ...] = ()
    """The overrides that give it options: those who share them share a group."""
    route: str = ""
    axes: str | None = None
    reason: str = ""
    told: bool = False
    """Whether an override says where it goes."""
    unknown_order: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """Without what wrappers put into them, everywhere it stands."""
        return [canonical(place.name, self.root) for place in self.places]

    @property
    def owners(self) -> list[str]:
        """The names of the modules that use it."""
        names = (f"{roles.owner(place.path)}.weight" for place in self.places)
        return [canonical(name, self.root).removesuffix(".weight") for name in names]

    @property
    def asks(self) -> bool:
        """Whether its owner should hear of a doubt: it trains, and no override has said."""
        return self.param.requires_grad and not self.told


@dataclass(frozen=True)
class Routed:
    """Every parameter of a model with what was decided on it."""

    parameters: "Sequence[_Parameter]"
    note: str
    """What the user should know."""

    @property
    def left_out(self) -> tuple[Row, ...]:
        """The parameters that are not optimized, for `explain`."""
        return tuple(
            Row(p.name, tuple(p.param.shape), None, "frozen", p.reason, 0, "")
            for p in self.parameters
            if p.route == "frozen"
        )

    def groups(self, matrix: Mapping[str, Any], adamw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Groups of parameters, each route with its options."""
        found = [
            *_groups("matrix", self.parameters, matrix),
            *_groups("adamw", self.parameters, adamw),
        ]
        if not found:
            raise ValueError("the model has no parameter to optimize; all are left out")
        return found


def routed(
    model: nn.Module,
    *,
    aux: Mapping[str, Any] | None,
    head: Head,
    overrides: Mapping[str, Override] | None,
    known: set[str],
    only: Collection[Tensor] | None = None,
) -> Routed:
    """Where each parameter of a model goes; see `MatrixOptimizer.for_model`.

    Args:
        model: routed module by module; a parameter of an unknown module must be overridden.
        aux: options of the parameters that go to AdamW, but for their rate.
        head: the output head, see `nucleon.optim.routing.heads`.
        overrides: {glob over parameter names: route or options}.
        known: the options that a matrix may have.
        only: the parameters to be routed (None: all).
    """
    every = _parameters(model)
    _apply_overrides(every, overrides or {})
    heads = output_heads(model, head)
    found = [p for p in every if only is None or p.param in only]
    problems = [said for p in found if (said := _decide(p, heads)) is not None]
    if unknown := [p for p in found if p.route == "unknown"]:
        kinds = {
            p.name: f"{'×'.join(map(str, p.param.shape))}, {p.places[0].kind}" for p in unknown
        }
        problems.append(notices.unknown(kinds, _others(unknown, every)))
    if problems:
        raise ValueError("\n".join(problems))
    check_names("aux", aux or {}, OF_ADAMW - {"lr"}, "; its lr is aux_lr")
    for parameter in found:
        if parameter.route != "frozen":
            allowed = OF_ADAMW if parameter.route == "adamw" else known
            if not parameter.param.requires_grad:  # nothing about it raises
                parameter.wish = {k: x for k, x in parameter.wish.items() if k in allowed}
            check_names(
                parameter.name, parameter.wish, allowed, "; an override has route and axes too"
            )
    if unsure := [p for p in found if p.unknown_order and p.asks]:
        _warn(notices.unknown_order([_in_turn(p) for p in unsure], _others(unsure, every)))
    if head != "auto":
        return Routed(found, "")
    last = missed(model, heads)
    asking = {owner for p in found if p.route == "matrix" and p.asks for owner in p.owners}
    if last is not None:  # what is taken apart goes on within the model
        apart = {owner for p in found if p.unknown_order for owner in p.owners}
        last = replace(last, names=[name for name in last.names if name not in apart])
        if asking.intersection(last.names):
            _warn(notices.no_head(last))
    if unsure := [name for name in doubtful(model, heads) if name in asking]:
        _warn(notices.doubtful_heads(unsure))
    return Routed(found, "" if heads else NO_HEAD)


def param_groups(
    model: nn.Module,
    lr: float | Tensor | None = None,
    *,
    aux_lr: float | Tensor = AUX_LR,
    aux: Mapping[str, Any] | None = None,
    head: Head = "auto",
    overrides: Mapping[str, Override] | None = None,
) -> list[dict[str, Any]]:
    """The groups of `for_model`, without an optimizer and its state, for factories that want them.

    `Leon(param_groups(model), lr=0.02)` takes the steps of `Leon.for_model(model, lr=0.02)`. What
    the factory passes to the constructor is for the matrices; AdamW's options are given here.

    Args:
        model: its parameters are routed by the module that holds them.
        lr: learning rate of the matrices (None: that of the constructor).
        aux_lr: learning rate of the parameters that go to AdamW (1e-3).
        aux: their other options, see `AdamWOptions` (None).
        head: the output head, as in `for_model` ("auto").
        overrides: {glob over parameter names: a route, or options of its own} (None).
    """
    known = options.of_matrices(options.OF_METHODS)
    found = routed(model, aux=aux, head=head, overrides=overrides, known=known)
    return found.groups({} if lr is None else {"lr": lr}, {**(aux or {}), "lr": aux_lr})


def _in_turn(parameter: _Parameter) -> tuple[str, str, str]:
    """The name of a weight of several maps, its axes, and the word of its maps in turn."""
    axes, place = str(parameter.axes), parameter.places[0]
    rows = place.param.shape[axes.split().index("r")]
    if (found := place.cut) is not None:
        user, cut = found
        return parameter.name, axes, cuts.word(cut, user, rows)
    return parameter.name, axes, fused.in_turn(*place.as_map, rows)


def _others(chosen: Sequence[_Parameter], found: Sequence[_Parameter]) -> list[str]:
    """The names of all parameters but the chosen ones."""
    return [p.name for p in found if not any(p is one for one in chosen)]


def _warn(message: str) -> None:
    """Warn where this package was called from."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "nucleon":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def rows(
    method: HasDirection,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, State],
    infos: Mapping[Tensor, ParameterInfo],
) -> list[Row]:
    """A row for each parameter of an optimizer: name, shape, axes, route, reason, state, method."""
    found: list[Row] = []
    for group in groups:
        matrix = group["route"] == "matrix"
        for param in group["params"]:
            info, state = infos[param], states.get(param, {}).values()
            spec = (info.axes or axes.default(param.ndim)) if matrix else None
            found.append(
                Row(
                    name=info.name,
                    shape=tuple(param.shape),
                    axes=spec,
                    route=group["route"],
                    reason=info.reason if param.requires_grad else f"{info.reason}; {FROZEN}",
                    state_bytes=sum(t.numel() * t.element_size() for t in state),
                    method=_method(method, group, param, spec),
                )
            )
    return found


def _method(method: HasDirection, group: Mapping[str, Any], param: Tensor, spec: str | None) -> str:
    """The name of an optimizer, with what "auto" is for the matrices of a parameter.

    A `direction` of the user's own has the name alone: whether it heeds `method` is not known.

    On CUDA also why its kernels do not serve them, where that is so: torch's path is slower.
    """
    if spec is None:
        refusal = cuda_adamw.refusal(param) if param.is_cuda else None
        return f"adamw (torch: {refusal})" if refusal else "adamw"
    found = dict.fromkeys(_how(method, group, param, block) for block in blocks(param, spec))
    return ", ".join(found)


def _how(method: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block) -> str:
    text = method.name
    if facts_of(method).kernel is not None:
        text += f"/{chosen_method(group, block.rows, block.columns, param.device, param.dtype)}"
    refusal = cuda.refusal(method, group, param, block) if param.is_cuda else None
    return f"{text} (torch: {refusal})" if refusal else text


# ------------------------------------------------------------------------------ from the model


def _parameters(model: nn.Module) -> list[_Parameter]:
    """Every parameter once, with all the places where it stands."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model "
            f"itself, as for_model(model): the modules tell where its parameters go"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[Tensor, _Parameter] = {}
    for path, holder in modules.items():
        own = roles.owner(path)
        outer = own.rpartition(".")[0]
        parent = modules.get(outer) if own else None
        grandparent = modules.get(outer.rpartition(".")[0]) if outer else None
        module = modules[own] if isinstance(holder, ParametrizationList) else holder
        for key, param in holder.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(module, parent, path, key, param, grandparent)
            if is_lazy(param):
                raise ValueError(
                    f"{place.name} has no shape yet; run a batch through the model first"
                )
            found.setdefault(param, _Parameter(param, [])).places.append(place)
    root = root_of(place.name for p in found.values() for place in p.places)
    for parameter in found.values():
        parameter.root = root
    return list(found.values())


def _apply_overrides(found: Sequence[_Parameter], overrides: Mapping[str, Override]) -> None:
    _check_mapping("overrides", overrides)
    for glob, override in overrides.items():
        wish = {"route": override} if isinstance(override, str) else override
        _check_mapping(f"the override {glob!r}", wish)
        if "route" in wish:
            _checks.choice(f"the route of the override {glob!r}", wish["route"], ROUTES)
        matched = _matched(found, glob)
        if not matched:
            names = [name for p in found for name in p.names]
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            raise ValueError(
                f"the override {glob!r} matches no parameter; it is a glob over the names of "
                f"model.named_parameters(), such as {near[0] if near else 'head.weight'!r}"
            )
        for parameter in matched:
            parameter.wish |= wish
            if set(wish) - {"route", "axes"}:
                parameter.globs += (glob,)


def _matched(found: Sequence[_Parameter], glob: str) -> list[_Parameter]:
    """The parameters of such a name, or if there are none those that wrappers give such a name."""
    return [p for p in found if any(fnmatchcase(name, glob) for name in p.names)] or [
        p for p in found if any(fnmatchcase(place.name, glob) for place in p.places)
    ]


def _decide(parameter: _Parameter, heads: Mapping[nn.Module, str]) -> str | None:
    """Set route, axes and reason of a parameter; or what to tell its owner.

    A frozen parameter, which may train later, goes to AdamW where nobody knows better.
    """
    if parameter.param.requires_grad:
        return _route(parameter, heads)
    if not _can_train(parameter.param):
        parameter.route, parameter.reason = "frozen", "requires_grad is False, quantized"
        return None
    try:
        said = _route(parameter, heads)
        if parameter.route == "matrix":
            blocks(parameter.param, parameter.axes)
    except ValueError as error:
        said = str(error)
    if said is not None or parameter.route == "unknown":
        parameter.route, parameter.axes = "adamw", None
        parameter.reason = f"not known in {parameter.places[0].kind}"
    return None


def _can_train(param: Tensor) -> bool:
    """Whether a frozen parameter may have a gradient later: a plain tensor of real numbers.

    Quantized weights are integers, float8, or classes that look like half precision.
    """
    plain = nn.Parameter in type(param).__mro__ or shards.sharded(param)
    return plain and param.dtype in _checks.REAL_DTYPES


def _route(parameter: _Parameter, heads: Mapping[nn.Module, str]) -> str | None:
    """Set route, axes and reason of a parameter; or what to tell its owner."""
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
        role = _role(parameter, heads, wanted=route)
    except roles.RoleError as error:
        return str(error)
    if route == "matrix" and (role is None or role.route != "matrix"):
        parameter.route, parameter.reason = "matrix", "override"
    elif role is None:
        parameter.route = "unknown"
    else:
        parameter.route, parameter.axes, parameter.reason = role.route, role.axes, role.reason
        parameter.unknown_order = role.unknown_order
    return None


def _role(parameter: _Parameter, heads: Mapping[nn.Module, str], wanted: str | None) -> Role | None:
    """The one role of a parameter in all its places; None if nobody knows it.

    The output head decides for whatever shares its weight.
    """
    found: dict[str, Role] = {}
    told = heads if wanted is None and parameter.param.ndim >= 2 else {}
    is_head = any(place.module in told for place in parameter.places)
    for place in parameter.places:
        if place.module in told:
            found[place.name] = Role("adamw", told[place.module])
        elif (role := roles.role(place)) is not None:
            found[place.name] = Role("adamw", role.reason) if is_head else role
    if not found:
        return None
    first = next(iter(found.values()))
    chosen = [r for r in found.values() if wanted is None or r.route == wanted] or [first]
    if len({(r.route, r.axes) for r in chosen}) > 1:
        said = ", ".join(f"{n} ({r.route}: {r.reason})" for n, r in found.items())
        raise roles.RoleError(
            f"one parameter has several roles: {said}; pass overrides={{{parameter.name!r}: "
            f"'adamw'}} or 'matrix', or head= if one of them is the output head"
        )
    if len(found) == 1:
        return chosen[0]
    reasons = " and ".join(dict.fromkeys(r.reason for r in chosen))
    return replace(chosen[0], reason=f"{reasons}, shared by {len(found)} modules")


# ------------------------------------------------------------------------------ to the groups


def _groups(
    route: str, found: Sequence[_Parameter], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One group for each device and each set of overrides."""
    buckets: dict[tuple[torch.device, tuple[str, ...]], list[_Parameter]] = {}
    for parameter in found:
        if parameter.route == route:
            buckets.setdefault((parameter.param.device, parameter.globs), []).append(parameter)
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


def check_names(of: str, given: Mapping[str, Any], known: set[str], more: str = "") -> None:
    """Raise on options of `of` that are not known."""
    _check_mapping(of, given)
    if unknown := sorted(set(given) - known):
        raise options.unknown(of, unknown, known, more)


def _check_mapping(name: str, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        kind = f"one of {ROUTES} or a dict" if name.startswith("the") else "a dict"
        raise TypeError(f"{name} must be {kind} with names as keys, got {given!r}")
