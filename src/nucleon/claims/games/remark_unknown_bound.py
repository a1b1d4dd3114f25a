"""remark-unknown-bound: three ways around knowing max‖g_t‖ beforehand (Remark B.1)."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.beside import EXACT, SOLVED, SOLVER, against_oracle, compare, drawn, leaning
from nucleon.claims.engine import Claim, Item, Row, Run, above, at_least, at_most, cases
from nucleon.claims.grid import swing, swung
from nucleon.claims.oracle import twins, unknown
from nucleon.claims.shown import Figure, Panel, level
from nucleon.online import theory
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTPL, FTRL, GBPA, AdaGradFTRL
from nucleon.online.streams import replay

F64 = torch.float64
OFFSETS = {"δ = 0": "scale-free", "clipping": "clip", "proximal": "proximal"}
SIDES = cases(preconditioner=("scalar", "diagonal"), ball=("l2", "linf"))
DIMENSION = 4
GAMES, ROUNDS = (64, 16), (200, 60)
LENGTHS = ((10, 30, 100, 300), (10, 30))
PUSH = {"δ = 0": math.sqrt(2), "clipping": math.sqrt(2), "proximal": 1.0}
"""The rounds that push each across the ball at the end, over √T."""
SHAPE, DRAWS = (2, 3), 16
MATRICES: dict[str, tuple[Callable[..., GBPA], dict[str, Any]]] = {
    "FAML": (FAML, {}),
    "FTRL": (FTRL, dict(SOLVER)),
    "FTPL": (FTPL, {"samples": 4}),
}
SIZES = (1.0, 3.0, 0.2, 5.0, 0.5, 9.0, 1.0, 2.0)
"""Sizes of the gradients that the oracle plays too: above the largest so far three times."""
EXCESS = ("clip", "grow")
"""Answers of a matrix learner to gradients above the bound."""

# Regression lines: what the swing of 30 rounds costs each variant, and that of 200 rounds each
# matrix learner without a stated bound, rounded down.
REACHED = {"δ = 0": 0.4, "clipping": 0.8, "proximal": 0.7}
MATRIX_REACHED = {"FAML": 0.75, "FTRL": 0.85, "FTPL": 0.4}


def wild_streams(run: Run) -> Tensor:
    """Return gradients (T, b, 1, d) over many decades: log-normal, growing, and with jumps."""
    games, rounds = run.pick(GAMES), run.pick(ROUNDS)
    normal = noise.normal((rounds, games, 1, DIMENSION), seed=run.seed, stream=0, dtype=F64)
    sizes = noise.normal((rounds, games, 1, 1), seed=run.seed, stream=1, dtype=F64)
    t = torch.arange(rounds, dtype=F64)[:, None, None, None]
    kinds = [
        torch.exp(3 * sizes),
        1.1**t,
        torch.where(t < rounds // 2, 1e-6, 1.0),
        torch.where(t % 7 == 6, 100.0, 0.1) * (-1.0) ** t,
    ]
    scales = [kind.expand(rounds, games, 1, 1)[:, k::4] for k, kind in enumerate(kinds)]
    return normal * torch.cat(scales, 1)


def shares(gradients: Tensor, **options: Any) -> Tensor:
    """Return regret/bound after the recorded rounds, (R, b)."""
    learner = AdaGradFTRL(tuple(gradients.shape[1:]), dtype=F64, **options)
    trace = play(learner, replay(gradients), len(gradients))
    return trace.regret / trace.bound


def beside_twins(seed: int) -> Iterator[Row]:
    """Compare AdaGrad-FTRL, and matrix learners that clip or grow, with a bound or without."""
    sizes = torch.tensor(SIZES, dtype=F64)[:, None, None, None]
    shape = (2, 1, DIMENSION)
    gradients = sizes * leaning(shape, seed=seed)
    for name, side in itertools.product(OFFSETS, SIDES):
        options: dict[str, Any] = {"offset": OFFSETS[name], **side}
        twin = twins.on_rows(unknown.adagrad, unknown.adagrad_bound, **options)
        learner = AdaGradFTRL(shape, dtype=F64, **options)
        yield compare(", ".join((name, *side.values())), learner, gradients, twin)
    shape = (2, *SHAPE)
    gradients, draws = sizes * leaning(shape, seed=seed), drawn(shape, samples=4)
    for case in cases(name=MATRICES, on_excess=EXCESS, bound=(None, 2.0), discount=(1.0, 0.9)):
        name, excess, bound, discount = case.values()
        make, options = MATRICES[name]
        options = {**options, "discount": discount, "on_excess": excess}
        learner = make(shape, gradient_bound=bound, dtype=F64, **options)
        game: dict[str, Any] = {"bound": bound, "discount": discount, "noise": draws}
        twin = twins.gbpa(name, shape, clip=excess == "clip", **game)
        yield compare(f"{name}, {excess}, G {bound}, γ = {discount:g}", learner, gradients, twin)


def too_small_a_delta() -> float:
    """Return regret over Table 2's bound of FTRL with δ = 1e-6 on the gradients 1e-3 and −1."""
    gradients = torch.tensor([1e-3, -1.0], dtype=F64).reshape(2, 1, 1)
    table: dict[str, Any] = {"preconditioner": "scalar", "ball": "linf", "delta": 1e-6}
    learner = AdaGradFTRL((1, 1), offset="stated", validate=False, dtype=F64, **table)
    regret = play(learner, replay(gradients), 2).regret[-1]
    moment = gradients.square().sum((0, 2))
    return (regret / theory.adagrad_bound(moment, update="ftrl", radius=1.0, **table)).item()


def measure(run: Run) -> Iterator[Item]:
    lengths, gradients = run.pick(LENGTHS), wild_streams(run)
    sides = [{"variant": name, "_side": side, **side} for name in OFFSETS for side in SIDES]

    def wild(variant: str, _side: dict[str, str]) -> dict[str, float]:
        return {"share": shares(gradients, offset=OFFSETS[variant], **_side).max().item()}

    def swings(variant: str, _side: dict[str, str], rounds: int) -> dict[str, float]:
        # An axis, or the cube's diagonal: there the game is one on an interval.
        along = torch.eye(1, DIMENSION) if _side["ball"] == "l2" else torch.ones(1, DIMENSION)
        stream = swing(rounds, PUSH[variant])[:, None, None, None] * along.double()
        return {"share": shares(stream, offset=OFFSETS[variant], **_side)[-1].item()}

    games = run.each(sides, wild)
    swung_games = run.each([{**s, "rounds": t} for s in sides for t in lengths], swings)
    for name in OFFSETS:
        ratios = games.where(variant=name).column("share")
        yield at_most(f"{name}: largest regret/bound, wild", ratios, 1.0)
    yield at_most("swing: largest regret/bound", swung_games.column("share"), 1.0)
    for name, reached in REACHED.items():
        ratios = swung_games.where(variant=name, rounds=30).column("share")
        yield at_least(f"{name}, swing of 30: smallest share", ratios, reached)
    for case in cases(name=MATRICES, on_excess=EXCESS):
        name, excess = case.values()
        shape = (DRAWS, *SHAPE) if name == "FTPL" else SHAPE
        learner = MATRICES[name][0](shape, gradient_bound=None, on_excess=excess, dtype=F64)
        words = f"{name}, {excess}, swing: regret/bound"
        yield at_least(words, swung(learner), MATRIX_REACHED[name])
    yield above("FTRL with δ too small: regret/bound", too_small_a_delta(), 1.0)
    yield from against_oracle(beside_twins(run.seed))

    columns = {name: name for name in ("variant", "preconditioner", "ball")}
    columns["wild streams, largest"] = "share"
    yield games.listing(f"Regret/bound, d = {DIMENSION}", columns)
    lines = [level("the bound", lengths)]
    for name, style in zip(OFFSETS, (0, 2, 4), strict=True):
        scalar = swung_games.where(variant=name, preconditioner="scalar", ball="l2")
        lines.append(scalar.line(name, "rounds", "share", style))
    panel = Panel("on the swing", "T", "regret/bound", tuple(lines), "log", marked=True)
    caption = "Regret over bound of three ways without knowing the largest gradient."
    yield Figure("shares", "Without a bound on the gradients", caption, (panel,))
    yield """
        δ = 0 is in the manner of Orabona and Pál (2018) and pays (2+√2)·2D·max|g_t|; clipping feeds
        what lies below the largest gradient so far (Cutkosky 2019) and pays 2D·Σ‖e_t‖ for the rest;
        proximal FTRL (McMahan 2017) pays with the diameter 2D for the radius D.
    """


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
        f"{EXACT:g}, AdaGrad's and FTRL's to {SOLVED:g}; FTRL with δ = 1e-6 "
        "passes its bound."
    ),
    measure=measure,
    seconds=(6, 3),
)
