"""The library beside the oracle: the same few rounds by both, and how far apart they are."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.engine import Check, Item, Row, Rows, at_most, label, worst
from nucleon.claims.oracle import bounds, learners, twins
from nucleon.claims.oracle.algebra import Array, nuclear
from nucleon.online import learners as library
from nucleon.online import streams, theory
from nucleon.online.learners import Learner

F64 = torch.float64
ROUNDS = 8
"""Rounds that both play: enough for every sum to have an older term."""
EXACT = 1e-8
"""Closed forms in float64: two decompositions of matrices whose condition is below 1e6 differ by
less than 1e6·eps = 2e-10 in each of a few dozen operations."""
SOLVED = 1e-4
"""An action solved to a relative gap of 1e-12 is within √(2·1e-12/λ) of the solution, λ ≥ 1e-3 the
least curvature over the value."""
SOLVER: Mapping[str, Any] = {
    "solver": "douglas-rachford",
    "tolerance": 1e-12,
    "max_iterations": 20_000,
}
"""Options of a learner that is solved as far as `SOLVED` needs."""


def largest(values: float | Array) -> float:
    """Return the largest magnitude, NaN if there is one."""
    return float(np.abs(values).max())


def close(name: str, *errors: float | Array, limit: float = EXACT) -> Check:
    """Check that no difference from the oracle is larger than a limit."""
    return at_most(name, map(largest, errors), limit)


def share(sides: theory.Sides) -> float:
    """Return left over right of an inequality."""
    return (sides.left / sides.right).item()


def sides_of(sides: theory.Sides, expected: tuple[float, float]) -> dict[str, float]:
    """Return left over right of an inequality, and the larger relative distance to the oracle's."""
    apart = (abs(mine.item() / other - 1) for mine, other in zip(sides, expected, strict=True))
    return {"share": share(sides), "apart": worst(apart)}


def played(learner: Learner, gradients: Iterable[Tensor], **options: Any) -> Array:
    """Return the actions of a learner that observes the gradients, (T, …, m, n)."""
    actions = list[Tensor]()
    for gradient in gradients:
        actions.append(learner.play())
        learner.observe(gradient, **options)
    return torch.stack(actions).double().numpy()


def compare(
    name: str, learner: Learner, gradients: Tensor, twin: twins.Twin, actions: Array | None = None
) -> Row:
    """Compare all that a learner does on gradients (T, …, m, n) with its twin.

    A fresh learner plays them, unless its `actions` are passed. These are compared over D, entry by
    entry, the regret over D·Σ‖G_t‖_*, the bound over the twin's.
    """
    actions = played(learner, gradients) if actions is None else actions
    history = gradients.double().numpy()
    expected, regret = twin.actions(history), learner.ledger.regret().numpy()
    options: dict[str, Any] = {"discount": twin.discount, "ball": twin.ball}
    apart = regret - learners.regret(history, expected, radius=twin.radius, **options)
    bound = learner.bound().numpy()
    return Row(
        name=name,
        actions=largest(actions - expected) / twin.radius,
        regret=largest(apart / (twin.radius * nuclear(history).sum(0))),
        bound=0.0 if twin.bound is None else largest(bound / twin.bound(history) - 1),
        exact=twin.exact,
    )


def against_oracle(*games: Iterable[Row]) -> Iterator[Item]:
    """Check actions, regrets and bounds of all games, and show their differences."""
    rows = Rows(row for each in games for row in each)
    for kind, exact, limit in (("closed forms", True, EXACT), ("solved", False, SOLVED)):
        if apart := [worst([r.actions, r.regret, r.bound]) for r in rows.where(exact=exact)]:
            yield at_most(f"against the reference, {kind}: actions, regret, bound", apart, limit)
    columns = {"learner": "name", "actions/D": "actions", "regret over D·Σ‖G_t‖_*": "regret"}
    title = "Against the reference, largest differences in a few rounds"
    yield rows.listing(title, columns | {"bound": "bound"})


# ---------------------------------------------------------------------- inputs of both


def leaning(
    shape: tuple[int, ...], *, bound: float = 1.0, seed: int = 0, rounds: int = ROUNDS
) -> Tensor:
    """Return half of a Gaussian stream and half of G·I, (T, …, m, n), which makes the ball bind."""
    stream = streams.gaussian(shape, bound=bound, seed=seed, dtype=F64)
    gradients = torch.stack([stream.gradient(t) for t in range(1, rounds + 1)])
    return (gradients + bound * torch.eye(*shape[-2:], dtype=F64)) / 2


def drawn(
    shape: tuple[int, ...],
    *,
    samples: int,
    seed: int = 0,
    redraw: bool = True,
    antithetic: bool = False,
    width: int | None = None,
) -> Callable[[int], Array]:
    """Return FTPL's Z of every round, t → (samples, b, m, n′), keyed as `noise` says.

    The `width` n′ is the library's where None is given.
    """
    *batch, rows, columns = shape
    m, n = sorted((rows, columns))
    count = samples // 2 if antithetic else samples

    def draws(t: int) -> Array:
        z = noise.normal(
            (count, *batch, m, width or bounds.padded(m, n)),
            seed=seed,
            stream=torch.arange(batch[0]) if batch else 0,
            step=t if redraw else 0,
            sample=torch.arange(count).reshape(-1, *(1 for _ in batch)),
            dtype=F64,
        ).numpy()
        return np.concatenate([z, -z]) if antithetic else z

    return draws


# ---------------------------------------------------------------------- games of both

GBPAS: Mapping[str, Callable[..., Learner]] = {
    "FTL": library.FTL,
    "FTRL": library.FTRL,
    "FTPL": library.FTPL,
    "FAML": library.FAML,
}
PROJECTED: Mapping[str, Callable[..., Learner]] = {
    "One-sided Shampoo": library.OneSidedShampoo,
    "Shampoo": library.Shampoo,
    "Kronecker FTRL": library.KroneckerFTRL,
}
PRECONDITIONERS: tuple[learners.Preconditioner, ...] = get_args(learners.Preconditioner)


def gbpa_games(
    names: Iterable[str],
    shapes: Iterable[tuple[int, int]],
    *,
    radius: float = 1.0,
    gradient_bound: float = 1.0,
    variants: Iterable[Mapping[str, float]] = ({},),
    samples: int = 4,
    seed: int = 0,
    late: bool = False,
) -> Iterator[Row]:
    """Compare GBPA learners in several shapes, in variants of the discount and a factor of η.

    A `late` game begins with a gradient of zero.
    """
    for m, n in shapes:
        shape = (2, m, n)
        gradients = leaning(shape, bound=gradient_bound, seed=seed)
        gradients[0] *= not late
        draws = drawn(shape, samples=samples, seed=seed)
        for name, variant in itertools.product(names, variants):
            game: dict[str, Any] = {"radius": radius, "discount": variant.get("discount", 1.0)}
            options: dict[str, Any] = {"FTRL": SOLVER, "FTPL": {"samples": samples, "seed": seed}}
            options = {**game, "gradient_bound": gradient_bound, **options.get(name, {})}
            factor = variant.get("factor", 1.0)
            if factor != 1.0:
                options["eta"] = factor * bounds.eta(twins.smoothing(name, shape).constants)
            twin = twins.gbpa(name, shape, **game, bound=gradient_bound, factor=factor, noise=draws)
            title = ", ".join((name, label(shape), *(f"{k} {v:g}" for k, v in variant.items())))
            yield compare(title, GBPAS[name](shape, dtype=F64, **options), gradients, twin)


def projected_games(
    shape: tuple[int, int],
    *,
    names: Iterable[str] = PROJECTED,
    radius: float = 1.0,
    factor: float = 1.0,
    epsilon: float = 0.0,
    seed: int = 0,
) -> Iterator[Row]:
    """Compare the learners with a projection, which is unique for ε > 0 or a square shape.

    With an ε in Shampoo's roots, or with a factor on the theorem's η, there is no bound.
    """
    for name in names:
        options: dict[str, Any] = {"epsilon": epsilon} if "Shampoo" in name else {}
        if factor != 1.0:
            options["eta"] = factor * radius * math.sqrt(2 if "Shampoo" in name else 0.5)
        learner = PROJECTED[name]((2, *shape), radius=radius, dtype=F64, **options, **SOLVER)
        twin = twins.preconditioned(name, radius=radius, factor=factor, epsilon=epsilon)
        yield compare(f"{name}, {label(shape)}", learner, leaning((2, *shape), seed=seed), twin)


def scalar_game(shape: tuple[int, int], *, radius: float = 1.0, seed: int = 0) -> Iterator[Row]:
    """Compare scalar GBPA with G = √m, since ‖G‖_F ≤ √m‖G‖_op."""
    bound = math.sqrt(min(shape))
    learner = library.ScalarGBPA((2, *shape), gradient_bound=bound, radius=radius, dtype=F64)
    twin = twins.preconditioned("Scalar GBPA", radius=radius, bound=bound)
    yield compare("Scalar GBPA", learner, leaning((2, *shape), seed=seed), twin)


def vector_games(
    dimension: int,
    *,
    preconditioners: Iterable[learners.Preconditioner] = PRECONDITIONERS,
    balls: Iterable[learners.Ball] = ("l2", "linf"),
    radius: float = 1.0,
    seed: int = 0,
) -> Iterator[Row]:
    """Compare the learners of Appendix B on rows, full OGD with a δ that makes actions unique."""
    shape = (2, 1, dimension)
    gradients = leaning(shape, seed=seed)
    common: dict[str, Any] = {"radius": radius, "dtype": F64}
    gaussian = twins.gaussian(dimension, radius=radius, bound=1.0)
    yield compare("Gaussian FTPL", library.GaussianFTPL(shape, **common), gradients, gaussian)
    updates: Mapping[learners.Update, Callable[..., Learner]]
    updates = {"ogd": library.AdaGradOGD, "ftrl": library.AdaGradFTRL}
    for p, ball, (update, make) in itertools.product(preconditioners, balls, updates.items()):
        delta = 0.0 if update == "ogd" and p != "full" else 1.0
        options: dict[str, Any] = {"preconditioner": p, "delta": delta}
        rules = learners.adagrad, bounds.adagrad
        twin = twins.on_rows(*rules, ball, radius, update=update, **options)
        learner = make(shape, ball=ball, tolerance=SOLVER["tolerance"], **options, **common)
        yield compare(f"{update.upper()}, {p}, {ball}", learner, gradients, twin)
