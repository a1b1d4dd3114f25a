"""app-rotations: orthogonal matrices learned online from noisy pairs (Appendix A)."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, final

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Certificate
from nucleon.claims import agreement, twins
from nucleon.claims.base import (
    Check,
    Claim,
    Progress,
    Result,
    Settings,
    least,
    one_thread,
    worst,
)
from nucleon.claims.oracle import bounds
from nucleon.claims.oracle import learners as reference
from nucleon.claims.shown import Figure, Panel, Series, Table, records
from nucleon.linalg.projections import clip
from nucleon.online.learners import FAML, Learner
from nucleon.online.problems.rotations import OnlineRotations, Registration, SignRounding
from nucleon.online.regret import Ledger, Shape

ROUNDS, QUICK_ROUNDS = 1000, 200
HIGH_ROUNDS, QUICK_HIGH_ROUNDS = 1000, 100
SEEDS, QUICK_SEEDS = 2, 1
DISCOUNT, WINDOW = 0.95, 20
DRIFT = 0.02
EXACT = 1e-12  # eight signed sums of 3×3 matrices in float64 are good to 1e-15
TURNS_SHARE = 0.2
"""Of its bound, what FAML loses where two poses alternate, at least."""
MOST_ERRORS = 4.5  # a normal deviate exceeds this once in 150 000

STREAMS: Mapping[str, dict[str, Any]] = {
    "3-D scans, steady": {},
    "3-D scans, drifting": {"drift": DRIFT},
    "3-D scans, half turns": {
        "symmetric": True,
        "markers": True,
        "points": 64,
        "outliers": 0.0,
    },
    "dimension 50, single pairs": {"dimension": 50, "points": 1, "outliers": 0.0},
}


@final
class ProjectedDescent(Learner):
    """Online gradient descent with the Euclidean projection onto the ball ‖X‖_op ≤ D.

    X_{t+1} = Π(X_t − η_tG_t) with η_t = D√(2m)/√Σ‖G_s‖_F², m the shorter side: all actions are
    within 2D√m of each other, so Reg ≤ 2√2·D·√m·√Σ‖G_t‖_F².

    Args:
        shape: (m, n).
        options: radius, dtype, device and validate, as for every learner.
    """

    name: ClassVar[str] = "projected-descent"
    theorem: ClassVar[str] = "online gradient descent with adaptive steps"
    state_names: ClassVar[tuple[str, ...]] = ("center", "squares")
    plays_discounted: ClassVar[bool] = False

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.center = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        self.squares = self.center.new_zeros(self.shape[:-2])
        self.reach = self.radius * math.sqrt(2 * min(self.shape[-2:]))

    def options(self) -> dict[str, Any]:
        """None."""
        return {}

    def bound(self) -> Tensor:
        """2√2·D·√m·√Σ‖G_t‖_F²."""
        return 2 * self.reach * self.squares.sqrt()

    def _act(self) -> Tensor:
        return self.center.to(self.dtype)

    def _absorb(self, gradient: Tensor) -> None:
        gradient = gradient.double()
        squares = self.squares + gradient.square().sum((-2, -1))
        _checks.finite("the sum of the squared gradients", squares)
        step = torch.where(squares > 0, self.reach * squares.rsqrt(), 0.0)
        self.center = clip(self.center - step[..., None, None] * gradient, self.radius)
        self.squares = squares


class Player(Protocol):
    """Shows a matrix each round and then takes the pairs it is judged by."""

    def matrix(self) -> Tensor: ...  # noqa: D102
    def observe(self, u: Tensor, v: Tensor) -> object: ...  # noqa: D102


class Procrustes:
    """The best orthogonal matrix for the pairs so far, solved from scratch by SciPy every round.

    Args:
        dimension: n.
        window: how many of the latest scans count; None is all of them (default None).
    """

    def __init__(self, dimension: int, *, window: int | None = None) -> None:
        try:
            from scipy.linalg import orthogonal_procrustes
        except ImportError as error:
            raise ImportError("app-rotations needs SciPy: pip install scipy") from error
        self.solve: Callable[..., tuple[Any, float]] = orthogonal_procrustes
        self.window = window
        self.u = self.v = torch.zeros(0, dimension, dtype=torch.float64)

    def matrix(self) -> Tensor:
        """The minimizer of Σ‖v − Ru‖²; 0 before the first pair."""
        if not len(self.u):
            return torch.zeros(2 * self.u.shape[1:], dtype=torch.float64)
        transposed, _ = self.solve(self.u.numpy(), self.v.numpy(), check_finite=False)
        return torch.from_numpy(transposed).mT

    def observe(self, u: Tensor, v: Tensor) -> None:
        """Keep the pairs."""
        first = 0 if self.window is None else -(self.window - 1) * len(u)
        self.u, self.v = torch.cat([self.u[first:], u]), torch.cat([self.v[first:], v])


PLAYERS: Mapping[str, Callable[[int], Player]] = {
    "FAML": lambda n: OnlineRotations(n, FAML, dtype=torch.float64),
    f"FAML, γ = {DISCOUNT:g}": lambda n: OnlineRotations(
        n, FAML, discount=DISCOUNT, dtype=torch.float64
    ),
    "OGD": lambda n: OnlineRotations(n, ProjectedDescent, dtype=torch.float64),
    "Procrustes": Procrustes,
    f"Procrustes, last {WINDOW}": lambda n: Procrustes(n, window=WINDOW),
}


_STYLES = (4, 5, 2, 0, 1)  # the colours of the learners and of Procrustes apart


@dataclass
class Game:
    """One player on one stream: losses, the plain regret, its time and, of a learner, its draws."""

    player: Player
    ledger: Ledger
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    drawn: float = 0.0
    """Σ(loss of the matrix drawn − loss of X_t)."""
    variance: float = 0.0
    """Of that sum: Σ of the conditional variances, exactly."""

    def round(self, u: Tensor, v: Tensor) -> None:
        """One round, timed without the bookkeeping of this record."""
        begun = time.perf_counter()
        action = self.player.matrix()
        self.player.observe(u, v)
        self.seconds += time.perf_counter() - begun
        gradient = -(v.mT @ u) / len(u)
        self.ledger.record(gradient, action)
        self.losses.append(1 + (gradient * action).sum().item())

    def draw(self, u: Tensor, v: Tensor, generator: torch.Generator) -> None:
        """Before the round: the loss of a matrix drawn, beside the mean and the variance of it."""
        rounding, seen = SignRounding.of(self.player.matrix()), (v.mT @ u) / len(u)
        weights = (rounding.left.mT @ seen @ rounding.right.mT).diagonal()
        mean = (weights * rounding.sigma).sum()
        self.drawn += (mean - (seen * rounding.draw(generator)).sum()).item()
        self.variance += ((1 - rounding.sigma**2) * weights**2).sum().item()

    @property
    def certificate(self) -> Certificate | None:
        """Return a learner's."""
        player = self.player
        return player.certificate() if isinstance(player, OnlineRotations) else None


Games = dict[str, Game]


def play(stream: Registration, rounds: int, progress: Callable[[], None]) -> Games:
    """All players on the same scans; FAML also draws."""
    n = stream.dimension
    games = {name: Game(make(n), Ledger((n, n))) for name, make in PLAYERS.items()}
    generator = torch.Generator().manual_seed(stream.seed)
    for t in range(1, rounds + 1):
        u, v = stream.pairs(t)
        games["FAML"].draw(u, v, generator)
        for game in games.values():
            game.round(u, v)
        progress()
    return games


def enumerated(rounding: SignRounding, *, special: bool = False) -> Tensor:
    """E[R], summed over all 2^n signs with their probabilities."""
    n = len(rounding.sigma)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=n)), dtype=torch.float64)
    chances = ((1 + signs * rounding.sigma) / 2).prod(-1)
    values = rounding.special_signs(signs) if special else signs
    return torch.einsum("k,kij->ij", chances, rounding.left * values[:, None, :] @ rounding.right)


def mean_errors(stream: Registration, rounds: int) -> tuple[float, float]:
    """The most by which E[R] misses X_t, and by which SO(n)'s misses X_t plus its stated bias."""
    learner, plain, special = OnlineRotations(stream.dimension, dtype=torch.float64), 0.0, 0.0
    for t in range(1, rounds + 1):
        x = learner.matrix()
        rounding = SignRounding.of(x)
        stated = rounding.matrix(rounding.special_signs(rounding.sigma))
        plain = worst((plain, (enumerated(rounding) - x).abs().max().item()))
        found = enumerated(rounding, special=True)
        special = worst((special, (found - stated).abs().max().item()))
        learner.observe(*stream.pairs(t))
    return plain, special


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Play every stream with every player; `quick` takes fewer rounds and one seed."""
    short, high = (QUICK_ROUNDS, QUICK_HIGH_ROUNDS) if settings.quick else (ROUNDS, HIGH_ROUNDS)
    seeds = settings.seed_range(SEEDS, QUICK_SEEDS)
    rounds = {name: high if "dimension" in how else short for name, how in STREAMS.items()}
    progress.begin(len(seeds) * sum(rounds.values()), "rounds")
    found: dict[str, list[Games]] = {}
    for name, how in STREAMS.items():
        streams = (Registration(seed=seed, **how) for seed in seeds)
        found[name] = [
            play(stream, rounds[name], lambda stage=name: progress.advance(1, stage))
            for stream in streams
        ]
    agreed = [_agrees(name, how, settings.first_seed) for name, how in STREAMS.items()]
    agreed.append(_descends(settings.first_seed))
    plain, special = mean_errors(Registration(seed=settings.first_seed), short // 5)
    return Result(
        checks=(
            Check("mean of the drawn matrix − X_t, all signs enumerated", plain, "≤", EXACT),
            Check("the same in SO(3), less its stated bias", special, "≤", EXACT),
            *_draw_checks(found),
            *_regret_checks(found),
            *_comparisons(found),
            _lower_side(found),
            *agreement.checks(agreed),
        ),
        tables=(
            *(_table(name, games) for name, games in found.items()),
            agreement.table(agreed),
        ),
        figures=(_figure(found),),
        records=records(
            [(name, games) for name, runs in found.items() for games in runs],
            {
                "stream": lambda item: item[0],
                "rounds": lambda item: len(item[1]["FAML"].losses),
                "players": lambda item: {
                    name: {"loss": sum(game.losses), "regret": game.ledger.regret().item()}
                    for name, game in item[1].items()
                },
            },
        ),
        notes=(
            "The loss of a learner is that of X_t, which is the expected loss of the orthogonal "
            "matrix it draws; Procrustes is judged by the orthogonal matrix it found. The regret "
            "is against the best orthogonal matrix of the whole stream, for a discounted learner "
            "too; what its theorem bounds is the discounted one, in the last two columns.",
            "Procrustes from scratch is following the leader. On steady scans, whose errors are "
            "independent, that is the thing to do: it has the least loss, in dimension 50 by far, "
            "and in three dimensions its rounds cost about the same, until reading all pairs again "
            "counts. OGD is ahead of FAML there too. What Procrustes lacks is a guarantee: where "
            "scans of a symmetric object alternate between two poses it is wrong every other time, "
            "the other times at a tie, and its regret grows linearly. A window of even length sees "
            "only ties, which serves it well; an odd one would be wrong every time.",
            "Under drift neither FAML nor Procrustes on all scans follows; forgetting helps both, "
            f"and Procrustes on the last {WINDOW} scans does best in the long run. In dimension 50 "
            "so short a memory holds fewer pairs than dimensions, and learns little.",
            "SO(n) is a heuristic: with mended determinants the mean is X_t with its smallest "
            "singular value replaced by d·(the product of the others).",
        ),
    )


def _pairs_of(how: dict[str, Any], seed: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The first scans of a stream, and the gradients −Σvuᵀ/k that they stand for, (T, n, n)."""
    scans = Registration(seed=seed, **how)
    pairs = [scans.pairs(t) for t in range(1, agreement.ROUNDS + 1)]
    outer = [-torch.stack(list(map(torch.outer, v, u))).mean(0) for u, v in pairs]
    return pairs, torch.stack(outer)


def _agrees(name: str, how: dict[str, Any], seed: int) -> agreement.Agreement:
    """FAML fed by pairs, whose gradients the reference makes of them itself."""
    pairs, gradients = _pairs_of(how, seed)
    n = gradients.shape[-1]
    player = OnlineRotations(n, FAML, dtype=torch.float64)
    actions = list[Tensor]()
    for u, v in pairs:
        actions.append(player.matrix())
        player.observe(u, v)
    given, twin = gradients.numpy(), twins.gbpa_twin("FAML", (n, n))
    wanted = twin.actions(given)
    assert twin.bound is not None
    return agreement.Agreement(
        name,
        agreement.largest(torch.stack(actions).numpy() - wanted),
        agreement.largest(player.regret().numpy() - reference.regret(given, wanted, radius=1.0)),
        agreement.largest(player.learner.bound().numpy() / twin.bound(given) - 1),
    )


def _descends(seed: int) -> agreement.Agreement:
    """OGD beside the reference's."""
    _, gradients = _pairs_of({}, seed)
    twin = twins.Twin(reference.projected_descent, bounds.projected_descent)
    n = gradients.shape[-1]
    return agreement.compare("OGD", ProjectedDescent((n, n), dtype=torch.float64), gradients, twin)


def _lower_side(found: dict[str, list[Games]]) -> Check:
    """A stream on which FAML loses a share of its bound."""
    turns = [g["FAML"].certificate for g in found["3-D scans, half turns"]]
    shares = [(c.regret / c.bound).item() for c in turns if c is not None]
    return Check.at_least("half turns: FAML's regret/bound", shares, TURNS_SHARE)


def _draw_checks(found: dict[str, list[Games]]) -> tuple[Check, ...]:
    def errors(games: list[Games]) -> float:
        drawn = sum(g["FAML"].drawn for g in games)
        return abs(drawn) / math.sqrt(sum(g["FAML"].variance for g in games))

    name = "{}: loss of the drawn matrices − loss of X_t, standard errors"
    return tuple(
        Check(name.format(stream), errors(games), "≤", MOST_ERRORS)
        for stream, games in found.items()
    )


def _regret_checks(found: dict[str, list[Games]]) -> tuple[Check, ...]:
    checks: list[Check] = []
    for stream, runs in found.items():
        for player in PLAYERS:
            held = [c for games in runs if (c := games[player].certificate) is not None]
            if held:
                nearest = min(held, key=lambda c: c.slack.item())
                refused = any(c.refusal is not None for c in held)
                regret, bound = nearest.regret.item(), nearest.bound.item()
                name = f"{stream}, {player}: regret"
                checks.append(Check(name, math.nan if refused else regret, "≤", bound))
    return tuple(checks)


def _comparisons(found: dict[str, list[Games]]) -> tuple[Check, ...]:
    turns, drift = found["3-D scans, half turns"], found["3-D scans, drifting"]
    largest = worst(g["FAML"].ledger.regret().item() for g in turns)
    forgetting = f"FAML, γ = {DISCOUNT:g}"
    return (
        Check(
            "half turns: least regret of Procrustes, over the largest of FAML",
            least(g["Procrustes"].ledger.regret().item() for g in turns) / largest,
            "≥",
            2.0,
        ),
        Check(
            "drifting: mean loss of FAML with a discount, over that without",
            _mean_loss(drift, forgetting) / _mean_loss(drift, "FAML"),
            "<",
            1.0,
        ),
    )


def _mean_loss(runs: list[Games], player: str) -> float:
    return sum(sum(g[player].losses) / len(g[player].losses) for g in runs) / len(runs)


def _table(stream: str, runs: list[Games]) -> Table:
    rounds = len(runs[0]["FAML"].losses)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def certified(player: str, value: Callable[[Certificate], Tensor], none: str) -> str | float:
        held = [c for g in runs if (c := g[player].certificate) is not None]
        return mean([value(c).item() for c in held]) if held else none

    return Table.listing(
        f"{stream}: {rounds} rounds, means over {len(runs)} streams",
        PLAYERS,
        {
            "player": lambda player: player,
            "loss": lambda player: _mean_loss(runs, player) * rounds,
            "regret": lambda player: mean([g[player].ledger.regret().item() for g in runs]),
            "ms a round": lambda player: 1e3 * mean([g[player].seconds for g in runs]) / rounds,
            "its own regret": lambda player: certified(player, lambda c: c.regret, "—"),
            "its bound": lambda player: certified(player, lambda c: c.bound, "none"),
        },
    )


def _figure(found: dict[str, list[Games]]) -> Figure:
    def panel(stream: str, runs: list[Games]) -> Panel:
        def series(style: int, player: str) -> Series:
            losses = torch.tensor([g[player].losses for g in runs]).mean(0)
            means = losses.cumsum(0) / torch.arange(1, len(losses) + 1)
            kept = sorted({round(len(losses) ** (k / 60)) for k in range(61)})
            return Series(
                player, [float(t) for t in kept], [means[t - 1].item() for t in kept], style=style
            )

        lines = tuple(series(*each) for each in zip(_STYLES, PLAYERS, strict=True))
        return Panel(stream, "round t", "mean loss of rounds 1 … t", lines, x_scale="log")

    return Figure(
        "rotations",
        "Learning rotations: mean loss so far",
        "1 is the loss of X = 0, which says nothing; 2 that of the opposite. Means over the "
        "streams of all seeds.",
        tuple(panel(stream, runs) for stream, runs in found.items()),
    )


CLAIM = Claim(
    id="app-rotations",
    title="Learning rotations online",
    statement=(
        "Orthogonal matrices drawn from a learner of the unit ball have its expected loss, and its "
        "bound on the regret against the best orthogonal matrix."
    ),
    place="Appendix A, learning rotations",
    tolerance=(
        f"The enumerated mean of the draws is X_t to {EXACT:g}; drawn losses are within "
        f"{MOST_ERRORS:g} standard errors of those of X_t; every learner is within its bound; on "
        f"half turns Procrustes has at least twice FAML's regret, and FAML's is at least "
        f"{TURNS_SHARE:g} of its bound; under drift forgetting helps. What pairs make of FAML and "
        f"OGD in a few rounds is the reference's to {agreement.EXACT:g}."
    ),
    run=run,
    seconds=70,
    quick_seconds=6,
)
