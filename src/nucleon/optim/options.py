"""The options that Muon, Pion and Leon share, their defaults and their checks."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.optim.axes import Block
from nucleon.optim.stacks import Room

Scale = Literal["spectral", "match-adamw", "none"]
SCALES: tuple[Scale, ...] = ("spectral", "match-adamw", "none")
Steps = Literal["constant", "exponential"]
STEPS: tuple[Steps, ...] = ("constant", "exponential")
NonFinite = Literal["skip", "raise"]
NON_FINITE: tuple[NonFinite, ...] = ("skip", "raise")
Placement = Literal["local", "owner", "gram"]
PLACEMENTS: tuple[Placement, ...] = ("local", "owner", "gram")
Rule = Literal["matrix", "adamw"]
RULES: tuple[Rule, ...] = ("matrix", "adamw")


class Options(TypedDict, total=False):
    """Keyword options of every optimizer, each settable per parameter group."""

    rule: Rule
    """"matrix", the method of the optimizer (default), or "adamw" for what is not a matrix, with
    the options of `nucleon.optim.adamw`."""
    axes: str | list[str | None] | None
    """Which axes of the parameters are rows, columns and batch, see `nucleon.optim.axes`: one spec
    for all, or one for each (default None: "r c" for 2-D, "b r c" for 3-D)."""
    nesterov: bool
    """Enter S = β₁Ĝ + G into the direction instead of S = Ĝ; Λ is made of the raw gradients either
    way (default False: Algorithms 1–3 as printed, and the only choice with a guarantee)."""
    weight_decay: float
    """Decoupled: W ← W − lr·weight_decay·W (default 0: the theory's)."""
    cautious: bool
    """Decay only where it goes along with the update: lr·weight_decay·W·[P∘W > 0] (default False:
    plain decoupled decay; measured by others to help, not by us)."""
    scale: Scale
    """Factor on the direction by the shape of W, see `scale_factor` (default "spectral", usual in
    practice; the theory's is "none")."""
    steps: Steps
    """"constant", s = 1 (default, usual in practice), or "exponential", one s ~ Exp(1) a step for
    all matrices together, the random scaling of the theory."""
    iterations: int
    """Steps of an iterative `method` (default 5: measured, the usual number of Muon)."""
    nonfinite: NonFinite
    """"skip": a matrix whose gradient is not finite, or overflows the moments, keeps its weights
    and state, without a host synchronization, and is counted (default: for safety; the theory has
    no such gradients). "raise": raise on one that is not finite, before anything changes."""
    maximize: bool
    """Climb instead of descend (default False)."""
    momentum_dtype: torch.dtype | None
    """Of Ĝ: None is float32, or float64 for float64 parameters (default: the theory has no
    rounding); bfloat16 halves it."""
    stochastic_rounding: bool
    """Round bf16 weights up or down at random so that the mean is exact (default False; the theory
    has no rounding)."""
    certify: bool
    """Keep the discounted regret of each matrix, for `certificates()`: the last direction, mn more
    numbers a matrix, and one more product GGᵀ a step (default False)."""
    certified: tuple[()] | list[Any] | None
    """The optimizer's own note of the options a certificate relies on; leave it alone."""
    placement: Placement
    """Who computes which matrix in a run of several processes, see `nucleon.optim.placement`:
    "local", every rank every matrix (default); "owner", one rank each; "gram", for matrices cut
    along their long side."""
    wire_dtype: torch.dtype | None
    """Of the directions sent by an owner: None is float32, or float64 for float64 parameters, and
    exact (default); bfloat16 halves what is sent, and rounds P."""
    consistency_every: int | None
    """Compare the update across the ranks every so many steps, and raise on all of them where it
    differs; every rank must step, and waits for the device (default 0: never). Parameters and
    options are compared before the first step in any case, unless it is None: then each rank
    trains a model of its own under "local"."""
    seed: int
    """Of Pion's noise, the exponential lengths and the stochastic rounding (default 0)."""
    largest_stack: int | None
    """Same-shape matrices of at most this many entries together go through one batched call, one
    matrix at least; it bounds the extra memory of a step, 20 to 110 bytes an entry (default None:
    2²⁴; on CUDA, where few large launches pay, 2²⁵, and 2²⁷ where the step is fused, which takes 9
    to 23 bytes an entry)."""


DEFAULTS = Options(
    rule="matrix",
    axes=None,
    nesterov=False,
    weight_decay=0.0,
    cautious=False,
    scale="spectral",
    steps="constant",
    iterations=5,
    nonfinite="skip",
    maximize=False,
    momentum_dtype=None,
    stochastic_rounding=False,
    certify=False,
    certified=(),
    placement="local",
    wire_dtype=None,
    consistency_every=0,
    seed=0,
    largest_stack=None,
)


def scale_factor(scale: Scale, rows: int, columns: int) -> float:
    """The factor on the direction P for a rows×columns weight.

    `"spectral"`: √max(1, rows/columns), as in Muon. `"match-adamw"`: 0.2·√max(rows, columns),
    which gives an orthogonal P a root mean square of 0.2, usual for AdamW. `"none"`: 1.
    """
    if scale == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    if scale == "match-adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0


STACKING = (
    "largest_stack",
    "method",
    "iterations",
    "certify",
    "placement",
    "momentum_dtype",
    "stochastic_rounding",
)
"""What the sizes of stacks depend on besides the parameters."""


def room(group: Mapping[str, Any], fused: Callable[[Tensor, Block], bool] | None = None) -> Room:
    """`largest_stack` or its default, which depends on the device and on whether it is `fused`."""

    def entries(param: Tensor, block: Block) -> int:
        default = 24 if not param.is_cuda else 27 if fused and fused(param, block) else 25
        return group["largest_stack"] or 2**default

    return entries


def check(group: dict[str, Any]) -> None:
    """Raise on a bad value among the options of a group, the method's own ones excepted."""
    check_lr(group["lr"])
    _checks.choice("rule", group["rule"], RULES)
    _checks.fraction("momentum", group["momentum"], closed="0")
    if group.get("beta2") is not None:
        _checks.fraction("beta2", group["beta2"], closed="0")
    if "gradient_bound" in group:
        _checks.nonnegative("gradient_bound", group["gradient_bound"])
        if group["gradient_bound"] and not group["momentum"]:
            raise ValueError(
                "gradient_bound enters as gradient_bound²/momentum², so it needs momentum > 0; "
                "pass gradient_bound=0.0 or a positive momentum"
            )
    _checks.nonnegative("weight_decay", group["weight_decay"])
    _checks.choice("scale", group["scale"], SCALES)
    _checks.choice("steps", group["steps"], STEPS)
    _checks.choice("nonfinite", group["nonfinite"], NON_FINITE)
    _checks.choice("placement", group["placement"], PLACEMENTS)
    if group["wire_dtype"] not in (None, torch.bfloat16):
        raise TypeError(f"wire_dtype must be None or torch.bfloat16, got {group['wire_dtype']!r}")
    if group["consistency_every"] is not None:
        _checks.count("consistency_every", group["consistency_every"], minimum=0)
    _checks.count("iterations", group["iterations"])
    if group["largest_stack"] is not None:
        _checks.count("largest_stack", group["largest_stack"])
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise TypeError(f"seed must be an integer, got {group['seed']!r}")
    for flag in ("nesterov", "cautious", "maximize", "stochastic_rounding", "certify"):
        if not isinstance(group[flag], bool):
            raise TypeError(f"{flag} must be True or False, got {group[flag]!r}")
    if group["certify"] and not group["momentum"]:
        raise ValueError(
            "certify=True measures the regret discounted by momentum; pass momentum > 0"
        )
    if group["momentum_dtype"] not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"momentum_dtype must be None, torch.bfloat16, torch.float32 or torch.float64, "
            f"got {group['momentum_dtype']!r}"
        )


def check_lr(lr: object) -> None:
    """Raise unless `lr` is a finite number ≥ 0 or a one-element tensor that holds one."""
    if not isinstance(lr, Tensor):
        _checks.nonnegative("lr", lr)  # pyright: ignore[reportArgumentType]
        return
    if lr.numel() != 1 or not lr.is_floating_point():
        raise ValueError(
            f"lr must be a number or a one-element real tensor, got {lr.numel()} of {lr.dtype}"
        )
    if lr.device.type != "meta":
        _checks.nonnegative("lr", lr.item())


OF_SOME_METHOD = {"beta2", "smoothing_scale", "gradient_bound", "samples", "antithetic"}
"""Options that not every method has: given to one that does not, they are a mistake."""
