"""The options that Muon, Pion and Leon share, and their checks.

An option is declared with its default, as in `momentum: Annotated[float, 0.95]`. Every option but
`average`, `average_dtype` and `seed` can be set per group.
"""

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from nucleon import _checks

ScaleName = Literal["spectral", "unit-rms", "match-adamw", "none"]
Scale = ScaleName | float | tuple[ScaleName, float]
StepLength = Literal["constant", "exponential"]
NonFinite = Literal["skip", "raise"]
Placement = Literal["local", "owner"]
Route = Literal["matrix", "adamw"]
Override = Literal["matrix", "adamw", "frozen"] | Mapping[str, Any]
"""A route, or {"route": …, "axes": …, and options of the parameter}, each of them optional."""
OverrideOf = Callable[[str, torch.nn.Module, torch.nn.Parameter], Override | None]
"""(name, module, parameter) → the override of the parameter, or None."""
_OneOverrides = Mapping[str, Override] | OverrideOf
Overrides = _OneOverrides | tuple[_OneOverrides, ...]
"""{glob over parameter names: override}, a function, or a tuple of these, one after the other."""
Head = str | Sequence[str] | None
"""A glob over module names, or several; "auto", or None for no head."""
LR = 0.02
"""Default learning rate of matrices."""
RATES = ("lr", "weight_decay")
"""Options that a schedule may change with every step: every step checks them."""
STRUCTURE = (
    *("route", "placement", "certify", "largest_stack", "momentum_dtype"),
    *("method", "iterations", "coefficients", "stochastic_rounding"),
)
"""Options that decide which engine steps a stack, or how large a stack is."""
RUN = ("placement", "wire_dtype")
"""Options of a run, which loading a state does not change."""


class Options(TypedDict, total=False):
    """Keyword options of every optimizer."""

    momentum: Annotated[float, 0.95]
    """β₁ of Ĝ ← β₁Ĝ + G (default 0.95, usual in practice; the theory's is its discount γ)."""
    average: Annotated[float | None, None]
    """Mean age of the iterates in their average, a fraction of the run or a number of steps, see
    `nucleon.optim.average`; one for all groups (default None: no average is kept)."""
    average_dtype: Annotated[torch.dtype | None, None]
    """Dtype of the average (default None: float32, or float64 for float64 parameters)."""
    route: Annotated[Route, "matrix"]
    """"matrix", the direction of the optimizer (default), or "adamw" for the other parameters of a
    group, with the options of `AdamWOptions`; of groups alone."""
    axes: Annotated[str | list[str | None] | None, None]
    """Rows, columns and batch among the axes of the parameters, see `nucleon.optim.matrices.axes`:
    one spec for all, or one for each (default None: "r c" for 2-D, "b r c" for 3-D)."""
    nesterov: Annotated[bool, False]
    """Use S = β₁Ĝ + G in the direction instead of S = Ĝ; Λ is computed from the raw gradients in
    both cases (default False: Algorithms 1–3 as printed, and the only choice with a guarantee)."""
    weight_decay: Annotated[float, 0.0]
    """Decoupled: W ← W − lr·weight_decay·W (default 0: the theory's)."""
    scale: Annotated[Scale, "spectral"]
    """Factor on the direction by the shape of W: a name, a number, or a pair of both for their
    product, see `scale_factor` (default "spectral", usual in practice; the theory's is "none")."""
    step_length: Annotated[StepLength, "constant"]
    """"constant", s = 1 (default, usual in practice), or "exponential", one s ~ Exp(1) per step
    for all matrices together, the random scaling of the theory."""
    iterations: Annotated[int, 5]
    """Steps of an iterative `method` (default 5: measured, the usual number of Muon)."""
    nonfinite: Annotated[NonFinite, "skip"]
    """"skip": a matrix whose gradient, moments, smoothing or direction are not finite keeps its
    weights and state bit for bit, without a host synchronization, and `skipped` of `diagnostics()`
    counts the step (default: for safety; the theory has no such gradients). "raise": raise on a
    non-finite gradient, before anything changes."""
    maximize: Annotated[bool, False]
    """Ascend instead of descend (default False)."""
    momentum_dtype: Annotated[torch.dtype | None, None]
    """Dtype of Ĝ: None is float32, or float64 for float64 parameters (default: the theory has no
    rounding); bfloat16 halves its memory. It applies when a state is created or loaded."""
    stochastic_rounding: Annotated[bool, False]
    """Round bf16 weights up or down at random so that the mean is exact (default False; the theory
    has no rounding)."""
    certify: Annotated[bool, False]
    """Record the discounted regret of each matrix, for `certificates()`: the last direction, ΣG and
    ΣGGᵀ in float64. It stores 2mn + m² more numbers per matrix; a step computes about 15 products
    of m×m matrices and a Cholesky factor more (default False)."""
    placement: Annotated[Placement, "local"]
    """Ranks that compute a matrix in a run of several processes: "local", every rank (default);
    "owner", one rank, see `nucleon.optim.engines.ranks`."""
    wire_dtype: Annotated[torch.dtype | None, None]
    """Dtype of the directions sent by an owner: None is float32, or float64 for float64 parameters,
    and exact (default); bfloat16 halves the traffic, and rounds P."""
    seed: Annotated[int, 0]
    """Seed of Pion's noise, the exponential lengths and the stochastic rounding, one for all groups
    (default 0)."""
    largest_stack: Annotated[int | None, None]
    """Most entries of a stack of same-shape matrices, which one batched call computes; a stack has
    one matrix at least. It bounds the extra memory of a step, 20 to 110 bytes per entry (default
    None: 2²⁴; on CUDA, where large launches are faster, 2²⁵, and 2²⁷ on the CUDA engine, which
    needs 9 to 23 bytes per entry)."""


class GramOptions(Options, total=False):
    """Options of an optimizer with M̂."""

    beta2: Annotated[float | None, None]
    """β₂ of M̂ ← β₂M̂ + GGᵀ (default None: β₁² at every step, the theory's)."""
    gradient_bound: Annotated[float, 0.0]
    """G ≥ ‖G_t‖_op, required by the theorem (default 0.0: Algorithms 2 and 3 as printed)."""


class AdamWOptions(TypedDict, total=False):
    """Options of a group with route="adamw"; `maximize` and `nonfinite` are as for matrices."""

    lr: Annotated[float | Tensor, 1e-3]
    """A number or a one-element tensor (default 1e-3, that of `torch.optim.AdamW`)."""
    betas: Annotated[tuple[float, float], (0.9, 0.999)]
    """(β₁, β₂) (default (0.9, 0.999), as torch)."""
    eps: Annotated[float, 1e-8]
    """ε (default 1e-8, as torch)."""
    weight_decay: Annotated[float, 0.0]
    """Decoupled (default 0.0, since norms and biases are seldom decayed; torch's is 0.01)."""


class ModelOptions(TypedDict, total=False):
    """Keyword arguments of `for_model` besides the options of the optimizer."""

    aux_lr: float | Tensor
    aux: AdamWOptions | Mapping[str, Any] | None
    head: Head
    overrides: Overrides | None


def defaults_in(options: type) -> dict[str, Any]:
    """Return the default of each option of a class, inherited ones included."""
    defaults: dict[str, Any] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            raise TypeError(
                f"{name} of {options.__name__} has no default; write Annotated[type, default]"
            )
        defaults[name] = get_args(hint)[1]
    return defaults


SHARED = defaults_in(Options)
ADAMW_DEFAULTS = defaults_in(AdamWOptions)
OF_ADAMW = {*ADAMW_DEFAULTS, "maximize", "nonfinite"}
"""The options of a group with route="adamw"."""
OWN_OPTIONS = frozenset(
    {"beta2", "coefficients", "gradient_bound", "method", "samples", "smoothing_scale"}
)
"""Options that only some of Muon, Pion and Leon have; groups of the others raise on them."""


def added_by(options: type) -> dict[str, Any]:
    """Return the `own_options` of an optimizer whose keywords are this class of options."""
    return {name: x for name, x in defaults_in(options).items() if name not in SHARED}


def filled(group: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return a group completed by the defaults; raise on options that no group of it has.

    Unknown entries are the user's, and are kept.
    """
    foreign = OWN_OPTIONS.difference(defaults, OF_ADAMW) | {"average", "average_dtype"}
    if wrong := sorted(foreign.intersection(group)):
        raise TypeError(f"a group of {optimizer} has no option {', '.join(map(repr, wrong))}")
    adamw_defaults = ADAMW_DEFAULTS if group.get("route") == "adamw" else {}
    return {**defaults, **adamw_defaults, **group}


def scale_factor(scale: Scale, rows: int, columns: int) -> float:
    """Return the factor on the direction P for a rows×columns weight.

    `"spectral"`: √max(1, rows/columns), as in Muon. `"unit-rms"`: √(rows/columns), with which
    inputs of root mean square 1 change the outputs by 1 at most, wide weights too. `"match-adamw"`:
    0.2·√max(rows, columns), which gives an orthogonal P a root mean square of 0.2, usual for AdamW:
    for AdamW's best rate in fine-tuning. From scratch another rate is best with it, see "tuning" in
    the documentation. `"none"`: 1. A number stands for itself, and ("unit-rms", 0.5) for half of
    `"unit-rms"`.
    """
    name, number = _name_and_number(scale)
    if name == "spectral":
        return number * math.sqrt(max(1.0, rows / columns))
    if name == "unit-rms":
        return number * math.sqrt(rows / columns)
    if name == "match-adamw":
        return number * 0.2 * math.sqrt(max(rows, columns))
    return number


def _name_and_number(scale: object) -> tuple[object, float]:
    """Return the name and the number of a scale, which need not be valid."""
    if isinstance(scale, str):
        return scale, 1.0
    if isinstance(scale, tuple | list) and len(pair := cast(Sequence[Any], scale)) == 2:
        return pair[0], pair[1]
    return "none", cast(float, scale)


def check(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check the options of a group; a flag among `defaults` must be True or False."""
    for name, check in _CHECKS.items():
        if name in group and not (group[name] is None and name in _OPTIONAL):
            check(name, group[name])
    for name, default in defaults.items():
        if isinstance(default, bool) and not isinstance(group.get(name, default), bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r}")
    if not group["momentum"] and (group["certify"] or group.get("gradient_bound")):
        name = "certify" if group["certify"] else "gradient_bound"
        raise ValueError(
            f"{name}={group[name]!r} needs momentum > 0: the regret is discounted by it, and Λ "
            f"contains gradient_bound²/momentum²"
        )


def check_lr(name: str, lr: object) -> None:
    """Check that a rate is a finite number ≥ 0 or a one-element tensor of one."""
    if not isinstance(lr, Tensor):
        _checks.nonnegative(name, lr)  # pyright: ignore[reportArgumentType]
        return
    if lr.numel() != 1 or not lr.is_floating_point():
        raise ValueError(
            f"{name} must be a number or a one-element real tensor, got {lr.numel()} of {lr.dtype}"
        )
    if lr.device.type != "meta":
        _checks.nonnegative(name, lr.item())


def _check_scale(_: str, scale: object) -> None:
    name, number = _name_and_number(scale)
    _checks.choice("scale", name, get_args(ScaleName))
    _checks.positive("scale", number)


def _check_betas(_: str, betas: Any) -> None:
    if not isinstance(betas, Sequence) or len(cast(Sequence[object], betas)) != 2:
        raise ValueError(f"betas must be a pair (β₁, β₂), got {betas!r}; torch's is (0.9, 0.999)")
    for index, beta in enumerate(cast(Sequence[float], betas)):
        _checks.fraction(f"betas[{index}]", beta, closed="0")


def _check_dtype(*dtypes: torch.dtype) -> Callable[[str, object], None]:
    def check(name: str, dtype: object) -> None:
        if dtype not in dtypes:
            raise TypeError(f"{name} must be None or one of {dtypes}, got {dtype!r}")

    return check


_DISCOUNT = partial(_checks.fraction, closed="0")
_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "route": partial(_checks.choice, options=get_args(Route)),
    "lr": check_lr,
    "weight_decay": _checks.nonnegative,
    "momentum": _DISCOUNT,
    "beta2": _DISCOUNT,
    "gradient_bound": _checks.nonnegative,
    "scale": _check_scale,
    "step_length": partial(_checks.choice, options=get_args(StepLength)),
    "iterations": _checks.count,
    "nonfinite": partial(_checks.choice, options=get_args(NonFinite)),
    "momentum_dtype": _check_dtype(torch.bfloat16, torch.float32, torch.float64),
    "placement": partial(_checks.choice, options=get_args(Placement)),
    "wire_dtype": _check_dtype(torch.bfloat16),
    "seed": partial(_checks.count, minimum=0),
    "largest_stack": _checks.count,
    "betas": _check_betas,
    "eps": _checks.nonnegative,
}
_OPTIONAL = ("beta2", "momentum_dtype", "wire_dtype", "largest_stack")
"""Options that may be None."""


def check_range(named: Sequence[tuple[str, Tensor]], group: Mapping[str, Any]) -> None:
    """Check that c and cG²β₁⁻² of Λ are normal numbers of the dtype of a step, or 0."""
    if group["route"] != "matrix" or "gradient_bound" not in group:
        return
    scale = group.get("smoothing_scale", 1.0)
    scale = 1.0 if isinstance(scale, str) else float(scale)
    root = float(group["gradient_bound"]) / (group["momentum"] or 1.0)
    for name, param in named:
        limits = torch.finfo(_checks.work_dtype(param.dtype))
        for option, value in (("smoothing_scale", scale), ("gradient_bound", scale * root * root)):
            if not (value == 0 or limits.tiny <= value <= limits.max / 2):
                raise ValueError(
                    f"{option}={group[option]!r} makes Λ leave {limits.dtype}, in which {name} is "
                    f"stepped; choose it nearer to 1, and scale the loss"
                )


HINTS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "betas": 'momentum, and for AdamW aux={"betas": …} of for_model',
    "beta1": "momentum",
    "mu": "momentum",
    "eps": 'aux={"eps": …} of for_model',
    "ns_steps": "iterations",
    "ns_coefficients": "coefficients=[(a, b, c)] of Muon",
    "extra_scale_factor": 'scale=("spectral", factor)',
    "adjust_lr_fn": 'scale="spectral" or scale="match-adamw"',
    "adamw_lr": "aux_lr of for_model",
    "use_muon": 'route="matrix" or route="adamw"',
    "route": '{"params": [...], "route": "adamw", "lr": 1e-3}, a group among the parameters',
}
"""The option to write for one of AdamW or of other Muons."""


def check_names(of: str, names: Collection[str], options: Collection[str], more: str = "") -> None:
    """Raise on unknown options of `of`, with the option to write for each."""
    unknown, remedies = sorted({*names}.difference(options)), list[str]()
    for name in unknown:
        near = difflib.get_close_matches(name, options, n=1)
        if name in ModelOptions.__annotations__:
            remedies.append(f"{name!r}: it is an argument of for_model, which takes a model")
        elif name in HINTS:
            remedies.append(f"{name!r}: write {HINTS[name]}")
        elif near:
            remedies.append(f"{name!r}: did you mean {near[0]!r}?")
    if unknown:
        raise TypeError(
            f"{of} has no option {', '.join(map(repr, unknown))}"
            + (f" ({'; '.join(remedies)})" if remedies else "")
            + f"; its options are {', '.join(sorted(options))}{more}"
        )
