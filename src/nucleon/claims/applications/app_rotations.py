"""app-rotations: orthogonal matrices learned online from noisy pairs (Appendix A)."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from nucleon.claims import beside, engine
from nucleon.claims.applications import needed
from nucleon.claims.engine import Check, Claim, Item, Row, Rows, Run, at_least, at_most, cases
from nucleon.claims.oracle import bounds, learners, twins
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.linalg.projections import clip
from nucleon.online.learners import FAML, Learner
from nucleon.online.problems.rotations import OnlineRotations, Registration, SignRounding
from nucleon.online.regret import Ledger, Shape

F64 = torch.float64
ROUNDS, HIGH_ROUNDS, SEEDS = (1000, 200), (1000, 100), (2, 1)
DISCOUNT, WINDOW = 0.95, 20
DRIFT = 0.02
EXACT = 1e-12  # eight signed sums of 3×3 matrices in float64 are good to 1e-15
TURNS_SHARE = 0.2
"""Share of its bound that FAML loses where two poses alternate, at least."""
MOST_ERRORS = 4.5  # a normal deviate exceeds this once in 150 000

STREAMS: Mapping[str, dict[str, Any]] = {
    "3-D scans, steady": {},
    "3-D scans, drifting": {"drift": DRIFT},
    "3-D scans, half turns": {"symmetric": True, "markers": True, "points": 64, "outliers": 0.0},
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
    plays_discounted: ClassVar[bool] = False

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.center, self.squares = self.zeros(*self.sides), self.zeros()
        self.reach = self.radius * math.sqrt(2 * self.sides[0])

    def bound(self) -> Tensor:
        return 2 * self.reach * self.squares.sqrt()

    def action(self) -> Tensor:
        return self.center

    def update(self, gradient: Tensor) -> None:
        """Descend along G_t, and project."""
        self.squares = self.squares + gradient.square().sum((-2, -1))
        step = torch.where(self.squares > 0, self.reach * self.squares.rsqrt(), 0.0)
        self.center = clip(self.center - step[..., None, None] * gradient, self.radius)


class Procrustes:
    """The best orthogonal matrix for the pairs so far, solved from scratch by SciPy every round.

    Args:
        dimension: n.
        window: how many of the latest scans count; None is all of them (default None).
    """

    def __init__(self, dimension: int, *, window: int | None = None) -> None:
        self.solve = needed("scipy.linalg", "scipy").orthogonal_procrustes
        self.window = window
        self.u = self.v = torch.zeros(0, dimension, dtype=F64)

    def matrix(self) -> Tensor:
        """Return the minimizer of Σ‖v − Ru‖²; 0 before the first pair."""
        if not len(self.u):
            return torch.zeros(2 * self.u.shape[1:], dtype=F64)
        transposed, _ = self.solve(self.u.numpy(), self.v.numpy(), check_finite=False)
        return torch.from_numpy(transposed).mT

    def observe(self, u: Tensor, v: Tensor) -> None:
        first = 0 if self.window is None else -(self.window - 1) * len(u)
        self.u, self.v = torch.cat([self.u[first:], u]), torch.cat([self.v[first:], v])


FORGETTING = f"FAML, γ = {DISCOUNT:g}"
PLAYERS: Mapping[str, Callable[[int], OnlineRotations | Procrustes]] = {
    "FAML": lambda n: OnlineRotations(n, FAML, dtype=F64),
    FORGETTING: lambda n: OnlineRotations(n, FAML, discount=DISCOUNT, dtype=F64),
    "OGD": lambda n: OnlineRotations(n, ProjectedDescent, dtype=F64),
    "Procrustes": Procrustes,
    f"Procrustes, last {WINDOW}": lambda n: Procrustes(n, window=WINDOW),
}
STYLES = dict(zip(PLAYERS, (4, 5, 2, 0, 1), strict=True))  # learners and Procrustes apart


@lru_cache(maxsize=1)
def scans(stream: str, seed: int, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """Return the scans that all players of a stream observe."""
    source = Registration(seed=seed, **STREAMS[stream])
    return [source.pairs(t) for t in range(1, rounds + 1)]


def draw(x: Tensor, gradient: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """Draw a matrix R with mean X, and return ⟨G, R⟩ − ⟨G, X⟩ with its variance, exactly."""
    rounding = SignRounding.of(x)
    weights = (rounding.left.mT @ gradient @ rounding.right.mT).diagonal()
    apart = (gradient * rounding.draw(generator)).sum() - (weights * rounding.sigma).sum()
    return apart.item(), ((1 - rounding.sigma**2) * weights**2).sum().item()


def play(stream: str, seed: int, player: str, rounds: int) -> dict[str, Any]:
    """Play all rounds; FAML also draws a matrix before each, and sums what `draw` returns."""
    pairs, generator = scans(stream, seed, rounds), torch.Generator().manual_seed(seed)
    n = pairs[0][0].shape[1]
    players, ledger = PLAYERS[player](n), Ledger((n, n))  # the plain regret, of each
    losses, drawn, variance = list[float](), 0.0, 0.0
    for u, v in pairs:
        action, gradient = players.matrix(), -(v.mT @ u) / len(u)
        if player == "FAML":
            apart, spread = draw(action, gradient, generator)
            drawn, variance = drawn + apart, variance + spread
        players.observe(u, v)
        ledger.record(gradient, action)
        losses.append(1 + (gradient * action).sum().item())
    learner = players.learner if isinstance(players, OnlineRotations) else None
    return {
        "loss": sum(losses),
        "regret": ledger.regret().item(),
        "drawn": drawn,
        "variance": variance,
        "certificate": learner and learner.certificate(),
        "_losses": losses,
    }


def enumerated(rounding: SignRounding, *, special: bool = False) -> Tensor:
    """Return E[R], summed over all 2^n signs with their probabilities."""
    n = len(rounding.sigma)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=n)), dtype=F64)
    chances = ((1 + signs * rounding.sigma) / 2).prod(-1)
    values = rounding.special_signs(signs) if special else signs
    return torch.einsum("k,kij->ij", chances, rounding.left * values[:, None, :] @ rounding.right)


def mean_errors(stream: Registration, rounds: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return E[R] − X_t of every round, and the same for SO(n) less its stated bias."""
    learner = OnlineRotations(stream.dimension, dtype=F64)
    plain, special = list[Tensor](), list[Tensor]()
    for t in range(1, rounds + 1):
        x = learner.matrix()
        rounding = SignRounding.of(x)
        stated = rounding.matrix(rounding.special_signs(rounding.sigma))
        plain.append((enumerated(rounding) - x).abs())
        special.append((enumerated(rounding, special=True) - stated).abs())
        learner.observe(*stream.pairs(t))
    return plain, special


def measure(run: Run) -> Iterator[Item]:
    def played(stream: str, seed: int, player: str) -> dict[str, Any]:
        rounds = run.pick(HIGH_ROUNDS if "dimension" in STREAMS[stream] else ROUNDS)
        return play(stream, seed, player, rounds)

    rows = run.each(cases(stream=STREAMS, seed=run.seeds(SEEDS), player=PLAYERS), played)
    plain, special = mean_errors(Registration(seed=run.seed), run.pick(ROUNDS) // 5)
    yield at_most("mean of the drawn matrix − X_t, all signs enumerated", plain, EXACT)
    yield at_most("the same in SO(3), less its stated bias", special, EXACT)
    for stream in STREAMS:
        games = rows.where(stream=stream, player="FAML")
        error = abs(sum(games.column("drawn"))) / math.sqrt(sum(games.column("variance")))
        words = f"{stream}: loss of the drawn matrices − loss of X_t, standard errors"
        yield at_most(words, error, MOST_ERRORS)
    yield from regret_checks(rows)
    turns = rows.where(stream="3-D scans, half turns")
    faml, procrustes = (turns.where(player=name) for name in ("FAML", "Procrustes"))
    ratio = engine.least(procrustes.column("regret")) / engine.worst(faml.column("regret"))
    yield at_least("half turns: least regret of Procrustes, over the largest of FAML", ratio, 2.0)
    drifting = rows.where(stream="3-D scans, drifting")
    forgetting, keeping = (
        sum(drifting.where(player=name).column("loss")) for name in (FORGETTING, "FAML")
    )
    name = "drifting: mean loss of FAML with a discount, over that without"
    yield engine.below(name, forgetting / keeping, 1.0)
    shares = [row.certificate.regret / row.certificate.bound for row in faml]
    yield at_least("half turns: FAML's regret/bound", shares, TURNS_SHARE)
    columns = {n: n for n in ("stream", "seed", "player", "loss", "regret")}
    yield rows.listing("After the last round", columns)

    def line(stream: str, player: str) -> Series:
        losses = torch.tensor(rows.where(stream=stream, player=player).column("_losses")).mean(0)
        so_far = losses.cumsum(0) / torch.arange(1, len(losses) + 1)
        kept = sorted({round(len(losses) ** (k / 60)) for k in range(61)})
        x, y = [float(t) for t in kept], [so_far[t - 1].item() for t in kept]
        return Series(player, x, y, style=STYLES[player])

    def panel(stream: str) -> Panel:
        lines = tuple(line(stream, player) for player in PLAYERS)
        return Panel(stream, "round t", "mean loss of rounds 1 … t", lines, x_scale="log")

    yield Figure(
        "rotations",
        "Learning rotations: mean loss so far",
        "1 is the loss of X = 0, which says nothing; 2 that of the opposite. Means over the "
        "streams of all seeds.",
        tuple(map(panel, STREAMS)),
    )
    yield from beside.against_oracle(compared(run.seed))
    yield """
        The loss of a learner is that of X_t, which is the expected loss of the orthogonal matrix it
        draws; Procrustes is judged by the orthogonal matrix it found. The regret is against the
        best orthogonal matrix of the whole stream, for a discounted learner too.

        Procrustes from scratch is following the leader: on steady scans it has the least loss, and
        no guarantee. Where scans alternate between two poses it is wrong every other time, the
        other times at a tie, and its regret grows linearly; a window of even length sees only ties.
    """


def regret_checks(rows: Rows) -> Iterator[Check]:
    for stream in STREAMS:
        for player in PLAYERS:
            every = rows.where(stream=stream, player=player).column("certificate")
            certificates = [c for c in every if c is not None]
            if certificates:
                nearest = min(certificates, key=lambda c: c.slack.item())
                refused = any(c.refusal is not None for c in certificates)
                regret = math.nan if refused else nearest.regret
                yield at_most(f"{stream}, {player}: regret", regret, nearest.bound.item())


def compared(seed: int) -> Iterator[Row]:
    """Compare FAML fed by pairs, whose gradients −Σvuᵀ/k the oracle makes itself, and OGD."""
    for name, options in STREAMS.items():
        scans = Registration(seed=seed, **options)
        pairs = [scans.pairs(t) for t in range(1, beside.ROUNDS + 1)]
        outer = [-torch.stack(list(map(torch.outer, v, u))).mean(0) for u, v in pairs]
        gradients, n = torch.stack(outer), scans.dimension
        player, actions = OnlineRotations(n, FAML, dtype=F64), list[Tensor]()
        for u, v in pairs:
            actions.append(player.matrix())
            player.observe(u, v)
        twin, played = twins.gbpa("FAML", (n, n)), torch.stack(actions).numpy()
        yield beside.compare(name, player.learner, gradients, twin, played)
        if not options:
            twin = twins.Twin(learners.projected_descent, bounds.projected_descent)
            descent = ProjectedDescent((n, n), dtype=F64)
            yield beside.compare("OGD", descent, gradients, twin)


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
        f"OGD in a few rounds is the reference's to {beside.EXACT:g}."
    ),
    measure=measure,
    seconds=(50, 3),
)
