"""high-probability: what FTPL's samples add to its regret, with probability 1−δ (ours)."""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims import agreement
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread
from nucleon.claims.oracle import deviations
from nucleon.claims.played import BOUND, PRINTED, gradients_of, growth, late, played, text
from nucleon.claims.shown import Figure, Panel, Series, Table, log_panel, records
from nucleon.online import streams
from nucleon.online.game import Trace, play
from nucleon.online.learners import FTPL

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

LINEAR = 0.85  # what counts as linear growth
NEAR = 0.1  # of the normal quantile, which a sum of T bounded terms nearly has
ERRORS = 4.0  # standard errors of a frequency

GAME: dict[str, Any] = {"radius": 2.0, "samples": 4}
CERTIFIED: dict[str, dict[str, Any]] = {
    "fixed": {},
    "fixed, in pairs": {"antithetic": True},
    "fixed, discounted": {"discount": 0.9},
    "fixed, 5 games": {"games": 5},
    "fixed, one Z": {"redraw": False},
    "adaptive": {"oblivious": False},
    "adaptive, in pairs": {"oblivious": False, "antithetic": True},
    "adaptive, discounted": {"oblivious": False, "discount": 0.9},
    "adaptive, 5 games": {"oblivious": False, "games": 5},
}
"""Games whose certificates are compared with the reference's."""


@dataclass(frozen=True)
class Oblivious:
    """Games on one fixed stream, each with its own noise."""

    samples: int
    padded: bool
    trace: Trace
    """With the certificate's bound, where there is one."""
    term: float
    """What the certificate of a single game adds to the bound of the mean at δ."""

    @property
    def label(self) -> str:
        """The shape."""
        return text(self.trace.shape) + ("" if self.padded else ", not padded")

    @property
    def excess(self) -> Tensor:
        """Regret − its mean over the games, (b,)."""
        return self.trace.regret[-1] - self.trace.regret[-1].mean()

    @property
    def above(self) -> float:
        """The share of games above the term."""
        return (self.excess > self.term).double().mean().item()

    @property
    def quantile(self) -> float:
        """The (1−δ)-quantile of the excess."""
        return self.excess.quantile(1 - DELTA).item()

    @property
    def share(self) -> float:
        """The quantile over the term; infinite where nothing is added for the noise."""
        return self.quantile / self.term if self.term > 0 else math.inf

    @property
    def misses(self) -> float:
        """`above`, over what δ and the number of games allow."""
        return self.above / (DELTA + ERRORS * math.sqrt(DELTA * (1 - DELTA) / len(self.excess)))


@dataclass(frozen=True)
class Adaptive:
    """Games against the adversary that answers the drawn action."""

    samples: int
    trace: Trace
    """With the certificate's bound."""
    mean: Tensor
    """Theorem 3.2's bound for the mean actions, largest over the games, (R,)."""
    fixed: Tensor
    """The term that would do on a fixed stream, (R,)."""

    @property
    def regret(self) -> Tensor:
        """The largest over the games, (R,)."""
        return self.trace.regret.amax(1)

    @property
    def bound(self) -> Tensor:
        """The certificate's, largest over the games, (R,)."""
        return self.trace.bound.amax(1)

    @property
    def exponent(self) -> float:
        """Of the mean regret."""
        return growth(self.trace)


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
    terms = {name: certified(settings.first_seed, **game) for name, game in CERTIFIED.items()}
    return Result(
        checks=checks(fixed, answered, means, terms),
        tables=(_fixed_table(fixed), _adaptive_table(answered), _term_table(terms)),
        figures=(_figure(fixed, answered),),
        records=_records(fixed, answered),
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
    options: dict[str, Any] = {
        "samples": samples,
        "width": None if padded else shape[1],
        "seed": settings.first_seed,
        "dtype": F64,
    }
    stage = f"fixed, {text(shape)}, k = {samples}"
    many = streams.alternating((games, *shape), dtype=F64)
    trace = played(FTPL((games, *shape), **options), many, rounds, progress, stage, delta=DELTA)
    stream = streams.alternating(shape, dtype=F64)
    if padded:
        one = FTPL(shape, **options)
        certificate = play(one, stream, rounds, delta=DELTA).certificate
        term = (certificate.bound - one.bound()).item()
    else:  # no theorem bounds the mean, and no certificate is given; the deviation needs none
        gradients = gradients_of(stream, rounds).numpy()
        known: dict[str, Any] = {"radius": 1.0, "samples": samples, "delta": DELTA}
        term = float(deviations.oblivious(gradients, **known))
    return Oblivious(samples, padded, trace, term)


def adaptive(samples: int, rounds: int, settings: Settings, progress: Progress) -> Adaptive:
    """FTPL against the greedy adversary, whose gradients all have the nuclear norm m."""
    shape = (ADAPTIVE_GAMES, *ADAPTIVE_SHAPE)
    learner = FTPL(shape, samples=samples, seed=settings.first_seed, dtype=F64)
    mean = list[Tensor]()
    trace = played(
        learner,
        streams.adversary(shape, dtype=F64),
        rounds,
        progress,
        f"adversary, k = {samples}",
        lambda row: mean.append(learner.bound().amax()),
        delta=DELTA,
    )
    # Its gradients are isometries: those of any fixed stream of isometries give the term.
    isometries = torch.eye(*ADAPTIVE_SHAPE, dtype=F64).expand(rounds, *shape).numpy()
    known: dict[str, Any] = {"radius": 1.0, "samples": samples, "delta": DELTA}
    fixed = [float(deviations.oblivious(isometries[:t], **known).max()) for t in trace.rounds]
    return Adaptive(samples, trace, torch.stack(mean), torch.tensor(fixed, dtype=F64))


def certified(
    seed: int,
    *,
    oblivious: bool = True,
    games: int = 1,
    discount: float = 1.0,
    antithetic: bool = False,
    redraw: bool = True,
) -> tuple[float, float]:
    """What certificate(delta=δ) adds to the bound of the mean, beside the reference's term."""
    shape = (games, *ADAPTIVE_SHAPE)
    given = agreement.leaning(shape, seed=seed)
    own: dict[str, Any] = {"antithetic": antithetic, "redraw": redraw, "seed": seed, "dtype": F64}
    learner = FTPL(shape, discount=discount, **GAME, **own)
    for gradient in given:
        learner.play()
        learner.observe(gradient, oblivious=oblivious)
    certificate = learner.certificate(delta=DELTA)
    added = certificate.bound - learner.bound()
    if certificate.refusal is not None:
        added = torch.full_like(added, torch.nan)
    known: dict[str, Any] = {
        "radius": GAME["radius"],
        "samples": GAME["samples"] // (2 if antithetic else 1),
        "delta": DELTA,
        "discount": discount,
    }
    term = (
        deviations.oblivious(given.numpy(), redraw=redraw, **known)
        if oblivious
        else deviations.adaptive(given.numpy(), **known)
    )
    return added.max().item(), agreement.largest(added.numpy() / term - 1)


def mean_norms(samples: int, settings: Settings) -> Tensor:
    """‖mean of k polar factors of Gaussian 2×4 matrices‖_op, whose expectation is 0, (draws,)."""
    draws = QUICK_MEANS if settings.quick else MEANS
    z = noise.normal(
        (draws, samples, *ADAPTIVE_SHAPE), seed=settings.first_seed, stream=samples, dtype=F64
    )
    u, _, vt = torch.linalg.svd(z, full_matrices=False)
    return torch.linalg.matrix_norm((u @ vt).mean(1), 2)


# ------------------------------------------------------------------ what is checked


def checks(
    fixed: list[Oblivious],
    answered: list[Adaptive],
    means: dict[int, Tensor],
    terms: dict[str, tuple[float, float]],
) -> tuple[Check, ...]:
    """Certificates as the reference has them, coverage, and the linear term's need."""
    normal = NormalDist().inv_cdf(1 - DELTA) / math.sqrt(-2 * math.log(DELTA))
    signs = [o.share / normal for o in fixed if not o.padded]
    above = [o.trace.regret[-1] > o.trace.bound[-1] for o in fixed if o.padded]
    first = answered[0]
    needed = ((first.regret - first.mean) / first.fixed)[-1].item()
    # The union over T = 1 round has no other rounds.
    levels = {k: deviations.bernstein(math.log(sum(ADAPTIVE_SHAPE) / DELTA), k) for k in means}
    misses = [(norms > levels[k]).double().mean().item() for k, norms in means.items()]
    return (
        agreement.close(
            "certificate(delta) − bound against the reference's term, largest difference",
            *(apart for _, apart in terms.values()),
        ),
        Check.at_most("fixed: games above the term/allowed", (o.misses for o in fixed), 1.0),
        Check.at_most(
            "fixed: games above their certificate, share",
            (games.double().mean().item() for games in above),
            DELTA,
        ),
        Check.at_most("fixed: largest quantile/term", (o.share for o in fixed), 1.0),
        Check.at_least("fixed, signs: quantile/normal's, smallest", signs, 1 - NEAR),
        Check.at_most("fixed, signs: quantile/normal's, largest", signs, 1 + NEAR),
        Check.at_most(
            "adversary: largest regret/certificate",
            ((a.trace.regret / a.trace.bound).max().item() for a in answered),
            1.0,
        ),
        Check("adversary, k = 1: (regret − bound)/term for fixed streams", needed, ">", 1.0),
        Check.at_least(
            "adversary: smallest exponent of the regret", (a.exponent for a in answered), LINEAR
        ),
        Check.at_most("means of polar factors: share above ε", misses, DELTA),
    )


def _fixed_table(fixed: list[Oblivious]) -> Table:
    return Table.listing(
        f"Fixed streams, δ = {DELTA:g}",
        fixed,
        {
            "shape": lambda o: o.label,
            "k": lambda o: o.samples,
            "term": lambda o: o.term,
            f"{1 - DELTA:.0%} quantile": lambda o: o.quantile,
            "quantile/term": lambda o: o.share,
            "above the term": lambda o: o.above,
        },
    )


def _adaptive_table(answered: list[Adaptive]) -> Table:
    return Table.listing(
        f"Against the adversary, {text(ADAPTIVE_SHAPE)}, T = {answered[0].trace.rounds[-1]}, "
        f"δ = {DELTA:g}",
        answered,
        {
            "k": lambda a: a.samples,
            "regret": lambda a: a.regret[-1].item(),
            "bound of the mean": lambda a: a.mean[-1].item(),
            "term for fixed streams": lambda a: a.fixed[-1].item(),
            "certificate": lambda a: a.bound[-1].item(),
            "exponent": lambda a: a.exponent,
        },
    )


def _term_table(terms: dict[str, tuple[float, float]]) -> Table:
    return Table.listing(
        f"What certificate(delta={DELTA:g}) adds in a few rounds",
        terms.items(),
        {
            "game": lambda item: item[0],
            "added": lambda item: item[1][0],
            "distance to the reference": lambda item: item[1][1],
        },
    )


def _records(fixed: list[Oblivious], answered: list[Adaptive]) -> tuple[dict[str, object], ...]:
    return (
        *records(
            fixed,
            {
                "shape": lambda o: o.label,
                "k": lambda o: o.samples,
                "quantile": lambda o: o.quantile,
                "term": lambda o: o.term,
            },
        ),
        *records(
            answered,
            {
                "k": lambda a: a.samples,
                "rounds": lambda a: list(a.trace.rounds),
                "regret": lambda a: a.regret.tolist(),
            },
        ),
    )


def _figure(fixed: list[Oblivious], answered: list[Adaptive]) -> Figure:
    levels = [k / 40 for k in range(41)]
    tails = list[Series]()
    for o, style in zip([o for o in fixed if o.samples == 1], (0, 2, 4), strict=True):
        x = (o.excess / o.term).sort().values
        share = [(x > level).double().mean().item() for level in levels]
        seen = [k for k, value in enumerate(share) if value > 0]
        tails.append(
            Series(o.label, [levels[k] for k in seen], [share[k] for k in seen], style=style)
        )
    hoeffding = [DELTA ** (level**2) for level in levels]
    tails.append(Series("Hoeffding", levels, hoeffding, style=BOUND))
    one = answered[1]
    places, t = late(one.trace)

    def line(name: str, values: Tensor, style: int) -> Series:
        return Series(name, t, values[places].tolist(), style=style)

    lines = (
        line("regret", one.regret, 3),
        line("bound + term for fixed streams", one.mean + one.fixed, BOUND),
        line("certificate", one.bound, PRINTED),
    )
    first = Panel(
        "fixed streams, k = 1: share of games above x",
        "x, in units of the term",
        "share",
        tuple(tails),
        y_scale="log",
    )
    second = log_panel(f"adversary, k = {one.samples}", ("T", "regret"), lines)
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
        f"What certificate(delta={DELTA:g}) adds is the reference's term to {agreement.EXACT:g}: "
        f"fixed and adaptive, in pairs, discounted, in a batch, with one Z. No more games than δ "
        f"and 4 standard errors allow exceed the term on fixed streams, whose quantile is the "
        f"normal one to {NEAR:.0%} where the noise is signs; against the adversary every regret is "
        f"within the certificate, the one of k = 1 above bound and term for fixed streams, and all "
        f"grow with an exponent of at least {LINEAR:g}."
    ),
    run=run,
    seconds=20,
    quick_seconds=6,
)
