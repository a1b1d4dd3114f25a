"""Runs of the conversion, measured and compared with the oracle: what three claims share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.beside import close, drawn, largest
from nucleon.claims.engine import Check, Row, at_most
from nucleon.claims.grid import RoundCounter
from nucleon.claims.oracle import conversion, twins
from nucleon.claims.oracle.algebra import Array
from nucleon.claims.shown import Series
from nucleon.online.learners import FAML, FTL, FTPL, Learner
from nucleon.online.o2nc.meter import ConversionMeter
from nucleon.online.o2nc.optimizer import O2NC
from nucleon.online.o2nc.plans import Interval
from nucleon.online.problems.kinks import Kinks

SHAPE = (2, 8)
LAW_GAMES, LAW_ROUNDS, LAW_RHO, LAW_DISCOUNT = 4096, 40, 1.0, 0.9
"""The process itself: enough games for its laws, and rounds for its averages to differ."""
KOLMOGOROV = 2.2
"""√N times the distance of two distribution functions exceeds it once in 8000 samples."""
TWINS: Mapping[Callable[..., Learner], str] = {FTL: "FTL", FTPL: "FTPL", FAML: "FAML"}
FEW = 12
"""Rounds that the oracle runs beside a process."""

Answers = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(W, t) → ∇L(W) and G_t, for all runs at once: (b, m, n) each."""
Fall = Callable[[Tensor], Tensor]
"""W_T → L(W_1) − L(W_T) of each run."""


@dataclass(frozen=True)
class Process:
    """The setting of a run of the conversion."""

    learner: Callable[..., Learner]
    start: Tensor
    rho: float
    discount: float
    rounds: int
    gradient_bound: float
    seed: int
    loss_gap: float


class History(NamedTuple):
    """A run step by step, (T, b, m, n) each: W_t, ∇L(W_t), G_t and X_t."""

    weights: Tensor
    truths: Tensor
    gradients: Tensor
    actions: Tensor


class Measured(Row):
    """Both sides of the proposition, `gap` ≤ `bound` = `descent` + `regret` + `noise`, (b,) each.

    Beside them are the gap along the way and the history, where it was kept.
    """

    _curve: list[tuple[int, Tensor]]
    _history: History

    @property
    def mean_gap(self) -> Interval:
        """Return the estimate of E‖∇L(W̄_τ)‖^{[ρ]}, over τ and the runs."""
        return Interval.of_mean(self.gap)

    def excess(self, errors: float = 3.0) -> Interval:
        """Return left less right of the proposition ± `errors` standard errors; ≤ 0 in the mean."""
        mean = Interval.of_mean(self.gap - self.bound)
        half = errors / 3.0 * (mean.high - mean.value)
        return Interval(mean.value, mean.value - half, mean.value + half)

    def series(self, name: str, style: int) -> Series:
        """Return the gap at time t against t, over the runs."""
        values = torch.stack([gap for _, gap in self._curve])
        return Series.spanning(name, [float(t) for t, _ in self._curve], values, style)


def convert(
    process: Process,
    answers: Answers,
    *,
    fall: Fall | None = None,
    keep: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Run b processes at once, each with its own lengths, τ and samples: fields of a `Measured`.

    `fall` is what the proof bounds by ΔL; with it the right side is as sharp as the proof makes it.
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
    (learner,) = optimizer.learners
    learner.ledger = RoundCounter(learner.shape)  # the meter takes the regret
    meter, kept = ConversionMeter(optimizer), list[tuple[Tensor, ...]]()
    gap: float | Tensor = process.loss_gap
    for t in range(process.rounds):
        now = weight.detach()
        truth, weight.grad = answers(now, t)
        meter.record([truth])
        if keep:
            kept.append((now.clone(), truth, weight.grad, optimizer.actions[0]))
        if fall is not None and t == process.rounds - 1:
            gap = fall(now)
        optimizer.step()
    history = History(*map(torch.stack, zip(*kept, strict=True))) if keep else None
    terms = meter.terms(gap)
    along = {"_curve": meter.curve, "_history": history}
    return {**vars(terms), "bound": terms.bound, **along}


def sampling(problem: Kinks, rounds: int, runs: int, seed: int) -> Answers:
    """Return ∇L and the gradient of one summand drawn at random, independent over runs."""
    draws = problem.draws(rounds, runs, seed=seed)
    return lambda w, t: (problem.gradient(w), problem.sample(w, draws[t]))


def identity_start(scale: float, runs: int) -> Tensor:
    """Return W_1 = scale·I for every run, (runs, m, n) in float64."""
    return (scale * torch.eye(*SHAPE, dtype=torch.float64)).repeat(runs, 1, 1)


# ---------------------------------------------------------------------- beside the oracle


def conduct(seed: int) -> Iterator[Check]:
    """Check O2NC's radius, lengths, averages and τ, where FTL answers G = 1 by X = −D."""
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
    ends = range(1, LAW_ROUNDS + 1)
    expected = np.stack([conversion.average(path[:t], LAW_DISCOUNT) for t in ends])
    output = optimizer.output[0].flatten().numpy()
    radius = conversion.radius(LAW_RHO, LAW_DISCOUNT)
    lengths = np.sort(-np.diff(path, axis=0).ravel() / radius)
    shares = np.bincount(tau, minlength=LAW_ROUNDS + 1)[1:].cumsum() / LAW_GAMES
    law = conversion.law_of_tau(LAW_ROUNDS, LAW_DISCOUNT).cumsum()
    apart = distance_from_exponential(lengths)
    yield at_most("lengths: √N·distance from Exp(1)", apart, KOLMOGOROV)
    apart = largest(shares - law) * LAW_GAMES**0.5
    yield at_most("τ: √N·distance from its law", apart, KOLMOGOROV)
    drawn_from = noise.uniform(
        (LAW_GAMES, 2), seed=seed, stream=-1 - torch.arange(LAW_GAMES), dtype=torch.float64
    )
    inverse = conversion.tau(drawn_from.numpy(), LAW_ROUNDS, LAW_DISCOUNT)
    yield at_most("τ against its inverse, share of games", (tau != inverse).mean(), 0.0)
    errors = (np.stack(averages) - expected, output - expected[tau - 1, np.arange(LAW_GAMES)])
    yield close("W̄_t and W̄_τ against the reference's, over ρ", *(e / LAW_RHO for e in errors))


def distance_from_exponential(lengths: Array) -> float:
    """Return √N times Kolmogorov's distance of sorted lengths from Exp(1)."""
    below = np.arange(len(lengths)) / len(lengths)
    law = -np.expm1(-lengths)
    apart = np.maximum(np.abs(law - below), np.abs(law - below - 1 / len(lengths)))
    return largest(apart) * len(lengths) ** 0.5


def agrees(name: str, process: Process, answers: Answers, fall: Fall, **options: Any) -> Check:
    """Check actions, moves and both sides of the proposition in a few rounds of a process.

    The moves are compared with the actions up to their lengths, whose law `conduct` checks.
    """
    short = Measured(
        **convert(replace(process, rounds=FEW), answers, fall=fall, keep=True, **options)
    )
    weights, truths, gradients, actions = (part.numpy() for part in short._history)
    radius, shape = conversion.radius(process.rho, process.discount), gradients.shape[1:]
    twin = twins.gbpa(
        TWINS[process.learner],
        shape,
        radius=radius,
        bound=process.gradient_bound,
        discount=process.discount,
        noise=drawn(shape, samples=options.get("samples", 16), seed=process.seed),
    )
    expected = twin.actions(gradients)
    moves, ways = np.diff(weights, axis=0), expected[1:]
    squares = (ways**2).sum((-2, -1), keepdims=True)
    lengths = (moves * ways).sum((-2, -1), keepdims=True) / np.where(squares > 0, squares, 1.0)
    left, right = conversion.proposition(
        truths,
        gradients,
        expected,
        rho=process.rho,
        discount=process.discount,
        fall=fall(short._history.weights[-1]).numpy(),
    )
    # The size of either side: what all gradients have in common, times the weights of the sums.
    scale = right.max() + left.max()
    return close(
        f"{name}: actions, moves, both sides against the reference's",
        (actions - expected) / radius,
        (moves - lengths * ways) / radius,
        (short.gap.numpy() - left) / scale,
        (short.bound.numpy() - right) / scale,
    )
