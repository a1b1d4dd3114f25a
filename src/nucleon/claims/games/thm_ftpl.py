"""thm-ftpl: the regret of the perturbed leader, and where its theorem ends (Theorem 4.1)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon.claims import agreement
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread
from nucleon.claims.games import thm_gbpa
from nucleon.claims.oracle import bounds
from nucleon.claims.played import (
    BOUND,
    bound_of,
    curve,
    curves,
    growth,
    lower_side,
    played,
    text,
)
from nucleon.claims.shown import Figure, Panel, Table, log_panel, records
from nucleon.linalg.norms import operator_norm
from nucleon.online import streams, theory
from nucleon.online.game import Trace
from nucleon.online.learners import FTPL
from nucleon.online.o2nc.plans import Interval
from nucleon.online.potentials import Gaussian, Hyperbolic

SHAPES = ((4, 8), (4, 4), (8, 3))  # wide, as the theorem wants; square and tall, by padding
SAMPLES = (1, 4, 16)
GAMES, QUICK_GAMES = 32, 12
ROUNDS, QUICK_ROUNDS = 600, 60
ADAPTIVE_ROUNDS, QUICK_ADAPTIVE_ROUNDS = 1600, 300
ADAPTIVE_GAMES = 2
WIDTHS, QUICK_WIDTHS = (8, 16, 32, 128, 512, 2048), (8, 32, 1024)
NEARER_FROM = 32
WIDTH_SAMPLES, QUICK_WIDTH_SAMPLES = 4096, 1024

LINEAR = 0.85  # what counts as linear growth

STREAMS = {
    name: thm_gbpa.STREAMS[name]
    for name in ("alternating", "gaussian", "ill-conditioned", "drifting")
}


@dataclass(frozen=True)
class Game:
    """Games of FTPL with k samples a round on one kind of stream, each with its own noise."""

    stream: str
    samples: int
    trace: Trace
    printed: Tensor
    """The theorem's printed bound after the last round, (b,)."""

    @property
    def shape(self) -> str:
        """As m×n."""
        return text(self.trace.shape)

    def over(self, bound: Tensor) -> Interval:
        """Regret over a bound in the mean over the noise, ± 3 standard errors."""
        return Interval.of_mean(self.trace.regret[-1] / bound)


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Play FTPL on fixed streams and against the adversary; widen it; `quick`: fewer rounds."""
    games = len(settings.seed_range(GAMES, QUICK_GAMES))
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    long = QUICK_ADAPTIVE_ROUNDS if settings.quick else ADAPTIVE_ROUNDS
    fixed = [(shape, stream, 4) for shape in SHAPES for stream in STREAMS]
    fixed += [(SHAPES[0], "alternating", k) for k in SAMPLES if k != 4]
    progress.begin(len(fixed) * rounds + len(SAMPLES) * long, "rounds")

    def game(shape: tuple[int, int], stream: str, k: int, batch: int, rounds: int) -> Game:
        make = STREAMS.get(stream, streams.adversary)
        options: dict[str, Any] = {"seed": settings.first_seed, "dtype": torch.float64}
        learner = FTPL((batch, *shape), samples=k, **options)
        stage = f"{stream}, {text(shape)}, k = {k}"
        trace = played(learner, make((batch, *shape), **options), rounds, progress, stage)
        m, n = sorted(shape)
        width = learner.potential.padded_width(m, n)
        printed = theory.ftpl_bound(learner.gram, width=width, radius=1.0, gradient_bound=1.0)
        return Game(stream, k, trace, printed)

    oblivious = [game(*point, games, rounds) for point in fixed]
    adaptive = [game(SHAPES[0], "adversary", k, ADAPTIVE_GAMES, long) for k in SAMPLES]
    distances = padded_distances(settings)
    agreed = agreement.gbpa_games(["FTPL"], SHAPES, seed=settings.first_seed)
    return Result(
        checks=(
            *checks(oblivious, adaptive, distances),
            *(_printed(shape, settings.first_seed) for shape in SHAPES),
            *lower_side("FTPL", FTPL, (GAMES, *SHAPES[0]), settings),
            *agreement.checks(agreed),
        ),
        tables=(
            _fixed_table(oblivious),
            _adaptive_table(adaptive),
            _width_table(distances),
            agreement.table(agreed),
        ),
        figures=(_figure(oblivious, adaptive),),
        records=records(
            (*oblivious, *adaptive),
            {
                "stream": lambda g: g.stream,
                "shape": lambda g: g.shape,
                "samples": lambda g: g.samples,
                "printed": lambda g: g.printed.tolist(),
                **curves(lambda g: g.trace),
            },
        ),
        notes=(
            "The theorem needs n ≥ m+2. Square and tall matrices get columns of zeros up to the "
            "width n' = max(n, 2m, m+2), which changes no nuclear norm, and the action is the "
            "leading block; the theorem then holds with n'. Without padding FTPL on a square "
            "matrix has no bound.",
            "The theorem is on the mean over the noise, against gradients that do not depend on "
            "it. The loss is linear in the action, so with any k ≥ 1 samples the mean regret on a "
            "fixed stream is the same; k only narrows its spread.",
            "Against an adversary that answers the drawn action, the loss of a round is "
            "D·G·‖X_t‖_* whatever its sign, and the mean of k polar factors of noise has norms of "
            "order 1/√k: the regret is linear, with a smaller slope for larger k. The theorem "
            "says nothing there, and no certificate is given.",
            "The printed constant 2√2·(n'/(n'−m−1))^¼ is never below that of Theorem 3.2, 2√(αβ), "
            "which tends to 2 as n' grows, and the padded action to FAML's: both slowly, since "
            "η² = α/β is about n'(1 + √(m/n')). Below n' = 32 the errors in η and of the finite "
            "width have opposite signs, and their sum is no guide.",
        ),
    )


def padded_distances(settings: Settings) -> list[tuple[int, float, float]]:
    """(n', 2√(αβ), ‖E∇Ψ_n' − ∇Ψ_FAML‖_op) at one S and M of four rows, η of each n'."""
    samples = QUICK_WIDTH_SAMPLES if settings.quick else WIDTH_SAMPLES
    generator = torch.Generator().manual_seed(settings.first_seed)
    m = SHAPES[0][0]
    s = torch.randn(m, m, dtype=torch.float64, generator=generator)
    gram = torch.eye(m, dtype=torch.float64) + s @ s.mT
    exact = Hyperbolic().gradient(s, gram)
    found: list[tuple[int, float, float]] = []
    for width in QUICK_WIDTHS if settings.quick else WIDTHS:
        draws = max(64, 8 * samples // width)  # the block varies by 1/√n' from draw to draw
        potential = Gaussian(draws, settings.first_seed, width=width)
        alpha, beta = theory.ftpl_constants(m, width)
        mean = potential.gradient(s, gram * beta / alpha)
        distance = operator_norm(mean - exact).item()
        found.append((width, 2 * math.sqrt(alpha * beta), distance))
    return found


def _printed(shape: tuple[int, int], seed: int) -> Check:
    """The printed bound and the constants α, β against the reference's."""
    m, n = sorted(shape)
    width = bounds.padded(m, n)
    given = agreement.leaning((m, n), seed=seed)
    game: dict[str, Any] = {"width": width, "radius": 1.0}
    mine = theory.ftpl_bound((given @ given.mT).sum(0), gradient_bound=1.0, **game).item()
    printed = mine / bounds.ftpl(given.numpy(), bound=1.0, **game) - 1
    stated = Gaussian().admissibility(m, n)
    constants = (0.0, 0.0) if stated is None else (stated.alpha, stated.beta)
    pairs = zip(constants, bounds.gaussian(m, width), strict=True)
    name = f"printed bound, α and β against the reference's, {text(shape)}"
    return agreement.close(name, printed, *(a / b - 1 for a, b in pairs))


def checks(
    oblivious: list[Game], adaptive: list[Game], distances: list[tuple[int, float, float]]
) -> tuple[Check, ...]:
    """Within the bounds on fixed streams, linear against the adversary, FAML in the limit."""
    printed = [g.over(g.printed).high for g in oblivious]
    sharp = [g.over(g.trace.bound[-1]).high for g in oblivious]
    unpadded = FTPL((4, 4), width=4).bound().isfinite()
    exponents = {g.samples: growth(g.trace) for g in adaptive}
    distance = {width: d for width, _, d in distances}
    widest = max(distance)
    ratio = adaptive[0].trace.regret[-1].mean() / adaptive[0].trace.bound[-1].mean()
    return (
        Check.at_most("fixed streams: mean regret/printed bound, upper end", printed, 1.0),
        Check.at_most("fixed streams: mean regret/Theorem 3.2, upper end", sharp, 1.0),
        Check("square without padding: bounds given", float(unpadded), "≤", 0.0),
        *(
            Check(f"adversary, k = {k}: exponent of the regret", found, "≥", LINEAR)
            for k, found in exponents.items()
        ),
        Check("adversary, k = 1: regret/bound", ratio.item(), ">", 1.0),
        Check(
            "certificates given against the adversary",
            float(sum(g.trace.refusal is None for g in adaptive)),
            "≤",
            0.0,
        ),
        Check(
            f"distance to FAML, n' = {widest} over n' = {NEARER_FROM}",
            distance[widest] / distance[NEARER_FROM],
            "≤",
            0.5,
        ),
    )


def _fixed_table(oblivious: list[Game]) -> Table:
    return Table.listing(
        f"Fixed streams, T = {oblivious[0].trace.rounds[-1]}, ± 3 standard errors",
        oblivious,
        {
            "stream": lambda g: g.stream,
            "shape": lambda g: g.shape,
            "k": lambda g: float(g.samples),
            "mean regret": lambda g: str(Interval.of_mean(g.trace.regret[-1])),
            "deviation of a game": lambda g: g.trace.regret[-1].std().item(),
            "Theorem 3.2": lambda g: g.trace.bound[-1].mean().item(),
            "printed bound": lambda g: g.printed.mean().item(),
        },
    )


def _adaptive_table(adaptive: list[Game]) -> Table:
    return Table.listing(
        f"Against the adversary, {adaptive[0].shape}, T = {adaptive[0].trace.rounds[-1]}",
        adaptive,
        {
            "k": lambda g: float(g.samples),
            "regret": lambda g: g.trace.regret[-1].mean().item(),
            "Theorem 3.2, if it applied": lambda g: g.trace.bound[-1].mean().item(),
            "exponent": lambda g: growth(g.trace),
            "no certificate because": lambda g: g.trace.refusal or "",
        },
    )


def _width_table(distances: list[tuple[int, float, float]]) -> Table:
    return Table.listing(
        "What padding 4×4 to 4×n' does",
        distances,
        {
            "n'": lambda found: found[0],
            "2√(αβ)": lambda found: found[1],
            "‖mean action − FAML's‖_op": lambda found: found[2],
        },
    )


def _figure(oblivious: list[Game], adaptive: list[Game]) -> Figure:
    def panel(title: str, games: list[Game], name: str) -> Panel:
        lines = (
            curve(f"k = {g.samples}", g.trace, style, band=True)
            for g, style in zip(games, (0, 3, 4), strict=True)
        )
        dashed = curve("bound", games[0].trace, BOUND, bound_of)
        return log_panel(title, ("T", name), (*lines, dashed))

    first = [g for g in oblivious if (g.stream, g.shape) == ("alternating", "4×8")]
    caption = (
        "Mean over the games, each with its own noise; the band spans them. Left the theorem "
        "applies, right it does not."
    )
    return Figure(
        "regret",
        "FTPL on a fixed stream, and against one that answers the draw",
        caption,
        (
            panel("alternating gradients", sorted(first, key=lambda g: g.samples), "regret"),
            panel("adversary that sees the action", adaptive, "regret"),
        ),
    )


CLAIM = Claim(
    id="thm-ftpl",
    title="The regret of the perturbed leader",
    statement=(
        "Gaussian smoothing gives a perturbed leader whose expected regret is at most "
        "2√2·D·(n/(n−m−1))^¼·(Tr M_T^½ + mG) for n ≥ m+2, the gradients being fixed beforehand."
    ),
    place="Theorem 4.1, Section 4.1; padding is ours",
    tolerance=(
        "On four fixed streams and three shapes, square and tall ones padded, the mean regret is "
        "within the printed bound and within Theorem 3.2's for the upper end of ± 3 standard "
        f"errors; against an adversary that sees the action it grows with an exponent of at least "
        f"{LINEAR:g} for k = 1, 4 and 16, passes the bound for k = 1 and gets no certificate; "
        f"widening the padding from n' = {NEARER_FROM} on at least halves the distance of the mean "
        f"action from FAML's. On the swing the mean regret is at least 0.4 of Theorem 3.2's "
        f"bound, on the worst streams found the share on file. Actions with their noise, "
        f"regrets and bounds of a few rounds are the reference's to {agreement.EXACT:g}."
    ),
    run=run,
    seconds=45,
    quick_seconds=6,
)
