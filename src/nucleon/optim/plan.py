"""The parameters with which Theorems 5.2 and 5.3 promise a (ρ, ε)-stationary point."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nucleon import _checks, theory
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.potentials import Gaussian

Planned = Literal["leon", "pion"]
Kind = Literal["reachable", "trivial", "not covered", "out of reach"]
PLANNED: tuple[Planned, ...] = ("leon", "pion")

MOST_ROUNDS = 10**12
"""More rounds than this are said to be out of reach: eleven days at a million a second."""
STANDARD_ERRORS = 3.0
"""Half the width of an `Interval`; for 16 runs or more it covers the mean 99 times of 100."""


@dataclass(frozen=True)
class Interval:
    """A measured value and the interval it is believed in."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, samples: Tensor) -> "Interval":
        """The mean of independent samples (r,) ± 3 standard errors; infinite for a single one."""
        mean = samples.double().mean().item()
        count = _checks.count("the number of samples", samples.numel())
        error = samples.double().std().item() / math.sqrt(count) if count > 1 else math.inf
        return cls(mean, mean - STANDARD_ERRORS * error, mean + STANDARD_ERRORS * error)

    def __str__(self) -> str:
        """The value with its interval."""
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Plan:
    """What `plan` found: a verdict in words and, unless the target is trivial, the parameters."""

    optimizer: Planned
    kind: Kind
    verdict: str
    """What to make of it, in a sentence or two."""
    complexity: theory.Complexity | None
    """γ, D and T with the terms and conditions they come from; None for a trivial target."""
    bound: theory.ConversionBound | None
    """What the proof promises at these γ and T, term by term, at most ε where it applies."""

    @property
    def discount(self) -> float:
        """γ, the optimizer's `momentum`."""
        return self._found.discount

    @property
    def radius(self) -> float:
        """D, the optimizer's `lr`."""
        return self._found.radius

    @property
    def rounds(self) -> int:
        """T."""
        return self._found.rounds

    @property
    def _found(self) -> theory.Complexity:
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
    gradient_bound: float,
    shape: tuple[int, int],
) -> Plan:
    """γ, D and T of Theorem 5.2 (Pion) or 5.3 (Leon), and whether they mean anything.

    γ = 1 − (ε/(20C‖Q‖_*))²,  D = (1−γ)ρ/(2γ),
    T = max{4000C²‖Q‖_*²ΔL/(ρε³), 400C²‖Q‖_*²/ε², 10√2·C·mG/ε}

    C is 1 for Leon and (n′/(n′−m−1))^¼ at the padded width n′ for Pion, whose theorem takes the
    mean over its noise as exact.

    Args:
        optimizer: "leon" or "pion".
        rho: ρ, the radius of the (ρ, ε)-stationary point.
        epsilon: ε, its accuracy in the nuclear norm.
        q_nuclear: ‖Q‖_* of a Q with E[GGᵀ] ⪯ Q² wherever the run may come.
        loss_gap: ΔL = L(W_0) − inf L.
        gradient_bound: G ≥ ‖G_t‖_op.
        shape: (m, n) of the matrix, tall or wide.
    """
    _checks.choice("optimizer", optimizer, PLANNED) if optimizer != "muon" else _refuse_muon()
    rows, columns = sorted(_checks.count("every side of shape", side) for side in shape)
    given = {"rho": rho, "loss_gap": loss_gap, "gradient_bound": gradient_bound, "rows": rows}
    q_nuclear, epsilon = (
        _checks.positive("q_nuclear", q_nuclear),
        _checks.positive("epsilon", epsilon),
    )
    if optimizer == "pion":
        width = Gaussian().padded_width(rows, columns)
        factor = theory.ftpl_factor(rows, width)
    else:
        width, factor = columns, 1.0
    if epsilon >= q_nuclear:
        _checks.positive("rho", rho)
        verdict = (
            f"ε = {epsilon:.6g} is trivial: every gradient has a mean of nuclear norm at most "
            f"‖Q‖_* = {q_nuclear:.6g}, so every point is (ρ, ε)-stationary, the first one too."
        )
        return Plan(optimizer, "trivial", verdict, None, None)
    target = {**given, "epsilon": epsilon, "q_nuclear": q_nuclear}
    if (epsilon / (20 * factor * q_nuclear)) ** 2 < torch.finfo(torch.float64).eps:
        raise ValueError(
            f"epsilon={epsilon!r} is so small against q_nuclear={q_nuclear!r} that 1 − discount "
            f"does not show in float64; pass a larger epsilon"
        )
    found = (
        theory.leon_complexity(**target)  # pyright: ignore[reportArgumentType]
        if optimizer == "leon"
        else theory.pion_complexity(**target, width=width)  # pyright: ignore[reportArgumentType]
    )
    bound = theory.stationarity_bound(
        **given,  # pyright: ignore[reportArgumentType]
        q_nuclear=q_nuclear,
        discount=found.discount,
        rounds=found.rounds,
        regret_constant=2.0 if optimizer == "leon" else 2 * math.sqrt(2) * factor,
    )
    kind, verdict = _verdict(found, bound, factor, target)
    return Plan(optimizer, kind, verdict, found, bound)


def _verdict(
    found: theory.Complexity,
    bound: theory.ConversionBound,
    factor: float,
    target: dict[str, Any],
) -> tuple[Kind, str]:
    if not found.valid:
        total = target["rows"] * target["gradient_bound"]
        largest = 10 * math.sqrt(2) * factor * target["q_nuclear"] ** 2 / total
        return "not covered", (
            f"The theorem does not cover ε = {target['epsilon']:.6g}: it needs ε ≤ 10√2·C‖Q‖_*²/(mG) "
            f"= {largest:.6g}. What the proof gives at these parameters is {bound.total:.6g}."
        )
    if found.rounds > MOST_ROUNDS:
        return "out of reach", (
            f"{found.rounds:.3g} rounds are out of reach; T falls with ε³ and with ρ: a target twice "
            f"as large needs about an eighth of them."
        )
    largest = max(found.terms, key=lambda name: found.terms[name])
    return "reachable", (
        f"{found.rounds} rounds, set by the {largest.replace('_', ' ')} term, promise a mean of at "
        f"most {bound.total:.6g} ≤ ε over the random time and the noise."
    )


def _refuse_muon() -> None:
    raise ValueError(
        "optimizer='muon' has no theorem to plan with: the regret of following the leader can be "
        "linear; pass 'leon' or 'pion'"
    )


@dataclass(frozen=True)
class Estimates:
    """What `plan` needs to know of a model, from a few of its batches."""

    q_nuclear: Interval
    """Σ over the parameters of Tr√(mean GGᵀ), corrected for its bias by the jackknife."""
    gradient_bound: Interval
    """The largest ‖G‖_op seen. A sample bounds no maximum: the interval is open above."""
    loss_gap: Interval
    """The mean loss less `lower`."""


def estimate(
    params: Tensor | Sequence[Tensor],
    closure: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    lower: float = 0.0,
) -> Estimates:
    """‖Q‖_*, G and ΔL of a model at its present weights, with intervals of ±3 standard errors.

    The theorems need ‖Q‖_* and G along the whole run, which no sample at its start can give: take
    the upper ends, and a margin. Weights and gradients are left as they were.

    Args:
        params: the matrices, 2-D, whose gradients count.
        closure: the loss of a batch, a scalar tensor with a graph.
        batches: at least two, independent.
        lower: a lower bound of the loss (default 0.0).
    """
    matrices = [params] if isinstance(params, Tensor) else list(params)
    if not matrices or any(p.ndim != 2 for p in matrices):
        raise ValueError("params must hold 2-D matrices, at least one; leave the others out")
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for batch in batches:
        with torch.enable_grad():
            loss = closure(batch)
            found = torch.autograd.grad(loss, matrices)
        losses.append(loss.item())
        gradients.append([_checks.finite("the gradient", g.double()) for g in found])
    if len(losses) < 2:
        raise ValueError(f"batches must hold at least two for an interval, got {len(losses)}")
    gap = Interval.of_mean(torch.tensor(losses, dtype=torch.float64) - lower)
    stacks = [torch.stack(each) for each in zip(*gradients, strict=True)]
    largest = max(operator_norm(stack).max().item() for stack in stacks)
    return Estimates(_q_nuclear(stacks), Interval(largest, largest, math.inf), gap)


def _q_nuclear(stacks: Sequence[Tensor]) -> Interval:
    """The jackknife of Σ Tr√(mean GGᵀ), whose concavity makes the plain figure too small."""
    count = len(stacks[0])
    whole, without = 0.0, torch.zeros(count, dtype=torch.float64)
    for stack in stacks:
        wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
        squares = wide @ wide.mT
        total = squares.sum(0)
        whole += _trace_root(total / count).item()
        without += _trace_root((total - squares) / (count - 1)).cpu()
    value = count * whole - (count - 1) * without.mean().item()
    error = math.sqrt((count - 1) * without.var(correction=0).item())
    return Interval(value, value - STANDARD_ERRORS * error, value + STANDARD_ERRORS * error)


def _trace_root(gram: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum(-1)
