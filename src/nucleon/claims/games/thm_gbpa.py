"""thm-gbpa: one bound for every admissible smoothing, on every stream (Theorem 3.2)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nucleon import noise
from nucleon.claims import agreement
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread
from nucleon.claims.played import bound_of, curve, curves, lower_side, played, ratio
from nucleon.claims.shown import Cell, Figure, Panel, Series, Table, log_panel, named, records
from nucleon.online import streams
from nucleon.online.game import Trace, play
from nucleon.online.learners import FAML, FTPL, FTRL, GBPA, ScalarGBPA
from nucleon.online.o2nc.plans import Interval
from nucleon.online.streams import Stream

SHAPE = (3, 8)
RADIUS, GRADIENT_BOUND = 2.0, 0.5
GAMES, QUICK_GAMES = 8, 4
DRAWS = 16  # games of FTPL, at least: its bound is on a mean
ROUNDS, QUICK_ROUNDS = 500, 40
SIGN_ROUNDS, SIGN_GAMES, SIGN_SIDE = 100, 64, 8

LEARNERS: dict[str, Callable[..., GBPA]] = {"FTRL": FTRL, "FTPL": FTPL, "FAML": FAML}
STREAMS: dict[str, Callable[..., Stream]] = {
    "alternating": streams.alternating,
    "gaussian": streams.gaussian,
    "low-rank": streams.low_rank,
    "ill-conditioned": streams.ill_conditioned,
    "drifting": lambda shape, **options: streams.drifting(shape, period=100, **options),
    "sparse": streams.sparse,
    "heavy-tailed": streams.heavy_tailed,
    "greedy": streams.adversary,
    "orthogonal": lambda shape, **options: streams.adversary(shape, kind="orthogonal", **options),
}
OBLIVIOUS = tuple(STREAMS)[:-2]
SETTINGS = ((1.0, 1.0), (0.97, 1.0), (1.0, 0.5), (1.0, 2.0))
"""Discounts γ, and factors on the theorem's η."""


@dataclass(frozen=True)
class Game:
    """A game of a learner on a stream, with a discount and a factor on η."""

    learner: str
    stream: str
    discount: float
    factor: float
    trace: Trace

    @property
    def plain(self) -> bool:
        """Whether it is the theorem's own setting."""
        return (self.discount, self.factor) == (1.0, 1.0)

    @property
    def ratio(self) -> float:
        """Regret over bound: the largest; for FTPL the mean of the last, the upper end."""
        if self.learner != "FTPL":
            return ratio(self.trace)
        return Interval.of_mean(self.trace.regret[-1] / self.trace.bound[-1]).high


def grid() -> Iterator[tuple[str, str, float, float]]:
    """Learners, streams, discounts and factors of η; FTPL on streams that are fixed beforehand."""
    for discount, factor in SETTINGS:
        for stream in STREAMS if (discount, factor) == (1.0, 1.0) else ("alternating", "low-rank"):
            for learner in LEARNERS:
                if learner != "FTPL" or stream in OBLIVIOUS:
                    yield learner, stream, discount, factor


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Play the grid; `quick` takes fewer rounds and games."""
    games = len(settings.seed_range(GAMES, QUICK_GAMES))
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    points = list(grid())
    progress.begin(len(points) * rounds, "rounds")

    def game(name: str, stream: str, discount: float, factor: float) -> Game:
        make = LEARNERS[name]
        shape = (max(games, DRAWS) if name == "FTPL" else games, *SHAPE)
        options: dict[str, Any] = {
            "radius": RADIUS,
            "gradient_bound": GRADIENT_BOUND,
            "discount": discount,
            "dtype": torch.float64,
            "eta": factor * make(SHAPE).eta,
        }
        source = {"bound": GRADIENT_BOUND, "seed": settings.first_seed, "dtype": torch.float64}
        trace = played(
            make(shape, **options), STREAMS[stream](shape, **source), rounds, progress, name
        )
        return Game(name, stream, discount, factor, trace)

    found = [game(*point) for point in points]
    signs = random_signs(settings.first_seed)
    agreed = agreement.gbpa_games(
        tuple(LEARNERS),
        [SHAPE],
        radius=RADIUS,
        bound=GRADIENT_BOUND,
        settings=SETTINGS,
        seed=settings.first_seed,
    )
    return Result(
        checks=(*checks(found, signs), *_lower_sides(settings), *agreement.checks(agreed)),
        tables=(_ratios(found), _others(found), agreement.table(agreed)),
        figures=(_figure(found),),
        records=records(
            found,
            {
                "learner": lambda g: g.learner,
                "stream": lambda g: g.stream,
                "discount": lambda g: g.discount,
                "eta_factor": lambda g: g.factor,
                "ratio": lambda g: g.ratio,
                **curves(lambda g: g.trace),
            },
        ),
        notes=(
            "The bound is the sharper form with Tr √(G²I + M_T), not the one with mG. With another "
            "η it is D((βη + α/η)·Tr √(G²I + M_T) + (1 − βη)·‖G_1‖_*), discounted the same with "
            "G/γ and discounted sums, as the proofs of Section 5 use it.",
            "FTRL's bound includes the duality gaps of its solver. FTPL's is on the mean over its "
            "noise, against gradients fixed beforehand: it plays no stream that answers it.",
            f"The paper's aside that a scalar parameter gives D·√Σ‖G_t‖_F² lacks a factor √m: on "
            f"random signs times the identity of side {SIGN_SIDE} the regret of the scalar "
            f"learner is {signs} times that in the mean, and no learner can do better, because "
            f"its expected loss is 0.",
        ),
    )


def _lower_sides(settings: Settings) -> Iterator[Check]:
    for name, make in LEARNERS.items():
        shape = (DRAWS, *SHAPE) if name == "FTPL" else SHAPE
        yield from lower_side(name, make, shape, settings, GRADIENT_BOUND)


def random_signs(seed: int) -> Interval:
    """The regret of the scalar learner over D√Σ‖G_t‖_F² on random signs times I: about 0.8·√m."""
    uniform = noise.uniform(
        (SIGN_ROUNDS, SIGN_GAMES, 1, 1), seed=seed, stream=0, dtype=torch.float64
    )
    eye = torch.eye(SIGN_SIDE, dtype=torch.float64)
    stream = streams.replay((uniform - 0.5).sign() * eye)
    learner = ScalarGBPA(
        (SIGN_GAMES, SIGN_SIDE, SIGN_SIDE),
        gradient_bound=math.sqrt(SIGN_SIDE),
        dtype=torch.float64,
        validate=False,
    )
    trace = play(learner, stream, SIGN_ROUNDS, record=SIGN_ROUNDS)
    return Interval.of_mean(trace.regret[-1] / math.sqrt(SIGN_SIDE * SIGN_ROUNDS))


def checks(found: list[Game], signs: Interval) -> tuple[Check, ...]:
    """No regret above its bound, and the scalar baseline above the printed one."""
    plain = (
        Check.at_most(
            f"{name}: largest regret/bound" + (", mean, upper end" if name == "FTPL" else ""),
            (g.ratio for g in found if g.learner == name and g.plain),
            1.0,
        )
        for name in LEARNERS
    )
    others = [g.ratio for g in found if not g.plain]
    norms = [g.trace.norm.max().item() / RADIUS - 1 for g in found]
    return (
        *plain,
        Check.at_most("other η and γ: largest regret/bound", others, 1.0),
        Check.at_most("largest ‖X_t‖_op/D − 1", norms, 1e-9),
        Check("random signs: scalar regret/(D√Σ‖G‖_F²), lower end", signs.low, ">", 1.0),
    )


def _ratios(found: list[Game]) -> Table:
    def cell(stream: str, learner: str) -> Cell:
        match = [g for g in found if (g.learner, g.stream) == (learner, stream) and g.plain]
        return match[0].ratio if match else ""

    title = "Regret over bound, γ = 1, η of the theorem"
    return Table.grid(title, "stream", named(STREAMS), named(LEARNERS), cell)


def _others(found: list[Game]) -> Table:
    return Table.listing(
        "Other discounts and η",
        [g for g in found if not g.plain],
        {
            "learner": lambda g: g.learner,
            "stream": lambda g: g.stream,
            "γ": lambda g: g.discount,
            "η over the theorem's": lambda g: g.factor,
            "regret/bound": lambda g: g.ratio,
        },
    )


def _figure(found: list[Game]) -> Figure:
    def pair(game: Game, style: int) -> tuple[Series, Series]:
        regret = curve(f"regret, {game.stream}", game.trace, style)
        return regret, curve(f"bound, {game.stream}", game.trace, style + 1, bound_of)

    def panel(title: str, name: str, discount: float) -> Panel:
        setting = (name, discount, 1.0)
        chosen = {g.stream: g for g in found if (g.learner, g.discount, g.factor) == setting}
        lines = (*pair(chosen["alternating"], 0), *pair(chosen["low-rank"], 4))
        return log_panel(title, ("T", "regret"), lines)

    caption = (
        "Means over the games. On gradients of rank one the bound falls with Tr √M, as a bound in "
        "m√T could not; discounted, regret and bound level off."
    )
    plain = (panel(name, name, 1.0) for name in LEARNERS)
    panels = (*plain, panel("FAML, γ = 0.97", "FAML", 0.97))
    title = "Regret and its bound for three admissible smoothings"
    return Figure("bounds", title, caption, panels, shared_axes=True)


CLAIM = Claim(
    id="thm-gbpa",
    title="The regret bound of every admissible smoothing",
    statement=(
        "With an (α, β)-admissible smoothing and η = √(α/β) the regret is at most "
        "2√(αβ)·D·Tr √(G²I + M_T) + (1 − √(αβ))·D·‖G_1‖_*."
    ),
    place="Theorem 3.2, discounted as in Section 5.2",
    tolerance=(
        "FTRL and FAML stay within the bound after every recorded round of every game, on nine "
        "streams, two of them adaptive; FTPL in the mean over its noise, for the upper end of ± 3 "
        "standard errors, on the seven that are fixed beforehand; all of them also with γ = 0.97 "
        "and with η halved and doubled, in their own form of the bound. On the swing they lose at "
        "least 0.9, 0.4 and 0.8 of it, and on the worst streams found the share on file. "
        "Actions, regrets and bounds of a few rounds are the reference's to "
        f"{agreement.EXACT:g}, FTRL's to {agreement.SOLVED:g}."
    ),
    run=run,
    seconds=60,
    quick_seconds=9,
)
