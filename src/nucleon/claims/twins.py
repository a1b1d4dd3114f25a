"""The reference's learners, built with the options of the library's: twins to compare them with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from nucleon import noise
from nucleon.claims.oracle import bounds, learners, lemma, unknown
from nucleon.claims.oracle.algebra import Array

Actions = Callable[[Array], Array]


@dataclass(frozen=True)
class Twin:
    """The reference's learner: actions and bound from gradients (T, …, m, n)."""

    actions: Actions
    bound: Actions | None
    """None where there is no theorem."""
    radius: float = 1.0
    discount: float = 1.0
    ball: Literal["op", "linf"] = "op"
    exact: bool = True
    """False where the library's actions come from a solver."""


class Smoothing(NamedTuple):
    """The reference's potential: Ψ, ∇Ψ and (α, β)."""

    value: lemma.Value
    slope: learners.Direction
    constants: tuple[float, float]


def smoothing(
    name: str, shape: tuple[int, ...], draws: Callable[[int], Array] | None = None
) -> Smoothing:
    """That of FTRL, of FTPL with the noise `draws`, or of FAML."""
    values: Mapping[str, lemma.Value] = {
        "FTRL": lemma.regularized_value,
        "FTPL": lemma.perturbed_value(draws or _none),
        "FAML": lemma.hyperbolic_value,
    }
    return Smoothing(values[name], _direction(name, draws), gbpa_constants(name, shape))


def gbpa_twin(
    name: str,
    shape: tuple[int, ...],
    *,
    radius: float = 1.0,
    bound: float = 1.0,
    discount: float = 1.0,
    factor: float = 1.0,
    draws: Callable[[int], Array] | None = None,
) -> Twin:
    """The twin of FTL, FTRL, FTPL with the noise `draws`, or FAML, η = factor·√(α/β)."""
    game: dict[str, Any] = {"radius": radius, "bound": bound, "discount": discount}
    eta, theorem = 1.0, None
    if name != "FTL":
        constants = gbpa_constants(name, shape)
        eta = factor * bounds.eta(constants)
        theorem = partial(bounds.gbpa, constants=constants, factor=factor, **game)
    actions = partial(learners.gbpa, _direction(name, draws), eta=eta, **game)
    return Twin(actions, theorem, radius, discount, exact=name != "FTRL")


def excess_twin(
    name: str,
    shape: tuple[int, ...],
    *,
    clip: bool,
    bound: float | None,
    discount: float = 1.0,
    draws: Callable[[int], Array] | None = None,
) -> Twin:
    """The twin of a GBPA learner that clips what exceeds the bound, or lets the bound grow."""
    constants = gbpa_constants(name, shape)
    game: dict[str, Any] = {"clip": clip, "bound": bound, "discount": discount}
    return Twin(
        partial(unknown.gbpa, _direction(name, draws), eta=bounds.eta(constants), **game),
        partial(unknown.gbpa_bound, constants=constants, **game),
        discount=discount,
        exact=name != "FTRL",
    )


def gbpa_constants(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(α, β) of FTRL, FTPL or FAML."""
    m, n = sorted(shape[-2:])
    gaussian = bounds.gaussian(m, bounds.padded(m, n))
    return {"FTRL": bounds.REGULARIZED, "FTPL": gaussian, "FAML": bounds.HYPERBOLIC}[name]


def _direction(name: str, draws: Callable[[int], Array] | None) -> learners.Direction:
    directions: Mapping[str, learners.Direction] = {
        "FTL": learners.leader,
        "FTRL": learners.regularized,
        "FTPL": learners.perturbed(draws or _none),
        "FAML": learners.augmented,
    }
    return directions[name]


def _none(t: int) -> Array:
    raise ValueError("FTPL's twin needs the noise it is given; pass draws=")


def ftpl_draws(
    shape: tuple[int, ...],
    *,
    samples: int,
    seed: int = 0,
    redraw: bool = True,
    antithetic: bool = False,
    width: int | None = None,
) -> Callable[[int], Array]:
    """Z of every round for FTPL's games: t → (samples, b, m, n′), keyed as `noise` says.

    The `width` n′ is the library's where None is given.
    """
    *batch, rows, columns = shape
    m, n = sorted((rows, columns))
    count = samples // 2 if antithetic else samples

    def draws(t: int) -> Array:
        drawn = noise.normal(
            (count, *batch, m, width or bounds.padded(m, n)),
            seed=seed,
            stream=torch.arange(batch[0]) if batch else 0,
            step=t if redraw else 0,
            sample=torch.arange(count).reshape(-1, *(1 for _ in batch)),
            dtype=torch.float64,
        ).numpy()
        return np.concatenate([drawn, -drawn]) if antithetic else drawn

    return draws


def shampoo_twin(name: str, *, radius: float, bound: float = 1.0) -> Twin:
    """The twin of Shampoo, one-sided Shampoo, Kronecker FTRL or scalar GBPA."""
    own = {"radius": radius}
    both = {**own, "bound": bound}
    known: dict[str, tuple[Actions, Actions]] = {
        "Shampoo": (partial(learners.shampoo, **own), partial(bounds.shampoo, **own)),
        "One-sided Shampoo": (
            partial(learners.shampoo, **own, exponents=(0.5, 0.0)),
            partial(bounds.one_sided_shampoo, **own),
        ),
        "Kronecker FTRL": (
            partial(learners.kronecker_ftrl, **both),
            partial(bounds.kronecker_ftrl, **both),
        ),
        "Scalar GBPA": (partial(learners.scalar_gbpa, **both), partial(bounds.scalar_gbpa, **both)),
    }
    return Twin(*known[name], radius, exact=name == "Scalar GBPA")


def adagrad_twin(
    update: learners.Update,
    preconditioner: learners.Preconditioner,
    ball: learners.Ball,
    *,
    radius: float,
    delta: float = 0.0,
) -> Twin:
    """The twin of an AdaGrad learner on rows."""
    own: dict[str, Any] = {"update": update, "preconditioner": preconditioner, "delta": delta}
    return _on_rows(learners.adagrad, bounds.adagrad, ball, radius, **own)


def gaussian_twin(dimension: int, *, radius: float, bound: float) -> Twin:
    """The twin of Gaussian FTPL on rows, which plays the mean; the reference sums it on a grid."""
    constants = bounds.spherical(dimension)
    game: dict[str, Any] = {"radius": radius, "bound": bound}
    return Twin(
        partial(learners.gbpa, learners.spherical, eta=bounds.eta(constants), **game),
        partial(bounds.gbpa, constants=constants, **game),
        radius,
        exact=False,
    )


def unknown_twin(
    offset: unknown.Offset,
    preconditioner: unknown.Preconditioner,
    ball: learners.Ball,
    *,
    radius: float = 1.0,
) -> Twin:
    """The twin of AdaGrad-FTRL without δ, on rows (Remark B.1)."""
    own: dict[str, Any] = {"offset": offset, "preconditioner": preconditioner}
    return _on_rows(unknown.adagrad, unknown.adagrad_bound, ball, radius, **own)


def _on_rows(
    actions: Callable[..., Array],
    bound: Callable[..., Any],
    ball: learners.Ball,
    radius: float,
    **own: Any,
) -> Twin:
    """A twin of vectors that are given as rows, whose ℓ₂ norm is the operator norm."""
    own |= {"ball": ball, "radius": radius}
    norm: Literal["op", "linf"] = "op" if ball == "l2" else "linf"
    return Twin(partial(actions, **own), partial(bound, **own), radius, ball=norm, exact=False)
