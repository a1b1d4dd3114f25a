"""Learners by the names and options of the library's: the actions and the bound of a game."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from nucleon.claims.oracle import bounds, learners, smoothings, unknown
from nucleon.claims.oracle.algebra import Array

Actions = Callable[[Array], Array]


@dataclass(frozen=True)
class Twin:
    """A learner: actions and bound from gradients (T, …, m, n).

    Args:
        actions: X_1 … X_T.
        bound: after the last round; None where there is no theorem.
        radius: D.
        discount: γ.
        ball: in whose norm D is.
        exact: False where the library's actions come from a solver.
    """

    actions: Actions
    bound: Actions | None
    radius: float = 1.0
    discount: float = 1.0
    ball: Literal["op", "linf"] = "op"
    exact: bool = True


class Smoothing(NamedTuple):
    """A potential: Ψ, ∇Ψ and (α, β)."""

    value: smoothings.Value
    slope: learners.Direction
    constants: tuple[float, float]


def _none(t: int) -> Array:
    raise ValueError("FTPL's twin needs the noise of every round; pass noise=")


def smoothing(name: str, shape: tuple[int, ...], noise: learners.Noise = _none) -> Smoothing:
    """Return the potential of FTRL, of FTPL with a noise, or of FAML."""
    m, n = sorted(shape[-2:])
    potentials: Mapping[str, Smoothing] = {
        "FTRL": Smoothing(smoothings.regularized_value, learners.regularized, bounds.REGULARIZED),
        "FTPL": Smoothing(
            smoothings.perturbed_value(noise),
            learners.perturbed(noise),
            bounds.gaussian(m, bounds.padded(m, n)),
        ),
        "FAML": Smoothing(smoothings.hyperbolic_value, learners.augmented, bounds.HYPERBOLIC),
    }
    return potentials[name]


def gbpa(
    name: str,
    shape: tuple[int, ...],
    *,
    radius: float = 1.0,
    bound: float | None = 1.0,
    discount: float = 1.0,
    factor: float = 1.0,
    noise: learners.Noise = _none,
    clip: bool | None = None,
) -> Twin:
    """Return the twin of FTL, FTRL, FTPL with a noise, or FAML, η = factor·√(α/β).

    With `clip` gradients above the bound are cut, or, if it is False, let the bound grow.
    """
    game: dict[str, Any] = {"radius": radius, "bound": bound, "discount": discount}
    if name == "FTL":
        return Twin(partial(learners.gbpa, learners.leader, **game), None, radius, discount)
    _, slope, constants = smoothing(name, shape, noise)
    step = factor * bounds.eta(constants)
    if clip is None:
        actions = partial(learners.gbpa, slope, eta=step, **game)
        theorem = partial(bounds.gbpa, constants=constants, factor=factor, **game)
    else:
        actions = partial(unknown.gbpa, slope, eta=step, clip=clip, **game)
        theorem = partial(unknown.gbpa_bound, constants=constants, clip=clip, **game)
    return Twin(actions, theorem, radius, discount, exact=name != "FTRL")


def preconditioned(
    name: str, *, radius: float, bound: float = 1.0, factor: float = 1.0, epsilon: float = 0.0
) -> Twin:
    """Return the twin of Shampoo, one-sided Shampoo, Kronecker FTRL or scalar GBPA.

    With another η, factor times the theorem's, or an ε in Shampoo's roots it has no bound.
    """
    kinds: Mapping[str, tuple[Callable[..., Array], Callable[..., Array], dict[str, Any]]] = {
        "Shampoo": (learners.shampoo, bounds.shampoo, {}),
        "One-sided Shampoo": (
            partial(learners.shampoo, exponents=(0.5, 0.0)),
            bounds.one_sided_shampoo,
            {},
        ),
        "Kronecker FTRL": (learners.kronecker_ftrl, bounds.kronecker_ftrl, {"bound": bound}),
        "Scalar GBPA": (learners.scalar_gbpa, bounds.scalar_gbpa, {"bound": bound}),
    }
    actions, theorem, options = kinds[name]
    options |= {"radius": radius}
    exact = name == "Scalar GBPA"
    if (factor, epsilon) != (1.0, 0.0):
        changes = {"factor": factor} | ({"epsilon": epsilon} if "Shampoo" in name else {})
        return Twin(partial(actions, **options, **changes), None, radius, exact=exact)
    return Twin(partial(actions, **options), partial(theorem, **options), radius, exact=exact)


def on_rows(
    actions: Callable[..., Array],
    bound: Callable[..., Array],
    ball: learners.Ball,
    radius: float = 1.0,
    **options: Any,
) -> Twin:
    """Return a twin for vectors given as rows, whose ℓ₂ norm is the operator norm."""
    options |= {"ball": ball, "radius": radius}
    norm: Literal["op", "linf"] = "op" if ball == "l2" else "linf"
    played = partial(actions, **options)
    return Twin(played, partial(bound, **options), radius, ball=norm, exact=False)


def gaussian(dimension: int, *, radius: float, bound: float) -> Twin:
    """Return the twin of Gaussian FTPL on rows, which plays the mean, here a sum on a grid."""
    constants = bounds.spherical(dimension)
    game: dict[str, Any] = {"radius": radius, "bound": bound}
    return Twin(
        partial(learners.gbpa, learners.spherical, eta=bounds.eta(constants), **game),
        partial(bounds.gbpa, constants=constants, **game),
        radius,
        exact=False,
    )
