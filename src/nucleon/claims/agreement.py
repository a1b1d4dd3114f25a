"""Holds the library to the reference: the same few rounds by both, and how far apart they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from nucleon.claims import twins
from nucleon.claims.base import Check, worst
from nucleon.claims.oracle import bounds, learners
from nucleon.claims.oracle.algebra import Array, nuclear
from nucleon.claims.played import gradients_of, text
from nucleon.claims.shown import Table
from nucleon.online import streams
from nucleon.online.learners import (
    FAML,
    FTL,
    FTPL,
    FTRL,
    GBPA,
    AdaGradFTRL,
    AdaGradOGD,
    GaussianFTPL,
    KroneckerFTRL,
    Learner,
    OneSidedShampoo,
    ScalarGBPA,
    Shampoo,
)
from nucleon.online.streams import Shape

ROUNDS = 8
"""Rounds that both play: enough for every sum to have an older term."""
EXACT = 1e-8
"""Closed forms in float64: two decompositions of matrices whose condition is below 1e6 differ by
less than 1e6·eps = 2e-10 in each of a few dozen operations."""
SOLVED = 1e-4
"""An action solved to a relative gap of 1e-12 is within √(2·1e-12/λ) of the solution, λ ≥ 1e-3 the
least curvature over the value."""
TIGHT = 1e-12
"""The gap to which a library's solver must be told to go for `SOLVED`."""


@dataclass(frozen=True)
class Agreement:
    """How far a learner's game is from that of its twin."""

    name: str
    actions: float
    """The largest |X_t − X'_t|/D of an entry."""
    regret: float
    """|Reg − Reg'| over D·Σ‖G_t‖_*."""
    bound: float
    """|bound/bound' − 1|."""
    exact: bool = True

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return worst([self.actions, self.regret, self.bound])


def compare(name: str, learner: Learner, gradients: Tensor, twin: twins.Twin) -> Agreement:
    """Play a fresh learner on gradients (T, …, m, n), and compare all it did with its twin."""
    played = list[Tensor]()
    for gradient in gradients:
        played.append(learner.play())
        learner.observe(gradient)
    given, mine = gradients.double().numpy(), torch.stack(played).double().numpy()
    wanted = twin.actions(given)
    options: dict[str, Any] = {"radius": twin.radius, "discount": twin.discount, "ball": twin.ball}
    regret = learners.regret(given, wanted, **options)
    scale = twin.radius * nuclear(given).sum(0)
    bound = 0.0
    if twin.bound is not None:
        bound = largest(learner.bound().numpy() / twin.bound(given) - 1)
    # The vector learners' ledgers measure the comparator in their own ball, as the twin does.
    return Agreement(
        name,
        largest(mine - wanted) / twin.radius,
        largest((learner.ledger.regret().numpy() - regret) / scale),
        bound,
        twin.exact,
    )


def largest(values: float | Array) -> float:
    """The largest magnitude, NaN if there is one."""
    return float(np.abs(values).max())


def close(name: str, *errors: float | Array, limit: float = EXACT) -> Check:
    """That no difference from the reference's is larger than a limit."""
    return Check.at_most(name, map(largest, errors), limit)


def checks(found: Sequence[Agreement]) -> tuple[Check, ...]:
    """That actions, regrets and bounds are the reference's."""
    kinds = (
        ("closed forms", EXACT, [a.worst for a in found if a.exact]),
        ("solved", SOLVED, [a.worst for a in found if not a.exact]),
    )
    return tuple(
        Check.at_most(f"against the reference, {kind}: actions, regret, bound", values, limit)
        for kind, limit, values in kinds
        if values
    )


def table(found: Sequence[Agreement]) -> Table:
    """The differences, by learner."""
    return Table.listing(
        "Against the reference, largest differences in a few rounds",
        found,
        {
            "learner": lambda a: a.name,
            "actions/D": lambda a: a.actions,
            "regret over D·Σ‖G_t‖_*": lambda a: a.regret,
            "bound": lambda a: a.bound,
        },
    )


def leaning(shape: Shape, *, bound: float = 1.0, seed: int = 0, rounds: int = ROUNDS) -> Tensor:
    """Half of a Gaussian stream and half of G·I, (T, …, m, n): so that the ball binds."""
    drawn = streams.gaussian(shape, bound=bound, seed=seed, dtype=torch.float64)
    return (gradients_of(drawn, rounds) + bound * torch.eye(*shape[-2:], dtype=torch.float64)) / 2


# ---------------------------------------------------------------------- games of both

GBPAS: Mapping[str, Callable[..., GBPA]] = {"FTL": FTL, "FTRL": FTRL, "FTPL": FTPL, "FAML": FAML}
PROJECTED: Mapping[str, Callable[..., Learner]] = {
    "One-sided Shampoo": OneSidedShampoo,
    "Shampoo": Shampoo,
    "Kronecker FTRL": KroneckerFTRL,
}
PRECONDITIONERS: tuple[learners.Preconditioner, ...] = get_args(learners.Preconditioner)
SOLVER: Mapping[str, Any] = {
    "solver": "douglas-rachford",
    "tolerance": TIGHT,
    "max_iterations": 20_000,
}


def gbpa_games(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    *,
    radius: float = 1.0,
    bound: float = 1.0,
    settings: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    samples: int = 4,
    seed: int = 0,
) -> list[Agreement]:
    """GBPA learners in several shapes, with the (γ, factor of η) of `settings`."""
    found = list[Agreement]()
    for m, n in shapes:
        shape = (2, m, n)
        given = leaning(shape, bound=bound, seed=seed)
        draws = twins.ftpl_draws(shape, samples=samples, seed=seed)
        for name in names:
            own = {"FTRL": SOLVER, "FTPL": {"samples": samples, "seed": seed}}.get(name, {})
            for discount, factor in settings:
                game = {"radius": radius, "discount": discount}
                # A factor on η is given as a number, which the reference knows by itself.
                twin = twins.gbpa_twin(name, shape, **game, bound=bound, factor=factor, draws=draws)
                eta = None
                if factor != 1.0:
                    eta = factor * bounds.eta(twins.gbpa_constants(name, shape))
                learner = GBPAS[name](
                    shape, **game, gradient_bound=bound, eta=eta, dtype=torch.float64, **own
                )
                label = f"{name}, {text(shape)}" + f", γ = {discount:g}, η × {factor:g}" * (
                    (discount, factor) != (1.0, 1.0)
                )
                found.append(compare(label, learner, given, twin))
    return found


def projected_games(
    side: int, *, names: Sequence[str] = tuple(PROJECTED), radius: float = 1.0, seed: int = 0
) -> list[Agreement]:
    """The learners with a projection, on square matrices, where its solution is unique."""
    shape = (2, side, side)
    given = leaning(shape, seed=seed)
    return [
        compare(
            f"{name}, {text(shape)}",
            PROJECTED[name](shape, radius=radius, dtype=torch.float64, **SOLVER),
            given,
            twins.shampoo_twin(name, radius=radius),
        )
        for name in names
    ]


def scalar_game(shape: tuple[int, int], *, radius: float = 1.0, seed: int = 0) -> Agreement:
    """Scalar GBPA with G = √m, since ‖G‖_F ≤ √m‖G‖_op."""
    bound = float(np.sqrt(min(shape)))
    learner = ScalarGBPA((2, *shape), gradient_bound=bound, radius=radius, dtype=torch.float64)
    twin = twins.shampoo_twin("Scalar GBPA", radius=radius, bound=bound)
    return compare("Scalar GBPA", learner, leaning((2, *shape), seed=seed), twin)


def vector_games(
    dimension: int,
    *,
    preconditioners: Sequence[learners.Preconditioner] = PRECONDITIONERS,
    balls: Sequence[learners.Ball] = ("l2", "linf"),
    radius: float = 1.0,
    seed: int = 0,
) -> list[Agreement]:
    """The learners of Appendix B on rows; the full OGD with δ, without which early ones tie."""
    shape = (2, 1, dimension)
    given = leaning(shape, seed=seed)
    common: dict[str, Any] = {"radius": radius, "dtype": torch.float64}
    found = [
        compare(
            "Gaussian FTPL",
            GaussianFTPL(shape, **common),
            given,
            twins.gaussian_twin(dimension, radius=radius, bound=1.0),
        )
    ]
    for p in preconditioners:
        for ball in balls:
            own: dict[str, Any] = {"preconditioner": p, "ball": ball, "tolerance": TIGHT, **common}
            delta = 1.0 if p == "full" else 0.0
            ogd, ftrl = AdaGradOGD(shape, delta=delta, **own), AdaGradFTRL(shape, delta=1.0, **own)
            twin = twins.adagrad_twin("ogd", p, ball, radius=radius, delta=delta)
            found.append(compare(f"OGD, {p}, {ball}", ogd, given, twin))
            twin = twins.adagrad_twin("ftrl", p, ball, radius=radius, delta=1.0)
            found.append(compare(f"FTRL, {p}, {ball}", ftrl, given, twin))
    return found
