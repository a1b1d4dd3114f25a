"""One optimizer for a whole model: each parameter goes where its module says, and `explain` why.

Matrices (Linear, convolutions, attention, experts) go to the matrix method; embeddings, the output
head, norms, biases and scalars to AdamW. What no table knows raises, naming the override to pass.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nucleon import _checks
from nucleon.optim import adamw, axes, options, roles, stacks
from nucleon.optim.explanation import Explanation, Row
from nucleon.optim.heads import output_heads
from nucleon.optim.methods import chosen_method
from nucleon.optim.roles import Place, Role

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer

Chosen = TypeVar("Chosen", bound="MatrixOptimizer")

ROUTES = ("matrix", "adamw", "frozen")
Override = Literal["matrix", "adamw", "frozen"] | Mapping[str, Any]
"""A route, or {"route": …, "axes": …, and options of the parameter}, each of them optional."""

NO_HEAD = 'no output head was found; pass head="NAME", a glob over module names, if there is one'


@dataclass
class _Parameter:
    """A parameter, everywhere it stands, and what is decided on it."""

    param: Tensor
    places: list[Place]
    wish: dict[str, Any] = field(default_factory=dict[str, Any])
    globs: tuple[str, ...] = ()
    """The overrides that give it options: those who share them share a group."""
    route: str = ""
    axes: str | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.places[0].name


def for_model(
    cls: type[Chosen],
    model: nn.Module,
    *,
    lr: float | Tensor = 0.02,
    aux_lr: float | Tensor = 3e-4,
    aux: Mapping[str, Any] | None = None,
    head: str | None = "auto",
    overrides: Mapping[str, Override] | None = None,
    **given: Any,
) -> Chosen:
    """An optimizer of the given class for all parameters of a model that want a gradient.

    Args:
        cls: Muon, Pion or Leon.
        model: routed module by module; a parameter of an unknown module must be overridden.
        lr: of the matrices (0.02).
        aux_lr: of the other parameters, by AdamW (3e-4).
        aux: their other options, see `nucleon.optim.adamw.AdamWOptions` (None).
        head: the output head, a glob over module names, "auto" for what the model itself tells
            (see `nucleon.optim.heads`), or None for no head ("auto").
        overrides: {glob over parameter names: route or options}; where several match, the later
            wins, key by key (None). A route is "matrix", "adamw" or "frozen", which leaves out.
        given: options of the method.
    """
    found = _parameters(model)
    _apply_overrides(found, overrides or {})
    heads = output_heads(model, head)
    problems = [said for p in found if (said := _decide(p, heads)) is not None]
    if problems:
        raise ValueError("\n".join(problems))
    _check_names("aux", aux or {}, _names_of("adamw", cls) - {"lr"}, "; its lr is aux_lr")
    others = {**(aux or {}), "lr": aux_lr}
    for parameter in found:
        if parameter.route != "frozen":
            _check_names(parameter.name, parameter.wish, _names_of(parameter.route, cls))
    groups = [
        *_groups("matrix", found, {"lr": lr}),
        *_groups("adamw", found, others),
    ]
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter to optimize; all are left out")
    optimizer = cls(groups, lr=lr, **given)  # pyright: ignore[reportCallIssue]
    vars(optimizer)["left_out"] = [
        Row(p.name, tuple(p.param.shape), None, "frozen", p.reason, 0, "")
        for p in found
        if p.route == "frozen"
    ]
    vars(optimizer)["note"] = NO_HEAD if head == "auto" and not heads else ""
    return optimizer


def _method(group: Mapping[str, Any], param: Tensor, spec: str | None) -> str:
    """What "auto" is for the matrices of a parameter, each kind once."""
    found = (
        chosen_method(group, block.rows, block.columns, param.device, param.dtype)
        for block in stacks.blocks(param, spec)
    )
    return ", ".join(dict.fromkeys(found))


def explain(optimizer: "MatrixOptimizer") -> Explanation:
    """Where each parameter of an optimizer goes: name, shape, axes, route, reason, state, method.

    Parameters that `for_model` left out stand at the end, as "frozen"; they are known to the
    optimizer it returned, not to a copy.
    """
    names = stacks.parameter_names(optimizer.param_groups)
    rows: list[Row] = []
    for group in optimizer.param_groups:
        matrix = group["rule"] == "matrix"
        reasons = group.get("reasons") or ["as given"] * len(group["params"])
        for param, spec, reason in zip(group["params"], group["axes"], reasons, strict=True):
            state = optimizer.state[param].values()
            rows.append(
                Row(
                    name=names[param],
                    shape=tuple(param.shape),
                    axes=(spec or axes.default(param.ndim)) if matrix else None,
                    route=group["rule"],
                    reason=reason,
                    state_bytes=sum(t.numel() * t.element_size() for t in state),
                    method=f"{optimizer.name}/{_method(group, param, spec)}" if matrix else "adamw",
                )
            )
    told = vars(optimizer)
    return Explanation(
        optimizer.name, (*rows, *told.get("left_out", ())), note=told.get("note", "")
    )


# ------------------------------------------------------------------------------ from the model


def _parameters(model: nn.Module) -> list[_Parameter]:
    """Every parameter once, with all the places where it stands."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass parameters to the "
            f"constructor instead"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[Tensor, _Parameter] = {}
    for path, module in modules.items():
        parent = modules.get(path.rpartition(".")[0]) if path else None
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(module, parent, path, key, param)
            if is_lazy(param):
                raise ValueError(
                    f"{place.name} has no shape yet; run a batch through the model first"
                )
            found.setdefault(param, _Parameter(param, [])).places.append(place)
    return list(found.values())


def _apply_overrides(found: Sequence[_Parameter], overrides: Mapping[str, Override]) -> None:
    _check_mapping("overrides", overrides)
    for glob, override in overrides.items():
        wish = {"route": override} if isinstance(override, str) else override
        _check_mapping(f"the override {glob!r}", wish)
        if "route" in wish:
            _checks.choice(f"the route of the override {glob!r}", wish["route"], ROUTES)
        matched = [p for p in found if any(fnmatchcase(place.name, glob) for place in p.places)]
        if not matched:
            names = [place.name for p in found for place in p.places]
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            raise ValueError(
                f"the override {glob!r} matches no parameter; it is a glob over the names of "
                f"model.named_parameters(), such as {near[0] if near else 'head.weight'!r}"
            )
        for parameter in matched:
            parameter.wish |= wish
            if set(wish) - {"route", "axes"}:
                parameter.globs += (glob,)


def _decide(parameter: _Parameter, heads: Mapping[nn.Module, str]) -> str | None:
    """Set route, axes and reason of a parameter; or what to tell its owner."""
    wish = parameter.wish
    route, spec = wish.pop("route", None), wish.pop("axes", None)
    if not parameter.param.requires_grad:
        parameter.route, parameter.reason = "frozen", "requires_grad is False"
        return None
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
        place = parameter.places[0]
        return (
            f"{place.name} of shape {tuple(place.param.shape)} belongs to {place.kind}, a module "
            f"that is not known here; pass overrides={{{place.name!r}: 'adamw'}}, or "
            f"{{'axes': 'r{' c' * (place.param.ndim - 1)}'}} in place of 'adamw' if it is a matrix "
            f"that multiplies, or teach the module once with nucleon.optim.register_module"
        )
    else:
        parameter.route, parameter.axes, parameter.reason = role.route, role.axes, role.reason
    return None


def _role(parameter: _Parameter, heads: Mapping[nn.Module, str], wanted: str | None) -> Role | None:
    """The one role of a parameter in all its places; None if nobody knows it."""
    found: dict[str, Role] = {}
    for place in parameter.places:
        if wanted is None and place.module in heads and place.param.ndim >= 2:
            found[place.name] = Role("adamw", heads[place.module])
        elif (role := roles.role(place)) is not None:
            found[place.name] = role
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
    return Role(chosen[0].route, f"{reasons}, shared by {len(found)} modules", chosen[0].axes)


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
            "rule": route,
            "axes": [p.axes for p in members],
            "reasons": [p.reason for p in members],
            **shared,
            **members[0].wish,
        }
        for members in buckets.values()
    ]


def _names_of(route: str, cls: type[Any]) -> set[str]:
    """The options a parameter of this route may have."""
    if route == "adamw":
        return {*adamw.DEFAULTS, "maximize", "nonfinite"}
    own = set(inspect.signature(cls.__init__).parameters) - {"self", "params", "options"}
    return (own | set(cast(Mapping[str, Any], options.DEFAULTS))) - {"rule", "axes", "certified"}


def _check_names(of: str, given: Mapping[str, Any], known: set[str], more: str = "") -> None:
    _check_mapping(of, given)
    unknown = sorted(set(given) - known)
    if unknown:
        raise TypeError(
            f"{of} has no option {', '.join(map(repr, unknown))}; its options are "
            f"{', '.join(sorted(known))}{more}"
        )


def _check_mapping(name: str, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        kind = f"one of {ROUTES} or a dict" if name.startswith("the") else "a dict"
        raise TypeError(f"{name} must be {kind} with names as keys, got {given!r}")
