"""Worst-case search: gradient ascent over the stream for the largest regret/bound of a learner.

A GBPA learner's totals S_t and smoothings Λ_t depend on the gradients alone, so its regret on a
stream fixed beforehand is one function of it, all rounds at once:

    Reg_T/D = ‖S_T‖_* − Σ_t ⟨G_{t+1}, ∇Ψ(S_t; Λ_t)⟩

The slopes are computed as [Ψ(S + hG) − Ψ(S − hG)]/(2h), so one derivative of Ψ is enough, and the
search works for any potential. The learner itself then plays the stream that was found; regret and
bound of that game are reported.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nucleon import _checks, moments, noise
from nucleon.linalg.projections import truncated
from nucleon.online import theory
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTPL, FTRL, GBPA
from nucleon.online.potentials import Admissibility, Gaussian, Potential, Regularized
from nucleon.online.streams import replay
from nucleon.online.streams.worst_case import WorstCase, to_units

Searched = Literal["faml", "ftrl", "ftpl"]
Build = Callable[[tuple[int, ...], int], GBPA]
"""A learner of a shape, (m, n) or (b, m, n) for b games, with a seed for its noise; float64."""
GAMES, SAMPLES = 64, 64
"""Games of FTPL in a measurement, each with other noise, and draws of each round."""
_ASCENT_SAMPLES = 16
_NOISE = 0x776F727374  # of the ascent, apart from the seeds with which learners are built
_STEP = 0.01  # h, of the slopes
_RATE = 0.05  # Adam's, on gradients of norm ≤ 1
_JITTER = 0.05  # that tells starts of one kind apart in every entry


class Ratio(NamedTuple):
    """Regret/bound as played: of one game, or in the mean over games with noise of their own."""

    value: float
    margin: float
    """Three standard errors; 0 where nothing is random."""


def search(
    learner: Searched | Build,
    shape: tuple[int, int],
    rounds: int,
    *,
    starts: int = 8,
    steps: int = 200,
    seed: int = 0,
) -> WorstCase:
    """Search the worst stream for `learner` by Adam from several starts; measure its ratio.

    Half of the starts are random; the others alternate ±E and then drift along E, turning at
    different times. After every step the gradients are projected onto ‖G_t‖_op ≤ 1. FTPL's expected
    regret is climbed with new samples at every step, and measured on others.

    Args:
        learner: "faml", "ftrl" or "ftpl", or a function that builds another GBPA learner, with
            radius, gradient bound and discount 1 and a potential with constants.
        shape: (m, n), m ≤ n.
        rounds: T ≥ 2.
        starts: how many, all in one batch (default 8).
        steps: of the ascent (default 200).
        seed: of the starts and of the ascent's samples (default 0).
    """
    player = build(learner, shape, seed=seed)
    _checks.count("rounds", rounds, minimum=2)
    fixed: dict[str, Any] = {"eta": player.eta, "constants": player.constants}
    gradients = _starts(starts, rounds, shape, seed).requires_grad_()
    optimizer = torch.optim.Adam([gradients], lr=_RATE, betas=(0.9, 0.99), maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for step in range(steps):
        optimizer.zero_grad()
        regret_ratio(_drawn(player.potential, seed, step), gradients, **fixed).sum().backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            gradients.copy_(truncated(gradients, 1.0))
    with torch.no_grad():
        units = to_units(gradients)
        potential = _drawn(player.potential, seed, steps, 16 * _ASCENT_SAMPLES)
        best = regret_ratio(potential, units, **fixed).argmax()
    ratio = measure(learner, units[best], first_seed=seed)
    options = {"starts": starts, "steps": steps, "seed": seed}
    return WorstCase(player.name, units[best], ratio.value, ratio.margin, options)


def measure(
    learner: Searched | Build, gradients: Tensor, *, games: int = GAMES, first_seed: int = 0
) -> Ratio:
    """Return regret/bound of a learner, played by `online.play` on gradients (T, m, n).

    Args:
        learner: "faml", "ftrl" or "ftpl", or a function that builds another.
        gradients: gradients of norm ≤ 1, float64.
        games: number of games of a learner with noise, each with its own (default 64).
        first_seed: seed of the noise of the first game (default 0).
    """
    shape = tuple(gradients.shape[-2:])
    player = build(learner, shape, seed=first_seed)
    if player.is_random:
        player = build(learner, (games, *shape), seed=first_seed)
        gradients = gradients.unsqueeze(1).expand(-1, games, -1, -1)
    ratios = play(player, replay(gradients), len(gradients)).certificate.share
    margin = 3 * ratios.std().item() / math.sqrt(games) if player.is_random else 0.0
    return Ratio(ratios.mean().item(), margin)


def build(
    learner: Searched | Build, shape: tuple[int, ...], *, samples: int = SAMPLES, seed: int = 0
) -> GBPA:
    """Return a learner for the search: radius, gradient bound and discount 1, float64.

    Args:
        learner: "faml", "ftrl" or "ftpl", or a function that builds another.
        shape: (m, n), m ≤ n, or (b, m, n) for b games.
        samples: draws of FTPL in each round, in antithetic pairs (default 64).
        seed: of its noise (default 0).
    """
    if shape[-2] > shape[-1]:
        raise ValueError(f"shape must have m ≤ n, got {shape[-2]}×{shape[-1]}; transpose it")
    if not callable(learner):
        _checks.choice("learner", learner, get_args(Searched))
        if learner == "ftpl":
            return FTPL(shape, samples=samples, antithetic=True, seed=seed, dtype=torch.float64)
        return {"faml": FAML, "ftrl": FTRL}[learner](shape, dtype=torch.float64)
    player = learner(shape, seed)
    if not isinstance(player, GBPA):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"the search climbs through a potential, and {player!r} has none; name a learner "
            f"derived from GBPA"
        )
    bound = player.stated_bound
    if (player.radius, player.discount) != (1, 1) or bound is None or bool((bound != 1).any()):
        raise ValueError(
            f"the search is with radius, gradient_bound and discount 1, got {player.radius:g}, "
            f"{None if bound is None else bound.tolist()} and {player.discount:g}; leave them out"
        )
    return player


def regret_ratio(
    potential: Potential, gradients: Tensor, *, eta: float, constants: Admissibility | None = None
) -> Tensor:
    """Return Reg_T/bound of a potential's learner on streams (…, T, m, n), differentiably.

    D = G = 1, and (α, β) are the potential's own where no `constants` are given. The slopes are
    differences of values; a random potential has one expectation for all that depends on its
    samples.
    """
    constants = constants or potential.admissibility(*gradients.shape[-2:])
    if constants is None:
        raise ValueError(
            f"{type(potential).__name__} has no admissibility constants, hence no bound to reach"
        )
    totals, grams = gradients.cumsum(-3), (gradients @ gradients.mT).cumsum(-3)
    smoothing = moments.smoothing(grams[..., :-1, :, :], gradient_bound=1.0, eta=eta)
    roots = _square_root(smoothing)
    before, step = totals[..., :-1, :, :], _STEP * gradients[..., 1:, :, :]
    ahead = potential.value_at_root(before + step, roots)
    behind = potential.value_at_root(before - step, roots)
    loss = -((ahead - behind) / (2 * _STEP)).sum(-1)
    regret = loss + torch.linalg.svdvals(totals[..., -1, :, :]).sum(-1)
    bound = theory.gbpa_bound(
        grams[..., -1, :, :],
        radius=1.0,
        gradient_bound=1.0,
        alpha=constants.alpha,
        beta=constants.beta,
        first_nuclear=torch.linalg.svdvals(gradients[..., 0, :, :]).sum(-1),
        eta=eta,
    )
    return regret / bound


def _square_root(a: Tensor) -> Tensor:
    """Return A^{1/2} of positive definite A, with a derivative that repeated eigenvalues allow.

    The derivative solves A^{1/2}·dL + dL·A^{1/2} = dA in the basis of the eigenvectors.
    """
    values, vectors = torch.linalg.eigh(a.detach())
    roots = values.sqrt()
    sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    change = vectors.mT @ (a - a.detach()) @ vectors / sums  # 0, with the derivative
    return vectors @ (torch.diag_embed(roots) + change) @ vectors.mT


def _drawn(potential: Potential, seed: int, step: int, samples: int = _ASCENT_SAMPLES) -> Potential:
    """Return the potential of a step of the ascent: a random one with new samples."""
    if isinstance(potential, Gaussian):
        key = _NOISE ^ (seed << 32) ^ step
        return replace(potential, samples=samples, antithetic=True, seed=key)
    if isinstance(potential, Regularized):
        return Regularized(tolerance=1e-11)  # a value off by its gap is off by gap/h in the slope
    return potential.redrawn(noise.derived_seed(seed, step))


def _starts(count: int, rounds: int, shape: tuple[int, int], seed: int) -> Tensor:
    """Return streams (b, T, m, n): every other one random, the rest ±E, then a drift along E."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, rounds, *shape, dtype=torch.float64, generator=generator)
    t = torch.arange(rounds, dtype=torch.float64)
    structured = (count + 1) // 2
    turns = torch.linspace(0.3, 0.85, structured, dtype=torch.float64).unsqueeze(-1) * rounds
    alternating = torch.where(t == 0, 0.5, (-1.0) ** t)
    drift = (1 + (t - turns).clamp_min(0)).rsqrt().clamp_min(0.2)
    signs = torch.where(t < turns, alternating, drift)
    eye = torch.eye(*shape, dtype=torch.float64)
    streams = normal / 2
    streams[::2] = signs[..., None, None] * eye + _JITTER * normal[::2]
    return truncated(streams, 1.0)
