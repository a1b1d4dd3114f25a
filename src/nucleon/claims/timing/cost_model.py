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
from nucleon.claims import agreement, twins
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread
from nucleon.claims.oracle import costs, learners
from nucleon.claims.oracle.algebra import Array
from nucleon.claims.shown import Figure, Panel, Series, Table, records
from nucleon.linalg.augmented import augmented_coupled
from nucleon.linalg.coefficients import newton_schulz
from nucleon.linalg.polar import polar_polynomial
from nucleon.linalg.roots import coupled_steps
from nucleon.online import theory
from nucleon.online.learners import FAML

ROWS, QUICK_ROWS = (128, 192, 256, 384, 512), (192, 384)
ASPECTS, QUICK_ASPECTS = (1, 2, 4, 8), (1, 4)
STEPS = (4, 12)
SAMPLES = 4  # of FTPL: so many that the Cholesky factor, whose flops are dear, hardly counts
REPEATS, QUICK_REPEATS = 5, 7  # the fewer sizes, the more one of them decides
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
"""What the reference computes too, with steps enough that nothing is left of the start."""
FLOAT32 = 1e-3
"""Forty float32 steps of 8×16 matrices, whose condition is below 1e3."""


@dataclass(frozen=True)
class Problem:
    """A round to be timed: S, G, M and FTPL's noise, in float32."""

    m: int
    n: int
    steps: int
    seed: int

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """S and G, (m, n), M, (m, m), and Z, (k, m, n)."""
        drawn = noise.normal((SAMPLES + 2, self.m, self.n), seed=self.seed, dtype=torch.float32)
        s, g = drawn[:2] / math.sqrt(self.n)
        return s, g, g @ g.mT, drawn[2:]


Round = Callable[[Problem], Callable[[], object]]
"""From a problem, what to time."""


def augmented_round(problem: Problem) -> Callable[[], Tensor]:
    """The recursion as printed: T = (3I − B)/2, X ← TX, B ← TBT."""
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


def coupled_round(problem: Problem) -> Callable[[], Tensor]:
    """The coupled inverse root of SSᵀ + M + GGᵀ, times S."""
    s, g, gram, _ = problem.draw()
    return lambda: augmented_coupled(s, gram + g @ g.mT, problem.steps)


def ftpl_round(problem: Problem) -> Callable[[], Tensor]:
    """The mean of the polar factors of S + LZ; Z is drawn beforehand, as the formula has it."""
    s, g, gram, z = problem.draw()
    sequence = [newton_schulz()] * problem.steps

    def step() -> Tensor:
        factor = torch.linalg.cholesky_ex(gram + g @ g.mT).L
        return polar_polynomial(s + factor @ z, sequence).mean(0)

    return step


def faml_round(problem: Problem) -> Callable[[], None]:
    """A whole round of the learner with the coupled root, in float64, its bookkeeping included."""
    _, g, _, _ = problem.draw()
    shape, gradient = (problem.m, problem.n), g.double() / 4
    learner = FAML(shape, method="coupled", dtype=torch.float64, validate=False)

    def step() -> None:
        learner.play()
        learner.observe(gradient)

    step()  # the first action is 0 and costs nothing
    return step


@dataclass(frozen=True)
class Method:
    """What is timed, its number of steps if fixed, and the parts of its formula."""

    round: Round
    flops: Callable[[int, int, int], float]
    steps: tuple[int, ...] = STEPS

    def square(self, m: int, n: int, steps: int) -> float:
        """The flops that do not depend on n: the formula at n = 0, which is linear in n."""
        return 2 * self.flops(m, n, steps) - self.flops(m, 2 * n, steps)


METHODS: dict[str, Method] = {
    "augmented": Method(augmented_round, lambda m, n, k: theory.augmented_flops(m, n, steps=k)),
    "coupled": Method(coupled_round, lambda m, n, k: theory.coupled_flops(m, n, steps=k)),
    "FTPL": Method(ftpl_round, lambda m, n, k: theory.ftpl_flops(m, n, steps=k, samples=SAMPLES)),
    "FAML's round": Method(
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

    @property
    def net(self) -> float:
        """What the flops took."""
        return max(self.seconds - self.overhead, 0.01 * self.seconds)


@dataclass(frozen=True)
class Fit:
    """seconds ≈ overhead + wide·(flops with n) + square·(flops without), wide and square ≥ 0."""

    timings: tuple[Timing, ...]
    flops: tuple[float, ...]
    model: tuple[float, ...]
    wide: float
    square: float

    @property
    def explained(self) -> float:
        """The share of the variance of log seconds that the model explains."""
        seconds = [math.log(t.seconds) for t in self.timings]
        rest = sum((s - math.log(v)) ** 2 for s, v in zip(seconds, self.model, strict=True))
        return 1 - rest / (statistics.pvariance(seconds) * len(seconds))

    @property
    def factor(self) -> float:
        """The median factor between a time and the model, up or down."""
        pairs = zip(self.timings, self.model, strict=True)
        return math.exp(statistics.median(abs(math.log(t.seconds / v)) for t, v in pairs))

    def exponents(self) -> tuple[list[float], list[float]]:
        """The exponents of m, n/m and K in the net seconds and in the flops, by least squares."""
        t = self.timings
        columns = [[math.log(t.m), math.log(t.n / t.m), math.log(t.steps)] for t in t]
        if len({t.steps for t in t}) == 1:
            columns = [c[:2] for c in columns]
        x = torch.tensor([[1.0, *c] for c in columns], dtype=torch.float64)
        y = torch.tensor([[math.log(t.net) for t in t], [math.log(f) for f in self.flops]])
        slopes = torch.linalg.lstsq(x, y.double().mT).solution[1:]
        return slopes[:, 0].tolist(), slopes[:, 1].tolist()


def measure(settings: Settings, progress: Progress) -> dict[str, tuple[Timing, ...]]:
    """The least of a few CPU times each, as whatever else runs only adds to one.

    The repeats go over all points in turn, so that a slow spell hits few.
    """
    rows = QUICK_ROWS if settings.quick else ROWS
    aspects = QUICK_ASPECTS if settings.quick else ASPECTS
    repeats = QUICK_REPEATS if settings.quick else REPEATS
    points = [
        (name, Problem(m, aspect * m, k, settings.first_seed))
        for name, method in METHODS.items()
        for m, aspect, k in itertools.product((TINY, *rows), aspects, method.steps)
    ]
    rounds = [METHODS[name].round(problem) for name, problem in points]
    seconds: list[list[float]] = [[] for _ in points]
    progress.begin(len(points) * (repeats + 1), "timings")
    for repeat in range(repeats + 1):
        for (name, _), step, found in zip(points, rounds, seconds, strict=True):
            start = time.process_time()
            step()
            if repeat:  # the first pass warms up
                found.append(time.process_time() - start)
            progress.advance(1, name)
    least = {point: min(s) for point, s in zip(points, seconds, strict=True)}
    return {
        name: tuple(
            Timing(p.m, p.n, p.steps, s, least[other, replace(p, m=TINY, n=p.n // p.m * TINY)])
            for (other, p), s in least.items()
            if other == name and p.m != TINY
        )
        for name in METHODS
    }


def fit(method: Method, timings: tuple[Timing, ...]) -> Fit:
    """Nonnegative least squares in relative errors: every row is divided by its time."""
    flops = [method.flops(t.m, t.n, t.steps) for t in timings]
    square = [method.square(t.m, t.n, t.steps) for t in timings]
    features = [[f - s, s] for f, s in zip(flops, square, strict=True)]
    rows = torch.tensor(features, dtype=torch.float64)
    times, start = torch.tensor([[t.seconds, t.overhead] for t in timings]).double().mT
    scale = rows.amax()  # a flop takes picoseconds
    found = nonnegative(rows / scale / times[:, None], 1 - start / times) / scale
    model = (start + rows @ found).tolist()
    return Fit(timings, tuple(flops), tuple(model), *found.tolist())


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """The x ≥ 0 of least ‖ax − b‖, for a few columns: the best feasible one of all supports."""
    columns, best, least = a.shape[1], torch.zeros(a.shape[1], dtype=a.dtype), b.norm()
    for size in range(1, columns + 1):
        for support in itertools.combinations(range(columns), size):
            x = torch.zeros(columns, dtype=a.dtype)
            x[list(support)] = torch.linalg.lstsq(a[:, list(support)], b[:, None]).solution[:, 0]
            if (x >= 0).all() and (a @ x - b).norm() < least:
                best, least = x, (a @ x - b).norm()
    return best


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Time the four rounds over m, n and K, and fit; `quick` takes fewer sizes and repeats."""
    timings = measure(settings, progress)
    fits = {name: fit(METHODS[name], t) for name, t in timings.items()}
    fixed = METHODS["FAML's round"].steps[0]
    agreed = agreement.checks([_coupled_game(settings.first_seed)])
    return Result(
        checks=(*checks(fits), *_counts(settings.first_seed), *agreed),
        tables=(_constants(fits), _exponents(fits)),
        figures=(_figure(fits),),
        records=records(
            fits.items(),
            {
                "method": lambda item: item[0],
                "wide": lambda item: item[1].wide,
                "square": lambda item: item[1].square,
                "points": lambda item: _points(item[1]),
            },
        ),
        notes=(
            "Times are the least CPU time of the process on one thread; they differ from run "
            "to run and from machine to machine, and the seed does not determine them.",
            f"The exponents may be off by what the formulas leave out, if that takes as long as "
            f"the flops at m = {LEADS}: in m by {ROW_EXPONENT:.2g}, since the time is that of a "
            f"term m² too, and in n and K by {EXPONENT:.2g}, since a flop of one term may cost "
            f"twice one of another. An earlier tolerance was 0.5 for all three, which a time that "
            f"ignores n would have met in the coupled root; this one and its wider grid were "
            f"settled before the times on it were measured. It says little on n in FAML's round, "
            f"whose {fixed} steps leave n an exponent near zero.",
            "The formulas count matrix products alone. What they leave out, from reading the "
            "matrices to what is done elementwise, makes a flop dearer in small matrices; what "
            f"starting the operations takes is measured on matrices of {TINY} rows and taken off. "
            "Products with n columns and of m×m matrices have a constant each.",
            "Timed as printed, in float32: the recursion on (X, B), the coupled root, and the "
            f"perturbed leader with k = {SAMPLES} samples, noise drawn beforehand; its formula "
            "includes the products LZ, which the paper omits, and its m³ is the Cholesky factor "
            "alone, whose flops are slow. Our own augmented recursion postpones the products with "
            "X and restarts, which costs less for wide matrices and stays in the ball; see "
            "`linalg.augmented`.",
            f"FAML's round is the learner's, in float64, with the {fixed} steps that float64 "
            f"needs.",
        ),
    )


def _counts(seed: int) -> tuple[Check, ...]:
    """The formulas against products that are counted, and what is timed against the reference."""
    problem = Problem(SMALL[0], SMALL[1], CONVERGED, seed)
    s, g, gram, z = (part.double().numpy() for part in problem.draw())
    rounds = {
        "augmented": lambda k: costs.augmented(s, g, gram, k),
        "coupled": lambda k: costs.coupled(s, g, gram, k),
        "FTPL": lambda k: costs.ftpl(s, g, gram, z, k),
    }
    flops, values = list[float](), list[Array]()
    smoothing = gram + g @ g.T
    exact = {
        "augmented": learners.augmented(s, smoothing),
        "coupled": learners.augmented(s, smoothing),
        "FTPL": learners.perturbed(lambda t: z)(s, smoothing, 0),
    }
    for name, counted in rounds.items():
        flops += [METHODS[name].flops(*SMALL, k) / counted(k)[1] - 1 for k in STEPS]
        timed = METHODS[name].round(problem)()
        assert isinstance(timed, Tensor)
        values.append(timed.double().numpy() - exact[name])
    return (
        agreement.close("flop formulas against counted products", *flops, limit=1e-12),
        agreement.close(
            "what is timed, converged, against the reference's", *values, limit=FLOAT32
        ),
    )


def _coupled_game(seed: int) -> agreement.Agreement:
    """FAML with the coupled root, whose round is timed, beside the reference."""
    learner = FAML((2, *SMALL), method="coupled", dtype=torch.float64)
    twin = twins.gbpa_twin("FAML", (2, *SMALL))
    return agreement.compare(
        "FAML, coupled", learner, agreement.leaning((2, *SMALL), seed=seed), twin
    )


def checks(fits: dict[str, Fit]) -> tuple[Check, ...]:
    """The exponents and the share of the variance explained, for each method."""
    made = list[Check]()
    for name, f in fits.items():
        time_slopes, flop_slopes = f.exponents()
        row, *rest = (abs(a - b) for a, b in zip(time_slopes, flop_slopes, strict=True))
        made += [
            Check(f"{name}: error of the exponent of m", row, "≤", ROW_EXPONENT),
            Check.at_most(f"{name}: of n and K, the larger", rest, EXPONENT),
            Check(f"{name}: variance of log time explained", f.explained, "≥", EXPLAINED),
            Check(f"{name}: median factor off the model", f.factor, "≤", FACTOR),
        ]
    return tuple(made)


def _constants(fits: dict[str, Fit]) -> Table:
    def spread(f: Fit) -> str:
        residuals = [t.seconds / v for t, v in zip(f.timings, f.model, strict=True)]
        return f"{min(residuals):.2f} to {max(residuals):.2f}"

    def rate(f: Fit) -> float:
        return sum(f.flops) / sum(t.seconds for t in f.timings) / 1e9

    return Table.listing(
        "Fitted constants, by nonnegative least squares in relative errors",
        fits.items(),
        {
            "method": lambda item: item[0],
            "ps/flop with n": lambda item: 1e12 * item[1].wide,
            "ps/flop of m³": lambda item: 1e12 * item[1].square,
            "largest share of overhead": lambda item: max(
                t.overhead / t.seconds for t in item[1].timings
            ),
            "variance explained": lambda item: item[1].explained,
            "median factor": lambda item: item[1].factor,
            "time/model": lambda item: spread(item[1]),
            "Gflop/s in all": lambda item: rate(item[1]),
        },
    )


def _exponents(fits: dict[str, Fit]) -> Table:
    def cell(f: Fit, variable: int) -> str:
        pairs = [f"{a:.2f} / {b:.2f}" for a, b in zip(*f.exponents(), strict=True)]
        return pairs[variable] if variable < len(pairs) else ""

    variables = {"m at fixed n/m": 0, "n/m": 1, "K": 2}
    return Table.grid("Exponents in the time / in the flops", "method", fits, variables, cell)


def _figure(fits: dict[str, Fit]) -> Figure:
    def lines(f: Fit) -> Iterator[Series]:
        steps = max(t.steps for t in f.timings)
        widest = max(t.n / t.m for t in f.timings)
        for aspect, style in ((1.0, 0), (widest, 4)):
            chosen = [
                (t.m, t.seconds * 1e3, v * 1e3)
                for t, v in zip(f.timings, f.model, strict=True)
                if (t.steps, t.n / t.m) == (steps, aspect)
            ]
            m, seconds, model = ([float(c[i]) for c in chosen] for i in range(3))
            shape = "n = m" if aspect == 1 else f"n = {aspect:g}m"
            yield Series(f"measured, {shape}", m, seconds, style=style)
            yield Series(f"model, {shape}", m, model, style=style + 1)

    def panel(name: str, f: Fit) -> Panel:
        steps = max(t.steps for t in f.timings)
        title = f"{name}, K = {steps}"
        return Panel(title, "m", "ms a round", tuple(lines(f)), "log", "log", marked=True)

    caption = "Least CPU times on one thread, and the fitted formula."
    panels = tuple(panel(name, f) for name, f in fits.items())
    return Figure("time", "Time of a round against the flop model", caption, panels)


def _points(f: Fit) -> list[dict[str, object]]:
    return [
        {**asdict(t), "flops": flops, "model": v}
        for t, flops, v in zip(f.timings, f.flops, f.model, strict=True)
    ]


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
    run=run,
    seconds=150,
    quick_seconds=15,
    alone=True,
)
