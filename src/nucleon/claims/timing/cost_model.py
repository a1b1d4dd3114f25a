"""cost-model: measured time against the flop formulas (Section 4, Appendix F)."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.beside import against_oracle, close, compare, leaning
from nucleon.claims.engine import Check, Claim, Item, Row, Rows, Run, at_least, at_most
from nucleon.claims.grid import RoundCounter
from nucleon.claims.oracle import costs, learners, twins
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.linalg.augmented import augmented_coupled
from nucleon.linalg.coefficients import newton_schulz
from nucleon.linalg.polar import polar_polynomial
from nucleon.linalg.roots import coupled_steps
from nucleon.online import theory
from nucleon.online.learners import FAML

ROWS = ((128, 192, 256, 384, 512), (160, 256))
ASPECTS = ((1, 2, 4, 8), (1, 4))
STEPS = (4, 12)
SAMPLES = 4  # of FTPL: so many that the Cholesky factor, whose flops are dear, hardly counts
REPEATS = 4
TINY = 8
"""Rows of a matrix whose flops cost nothing: its time is what starting the operations takes."""

# Settled before the times on this grid were measured. The formulas are leading terms. What they
# leave out is nearly proportional to m² and mn, beside the m³ and m²n they count. It may take as
# long as the flops at m = LEADS, and less beyond.
LEADS = 128
# Then the time goes as m³ + LEADS·m²: the exponent of m, the mean of 3 − LEADS/(m + LEADS) over
# the rows, is low by a third. And a flop with n may cost up to twice one without, or the reverse.
# Where a share w of the flops has an exponent of 1 and costs ρ times as much as the rest, the
# exponent is ρw/(ρw + 1 − w) instead of w, which is off by at most (√ρ − 1)/(√ρ + 1), by 0.17 for
# ρ = 2: in n, and likewise in K.
ROW_EXPONENT, EXPONENT = 1 / 3, (math.sqrt(2) - 1) / (math.sqrt(2) + 1)
# With room for a machine that others use: the model explains this share of the variance of log
# time, and half of the points are within this factor of it.
EXPLAINED, FACTOR = 0.9, 1.5
SMALL, CONVERGED = (8, 16), 40
"""Shapes that the oracle computes too, with steps enough that nothing is left of the start."""
FLOAT32 = 1e-3
"""Forty float32 steps of 8×16 matrices, whose condition is below 1e3."""


# ------------------------------------------------------------------ what is timed


def inputs(m: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return S and G, (m, n), M, (m, m), and FTPL's Z, (k, m, n), in float32."""
    drawn = noise.normal((SAMPLES + 2, m, n), seed=seed, dtype=torch.float32)
    s, g = drawn[:2] / math.sqrt(n)
    return s, g, g @ g.mT, drawn[2:]


def augmented_round(m: int, n: int, steps: int, seed: int) -> Callable[[], Tensor]:
    """Return the recursion as printed: T = (3I − B)/2, X ← TX, B ← TBT."""
    s, g, gram, _ = inputs(m, n, seed)
    eye = torch.eye(m)

    def step() -> Tensor:
        smoothing = gram + g @ g.mT
        square = s.square().sum() + smoothing.trace()
        x, b = s / square.sqrt(), (s @ s.mT + smoothing) / square
        for _ in range(steps):
            t = 1.5 * eye - 0.5 * b
            x, b = t @ x, t @ b @ t
        return x

    return step


def coupled_round(m: int, n: int, steps: int, seed: int) -> Callable[[], Tensor]:
    """Return the coupled inverse root of SSᵀ + M + GGᵀ, times S."""
    s, g, gram, _ = inputs(m, n, seed)
    return lambda: augmented_coupled(s, gram + g @ g.mT, steps)


def ftpl_round(m: int, n: int, steps: int, seed: int) -> Callable[[], Tensor]:
    """Return the mean of the polar factors of S + LZ; Z is drawn before, as the formula has it."""
    s, g, gram, z = inputs(m, n, seed)
    sequence = [newton_schulz()] * steps

    def step() -> Tensor:
        factor = torch.linalg.cholesky_ex(gram + g @ g.mT).L
        return polar_polynomial(s + factor @ z, sequence).mean(0)

    return step


def faml_round(m: int, n: int, steps: int, seed: int) -> Callable[[], Tensor]:
    """Return a round of the learner with the coupled root, in float64, without its ledger."""
    g = inputs(m, n, seed)[1]
    # Well within the bound of 1 by its Frobenius norm, or every round takes products to see that.
    gradient = g.double() / (2 * g.norm())
    learner = FAML((m, n), method="coupled", dtype=torch.float64, validate=False)
    learner.ledger = RoundCounter((m, n))

    def step() -> Tensor:
        action = learner.play()
        learner.observe(gradient)
        return action

    step()  # the first action is 0 and costs nothing
    return step


@dataclass(frozen=True)
class TimedMethod:
    """A round to be timed, its number of steps if fixed, and the parts of its formula."""

    round: Callable[[int, int, int, int], Callable[[], Tensor]]
    """Return the function that is timed, of m, n, the steps and a seed."""
    flops: Callable[[int, int, int], float]
    steps: tuple[int, ...] = STEPS

    def square(self, m: int, n: int, steps: int) -> float:
        """Return the flops that do not depend on n: the formula, linear in n, at n = 0."""
        return 2 * self.flops(m, n, steps) - self.flops(m, 2 * n, steps)


METHODS: dict[str, TimedMethod] = {
    "augmented": TimedMethod(
        augmented_round, lambda m, n, k: theory.augmented_flops(m, n, steps=k)
    ),
    "coupled": TimedMethod(coupled_round, lambda m, n, k: theory.coupled_flops(m, n, steps=k)),
    "FTPL": TimedMethod(
        ftpl_round, lambda m, n, k: theory.ftpl_flops(m, n, steps=k, samples=SAMPLES)
    ),
    "FAML's round": TimedMethod(
        faml_round,
        lambda m, n, k: theory.coupled_flops(m, n, steps=k),
        (coupled_steps(torch.float64),),
    ),
}


def timings(run: Run) -> Rows:
    """Return the least of a few CPU times of each point; other processes only add to a time.

    The repeats go over all points in turn, so that a slow spell hits few. Beside the seconds is
    the `overhead`, those of the same operations on tiny matrices.
    """
    sizes = (TINY, *run.pick(ROWS))
    points = [
        (name, m, aspect, steps)
        for name, method in METHODS.items()
        for m, aspect, steps in itertools.product(sizes, run.pick(ASPECTS), method.steps)
    ]
    rounds = {p: METHODS[p[0]].round(p[1], p[1] * p[2], p[3], run.seed) for p in points}
    least = dict.fromkeys(points, math.inf)
    run.progress.begin(len(points) * (REPEATS + 1))
    for repeat in range(REPEATS + 1):
        for point, step in rounds.items():
            start = time.process_time()
            step()
            if repeat:  # the first pass warms up
                least[point] = min(least[point], time.process_time() - start)
            run.progress.advance(1, point[0])
    tiny = {(name, a, k): seconds for (name, m, a, k), seconds in least.items() if m == TINY}
    return Rows(
        Row(method=name, m=m, n=a * m, steps=k, seconds=seconds, overhead=tiny[name, a, k])
        for (name, m, a, k), seconds in least.items()
        if m != TINY
    )


# ------------------------------------------------------------------ the model


def fit(name: str, timings: Rows) -> Row:
    """Fit seconds ≈ overhead + wide·(flops with n) + square·(flops without), wide and square ≥ 0.

    It is in relative errors: every row is divided by its time. `explained` is the share of the
    variance of log seconds that the model explains, `factor` the median factor between a time and
    the model, up or down, and `exponents` those of m, n/m and K in net seconds and in flops.
    """
    points = [(t.m, t.n, t.steps) for t in timings]
    flops, square = (
        torch.tensor([formula(*p) for p in points], dtype=torch.float64)
        for formula in (METHODS[name].flops, METHODS[name].square)
    )
    times, start = (
        torch.tensor(timings.column(c), dtype=torch.float64) for c in ("seconds", "overhead")
    )
    rows = torch.stack([flops - square, square], 1)
    scale = rows.amax()  # a flop takes picoseconds
    constants = nonnegative(rows / scale / times[:, None], 1 - start / times) / scale
    model = start + rows @ constants
    apart, net = (times / model).log(), torch.maximum(times - start, 0.01 * times)
    varied = 3 if len(set(timings.column("steps"))) > 1 else 2
    logs = [[1.0, *map(math.log, (m, n / m, k)[:varied])] for m, n, k in points]
    x, y = torch.tensor(logs, dtype=torch.float64), torch.stack([net, flops], 1).log()
    return Row(
        method=name,
        wide=constants[0].item(),
        square=constants[1].item(),
        exponents=torch.linalg.lstsq(x, y).solution[1:].tolist(),
        explained=1 - (apart.square().sum() / times.log().var() / (len(times) - 1)).item(),
        factor=math.exp(statistics.median(apart.abs().tolist())),
        model=model.tolist(),
        _timings=timings,
    )


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """Return the x ≥ 0 of least ‖ax − b‖ for a few columns: the best feasible of all supports."""
    columns, best, least = a.shape[1], torch.zeros(a.shape[1], dtype=a.dtype), b.norm()
    for size in range(1, columns + 1):
        for support in itertools.combinations(range(columns), size):
            x = torch.zeros(columns, dtype=a.dtype)
            x[list(support)] = torch.linalg.lstsq(a[:, list(support)], b[:, None]).solution[:, 0]
            if (x >= 0).all() and (a @ x - b).norm() < least:
                best, least = x, (a @ x - b).norm()
    return best


# ------------------------------------------------------------------ the claim


def measure(run: Run) -> Iterator[Item]:
    timed = run.keep(timings(run))
    fits = run.keep(Rows(fit(name, timed.where(method=name)) for name in METHODS))
    yield from fit_checks(fits)
    yield from counts(run.seed)
    small = FAML((2, *SMALL), method="coupled", dtype=torch.float64)
    gradients, twin = leaning((2, *SMALL), seed=run.seed), twins.gbpa("FAML", (2, *SMALL))
    yield from against_oracle([compare("FAML, coupled", small, gradients, twin)])
    yield fits.listing(
        "Fitted constants, and the exponents in the time / in the flops",
        {
            "method": "method",
            "ps/flop with n": lambda f: 1e12 * f.wide,
            "ps/flop of m³": lambda f: 1e12 * f.square,
            "of m at fixed n/m, n/m and K": lambda f: ", ".join(
                f"{time:.2f} / {flops:.2f}" for time, flops in f.exponents
            ),
        },
    )
    caption = "The least of several CPU times on one thread, and the fitted formula."
    title = "Time of a round against the flop model"
    yield Figure("time", title, caption, tuple(map(panel, fits)))
    yield f"""
        Times are the least CPU time of the process on one thread; they differ from run to run and
        from machine to machine, and the seed does not determine them. What starting the operations
        takes is measured on matrices of {TINY} rows and taken off.

        Timed as printed, in float32: the recursion on (X, B), the coupled root, and the perturbed
        leader with k = {SAMPLES} samples, noise drawn beforehand; its formula includes the products
        LZ, which the paper omits, and its m³ is the Cholesky factor alone, whose flops are slow.
        The library's own augmented recursion postpones the products with X and restarts, which
        costs less for wide matrices and stays in the ball; see `linalg.augmented`.
    """


def fit_checks(fits: Rows) -> Iterator[Check]:
    for f in fits:
        row, *rest = (abs(a - b) for a, b in f.exponents)
        yield at_most(f"{f.method}: error of the exponent of m", row, ROW_EXPONENT)
        yield at_most(f"{f.method}: of n and K, the larger", rest, EXPONENT)
        yield at_least(f"{f.method}: variance of log time explained", f.explained, EXPLAINED)
        yield at_most(f"{f.method}: median factor off the model", f.factor, FACTOR)


def counts(seed: int) -> Iterator[Check]:
    """Check the formulas against counted products, and what is timed against the oracle."""
    s, g, gram, z = (part.double().numpy() for part in inputs(*SMALL, seed))
    smoothing = gram + g @ g.T
    mean = learners.perturbed(lambda t: z)(s, smoothing, 0)
    exact = learners.augmented(s, smoothing)
    counted = {
        "augmented": (lambda k: costs.augmented(s, g, gram, k), exact),
        "coupled": (lambda k: costs.coupled(s, g, gram, k), exact),
        "FTPL": (lambda k: costs.ftpl(s, g, gram, z, k), mean),
    }
    flops = [
        METHODS[name].flops(*SMALL, k) / count(k)[1] - 1
        for name, (count, _) in counted.items()
        for k in STEPS
    ]
    yield close("flop formulas against counted products", *flops, limit=1e-12)
    values = [
        METHODS[name].round(*SMALL, CONVERGED, seed)().double().numpy() - value
        for name, (_, value) in counted.items()
    ]
    yield close("what is timed, converged, against the reference's", *values, limit=FLOAT32)


def panel(f: Row) -> Panel:
    """Return times and the model over m, for the most steps, square and widest."""
    points = [(t, v) for t, v in zip(f._timings, f.model, strict=True) if t.steps == STEPS[-1]]
    points = points or list(zip(f._timings, f.model, strict=True))
    lines = list[Series]()
    for aspect, style in ((1, 0), (max(t.n // t.m for t, _ in points), 4)):
        chosen = [(t, model) for t, model in points if t.n == aspect * t.m]
        m, words = [float(t.m) for t, _ in chosen], f"n = {aspect}m".replace("= 1m", "= m")
        seconds, model = [t.seconds * 1e3 for t, _ in chosen], [v * 1e3 for _, v in chosen]
        lines.append(Series(f"measured, {words}", m, seconds, style=style))
        lines.append(Series(f"model, {words}", m, model, style=style + 1))
    title = f"{f.method}, K = {points[0][0].steps}"
    return Panel(title, "m", "ms a round", tuple(lines), "log", "log", marked=True)


CLAIM = Claim(
    id="cost-model",
    title="What a round costs, in flops and in seconds",
    statement=(
        "With K Newton–Schulz steps a round of FAML takes 4m²n + K(2m²n + 4m³) flops by the "
        "augmented recursion, 6m²n + 6Km³ by the coupled root, and one of FTPL with k samples "
        "2m²n + m³/3 + 4kKm²n + 2km²n."
    ),
    place="Section 4, Appendix F; the last term of FTPL is missing there",
    tolerance=(
        f"The exponents of the measured time are within {ROW_EXPONENT:.2g} of those of the flops "
        f"in m and within {EXPONENT:.2g} in n and K, the fitted model explains at least "
        f"{100 * EXPLAINED:g} % of the variance of log time, and half of the times are within a "
        f"factor of {FACTOR:g} of it. The formulas are the flops of the reference's products "
        f"exactly, and what is timed computes what the reference does to {FLOAT32:g}."
    ),
    measure=measure,
    seconds=(150, 4),
    alone=True,
)
