"""Runs of the conversion, measured and held to the reference: what three claims share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nucleon.claims import agreement, twins
from nucleon.claims.base import Check
from nucleon.claims.oracle import conversion
from nucleon.claims.oracle.algebra import Array
from nucleon.claims.shown import Series
from nucleon.online.learners import FAML, FTL, FTPL, Learner
from nucleon.online.o2nc.meter import ConversionMeter, ConversionTerms
from nucleon.online.o2nc.optimizer import O2NC
from nucleon.online.o2nc.plans import Interval
from nucleon.online.problems.kinks import Kinks

SHAPE = (2, 8)
LAW_GAMES, LAW_ROUNDS, LAW_RHO, LAW_DISCOUNT = 4096, 40, 1.0, 0.9
"""Of the process itself: enough games for its laws, and rounds for its averages to differ."""
KOLMOGOROV = 2.2
"""√N times the distance of two distribution functions exceeds it once in 8000 samples."""
TWINS: Mapping[Callable[..., Learner], str] = {FTL: "FTL", FTPL: "FTPL", FAML: "FAML"}
FEW = 12
"""Rounds that the reference runs beside a process."""

Oracle = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(W, t) → ∇L(W) and G_t, for all runs at once: (b, m, n) each."""


@dataclass(frozen=True)
class Process:
    """What a run of the conversion needs besides its oracle."""

    learner: Callable[..., Learner]
    start: Tensor
    rho: float
    discount: float
    rounds: int
    gradient_bound: float
    seed: int
    loss_gap: float


class History(NamedTuple):
    """What a run saw and did, (T, b, m, n) each: W_t, ∇L(W_t), G_t and X_t."""

    weights: Tensor
    truths: Tensor
    gradients: Tensor
    actions: Tensor


@dataclass(frozen=True)
class Measured:
    """Both sides of the proposition on b runs, and the gap along the way."""

    terms: ConversionTerms
    curve: list[tuple[int, Tensor]]
    history: History | None

    @property
    def gap(self) -> Interval:
        """The estimate of E‖∇L(W̄_τ)‖^{[ρ]}, over τ and the runs."""
        return Interval.of_mean(self.terms.gap)

    def excess(self, errors: float = 3.0) -> Interval:
        """Left less right of the proposition, ± `errors` standard errors: its mean is ≤ 0."""
        found = Interval.of_mean(self.terms.gap - self.terms.bound)
        half = errors / 3.0 * (found.high - found.value)
        return Interval(found.value, found.value - half, found.value + half)

    def series(self, name: str, style: int) -> Series:
        """The gap at time t against t, over the runs."""
        values = torch.stack([gap for _, gap in self.curve])
        return Series.spanning(name, [float(t) for t, _ in self.curve], values, style)


def convert(
    process: Process,
    oracle: Oracle,
    tick: Callable[[], None],
    *,
    fall: Callable[[Tensor], Tensor] | None = None,
    keep: bool = False,
    **options: Any,
) -> Measured:
    """Run b processes at once, each with its own lengths, τ and samples, and measure them.

    `fall`, W_T → L(W_1) − L(W_T) of each run, is what the proof bounds by ΔL; with it the right
    side is as sharp as the proof makes it.
    """
    weight = torch.nn.Parameter(process.start.clone())
    optimizer = O2NC(
        weight,
        process.learner,
        rho=process.rho,
        discount=process.discount,
        rounds=process.rounds,
        seed=process.seed,
        independent=True,
        gradient_bound=process.gradient_bound,
        **{"validate": False, **options},  # the bounds are exact here, and checks cost a third
    )
    meter, kept = ConversionMeter(optimizer), list[tuple[Tensor, ...]]()
    gap: float | Tensor = process.loss_gap
    for t in range(process.rounds):
        now = weight.detach()
        truth, weight.grad = oracle(now, t)
        meter.record([truth])
        if keep:
            kept.append((now.clone(), truth, weight.grad, optimizer.actions[0]))
        if fall is not None and t == process.rounds - 1:
            gap = fall(now)
        optimizer.step()
        tick()
    history = History(*map(torch.stack, zip(*kept, strict=True))) if keep else None
    return Measured(meter.terms(gap), meter.curve, history)


def sampling(problem: Kinks, rounds: int, runs: int, seed: int) -> Oracle:
    """∇L and the gradient of one summand drawn at random, independent over runs."""
    draws = problem.draws(rounds, runs, seed=seed)
    return lambda w, t: (problem.gradient(w), problem.sample(w, draws[t]))


def identity_start(scale: float, runs: int) -> Tensor:
    """W_1 = scale·I for every run, (runs, m, n) in float64."""
    return (scale * torch.eye(*SHAPE, dtype=torch.float64)).repeat(runs, 1, 1)


# ---------------------------------------------------------------------- against the reference


def conduct(seed: int) -> tuple[Check, ...]:
    """O2NC's radius, lengths, averages and τ, where FTL answers G = 1 by X = −D in every round."""
    weight = torch.nn.Parameter(torch.zeros(LAW_GAMES, 1, 1, dtype=torch.float64))
    setting: dict[str, Any] = {"rho": LAW_RHO, "discount": LAW_DISCOUNT, "rounds": LAW_ROUNDS}
    optimizer = O2NC(weight, FTL, seed=seed, independent=True, **setting)
    weights, averages = list[Array](), list[Array]()
    for _ in range(LAW_ROUNDS):
        weights.append(weight.detach().flatten().numpy().copy())
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        averages.append(optimizer.average[0].flatten().numpy())
    path, tau = np.stack(weights), optimizer.tau.numpy()
    wanted = np.stack(
        [conversion.average(path[:t], LAW_DISCOUNT) for t in range(1, LAW_ROUNDS + 1)]
    )
    output = optimizer.output[0].flatten().numpy()
    radius = conversion.radius(LAW_RHO, LAW_DISCOUNT)
    lengths = np.sort(-np.diff(path, axis=0).ravel() / radius)
    drawn = np.bincount(tau, minlength=LAW_ROUNDS + 1)[1:].cumsum() / LAW_GAMES
    law = conversion.law_of_tau(LAW_ROUNDS, LAW_DISCOUNT).cumsum()
    errors = (np.stack(averages) - wanted, output - wanted[tau - 1, np.arange(LAW_GAMES)])
    return (
        Check(
            "lengths: √N·distance from Exp(1)", distance_from_exponential(lengths), "≤", KOLMOGOROV
        ),
        Check(
            "τ: √N·distance from its law",
            agreement.largest(drawn - law) * LAW_GAMES**0.5,
            "≤",
            KOLMOGOROV,
        ),
        agreement.close(
            "W̄_t and W̄_τ against the reference's, over ρ", *(e / LAW_RHO for e in errors)
        ),
    )


def distance_from_exponential(lengths: Array) -> float:
    """√N times Kolmogorov's distance of sorted lengths from Exp(1)."""
    below = np.arange(len(lengths)) / len(lengths)
    law = -np.expm1(-lengths)
    apart = np.maximum(np.abs(law - below), np.abs(law - below - 1 / len(lengths)))
    return agreement.largest(apart) * len(lengths) ** 0.5


def agrees(
    name: str,
    process: Process,
    oracle: Oracle,
    fall: Callable[[Tensor], Tensor],
    **options: Any,
) -> Check:
    """A few rounds of a process: actions, moves and both sides of the proposition as they must be.

    The moves are held to the actions up to their lengths, whose law `conduct` checks.
    """
    short = replace(process, rounds=FEW)
    found = convert(short, oracle, lambda: None, fall=fall, keep=True, **options)
    assert found.history is not None
    weights, truths, gradients, actions = (part.numpy() for part in found.history)
    radius = conversion.radius(process.rho, process.discount)
    twin = twins.gbpa_twin(
        TWINS[process.learner],
        gradients.shape[1:],
        radius=radius,
        bound=process.gradient_bound,
        discount=process.discount,
        draws=twins.ftpl_draws(
            gradients.shape[1:], samples=options.get("samples", 16), seed=process.seed
        ),
    )
    wanted = twin.actions(gradients)
    moves, ways = np.diff(weights, axis=0), wanted[1:]
    squares = (ways**2).sum((-2, -1), keepdims=True)
    lengths = (moves * ways).sum((-2, -1), keepdims=True) / np.where(squares > 0, squares, 1.0)
    left, right = conversion.proposition(
        truths,
        gradients,
        wanted,
        rho=process.rho,
        discount=process.discount,
        fall=fall(found.history.weights[-1]).numpy(),
    )
    # The size of either side: what all gradients have in common, times the weights of the sums.
    scale = right.max() + left.max()
    return agreement.close(
        f"{name}: actions, moves, both sides against the reference's",
        (actions - wanted) / radius,
        (moves - lengths * ways) / radius,
        (found.terms.gap.numpy() - left) / scale,
        (found.terms.bound.numpy() - right) / scale,
    )
