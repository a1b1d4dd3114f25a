"""cost-model: measured time against the flop formulas (Section 4, Appendix F)."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.beside import against_oracle, close, compare, leaning
from nucleon.claims.engine import Check, Claim, Item, Row, Rows, Run, at_least, at_most, notes
from nucleon.claims.oracle import costs, learners, twins
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.linalg.augmented import augmented_coupled
from nucleon.linalg.coefficients import newton_schulz
from nucleon.linalg.polar import polar_polynomial
from nucleon.linalg.roots import coupled_steps
from nucleon.online import theory
from nucleon.online.learners import FAML
from nucleon.online.regret import Ledger

ROWS = ((128, 192, 256, 384, 512), (160, 256))
ASPECTS = ((1, 2, 4, 8), (1, 4))
STEPS = (4, 12)
SAMPLES = 4  # of FTPL: so many that the Cholesky factor, whose flops are dear, hardly counts
REPEATS = 4
TINY = 8
"""Rows of a matrix whose flops cost nothing: its time is what starting the operations takes."""

# Settled before the times on this grid were measured. The formulas are leading terms. Let what they
# leave out, as good as proportional to m² and mn beside the m³ and m²n they count, take as long as
# the flops at m = LEADS, and less beyond.
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


@dataclass(frozen=True)
class RoundInputs:
    """A round to be timed: S, G, M and FTPL's noise, in float32."""

    m: int
    n: int
    steps: int
    seed: int

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return S and G, (m, n), M, (m, m), and Z, (k, m, n)."""
        drawn = noise.normal((SAMPLES + 2, self.m, self.n), seed=self.seed, dtype=torch.float32)
        s, g = drawn[:2] / math.sqrt(self.n)
        return s, g, g @ g.mT, drawn[2:]


def augmented_round(problem: RoundInputs) -> Callable[[], Tensor]:
    """Return the recursion as printed: T = (3I − B)/2, X ← TX, B ← TBT."""
    s, g, gram, _ = problem.draw()
    eye = torch.eye(problem.m)

    def step() -> Tensor:
        smoothing = gram + g @ g.mT
        square = s.square().sum() + smoothing.trace()
        x, b = s / square.sqrt(), (s @ s.mT + smoothing) / square
        for _ in range(problem.steps):
            t = 1.5 * eye - 0.5 * b
            x, b = t @ x, t @ b @ t
        return x

    return step


def coupled_round(problem: RoundInputs) -> Callable[[], Tensor]:
    """Return the coupled inverse root of SSᵀ + M + GGᵀ, times S."""
    s, g, gram, _ = problem.draw()
    return lambda: augmented_coupled(s, gram + g @ g.mT, problem.steps)


def ftpl_round(problem: RoundInputs) -> Callable[[], Tensor]:
    """Return the mean of the polar factors of S + LZ; Z is drawn before, as the formula has it."""
    s, g, gram, z = problem.draw()
    sequence = [newton_schulz()] * problem.steps

    def step() -> Tensor:
        factor = torch.linalg.cholesky_ex(gram + g @ g.mT).L
        return polar_polynomial(s + factor @ z, sequence).mean(0)

    return step


class Uncounted(Ledger):
    """A ledger that counts rounds alone: measuring the regret takes an SVD of its own."""

    def record(self, gradient: Tensor, action: Tensor, *, oblivious: bool = False) -> None:
        """Count the round, and note that there was a gradient, before which every action is 0."""
        self.rounds, self.largest = self.rounds + 1, torch.ones_like(self.largest)


def faml_round(problem: RoundInputs) -> Callable[[], Tensor]:
    """Return a round of the learner with the coupled root, in float64, without its ledger."""
    _, g, _, _ = problem.draw()
    # Well within the bound of 1 by its Frobenius norm, or every round takes SVDs to see that.
    shape, gradient = (problem.m, problem.n), g.double() / (2 * g.norm())
    learner = FAML(shape, method="coupled", dtype=torch.float64, validate=False)
    learner.ledger = Uncounted(shape)

    def step() -> Tensor:
        action = learner.play()
        learner.observe(gradient)
        return action

    step()  # the first action is 0 and costs nothing
    return step


@dataclass(frozen=True)
class TimedMethod:
    """A round to be timed, its number of steps if fixed, and the parts of its formula."""

    round: Callable[[RoundInputs], Callable[[], object]]
    """Return the function that is timed."""
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


@dataclass(frozen=True)
class Timing:
    """The least CPU time of a round, and that of the same operations on tiny matrices."""

    m: int
    n: int
    steps: int
    seconds: float
    overhead: float


def timings(run: Run) -> dict[str, list[Timing]]:
    """Return the least of a few CPU times each, as whatever else runs only adds to one.

    The repeats go over all points in turn, so that a slow spell hits few.
    """
    rows = (TINY, *run.pick(ROWS))
    points = [
        (name, RoundInputs(m, aspect * m, k, run.seed))
        for name, method in METHODS.items()
        for m, aspect, k in itertools.product(rows, run.pick(ASPECTS), method.steps)
    ]
    rounds = {point: METHODS[point[0]].round(point[1]) for point in points}
    least = dict.fromkeys(points, math.inf)
    run.progress.begin(len(points) * (REPEATS + 1))
    for repeat in range(REPEATS + 1):
        for point, step in rounds.items():
            start = time.process_time()
            step()
            if repeat:  # the first pass warms up
                least[point] = min(least[point], time.process_time() - start)
            run.progress.advance(1, point[0])
    measured: dict[str, list[Timing]] = {name: [] for name in METHODS}
    for (name, p), seconds in least.items():
        if p.m != TINY:
            overhead = least[name, replace(p, m=TINY, n=p.n // p.m * TINY)]
            measured[name].append(Timing(p.m, p.n, p.steps, seconds, overhead))
    return measured


# ------------------------------------------------------------------ the model


class Fit(Row):
    """seconds ≈ overhead + wide·(flops with n) + square·(flops without), wide and square ≥ 0."""

    method: str
    timings: list[Timing]
    flops: list[float]
    model: list[float]
    wide: float
    square: float

    @property
    def explained(self) -> float:
        """Return the share of the variance of log seconds that the model explains."""
        seconds = [math.log(t.seconds) for t in self.timings]
        rest = sum((s - math.log(v)) ** 2 for s, v in zip(seconds, self.model, strict=True))
        return 1 - rest / (statistics.pvariance(seconds) * len(seconds))

    @property
    def factor(self) -> float:
        """Return the median factor between a time and the model, up or down."""
        pairs = zip(self.timings, self.model, strict=True)
        return math.exp(statistics.median(abs(math.log(t.seconds / v)) for t, v in pairs))

    def exponents(self) -> list[tuple[float, float]]:
        """Return the exponents of m, n/m and K in net seconds and in flops, by least squares."""
        varied = 3 if len({t.steps for t in self.timings}) > 1 else 2
        logs = [(math.log(t.m), math.log(t.n / t.m), math.log(t.steps)) for t in self.timings]
        net = [max(t.seconds - t.overhead, 0.01 * t.seconds) for t in self.timings]
        x = torch.tensor([[1.0, *values[:varied]] for values in logs], dtype=torch.float64)
        y = torch.tensor([net, self.flops], dtype=torch.float64).log()
        return [(a, b) for a, b in torch.linalg.lstsq(x, y.mT).solution[1:].tolist()]

    def record(self) -> dict[str, object]:
        """Return the constants, and the fields and flops of every point with its model."""
        columns = zip(self.timings, self.flops, self.model, strict=True)
        points = [{**asdict(t), "flops": flops, "model": v} for t, flops, v in columns]
        constants = {"method": self.method, "wide": self.wide, "square": self.square}
        return {**constants, "points": points}


def fit(name: str, timings: list[Timing]) -> Fit:
    """Fit by nonnegative least squares in relative errors: every row is divided by its time."""
    method = METHODS[name]
    flops = [method.flops(t.m, t.n, t.steps) for t in timings]
    square = [method.square(t.m, t.n, t.steps) for t in timings]
    rows = torch.tensor([[f - s, s] for f, s in zip(flops, square, strict=True)]).double()
    times, start = torch.tensor([[t.seconds, t.overhead] for t in timings]).double().mT
    scale = rows.amax()  # a flop takes picoseconds
    constants = nonnegative(rows / scale / times[:, None], 1 - start / times) / scale
    model, (wide, square) = (start + rows @ constants).tolist(), constants.tolist()
    return Fit(method=name, timings=timings, flops=flops, model=model, wide=wide, square=square)


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
    """Time the four rounds over m, n and K, and fit."""
    fits = run.keep(Rows(fit(name, measured) for name, measured in timings(run).items()))
    yield from fit_checks(fits)
    yield from counts(run.seed)
    yield from shown(fits)
    small = FAML((2, *SMALL), method="coupled", dtype=torch.float64)
    gradients, twin = leaning((2, *SMALL), seed=run.seed), twins.gbpa("FAML", (2, *SMALL))
    yield from against_oracle([compare("FAML, coupled", small, gradients, twin)])
    yield from notes(f"""
        Times are the least CPU time of the process on one thread; they differ from run to run and
        from machine to machine, and the seed does not determine them. What starting the operations
        takes is measured on matrices of {TINY} rows and taken off.

        Timed as printed, in float32: the recursion on (X, B), the coupled root, and the perturbed
        leader with k = {SAMPLES} samples, noise drawn beforehand; its formula includes the products
        LZ, which the paper omits, and its m³ is the Cholesky factor alone, whose flops are slow.
        The library's own augmented recursion postpones the products with X and restarts, which
        costs less for wide matrices and stays in the ball; see `linalg.augmented`.
    """)


def fit_checks(fits: Rows) -> Iterator[Check]:
    """Check the exponents and the share of the variance explained."""
    for f in fits:
        row, *rest = (abs(a - b) for a, b in f.exponents())
        yield at_most(f"{f.method}: error of the exponent of m", row, ROW_EXPONENT)
        yield at_most(f"{f.method}: of n and K, the larger", rest, EXPONENT)
        yield at_least(f"{f.method}: variance of log time explained", f.explained, EXPLAINED)
        yield at_most(f"{f.method}: median factor off the model", f.factor, FACTOR)


def counts(seed: int) -> Iterator[Check]:
    """Check the formulas against counted products, and what is timed against the oracle."""
    problem = RoundInputs(*SMALL, CONVERGED, seed)
    s, g, gram, z = (part.double().numpy() for part in problem.draw())
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
    timed = {"augmented": augmented_round, "coupled": coupled_round, "FTPL": ftpl_round}
    values = [timed[n](problem)().double().numpy() - value for n, (_, value) in counted.items()]
    yield close("what is timed, converged, against the reference's", *values, limit=FLOAT32)


def shown(fits: Rows) -> Iterator[Item]:
    """Show the constants and exponents, and times beside the model."""

    def exponent(f: Fit, variable: int) -> str:
        pairs = [f"{time:.2f} / {flops:.2f}" for time, flops in f.exponents()]
        return pairs[variable] if variable < len(pairs) else ""

    names = ("m at fixed n/m", "n/m", "K")
    yield fits.listing(
        "Fitted constants, and the exponents in the time / in the flops",
        {
            "method": "method",
            "ps/flop with n": lambda f: 1e12 * f.wide,
            "ps/flop of m³": lambda f: 1e12 * f.square,
            **{name: lambda f, i=i: exponent(f, i) for i, name in enumerate(names)},
            "Gflop/s in all": lambda f: sum(f.flops) / sum(t.seconds for t in f.timings) / 1e9,
        },
    )

    def panel(f: Fit) -> Panel:
        steps = max(t.steps for t in f.timings)
        points = [p for p in zip(f.timings, f.model, strict=True) if p[0].steps == steps]
        lines = list[Series]()
        for aspect, style in ((1, 0), (max(t.n // t.m for t, _ in points), 4)):
            chosen = [(t, model) for t, model in points if t.n == aspect * t.m]
            m, words = [float(t.m) for t, _ in chosen], f"n = {aspect}m".replace("= 1m", "= m")
            seconds, model = [t.seconds * 1e3 for t, _ in chosen], [v * 1e3 for _, v in chosen]
            lines.append(Series(f"measured, {words}", m, seconds, style=style))
            lines.append(Series(f"model, {words}", m, model, style=style + 1))
        title = f"{f.method}, K = {steps}"
        return Panel(title, "m", "ms a round", tuple(lines), "log", "log", marked=True)

    caption = "The least of several CPU times on one thread, and the fitted formula."
    title = "Time of a round against the flop model"
    yield Figure("time", title, caption, tuple(map(panel, fits)))


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
    seconds=(150, 5),
    alone=True,
)
