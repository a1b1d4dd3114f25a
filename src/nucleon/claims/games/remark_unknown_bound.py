"""remark-unknown-bound: three ways around knowing max‖g_t‖ beforehand (Remark B.1)."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims import agreement, twins
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, least, one_thread
from nucleon.claims.oracle.learners import Ball
from nucleon.claims.oracle.unknown import Offset, Preconditioner
from nucleon.claims.played import BOUND, swing, swung
from nucleon.claims.shown import Figure, Panel, Series, Table
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTPL, FTRL, GBPA, AdaGradFTRL
from nucleon.online.learners.gbpa import OnExcess
from nucleon.online.streams import replay

F64 = torch.float64
OFFSETS: dict[str, Offset] = {"δ = 0": "scale-free", "clipping": "clip", "proximal": "proximal"}
PRECONDITIONERS: tuple[Preconditioner, ...] = ("scalar", "diagonal")
BALLS: tuple[Ball, ...] = ("l2", "linf")
DIMENSION, GAMES, QUICK_GAMES = 4, 64, 16
ROUNDS, QUICK_ROUNDS = 200, 60
LENGTHS, QUICK_LENGTHS = (10, 30, 100, 300), (10, 30)
PUSH = {"δ = 0": math.sqrt(2), "clipping": math.sqrt(2), "proximal": 1.0}
"""The rounds that push each across the ball at the end, over √T."""
SHAPE, DRAWS = (2, 3), 16
MATRICES: dict[str, tuple[type[GBPA], dict[str, Any]]] = {
    "FAML": (FAML, {}),
    "FTRL": (FTRL, dict(agreement.SOLVER)),
    "FTPL": (FTPL, {"samples": 4}),
}
SIZES = (1.0, 3.0, 0.2, 5.0, 0.5, 9.0, 1.0, 2.0)
"""Of the gradients that the reference plays too: above the largest so far three times."""
EXCESS: tuple[OnExcess, ...] = ("clip", "grow")
"""What a matrix learner does with gradients above the bound."""

# Regression lines: what the swing of 30 rounds costs each variant, and that of 200 rounds each
# matrix learner without a stated bound, rounded down.
REACHED = {"δ = 0": 0.4, "clipping": 0.8, "proximal": 0.7}
MATRIX_REACHED = {"FAML": 0.75, "FTRL": 0.85, "FTPL": 0.4}


class Wild(NamedTuple):
    """A variant on streams over many decades."""

    variant: str
    preconditioner: Preconditioner
    ball: Ball
    share: float
    """The largest regret/bound after any round."""


class Swung(NamedTuple):
    """A variant on the swing."""

    variant: str
    preconditioner: Preconditioner
    ball: Ball
    rounds: int
    share: float
    """Regret/bound after the last round."""


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Wild streams and swings for every variant, and a few rounds of all beside the reference."""
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    points = list(itertools.product(OFFSETS, PRECONDITIONERS, BALLS))
    progress.begin(len(points) * (1 + len(lengths)) + len(MATRICES), "games")
    gradients = wild_streams(settings)
    wild, swings, agreed = list[Wild](), list[Swung](), list[agreement.Agreement]()
    for name, preconditioner, ball in points:
        side: dict[str, Any] = {"preconditioner": preconditioner, "ball": ball}
        share = shares(gradients, OFFSETS[name], **side).max().item()
        wild.append(Wild(name, preconditioner, ball, share))
        agreed.append(rows_agree(name, preconditioner, ball, settings.first_seed))
        progress.advance(1, f"{name}, {preconditioner}, {ball}")
        for length in lengths:
            stream = swing(length, PUSH[name])[:, None, None, None] * _along(ball)
            share = shares(stream, OFFSETS[name], **side)[-1].item()
            swings.append(Swung(name, preconditioner, ball, length, share))
            progress.advance(1, f"{name}, {preconditioner}, {ball}, T = {length}")
    for name in MATRICES:
        agreed += matrices_agree(name, settings.first_seed)
        progress.advance(1, name)
    return Result(
        checks=(*checks(wild, swings), *agreement.checks(agreed)),
        tables=(_wild_table(wild, swings), agreement.table(agreed)),
        figures=(_figure(swings),),
        records=tuple(found._asdict() for found in (*wild, *swings)),
        notes=(
            "FTRL weighs g_{t+1} with H_t, which has not seen it, and so adds δ ≥ max‖g_t‖. With a "
            "δ far below, the bound is false: two gradients, 1e-3 and then −1, are enough.",
            "δ = 0 is in the manner of Orabona and Pál (2018) and pays (2+√2)·2D·max|g_t|; "
            "clipping feeds what lies below the largest gradient so far (Cutkosky 2019) and pays "
            "2D·Σ‖e_t‖ for the rest; proximal FTRL (McMahan 2017) pays with the diameter 2D for "
            "the radius D.",
            "The wild streams have log-normal sizes over many decades, jumps after silence, and "
            "signs against the action. The swing alternates and then pushes across the ball, along "
            "an axis or, where the reach is longest there, along a diagonal: each game is then one "
            "on an interval, and all four sides lose the same share.",
            "The matrix learners do the same: without a stated bound the largest norm so far is in "
            "force, and what exceeds it is cut off (“clip”) or fed (“grow”), for 2D·Σ‖E_t‖_* in "
            "the bound.",
        ),
    )


# ------------------------------------------------------------------ the games


def wild_streams(settings: Settings) -> Tensor:
    """Gradients (T, b, 1, d) of sizes over many decades: log-normal, growing, and with jumps."""
    games = QUICK_GAMES if settings.quick else GAMES
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    shape = (rounds, games, 1, DIMENSION)
    seed = settings.first_seed
    normal = noise.normal(shape, seed=seed, stream=0, dtype=F64)
    sizes = noise.normal((rounds, games, 1, 1), seed=seed, stream=1, dtype=F64)
    t = torch.arange(rounds, dtype=F64)[:, None, None, None]
    kinds = [
        torch.exp(3 * sizes),
        1.1**t,
        torch.where(t < rounds // 2, 1e-6, 1.0),
        torch.where(t % 7 == 6, 100.0, 0.1) * (-1.0) ** t,
    ]
    scale = torch.cat(
        [kind.expand(rounds, games, 1, 1)[:, k::4] for k, kind in enumerate(kinds)], 1
    )
    return normal * scale


def shares(gradients: Tensor, offset: Offset, **options: Any) -> Tensor:
    """Regret/bound after the recorded rounds, (R, b)."""
    learner = AdaGradFTRL(tuple(gradients.shape[1:]), offset=offset, dtype=F64, **options)
    trace = play(learner, replay(gradients), len(gradients))
    return trace.regret / trace.bound


def _along(ball: Ball) -> Tensor:
    """The direction in which the game is one on an interval: an axis, or the cube's diagonal."""
    if ball == "l2":
        return torch.eye(1, DIMENSION, dtype=F64)
    return torch.ones(1, DIMENSION, dtype=F64)


def _given(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gradients of the sizes `SIZES`, some of which exceed all before."""
    return agreement.leaning(shape, seed=seed) * torch.tensor(SIZES, dtype=F64)[:, None, None, None]


def rows_agree(
    name: str, preconditioner: Preconditioner, ball: Ball, seed: int
) -> agreement.Agreement:
    """AdaGrad-FTRL beside its twin."""
    shape = (2, 1, DIMENSION)
    learner = AdaGradFTRL(
        shape, offset=OFFSETS[name], preconditioner=preconditioner, ball=ball, dtype=F64
    )
    twin = twins.unknown_twin(OFFSETS[name], preconditioner, ball)
    label = f"{name}, {preconditioner}, {ball}"
    return agreement.compare(label, learner, _given(shape, seed), twin)


def matrices_agree(name: str, seed: int) -> list[agreement.Agreement]:
    """A matrix learner that clips or grows beside its twin, told a bound or none."""
    shape, (make, options) = (2, *SHAPE), MATRICES[name]
    given = _given(shape, seed)
    draws = twins.ftpl_draws(shape, samples=4)
    found = list[agreement.Agreement]()
    for on_excess, bound, discount in itertools.product(EXCESS, (None, 2.0), (1.0, 0.9)):
        learner = make(
            shape,
            gradient_bound=bound,
            on_excess=on_excess,
            discount=discount,
            dtype=F64,
            **options,
        )
        twin = twins.excess_twin(
            name, shape, clip=on_excess == "clip", bound=bound, discount=discount, draws=draws
        )
        told = "none stated" if bound is None else f"stated {bound:g}"
        label = f"{name}, {on_excess}, {told}, γ = {discount:g}"
        found.append(agreement.compare(label, learner, given, twin))
    return found


def too_small_a_delta() -> float:
    """Regret/bound of FTRL with δ = 1e-6 on the gradients 1e-3 and −1."""
    learner = AdaGradFTRL(
        (1, 1), offset="stated", delta=1e-6, preconditioner="scalar", validate=False, dtype=F64
    )
    stream = replay(torch.tensor([1e-3, -1.0], dtype=F64).reshape(2, 1, 1))
    trace = play(learner, stream, 2)
    return (trace.regret[-1] / trace.bound[-1]).item()


# ------------------------------------------------------------------ what is checked


def checks(wild: list[Wild], swings: list[Swung]) -> tuple[Check, ...]:
    """Within every bound, and a stated share reached on every side."""

    def reached(name: str) -> float:
        return least(s.share for s in swings if (s.variant, s.rounds) == (name, 30))

    def matrix_share(name: str, on_excess: str) -> float:
        make, _ = MATRICES[name]
        options: dict[str, Any] = {"gradient_bound": None, "on_excess": on_excess, "dtype": F64}
        return swung(make((DRAWS, *SHAPE) if name == "FTPL" else SHAPE, **options))

    return (
        *(
            Check.at_most(
                f"{name}: largest regret/bound, wild",
                (w.share for w in wild if w.variant == name),
                1.0,
            )
            for name in OFFSETS
        ),
        Check.at_most("swing: largest regret/bound", (s.share for s in swings), 1.0),
        *(Check(f"{n}, swing of 30: smallest share", reached(n), "≥", REACHED[n]) for n in OFFSETS),
        *(
            Check(
                f"{n}, {kind}, swing: regret/bound", matrix_share(n, kind), "≥", MATRIX_REACHED[n]
            )
            for n, kind in itertools.product(MATRICES, EXCESS)
        ),
        Check("FTRL with δ too small: regret/bound", too_small_a_delta(), ">", 1.0),
    )


def _wild_table(wild: list[Wild], swings: list[Swung]) -> Table:
    longest = max(s.rounds for s in swings)
    at_end = {s[:3]: s.share for s in swings if s.rounds == longest}
    return Table.listing(
        f"Regret/bound, d = {DIMENSION}",
        wild,
        {
            "variant": lambda w: w.variant,
            "preconditioner": lambda w: w.preconditioner,
            "ball": lambda w: w.ball,
            "wild streams, largest": lambda w: w.share,
            f"swing of {longest}": lambda w: at_end[w[:3]],
        },
    )


def _figure(swings: list[Swung]) -> Figure:
    lines = list[Series]()
    for name, style in zip(OFFSETS, (0, 2, 4), strict=True):
        points = [s for s in swings if s[:3] == (name, "scalar", "l2")]
        x, y = [float(s.rounds) for s in points], [s.share for s in points]
        lines.append(Series(name, x, y, style=style))
    x = sorted({float(s.rounds) for s in swings})
    lines.append(Series("the bound", x, [1.0] * len(x), style=BOUND))
    panel = Panel("on the swing", "T", "regret/bound", tuple(lines), "log", marked=True)
    caption = "Regret over bound of three ways without knowing the largest gradient."
    return Figure("shares", "Without a bound on the gradients", caption, (panel,))


CLAIM = Claim(
    id="remark-unknown-bound",
    title="AdaGrad-FTRL without a bound on the gradients",
    statement=(
        "Scalar and diagonal AdaGrad-FTRL need no δ ≥ max‖g_t‖ if δ = 0 is analyzed with care, if "
        "gradients are clipped to the largest before, or if the regularizer is proximal."
    ),
    place="Remark B.1, Appendix B; the constants and the matrix learners are ours",
    tolerance=(
        "On streams over many decades each variant stays within its bound, scalar and diagonal, on "
        "both balls; on the swing of 30 rounds it loses at least "
        + ", ".join(f"{share:g} ({name})" for name, share in REACHED.items())
        + " of it, and matrix learners that clip or grow, on that of 200, "
        + ", ".join(f"{share:g} ({name})" for name, share in MATRIX_REACHED.items())
        + "; actions, regrets and bounds of a few rounds are the reference's to "
        f"{agreement.EXACT:g}, AdaGrad's and FTRL's to {agreement.SOLVED:g}; FTRL with δ = 1e-6 "
        "passes its bound."
    ),
    run=run,
    seconds=20,
    quick_seconds=6,
)
