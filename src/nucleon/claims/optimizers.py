"""Steps of Muon, Pion and Leon beside the oracle's, in float64 with exact decompositions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon.certificate import Certificate
from nucleon.claims.beside import close, drawn, largest
from nucleon.claims.conversions import KOLMOGOROV, distance_from_exponential
from nucleon.claims.engine import Check, at_most, worst
from nucleon.claims.oracle import bounds, conversion, learners
from nucleon.claims.oracle.algebra import Array, discounted, nuclear
from nucleon.optim import Leon, Muon, Pion

STEPS = 5
"""Steps of both optimizers: enough for the sums to have older terms."""
EXACT = 1e-7
"""Closed forms of 20×20 sums without a floor, whose condition may reach 1e8."""
METHODS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "Muon": (Muon, "svd"),
    "Pion": (Pion, "svd"),
    "Leon": (Leon, "eigh"),
}
"""The optimizers and their exact methods."""
LR, MOMENTUM, SAMPLES = 0.1, 0.95, 2
CERTIFIED_STEPS = 100
"""Steps of a run in the theorem's setting: enough for the law of its lengths."""
DEFAULT = 0.3
"""Float32 steps of the default methods, whose polynomials leave errors of a few hundredths in an
entry of a direction; another rule for the moments or the noise moves it by one or more."""

Gradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class OracleOptimizer:
    """The oracle's optimizer: P = polar(Ĝ), or P = (ĜĜᵀ + M̂)^{-1/2}Ĝ."""

    direction: learners.Direction
    smoothing_scale: float = 1.0


MUON, LEON = OracleOptimizer(learners.leader), OracleOptimizer(learners.augmented)


def pion(shape: tuple[int, ...], *, literal: bool, samples: int, seed: int) -> OracleOptimizer:
    """Return P = mean polar([Ĝ 0] + LZ), LLᵀ = c·M̂, c and width as printed or of the theory."""
    m, n = shape[-2:]
    width = n if literal else bounds.padded(m, n)
    draws = drawn(shape, samples=samples, seed=seed, width=width)
    scale = 1.0 if literal else bounds.eta(bounds.gaussian(m, width)) ** -2
    return OracleOptimizer(learners.perturbed(draws), scale)


def difference(
    optimizer: Optimizer,
    weight: torch.nn.Parameter,
    gradient: Gradient,
    twin: OracleOptimizer,
    *,
    lr: float,
    **settings: Any,
) -> float:
    """Return the largest |W_t − W'_t|/lr of an entry of (b, m, n) along a few steps of both.

    The settings are those of `conversion.descend`: β₁, β₂ and G.
    """
    expected = conversion.descend(
        twin.direction,
        weight.detach().double().numpy().copy(),
        lambda w: gradient(torch.from_numpy(w)).numpy(),
        STEPS,
        lr=lr,
        smoothing_scale=twin.smoothing_scale,
        **settings,
    )
    errors = list[float]()
    for step in expected[1:]:
        weight.grad = gradient(weight.detach().double()).to(weight)
        optimizer.step()
        errors.append(largest(weight.detach().double().numpy() - step) / lr)
    return worst(errors)


def checks(
    shape: tuple[int, int], *, names: Sequence[str] = tuple(METHODS), seed: int = 0
) -> Iterator[Check]:
    """Check a few steps in float64 with exact decompositions."""
    for name in names:
        apart = _synthetic(name, shape, seed, torch.float64, method=METHODS[name][1], scale="none")
        words = f"{name}, the optimizer: steps against the reference's, over the rate"
        yield at_most(words, apart, EXACT)


def default_checks(shape: tuple[int, int], *, seed: int = 0) -> Iterator[Check]:
    """Check the same in float32 with every option at its default, of square matrices."""
    for name in METHODS:
        words = f"{name} as trained with: steps against the reference's, over the rate"
        yield at_most(words, _synthetic(name, shape, seed, torch.float32), DEFAULT)


def _synthetic(
    name: str, shape: tuple[int, int], seed: int, dtype: torch.dtype, **options: Any
) -> float:
    """Return the difference on gradients A ∘ cos(W + B) of a smooth loss."""
    start, gradient, _ = _smooth_loss(shape, seed)
    samples, twin = SAMPLES if dtype == torch.float64 else 1, LEON if name == "Leon" else MUON
    if name == "Pion":
        options |= {"samples": samples, "seed": seed}
        twin = pion((2, *shape), literal=False, samples=samples, seed=seed)
    weight = torch.nn.Parameter(start.to(dtype))
    optimizer = METHODS[name][0]([weight], lr=LR, momentum=MOMENTUM, **options)
    return difference(optimizer, weight, gradient, twin, lr=LR, momentum=MOMENTUM)


def _smooth_loss(shape: tuple[int, int], seed: int) -> tuple[Tensor, Gradient, float]:
    """Return a start, the gradient A ∘ cos(W + B), two matrices each, and G = max ‖|A|‖_op."""
    generator = torch.Generator().manual_seed(seed)
    start, slope, phase = torch.randn(3, 2, *shape, dtype=torch.float64, generator=generator)
    bound = torch.linalg.matrix_norm(slope.abs(), 2).max().item()
    return start, lambda w: slope * torch.cos(w + phase), bound


# ---------------------------------------------------------------------- in the theorem's setting


def certified_checks(shape: tuple[int, int], *, seed: int = 0) -> Iterator[Check]:
    """Check Leon with G, by steps of constant and of exponential length, and its certificate."""
    start, gradient, bound = _smooth_loss(shape, seed)
    game = {"lr": LR, "momentum": MOMENTUM}
    setting: dict[str, Any] = {**game, "method": "eigh", "scale": "none", "gradient_bound": bound}
    weight = torch.nn.Parameter(start.clone())
    name, plain = "Leon with G, the optimizer", Leon([weight], **setting)
    error = difference(plain, weight, gradient, LEON, **game, gradient_bound=bound)
    yield at_most(f"{name}: steps against the reference's, over the rate", error, EXACT)
    options: dict[str, Any] = {**setting, "step_length": "exponential", "seed": seed}
    moves, gradients, certificate = _certified_run(start, gradient, **options)
    # X_{t+1} = −P_t: the oracle plays one round more than it is given gradients.
    longer = np.concatenate([gradients, np.zeros_like(gradients[:1])])
    actions = learners.gbpa(learners.augmented, longer, bound=bound, discount=MOMENTUM)
    ways = LR * actions[1:]
    lengths = (moves * ways).sum((1, 2, 3)) / (ways**2).sum((1, 2, 3))  # one for both matrices
    apart = largest(moves - lengths[:, None, None, None] * ways) / LR
    yield at_most(f"{name}: exponential steps up to their lengths, over the rate", apart, EXACT)
    apart = distance_from_exponential(np.sort(lengths))
    yield at_most(f"{name}: lengths, √N·distance from Exp(1)", apart, KOLMOGOROV)
    apart = _misstated(certificate, gradients, actions[:-1], bound)
    yield close(f"{name}: certificate's regret and bound against the reference's", apart)
    low = bound / 4  # which many gradients exceed
    _, gradients, certificate = _certified_run(start, gradient, **setting | {"gradient_bound": low})
    actions = learners.gbpa(learners.augmented, gradients, bound=low, discount=MOMENTUM)
    apart = _misstated(certificate, gradients, actions, low)
    yield close(f"{name}, above its bound: certificate against the reference's", apart)


def _certified_run(
    start: Tensor, gradient: Gradient, **options: Any
) -> tuple[Array, Array, Certificate]:
    """Return W_{t+1} − W_t and G_t of each step of Leon, (T, b, m, n) both, and its certificate."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = Leon([weight], certify=True, **options)
    moves, gradients = list[Array](), list[Array]()
    for _ in range(CERTIFIED_STEPS):
        before = weight.detach().clone()
        weight.grad = gradient(before)
        gradients.append(weight.grad.numpy().copy())
        optimizer.step()
        moves.append((weight.detach() - before).numpy())
    (certificate,) = optimizer.certificates().values()
    return np.stack(moves), np.stack(gradients), certificate


def _misstated(certificate: Certificate, gradients: Array, actions: Array, bound: float) -> float:
    """Return how far a certificate of radius 1 is from the oracle's; infinite where it refuses."""
    game: dict[str, Any] = {"radius": 1.0, "discount": MOMENTUM}
    regret = learners.regret(gradients, actions, **game)
    promised = bounds.gbpa(gradients, bounds.HYPERBOLIC, bound=bound, **game)
    promised = promised + 2 * bounds.excess(gradients, bound, MOMENTUM)
    scale = discounted(nuclear(gradients), MOMENTUM)
    errors = (
        largest((certificate.regret.numpy() - regret) / scale),
        largest(certificate.bound.numpy() / promised - 1),
    )
    return worst(errors) if certificate.holds else math.inf
