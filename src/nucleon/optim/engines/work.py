"""A piece of work: parameters with their state and options, and the engine that steps them."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Admissibility
from nucleon.linalg._precision import roundings
from nucleon.optim.engines.rest import Rest
from nucleon.optim.matrices.parameters import ParameterInfo
from nucleon.optim.matrices.stacks import Stack
from nucleon.optim.options import STRUCTURE, scale_factor

State = dict[str, Tensor]
EXPONENTIAL_STREAM = -1
"""Stream of the lengths s ~ Exp(1); matrices have streams ≥ 0."""


@dataclass(frozen=True)
class Draws:
    """Noise over which a direction averages: `samples` of m×`width` standard normals."""

    seed: int
    samples: int
    width: int
    """n′ ≥ n; S is padded by zero columns."""


KERNELS = {"polar": False, "augmented": True, "perturbed": True}
"""The recursions of the CUDA engine; True if M̂ is an operand."""
Constants = Callable[[Mapping[str, Any], int, int], Admissibility | None]
"""(group, m, n) → (α, β) of a potential for m×n matrices, m ≤ n, or None."""
F = TypeVar("F", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class of_potential:  # noqa: N801  (a decorator)
    """Decorator that attaches facts to a `direction`.

    They belong to the function: a class that overrides `direction` starts without facts, and
    decorates its own if they hold.
    """

    kernel: str | None = None
    """The recursion of the CUDA engine that computes this direction, one of `KERNELS`."""
    settles: bool = False
    """True if P decays as Ĝ does with `gradient_bound` > 0, see `engines.rest`."""
    constants: Constants | None = None
    """The constants of the potential whose gradient it is."""
    theorem: str = "none"
    """The theorem that bounds its regret."""
    uncertified: str | None = None
    """The reason why no run can be certified, other than that it names no theorem."""

    def __post_init__(self) -> None:
        if self.kernel is not None:
            _checks.choice("kernel", self.kernel, KERNELS)

    def __call__(self, function: F) -> F:
        """Attach the facts to a function and return it."""
        cast(Any, function).facts = self
        return function

    @property
    def refusal(self) -> str | None:
        """The reason why no run can be certified, or None."""
        unnamed = "the optimizer names no theorem" if self.theorem == "none" else None
        return self.uncertified or unnamed


_NO_FACTS = of_potential()


def facts_of(optimizer: "HasDirection") -> of_potential:
    """Return the facts of the `direction` that runs, which may be assigned to an instance."""
    return getattr(optimizer.direction, "facts", _NO_FACTS)


Kind = tuple[int, int, torch.dtype]
"""Rows, columns and dtype of the parameters of a stack."""


class HasDirection(Protocol):
    """The members of an optimizer that its engines and its list of work use."""

    name: ClassVar[str]
    has_gram: ClassVar[bool]
    param_groups: list[dict[str, Any]]
    state: Any
    """The state of each parameter: a mapping."""
    infos: dict[Tensor, ParameterInfo]

    def direction(self, total: Tensor, smoothing: Tensor, context: "Context") -> Tensor:
        """Return P (b, m, n) from S (b, m, n) and Λ (b, m, m), m ≤ n."""
        ...

    def smoothing_scale(self, group: Mapping[str, Any], m: int, n: int) -> float:
        """Return the factor c in Λ for m×n matrices."""
        ...

    def draws(self, group: Mapping[str, Any], m: int, n: int) -> Draws | None:
        """Return the noise in the direction of m×n matrices."""
        ...


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of a step, derived from the options of its group and the shape of its matrices.

    Every engine reads them here, so a rule such as β₂ = β₁² is written once.
    """

    momentum: float
    """β₁."""
    gram_discount: float
    """√β₂, which is β₁ unless `beta2` is set: M̂ ← β₂M̂ + GGᵀ."""
    gram_decay: float
    """β₂."""
    lookahead: bool
    """S = β₁Ĝ + G instead of Ĝ."""
    smoothing: float
    """c of Λ = c(G²β₁⁻²I + M̂)."""
    gradient_bound: float
    """G."""
    scale: float
    """The factor on P by the shape of the weight."""
    sign: float
    """−1 to maximize."""
    rest: Rest
    """The rule by which the direction becomes zero without gradients."""
    draws: Draws | None
    """The noise in the direction."""
    raised_bound: float
    """√(G²β₁⁻² + a bound on what the rounding of subnormal entries may take from M̂)."""

    @classmethod
    def of(cls, optimizer: HasDirection, group: Mapping[str, Any], kind: Kind) -> "Hyperparameters":
        """Derive the numbers of the matrices of a kind from the options of their group."""
        rows, columns, dtype = kind
        m, n = sorted((rows, columns))
        momentum = float(group["momentum"])
        bound = float(group.get("gradient_bound", 0.0))
        smooths = float(optimizer.smoothing_scale(group, m, n)) if optimizer.has_gram else 0.0
        settles = smooths and facts_of(optimizer).settles
        lost, info = 0.0, torch.finfo(_checks.work_dtype(dtype))
        if smooths > 1:  # which would enlarge m·s/(2(1 − β₂)), s the smallest number
            lost = (_checks.ROUNDING + roundings(gram_decay(group))) * m * info.tiny * info.eps
        return cls(
            momentum=momentum,
            gram_discount=gram_discount(group),
            gram_decay=gram_decay(group),
            lookahead=group["nesterov"],
            smoothing=smooths,
            gradient_bound=bound,
            scale=scale_factor(group["scale"], rows, columns),
            sign=-1.0 if group["maximize"] else 1.0,
            rest=Rest.of(momentum, m, settling_bound=bound if settles else 0.0),
            draws=optimizer.draws(group, m, n),
            raised_bound=math.hypot(bound / (momentum or 1.0), math.sqrt(lost)),
        )

    @property
    def shift(self) -> float:
        """The square of `raised_bound`, added to the diagonal of M̂; inf on overflow."""
        return self.raised_bound * self.raised_bound


@dataclass(frozen=True)
class Context:
    """Everything that a direction may depend on besides the moments."""

    options: Mapping[str, Any]
    """Options of the parameter group."""
    stack: Stack
    states: Sequence[Mapping[str, Tensor]]
    hyperparameters: Hyperparameters
    """Numbers derived from the options, such as β₁, √β₂, c and the noise."""

    @property
    def seed(self) -> int:
        """Seed of all noise."""
        return self.options["seed"]

    @property
    def stream(self) -> Tensor:
        """(b,) int64: the identity of each matrix, for noise."""
        return self.stack.gather_own([state["stream"] for state in self.states])

    @property
    def step(self) -> Tensor:
        """0-d int64: the number of this step."""
        return self.states[0]["step"]


def gram_discount(group: Mapping[str, Any]) -> float:
    """Return √β₂ of a group."""
    beta2 = group.get("beta2")
    return float(group["momentum"]) if beta2 is None else math.sqrt(beta2)


def gram_decay(group: Mapping[str, Any]) -> float:
    """Return β₂ of a group."""
    return gram_discount(group) ** 2


def sums_long(group: Mapping[str, Any]) -> bool:
    """Return True if β₂ is so near to 1 that Λ must compensate the rounding of M̂."""
    return roundings(gram_decay(group)) > 0


class Settings(dict[Kind, Hyperparameters]):
    """The options of a group, and the hyperparameters of each kind of matrix under them.

    A changed option makes a new object, with a snapshot of the values that have been checked; only
    `lr` and `weight_decay` are read from the group in every step.
    """

    def __init__(self, optimizer: HasDirection, group: dict[str, Any], snapshot: list[Any]) -> None:
        super().__init__()
        self.group, self.snapshot = group, snapshot
        self.structure = (*map(group.get, STRUCTURE), sums_long(group))
        """The values that decide which engine steps a stack, or how large it is."""
        self._optimizer = weakref.proxy(optimizer)

    def __missing__(self, kind: Kind) -> Hyperparameters:
        self[kind] = Hyperparameters.of(self._optimizer, self.group, kind)
        return self[kind]


@dataclass
class Work:
    """Parameters of one group that are stepped together."""

    engine: Any
    """The module whose `step(work, settings)` steps them; see `reference` for whole matrices."""
    group_index: int
    """Index of the group in the optimizer."""
    params: Sequence[Tensor]
    states: Sequence[State]
    """The state of each of `params`."""
    cache: object = field(default=None, kw_only=True)
    """Data that the engine keeps between steps."""


@dataclass
class Matrices(Work):
    """A stack of matrices of one shape; `params` and `states` have one entry per piece of it."""

    optimizer: HasDirection
    stack: Stack
    lanes: Any = field(default=None, kw_only=True)
    """Streams and memory that the CUDA works of a list share."""
    lane: int | None = field(default=None, kw_only=True)
    """Stream of its step; None is the stream of the caller."""
