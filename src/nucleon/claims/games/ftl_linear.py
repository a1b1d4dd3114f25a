"""ftl-linear: following the leader loses in every round, no other learner does (Section 3)."""

from collections.abc import Iterator
from functools import partial

from nucleon.claims import beside
from nucleon.claims.beside import EXACT, GBPAS, SOLVED
from nucleon.claims.engine import Claim, Item, Rows, Run, at_least, at_most
from nucleon.claims.grid import NINE, Grid, Make, play
from nucleon.claims.shown import BOUND, STYLES, Figure, Panel, log_panel
from nucleon.online import learners

MATRIX, ROW = (4, 8), (1, 8)
FIRST_SEED = 1000
"""Seeds below were looked at while the tolerance was made; it is judged on others."""

# Settled before a seed from FIRST_SEED on was run. FTL's regret is D·G·m·(T − ½), of a slope
# above 1. The theorems of the others promise √T and terms of lower order, which count most where
# the gradients are small beside G. The midpoint of the exponents ½ and 1 separates √T from T.
LINEAR, ROOT = 0.99, 0.75
ROUNDING = 1e-9

VECTORS: dict[str, Make] = {
    "AdaGrad-OGD": learners.AdaGradOGD,
    "AdaGrad-FTRL": learners.AdaGradFTRL,
    "Gaussian FTPL": learners.GaussianFTPL,
}
GRID = Grid(
    learners={
        **GBPAS,
        **beside.PROJECTED,
        "Scalar GBPA": partial(learners.ScalarGBPA, gradient_bound=2.0),  # ‖G_t‖_F ≤ √4
        **VECTORS,
    },
    streams={name: NINE[name] for name in ("alternating", "gaussian")},
    shapes=[MATRIX, ROW],
    rounds=(2000, 160),
    games=(4, 2),
    keep=lambda case: (
        (case.shape == ROW) == (case.learner in VECTORS)
        and (case.stream == "alternating" or case.learner in GBPAS)
    ),
    first_seed=FIRST_SEED,
)


def measure(run: Run) -> Iterator[Item]:
    games, seed = play(run, GRID), FIRST_SEED + run.seed
    hard, easy = games.where(stream="alternating"), games.where(stream="gaussian")
    ftl = hard.one(learner="FTL")
    rounds = ftl.trace.rounds[-1]
    error = (ftl.regret / (ftl.trace.radius * MATRIX[0] * (rounds - 0.5)) - 1).abs()
    yield at_most("FTL: regret against D·G·m·(T−½), relative error", error, ROUNDING)
    yield at_least("FTL: exponent of the regret", ftl.growth, LINEAR)
    for game in hard.where(lambda g: g.learner != "FTL"):
        yield at_most(f"{game.learner}: exponent of the regret", game.growth, ROOT)
    bounded = games.where(lambda g: g.learner != "FTL")
    shares = [(g.trace.regret.mean(1) / g.trace.bound.mean(1)).max() for g in bounded]
    yield at_most("all but FTL: largest mean regret over its bound", shares, 1.0)

    title = f"Mean regrets over the games, T = {rounds}"
    yield games.grid(title, "learner", "stream", lambda g: g.regret)
    yield from beside.against_oracle(
        beside.gbpa_games(GBPAS, [MATRIX], samples=16, seed=seed),
        beside.projected_games((MATRIX[0], MATRIX[0]), seed=seed),
        beside.scalar_game(MATRIX, seed=seed),
        beside.vector_games(ROW[1], preconditioners=("diagonal",), balls=("linf",), seed=seed),
    )

    def panel(title: str, games: Rows) -> Panel:
        faml = games.one(learner="FAML")
        lines = [g.curve(n, s) for n, s in STYLES.items() for g in games.where(learner=n)]
        lines.append(faml.curve("FAML's bound", BOUND, faml.trace.bound))
        return log_panel(title, ("T", "regret"), lines)

    yield Figure(
        "regret",
        "Regret of the learners against T",
        "Mean regret over the games. Shampoo coincides with one-sided Shampoo here, "
        "Kronecker FTRL with FTRL and scalar GBPA with FAML.",
        (panel("alternating gradients", hard), panel("Gaussian gradients", easy)),
        shared_axes=True,
    )
    yield """
        The stream is ½E, then −E, +E, −E, … with E a random isometry of norm G. The total is ±½E,
        so FTL plays ∓D·E, the next gradient is ∓E, and every round but the first costs D·G·m. The
        exponents are least-squares slopes of log regret in log T over the last decade.
    """


CLAIM = Claim(
    id="ftl-linear",
    title="Following the leader has linear regret",
    statement=(
        "The nuclear norm is not smooth, so follow-the-leader can be made to lose in every round, "
        "Ω(T); learners with a smoothed potential or a preconditioned step cannot."
    ),
    place="Section 3, after Lemma 3.1",
    tolerance=(
        f"On gradients that alternate FTL's regret is D·G·m·(T−½) to {ROUNDING:g} and grows with "
        f"an exponent of at least {LINEAR:g}; that of every other learner grows with one of at "
        f"most {ROOT:g}, nearer to ½ than to 1, and stays below its bound. Actions, regrets and "
        f"bounds of {beside.ROUNDS} rounds are the reference's to {EXACT:g}, to "
        f"{SOLVED:g} where a solver is in between."
    ),
    measure=measure,
    seconds=(50, 3),
)
