"""The parameters with which Theorems 5.2 and 5.3 promise a (ρ, ε)-stationary point."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.norms import operator_norm
from nucleon.online import theory
from nucleon.online.potentials import Gaussian
from nucleon.online.theory.nonconvex import OutOfReachError

Planned = Literal["leon", "pion"]
Kind = Literal["reachable", "trivial", "not covered", "out of reach"]
End = Literal["low", "value", "high"]

MOST_ROUNDS = 10**12
"""More rounds than this are out of reach: eleven days at a million a second."""
STANDARD_ERRORS = 3.0
"""Half the width of an `Interval`; for 16 runs or more it covers the mean 99 times of 100."""
MARGIN = 2.0
"""Factor on the largest gradient seen, for the upper end of G."""


@dataclass(frozen=True)
class Interval:
    """A measured value with its interval of confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, samples: Tensor) -> "Interval":
        """Return the mean of independent samples (r,) ± 3 standard errors, infinite for r = 1."""
        mean = samples.double().mean().item()
        count = _checks.count("the number of samples", samples.numel())
        error = samples.double().std().item() / math.sqrt(count) if count > 1 else math.inf
        return cls(mean, mean - STANDARD_ERRORS * error, mean + STANDARD_ERRORS * error)

    def __str__(self) -> str:
        """Return the value with its interval."""
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Plan:
    """A verdict in words and, unless the target is trivial, the parameters of a run."""

    optimizer: Planned
    kind: Kind
    verdict: str
    """The plan in words: reachable, or why not."""
    complexity: theory.Complexity | None = None
    """γ, D and T with the terms and conditions they come from; None for a trivial target, and for
    one so far out of reach that float64 cannot hold them."""
    bound: theory.ConversionBound | None = None
    """The bound of the proof at these γ and T, term by term, at most ε where it applies."""

    @property
    def discount(self) -> float:
        """γ, the optimizer's `momentum`."""
        return self._parameters.discount

    @property
    def radius(self) -> float:
        """D, the optimizer's `lr`."""
        return self._parameters.radius

    @property
    def rounds(self) -> int:
        """T."""
        return self._parameters.rounds

    @property
    def _parameters(self) -> theory.Complexity:
        if self.complexity is None:
            raise ValueError(f"there is nothing to plan: {self.verdict}")
        return self.complexity


def plan(
    optimizer: Planned,
    *,
    rho: float,
    epsilon: float,
    q_nuclear: float,
    loss_gap: float,
    gradient_bound: float | Sequence[float],
    shapes: Sequence[tuple[int, int]],
) -> Plan:
    """Return γ, D and T of Theorem 5.2 (Pion) or 5.3 (Leon), and whether they mean anything.

    γ = 1 − (ε/(20C𝒬))²,  D = (1−γ)ρ/(2γ),
    T = max{4000C²𝒬²ΔL/(ρε³), 400C²𝒬²/ε², 10√2·C·𝒢/ε},  𝒬 = Σ‖Q_b‖_*,  𝒢 = Σ m_bG_b

    The matrices share γ, D, T, the lengths s and τ, as they do in `O2NC`; the gap is the largest
    nuclear norm over the product of their balls, Σ_b‖·‖_*. C is 1 for Leon, and for Pion the
    largest (n′/(n′−m−1))^¼ at their padded widths n′; its theorem takes the mean over its noise as
    exact. `estimate` measures the numbers of a model.

    Args:
        optimizer: "leon" or "pion".
        rho: ρ, the radius of the (ρ, ε)-stationary point.
        epsilon: ε, its accuracy in the nuclear norm.
        q_nuclear: Σ‖Q_b‖_* with E[G_tG_tᵀ] ⪯ Q_b² wherever the run may come.
        loss_gap: ΔL = L(W_0) − inf L.
        gradient_bound: G_b ≥ ‖G_t‖_op, one number for all matrices or one for each.
        shapes: (m, n) of each matrix, tall or wide.
    """
    if optimizer not in get_args(Planned):
        raise ValueError(
            f"optimizer must be 'leon' or 'pion', got {optimizer!r}; Muon has no theorem to plan "
            f"with, since the regret of following the leader can be linear"
        )
    if not shapes or any(not isinstance(s, Sequence) or len(s) != 2 for s in shapes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"shapes must name (m, n) of each matrix, got {shapes!r}; pass [(8, 16)]")
    sides = [sorted(_checks.count("every side of shapes", side) for side in s) for s in shapes]
    bounds = (
        gradient_bound if isinstance(gradient_bound, Sequence) else [gradient_bound] * len(sides)
    )
    if len(bounds) != len(sides):
        raise ValueError(
            f"gradient_bound must be one number or one for each of {len(sides)} shapes, got "
            f"{len(bounds)}; pass gradient_bound={max(bounds, default=1.0)!r} for all"
        )
    if _checks.positive("epsilon", epsilon) >= _checks.positive("q_nuclear", q_nuclear):
        verdict = (
            f"ε = {epsilon:.6g} is trivial: no mean gradient exceeds ‖Q‖_* = {q_nuclear:.6g} in "
            f"the nuclear norm, so every point is (ρ, ε)-stationary, the first one too."
        )
        return Plan(optimizer, "trivial", verdict)
    pairs = zip(sides, bounds, strict=True)
    total = sum(m * _checks.nonnegative("gradient_bound", bound) for (m, _), bound in pairs)  # 𝒢
    factor, constant = 1.0, 2.0
    if optimizer == "pion":
        factor = max(theory.ftpl_factor(m, Gaussian().padded_width(m, n)) for m, n in sides)
        constant = 2 * math.sqrt(2) * factor
    try:  # C enters the theorem as a factor of 𝒬 and 𝒢
        complexity = theory.leon_complexity(
            rho=rho,
            epsilon=epsilon,
            q_nuclear=factor * q_nuclear,
            loss_gap=loss_gap,
            gradient_bound=factor * total,
            rows=1,
        )
    except OutOfReachError as error:
        return Plan(optimizer, "out of reach", f"No run can be planned: {error}.")
    bound = theory.stationarity_bound(
        rho=rho,
        loss_gap=loss_gap,
        gradient_bound=total,
        q_nuclear=q_nuclear,
        discount=complexity.discount,
        rounds=complexity.rounds,
        rows=1,
        regret_constant=constant,
    )
    if not complexity.valid:  # the condition on G fails: that on γ follows from ε < ‖Q‖_*
        largest = 10 * math.sqrt(2) * (factor * q_nuclear * (q_nuclear / total))
        verdict = (
            f"The theorem does not cover ε = {epsilon:.6g}: it needs ε ≤ 10√2·C‖Q‖_*²/(mG) = "
            f"{largest:.6g}. The bound of the proof at these parameters is {bound.total:.6g}."
        )
        return Plan(optimizer, "not covered", verdict, complexity, bound)
    if complexity.rounds > MOST_ROUNDS:
        verdict = (
            f"{complexity.rounds:.3g} rounds are out of reach. T grows with 1/(ρε³): twice the ε "
            f"needs about an eighth of them."
        )
        return Plan(optimizer, "out of reach", verdict, complexity, bound)
    name = max(complexity.terms, key=lambda term: complexity.terms[term]).replace("_", " ")
    verdict = (
        f"{complexity.rounds} rounds, set by the {name} term, promise a gap of at most "
        f"{bound.total:.6g} ≤ ε in the mean over the random time, the lengths and the noise."
    )
    return Plan(optimizer, "reachable", verdict, complexity, bound)


@dataclass(frozen=True)
class Estimates:
    """Statistics of a model for `plan`, from a few of its batches."""

    q_nuclear: Interval
    """Σ over the parameters of Tr√(mean GGᵀ), corrected for its bias by the jackknife."""
    gradient_bounds: tuple[float, ...]
    """The largest ‖G‖_op seen of each parameter: a lower bound, as a sample bounds no maximum."""
    loss_gap: Interval
    """The mean loss less `lower`."""
    shapes: tuple[tuple[int, int], ...]
    """(m, n) of each parameter."""

    def at(self, end: End = "value") -> dict[str, Any]:
        """Return arguments of `plan`: the values, or the ends of their intervals.

        No sample bounds G above: "high" has `MARGIN` times the largest gradient seen.
        """
        factor = MARGIN if end == "high" else 1.0
        # Lower ends may be negative, the quantities not; a tiny ‖Q‖_* makes every target trivial.
        return {
            "q_nuclear": max(getattr(self.q_nuclear, end), 1e-300),
            "loss_gap": max(getattr(self.loss_gap, end), 0.0),
            "gradient_bound": [factor * bound for bound in self.gradient_bounds],
            "shapes": self.shapes,
        }


def estimate(
    params: Tensor | Sequence[Tensor],
    closure: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    lower: float = 0.0,
) -> Estimates:
    """Estimate Σ‖Q_b‖_*, G_b and ΔL of a model at its weights.

    `plan("leon", rho=…, epsilon=…, **estimate(…).at("high"))` plans with the upper ends.

    Σ‖Q_b‖_* and ΔL have intervals of ±3 standard errors over the batches; each G_b is the largest
    ‖G‖_op seen, with no upper end. The theorems need both along the whole run, of which the first
    weights show only the beginning, so a plan from them is a guess. Weights and their gradients are
    left as they were.

    Args:
        params: the matrices, 2-D, whose gradients count.
        closure: the loss of a batch, a scalar tensor with a graph.
        batches: at least two, independent.
        lower: a lower bound of the mean loss (default 0.0).
    """
    matrices = [params] if isinstance(params, Tensor) else list(params)
    if not matrices or any(p.ndim != 2 for p in matrices):
        raise ValueError("params must hold 2-D matrices, at least one; leave the others out")
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for batch in batches:
        with torch.enable_grad():
            loss = closure(batch)
            losses.append(_checks.finite("the loss", loss.detach()).item())
            slopes = torch.autograd.grad(loss, matrices)
        gradients.append([_checks.finite("the gradient", g.double()) for g in slopes])
    if len(losses) < 2:
        raise ValueError(f"batches must hold at least two for an interval, got {len(losses)}")
    gap = Interval.of_mean(torch.tensor(losses, dtype=torch.float64) - lower)
    if gap.value < 0:
        raise ValueError(
            f"lower={lower!r} is above the mean loss {gap.value + lower:.6g}; pass a lower bound"
        )
    stacks = [torch.stack(each) for each in zip(*gradients, strict=True)]
    largest = tuple(operator_norm(stack).max().item() for stack in stacks)
    shapes = tuple((p.shape[0], p.shape[1]) for p in matrices)
    return Estimates(_q_nuclear(stacks), largest, gap, shapes)


def _q_nuclear(stacks: Sequence[Tensor]) -> Interval:
    """Return the jackknife of Σ Tr√(mean GGᵀ), whose concavity biases the plain value downward."""
    count = len(stacks[0])
    whole, without = 0.0, torch.zeros(count, dtype=torch.float64)
    for stack in stacks:
        wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
        squares = wide @ wide.mT
        total = squares.sum(0)
        means = torch.cat([total[None] / count, (total - squares) / (count - 1)])
        traces = torch.linalg.eigvalsh(means).clamp_min(0).sqrt().sum(-1).cpu()
        whole, without = whole + traces[0].item(), without + traces[1:]
    value = count * whole - (count - 1) * without.mean().item()
    error = math.sqrt((count - 1) * without.var(correction=0).item())
    return Interval(value, value - STANDARD_ERRORS * error, value + STANDARD_ERRORS * error)
