"""high-probability: what FTPL's samples add to its regret, with probability 1−δ (ours)."""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from nucleon import noise, streams, theory
from nucleon.experiments.base import (
    Check,
    Claim,
    Figure,
    Panel,
    Progress,
    Result,
    Series,
    Settings,
    Table,
    one_thread,
)
from nucleon.experiments.games import BOUND, PRINTED, exponent, played, worst
from nucleon.game import Trace
from nucleon.learners import FTPL
from nucleon.linalg.norms import nuclear_norm
from nucleon.streams import Stream

F64 = torch.float64
DELTA = 0.01
SHAPES = ((1, 1), (2, 4))
SAMPLES = (1, 4)
ROUNDS, QUICK_ROUNDS = 100, 40
GAMES, QUICK_GAMES = 4000, 1500
ADAPTIVE_SHAPE, ADAPTIVE_GAMES = (2, 4), 4
ADAPTIVE_SAMPLES = (1, 4, 16)
ADAPTIVE_ROUNDS, QUICK_ADAPTIVE_ROUNDS = 1000, 400
MEANS, QUICK_MEANS = 20_000, 4000

# Fixed beforehand.
LINEAR = 0.85  # what counts as linear growth
NEAR = 0.1  # of the normal quantile, which a sum of T bounded terms nearly has
ERRORS = 4.0  # standard errors of a frequency


@dataclass(frozen=True)
class Oblivious:
    """Games on one fixed stream, each with its own noise."""

    shape: tuple[int, int]
    samples: int
    padded: bool
    excess: Tensor
    """Regret − its mean over the games, (b,)."""
    term: float
    """The deviation that the theory allows at δ."""

    @property
    def misses(self) -> float:
        """The share of games above the term, over what δ and the number of games allow."""
        games = len(self.excess)
        allowed = DELTA + ERRORS * math.sqrt(DELTA * (1 - DELTA) / games)
        return (self.excess > self.term).double().mean().item() / allowed

    @property
    def share(self) -> float:
        """The (1−δ)-quantile of the excess over the term."""
        return self.excess.quantile(1 - DELTA).item() / self.term


@dataclass(frozen=True)
class Adaptive:
    """Games against the adversary that answers the drawn action."""

    samples: int
    trace: Trace
    fixed: Tensor
    """What would be allowed on a fixed stream after each recorded round, (R,)."""
    linear: Tensor
    """What is allowed against any gradients, (R,)."""

    @property
    def regret(self) -> Tensor:
        """The largest over the games, (R,)."""
        return self.trace.regret.amax(1)

    @property
    def bound(self) -> Tensor:
        """Theorem 3.2's bound for the mean actions, (R,)."""
        return self.trace.bound.amax(1)


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Tails on fixed streams, the adversary, and the norm of a mean of polar factors."""
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    long = QUICK_ADAPTIVE_ROUNDS if settings.quick else ADAPTIVE_ROUNDS
    points = [(shape, k, True) for shape, k in itertools.product(SHAPES, SAMPLES)]
    points += [((1, 1), k, False) for k in SAMPLES]
    progress.begin(len(points) * rounds + len(ADAPTIVE_SAMPLES) * long, "rounds")
    fixed = [oblivious(*point, rounds, settings, progress) for point in points]
    answered = [adaptive(k, long, settings, progress) for k in ADAPTIVE_SAMPLES]
    means = {k: mean_norms(k, settings) for k in ADAPTIVE_SAMPLES}
    return Result(
        checks=checks(fixed, answered, means),
        tables=(_fixed_table(fixed), _adaptive_table(answered)),
        figures=(_figure(fixed, answered),),
        records=(
            *({"shape": o.shape, "k": o.samples, "share": o.share, "term": o.term} for o in fixed),
            *(
                {"k": a.samples, "rounds": list(a.trace.rounds), "regret": a.regret.tolist()}
                for a in answered
            ),
        ),
        notes=(
            "Theorem 3.2 bounds the regret of the mean actions X̄_t on every path; k samples add "
            "Σ⟨G_t, X_t − X̄_t⟩. On a fixed stream with fresh noise these terms are independent and "
            "centered: Hoeffding's inequality gives D√(2 log(1/δ)·Σ‖G_t‖_*²/k).",
            "The 1×1 game without padding plays signs, of the largest variance there is: its "
            "quantile is the normal one over √(2 log 1/δ) of the term, "
            f"{NormalDist().inv_cdf(1 - DELTA) / math.sqrt(-2 * math.log(DELTA)):.3f} at "
            f"δ = {DELTA:g}, which is all that Hoeffding's inequality gives away. (Without padding "
            "there is no bound on the mean, but the deviation needs none.)",
            "An adversary that sees X_t makes every term ‖G_t‖_*‖X_t − X̄_t‖_op: the sum is linear "
            "in T, and so is what has to be allowed, D·Σ‖G_t‖_*·ε with ε from the matrix Bernstein "
            "inequality. That is Pion's case, whose gradients are taken at the drawn weights. A "
            "regret above the term for fixed streams shows that the latter does not hold there.",
        ),
    )


# ------------------------------------------------------------------ the games


def oblivious(
    shape: tuple[int, int],
    samples: int,
    padded: bool,
    rounds: int,
    settings: Settings,
    progress: Progress,
) -> Oblivious:
    """FTPL on the alternating stream, where the mean action stays near 0 and noise counts most."""
    games = len(settings.seed_range(GAMES, QUICK_GAMES))
    width = None if padded else shape[1]
    learner = FTPL(
        (games, *shape), samples=samples, width=width, seed=settings.first_seed, dtype=F64
    )
    stream = streams.alternating((games, *shape), dtype=F64)
    stage = f"fixed, {shape[0]}×{shape[1]}, k = {samples}"
    trace = played(learner, stream, rounds, progress, stage)
    norms = _norms(streams.alternating(shape, dtype=F64), rounds)
    term = theory.ftpl_oblivious_deviation(norms, radius=1.0, samples=samples, delta=DELTA)
    regret = trace.regret[-1]
    return Oblivious(shape, samples, padded, regret - regret.mean(), term.item())


def adaptive(samples: int, rounds: int, settings: Settings, progress: Progress) -> Adaptive:
    """FTPL against the greedy adversary, whose gradients all have the nuclear norm m."""
    shape = (ADAPTIVE_GAMES, *ADAPTIVE_SHAPE)
    learner = FTPL(shape, samples=samples, seed=settings.first_seed, dtype=F64)
    stage = f"adversary, k = {samples}"
    trace = played(learner, streams.adversary(shape, dtype=F64), rounds, progress, stage)
    m, n = ADAPTIVE_SHAPE
    norms = torch.full((rounds,), float(m), dtype=F64)
    fixed, linear = list[Tensor](), list[Tensor]()
    for t in trace.rounds:
        options: dict[str, Any] = {"radius": 1.0, "samples": samples, "delta": DELTA}
        fixed.append(theory.ftpl_oblivious_deviation(norms[:t], **options))
        linear.append(theory.ftpl_adaptive_deviation(norms[:t], rows=m, columns=n, **options))
    return Adaptive(samples, trace, torch.stack(fixed), torch.stack(linear))


def mean_norms(samples: int, settings: Settings) -> Tensor:
    """‖mean of k polar factors of Gaussian 2×4 matrices‖_op, whose expectation is 0, (draws,)."""
    draws = QUICK_MEANS if settings.quick else MEANS
    z = noise.normal(
        (draws, samples, *ADAPTIVE_SHAPE), seed=settings.first_seed, stream=samples, dtype=F64
    )
    u, _, vt = torch.linalg.svd(z, full_matrices=False)
    return torch.linalg.matrix_norm((u @ vt).mean(1), 2)


def bernstein_by_bisection(log: float, samples: int) -> float:
    """The ε ≤ 2 at which kε²/2/(1 + 2ε/3) passes ℓ."""
    low, high = 0.0, 2.0
    for _ in range(80):
        middle = (low + high) / 2
        if samples * middle**2 / 2 / (1 + 2 * middle / 3) < log:
            low = middle
        else:
            high = middle
    return high


def _norms(stream: Stream, rounds: int) -> Tensor:
    return torch.stack([nuclear_norm(stream.gradient(t)) for t in range(1, rounds + 1)])


# ------------------------------------------------------------------ what is checked


def checks(
    fixed: list[Oblivious], answered: list[Adaptive], means: dict[int, Tensor]
) -> tuple[Check, ...]:
    """Coverage on fixed streams, the constant where it is sharp, and the linear term's need."""
    normal = NormalDist().inv_cdf(1 - DELTA) / math.sqrt(-2 * math.log(DELTA))
    signs = [o.share / normal for o in fixed if not o.padded]
    passed = [(a.regret / (a.bound + a.linear)).max().item() for a in answered]
    first = answered[0]
    needed = ((first.regret - first.bound) / first.fixed)[-1].item()
    slope = min(exponent(a.trace.rounds, a.trace.regret.mean(1)) for a in answered)
    m, n = ADAPTIVE_SHAPE
    misses, apart = list[float](), list[float]()
    for k, norms in means.items():
        one = torch.ones(1, dtype=F64)
        level = theory.ftpl_adaptive_deviation(
            one, rows=m, columns=n, radius=1.0, samples=k, delta=DELTA
        ).item()
        misses.append((norms > level).double().mean().item())
        apart.append(abs(level / bernstein_by_bisection(math.log((m + n) / DELTA), k) - 1))
    return (
        Check("fixed: games above the term/allowed", worst([o.misses for o in fixed]), "≤", 1.0),
        Check("fixed: largest quantile/term", worst([o.share for o in fixed]), "≤", 1.0),
        Check("fixed, signs: quantile/normal's, smallest", min(signs), "≥", 1 - NEAR),
        Check("fixed, signs: quantile/normal's, largest", worst(signs), "≤", 1 + NEAR),
        Check("adversary: largest regret/(bound + linear term)", worst(passed), "≤", 1.0),
        Check("adversary, k = 1: (regret − bound)/term for fixed streams", needed, ">", 1.0),
        Check("adversary: smallest exponent of the regret", slope, "≥", LINEAR),
        Check("means of polar factors: share above ε", worst(misses), "≤", DELTA),
        Check("ε: distance to Bernstein's equation", worst(apart), "≤", 1e-9),
    )


def _fixed_table(fixed: list[Oblivious]) -> Table:
    rows = tuple(
        (
            "{}×{}".format(*o.shape) + ("" if o.padded else ", not padded"),
            o.samples,
            o.term,
            o.excess.quantile(1 - DELTA).item(),
            o.share,
            (o.excess > o.term).double().mean().item(),
        )
        for o in fixed
    )
    columns = ("shape", "k", "term", f"{1 - DELTA:.0%} quantile", "quantile/term", "above the term")
    return Table(f"Fixed streams, δ = {DELTA:g}", columns, rows)


def _adaptive_table(answered: list[Adaptive]) -> Table:
    rows = tuple(
        (
            a.samples,
            a.regret[-1].item(),
            a.bound[-1].item(),
            a.fixed[-1].item(),
            a.linear[-1].item(),
            exponent(a.trace.rounds, a.trace.regret.mean(1)),
        )
        for a in answered
    )
    terms = ("term for fixed streams", "term for any")
    columns = ("k", "regret", "bound of the mean", *terms, "exponent")
    title = f"Against the adversary, 2×4, T = {answered[0].trace.rounds[-1]}, δ = {DELTA:g}"
    return Table(title, columns, rows)


def _figure(fixed: list[Oblivious], answered: list[Adaptive]) -> Figure:
    levels = [k / 40 for k in range(41)]
    tails = list[Series]()
    for o, style in zip([o for o in fixed if o.samples == 1], (0, 2, 4), strict=True):
        x = (o.excess / o.term).sort().values
        share = [(x > level).double().mean().item() for level in levels]
        seen = [k for k, value in enumerate(share) if value > 0]
        name = "{}×{}".format(*o.shape) + ("" if o.padded else ", not padded")
        tails.append(Series(name, [levels[k] for k in seen], [share[k] for k in seen], style=style))
    hoeffding = [DELTA ** (level**2) for level in levels]
    tails.append(Series("Hoeffding", levels, hoeffding, style=BOUND))
    one = answered[1]
    late = [i for i, t in enumerate(one.trace.rounds) if t >= 5]
    t = [float(one.trace.rounds[i]) for i in late]

    def line(name: str, values: Tensor, style: int) -> Series:
        return Series(name, t, values[late].tolist(), style=style)

    lines = (
        line("regret", one.regret, 3),
        line("bound + term for fixed streams", one.bound + one.fixed, BOUND),
        line("bound + term for any", one.bound + one.linear, PRINTED),
    )
    first = Panel(
        "fixed streams, k = 1: share of games above x",
        "x, in units of the term",
        "share",
        tuple(tails),
        y_scale="log",
    )
    title = f"adversary, k = {one.samples}"
    second = Panel(title, "T", "regret", lines, x_scale="log", y_scale="log")
    caption = (
        "Left, how often the regret exceeds its mean by more than a share of the term at δ = "
        f"{DELTA:g}; right, only the linear term holds against gradients that know the draw."
    )
    return Figure(
        "deviations", "What k samples add, with high probability", caption, (first, second)
    )


CLAIM = Claim(
    id="high-probability",
    title="FTPL with samples, with high probability",
    statement=(
        "With probability 1−δ the regret of FTPL with k samples exceeds the bound of its mean by "
        "at most D√(2 log(1/δ)·Σ‖G_t‖_*²/k) on a fixed stream with fresh noise, and by at most "
        "D·Σ‖G_t‖_*·ε, ε = O(√(log((m+n)T/δ)/k)), against gradients that know the draws."
    ),
    place="ours; the paper takes the expectation over Z as exact",
    tolerance=(
        f"At δ = {DELTA:g} no more games than δ and 4 standard errors allow exceed the term on "
        f"fixed streams, whose quantile is the normal one to {NEAR:.0%} where the noise is signs; "
        f"against the adversary every regret is within bound and linear term, the one of k = 1 "
        f"above bound and term for fixed streams, and all grow with an exponent of at least "
        f"{LINEAR:g}; ε solves Bernstein's equation."
    ),
    run=run,
    seconds=25,
    quick_seconds=5,
)
