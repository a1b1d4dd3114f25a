"""Steps of Muon, Pion and Leon beside the reference's, in float64 with exact decompositions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon import noise
from nucleon.experiments import agreement
from nucleon.experiments.base import Check
from nucleon.experiments.games import worst
from nucleon.experiments.reference import bounds, conversion, learners
from nucleon.experiments.reference.algebra import Array
from nucleon.optim import Leon, Muon, Pion

STEPS = 5
"""Steps that both take: enough for the sums to have older terms."""
EXACT = 1e-7
"""Closed forms of 20×20 sums without a floor, whose condition may reach 1e8."""

Gradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Twin:
    """The reference's optimizer."""

    direction: learners.Direction
    smoothing_scale: float = 1.0


def muon() -> Twin:
    """P = polar(Ĝ)."""
    return Twin(learners.leader)


def leon() -> Twin:
    """P = (ĜĜᵀ + M̂)^{-1/2}Ĝ."""
    return Twin(learners.augmented)


def pion(shape: tuple[int, ...], *, literal: bool, samples: int, seed: int) -> Twin:
    """P = mean polar([Ĝ 0] + LZ), LLᵀ = c·M̂: as printed, or with the theory's 1/η² and width."""
    batch, m, n = shape
    width = n if literal else bounds.padded(m, n)

    def draws(t: int) -> Array:
        return noise.normal(
            (samples, batch, m, width),
            seed=seed,
            stream=torch.arange(batch),
            step=t,
            sample=torch.arange(samples)[:, None],
            dtype=torch.float64,
        ).numpy()

    scale = 1.0 if literal else bounds.eta(bounds.gaussian(m, width)) ** -2
    return Twin(learners.perturbed(draws), scale)


def difference(
    optimizer: Optimizer,
    weight: torch.nn.Parameter,
    gradient: Gradient,
    twin: Twin,
    *,
    lr: float,
    momentum: float,
    beta2: float | None = None,
) -> float:
    """The largest |W_t − W'_t|/lr of an entry of (b, m, n) along a few steps of both."""
    wanted = conversion.descend(
        twin.direction,
        weight.detach().double().numpy().copy(),
        lambda w: gradient(torch.from_numpy(w)).numpy(),
        STEPS,
        lr=lr,
        momentum=momentum,
        beta2=beta2,
        smoothing_scale=twin.smoothing_scale,
    )
    errors = list[float]()
    for step in wanted[1:]:
        weight.grad = gradient(weight.detach().double()).to(weight)
        optimizer.step()
        errors.append(agreement.largest(weight.detach().double().numpy() - step) / lr)
    return worst(errors)


METHODS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "Muon": (Muon, "svd"),
    "Pion": (Pion, "svd"),
    "Leon": (Leon, "eigh"),
}
"""The optimizers and their exact methods."""
LR, MOMENTUM, SAMPLES = 0.1, 0.95, 2
DEFAULT = 0.3
"""Float32 steps of the default methods, whose polynomials leave errors of a few hundredths in an
entry of a direction; another rule for the moments or the noise moves it by one or more."""


def checks(
    shape: tuple[int, int], *, names: Sequence[str] = tuple(METHODS), seed: int = 0
) -> tuple[Check, ...]:
    """A few steps in float64 with exact decompositions, one check for each optimizer."""
    return tuple(
        Check(
            f"{name}, the optimizer: steps against the reference's, over the rate",
            _synthetic(name, shape, seed, torch.float64, method=METHODS[name][1], scale="none"),
            "≤",
            EXACT,
        )
        for name in names
    )


def default_checks(shape: tuple[int, int], *, seed: int = 0) -> tuple[Check, ...]:
    """The same in float32 with every option at its default, of square matrices."""
    return tuple(
        Check(
            f"{name} as trained with: steps against the reference's, over the rate",
            _synthetic(name, shape, seed, torch.float32),
            "≤",
            DEFAULT,
        )
        for name in METHODS
    )


def _synthetic(
    name: str, shape: tuple[int, int], seed: int, dtype: torch.dtype, **options: Any
) -> float:
    """The difference on gradients A ∘ cos(W + B) of a smooth loss."""
    m, n = shape
    generator = torch.Generator().manual_seed(seed)
    start, slope, phase = torch.randn(3, 2, m, n, dtype=torch.float64, generator=generator)
    samples = SAMPLES if dtype == torch.float64 else 1
    twins = {
        "Muon": muon(),
        "Pion": pion((2, m, n), literal=False, samples=samples, seed=seed),
        "Leon": leon(),
    }
    own = {"samples": samples, "seed": seed} if name == "Pion" else {}
    weight = torch.nn.Parameter(start.to(dtype))
    optimizer = METHODS[name][0]([weight], lr=LR, momentum=MOMENTUM, **own, **options)
    return difference(
        optimizer,
        weight,
        lambda w: slope * torch.cos(w + phase),
        twins[name],
        lr=LR,
        momentum=MOMENTUM,
    )
