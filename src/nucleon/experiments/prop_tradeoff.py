"""prop-tradeoff: αβ ≥ ½ for random admissible mixtures of smoothings (Proposition 3.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon import noise, theory
from nucleon.admissibility import AdmissibilitySearch, search_admissibility
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
from nucleon.experiments.games import worst
from nucleon.potentials import Admissibility, Hyperbolic, Potential, Regularized

F64 = torch.float64
SHAPE = (2, 3)
MIXTURES, QUICK_MIXTURES = 6, 2
POINTS = 200
SEARCH: dict[str, Any] = {"starts": 4, "steps": 60, "replicates": 8}
QUICK_SEARCH: dict[str, Any] = {"starts": 4, "steps": 40, "replicates": 8}
ROUNDING = 1e-6  # relative, of the solver's gap in Ψ
CLOSE = 0.98  # of a product of constants that a search has found from below


@dataclass(frozen=True)
class Mixture(Potential):
    """Σ w_iΨ_i(S; c_iL) of smoothings with constants (α_i, β_i): (Σw_ic_iα_i, Σw_iβ_i/c_i).

    Each of the four properties of Definition 3.1 passes from the parts to the mixture.
    """

    parts: tuple[Potential, ...]
    weights: tuple[float, ...]
    scales: tuple[float, ...]

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Σ w_iΨ_i(S; c_i²Λ)."""
        return self._sum(lambda part, c: part.value(s, c**2 * smoothing))

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Σ w_i∇Ψ_i(S; c_i²Λ)."""
        return self._sum(lambda part, c: part.gradient(s, c**2 * smoothing))

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Σ w_iΨ_i at the roots c_iL."""
        return self._sum(lambda part, c: part.value_at_root(s, c * root))

    def admissibility(self, m: int, n: int) -> Admissibility:
        """The mixed constants."""
        alpha = beta = 0.0
        for part, weight, scale in zip(self.parts, self.weights, self.scales, strict=True):
            constants = part.admissibility(m, n)
            assert constants is not None
            alpha += weight * scale * constants.alpha
            beta += weight * constants.beta / scale
        return Admissibility(alpha, beta)

    def _sum(self, term: Callable[[Potential, float], Tensor]) -> Tensor:
        each = zip(self.parts, self.weights, self.scales, strict=True)
        terms = [weight * term(part, scale) for part, weight, scale in each]
        return torch.stack(terms).sum(0)


@dataclass(frozen=True)
class Measured:
    """One mixture: its constants, what a search finds of them, and the two inequalities."""

    mixture: Mixture
    stated: Admissibility
    found: AdmissibilitySearch
    dominance: float
    """The smallest Ψ(X; L)/‖X‖_* over random points."""
    ceiling: float
    """The largest Ψ(X; L)/(α Tr L + β/2·Tr XᵀL⁻¹X)."""
    least: float
    """(α Tr L + β/2·Tr XᵀL⁻¹X)/‖X‖_* at the proof's L, over √(2αβ)."""


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Draw mixtures, search their constants, and hold the proof's inequalities to random points."""
    seeds = settings.seed_range(MIXTURES, QUICK_MIXTURES)
    progress.begin(len(seeds), "mixtures")
    measured = list[Measured]()
    for seed in seeds:
        measured.append(measure(drawn(seed), seed, settings.quick))
        progress.advance(1, f"αβ = {measured[-1].stated.product:.3f}")
    return Result(
        checks=checks(measured),
        tables=(_table(measured),),
        figures=(_figure(measured),),
        records=tuple(_record(m) for m in measured),
        notes=(
            "A mixture of admissible smoothings at different scales of L is admissible with the "
            "mixed constants. By Cauchy–Schwarz their product is at least (Σw_i√(α_iβ_i))² ≥ ½, "
            "with equality for the regularized smoothing alone: mixing never helps.",
            "The proof puts Ψ(X; L) between ‖X‖_* and α Tr L + β/2·Tr XᵀL⁻¹X and takes "
            "L = √(β/2α)·√(XXᵀ), where the latter is √(2αβ)‖X‖_*. A pair with αβ < ½ would put the "
            "ceiling below the floor.",
        ),
    )


def drawn(seed: int) -> Mixture:
    """Three parts, regularized and hyperbolic, with random weights and scales over two decades."""
    uniform = noise.uniform((6,), seed=seed, stream=7, dtype=F64).tolist()
    weights = [-math.log(u) for u in uniform[:3]]
    scales = [10 ** (2 * u - 1) for u in uniform[3:]]
    parts = (Regularized(tolerance=1e-11), Hyperbolic(), Regularized(tolerance=1e-11))
    return Mixture(parts, tuple(w / sum(weights) for w in weights), tuple(scales))


def measure(mixture: Mixture, seed: int, quick: bool) -> Measured:
    """Search and inequalities of one mixture."""
    stated = mixture.admissibility(*SHAPE)
    options = QUICK_SEARCH if quick else SEARCH
    found = search_admissibility(mixture, *SHAPE, seed=seed, **options)
    x = noise.normal((POINTS, *SHAPE), seed=seed, stream=8, dtype=F64)
    factor = noise.normal((POINTS, SHAPE[0], SHAPE[0]), seed=seed, stream=9, dtype=F64)
    sizes = 10 ** (2 * noise.uniform((POINTS, 1, 1), seed=seed, stream=10, dtype=F64) - 1)
    roots = sizes * (factor @ factor.mT + 0.1 * torch.eye(SHAPE[0], dtype=F64))
    constants = {"alpha": stated.alpha, "beta": stated.beta}
    sides = theory.admissibility_tradeoff(x, roots, **constants)
    value = mixture.value_at_root(x, roots)
    best = math.sqrt(stated.beta / (2 * stated.alpha)) * _root_of_gram(x)
    tight = theory.admissibility_tradeoff(x, best, **constants)
    least = (tight.right / tight.left).mean().item() / math.sqrt(2 * stated.product)
    norms = torch.linalg.svdvals(x).sum(-1)
    return Measured(
        mixture,
        stated,
        found,
        (value / norms).min().item(),
        (value / sides.right).max().item(),
        least,
    )


def _root_of_gram(x: Tensor) -> Tensor:
    """√(XXᵀ) from the singular vectors of X."""
    u, sigma, _ = torch.linalg.svd(x, full_matrices=False)
    return (u * sigma.unsqueeze(-2)) @ u.mT


def checks(measured: list[Measured]) -> tuple[Check, ...]:
    """No pair below ½, none refuted, found from below, and the proof's inequalities."""
    products = [m.stated.product for m in measured]
    cauchy = [m.stated.product / sum(_share(m.mixture)) ** 2 for m in measured]
    above = [
        estimate.interval[0] / estimate.stated
        for m in measured
        for estimate in (m.found.alpha, m.found.beta)
    ]
    upper = [m.found.alpha.interval[1] * m.found.beta.interval[1] for m in measured]
    return (
        Check("smallest αβ stated", min(products), "≥", 0.5),
        Check("smallest αβ/(Σw√(α_iβ_i))²", min(cauchy), "≥", 1 - 1e-12),
        Check("largest constant found/stated, lower end", worst(above), "≤", 1.0),
        Check("smallest αβ found, upper end", min(upper), "≥", 0.5 * CLOSE**2),
        Check("smallest Ψ/‖X‖_*", min(m.dominance for m in measured), "≥", 1 - ROUNDING),
        Check("largest Ψ/ceiling", worst([m.ceiling for m in measured]), "≤", 1 + ROUNDING),
        Check(
            "ceiling/(√(2αβ)‖X‖_*) at the proof's L, farthest from 1",
            worst([abs(m.least - 1) for m in measured]),
            "≤",
            1e-9,
        ),
    )


def _share(mixture: Mixture) -> list[float]:
    """w_i√(α_iβ_i) of every part."""
    shares = list[float]()
    for part, weight in zip(mixture.parts, mixture.weights, strict=True):
        constants = part.admissibility(*SHAPE)
        assert constants is not None
        shares.append(weight * math.sqrt(constants.product))
    return shares


def _table(measured: list[Measured]) -> Table:
    def list_of(values: tuple[float, ...]) -> str:
        return ", ".join(f"{v:.2g}" for v in values)

    rows = tuple(
        (
            list_of(m.mixture.weights),
            list_of(m.mixture.scales),
            m.stated.alpha,
            m.found.alpha.found,
            m.stated.beta,
            m.found.beta.found,
            m.stated.product,
            m.found.alpha.found * m.found.beta.found,
        )
        for m in measured
    )
    constants = ("α stated", "α found", "β stated", "β found", "αβ stated", "αβ found")
    title = "Mixtures of Regularized, Hyperbolic and Regularized"
    return Table(title, ("weights", "scales", *constants), rows)


def _figure(measured: list[Measured]) -> Figure:
    ordered = sorted(measured, key=lambda m: m.stated.product)
    x = [float(k) for k in range(1, len(ordered) + 1)]
    lines = (
        Series("stated", x, [m.stated.product for m in ordered], style=4),
        Series(
            "found by search",
            x,
            [m.found.alpha.found * m.found.beta.found for m in ordered],
            style=0,
        ),
        Series("½, the least there is", x, [0.5] * len(x), style=6),
    )
    panel = Panel("random mixtures, by αβ", "mixture", "αβ", lines, y_scale="log", marked=True)
    caption = "No mixture has a product below ½, neither stated nor found."
    return Figure("products", "αβ of random mixtures", caption, (panel,))


def _record(m: Measured) -> dict[str, object]:
    return {
        "weights": list(m.mixture.weights),
        "scales": list(m.mixture.scales),
        "alpha": [m.stated.alpha, m.found.alpha.found],
        "beta": [m.stated.beta, m.found.beta.found],
        "dominance": m.dominance,
        "ceiling": m.ceiling,
    }


CLAIM = Claim(
    id="prop-tradeoff",
    title="No mixture of smoothings has αβ below ½",
    statement="Every admissible smoothing of the nuclear norm has αβ ≥ ½, mixtures included.",
    place="Proposition 3.3; the mixtures are ours",
    tolerance=(
        "For random mixtures of three smoothings at scales over two decades the stated αβ is at "
        f"least ½, a search refutes no constant and finds no product below ½·{CLOSE:g}²; on random "
        "points ‖X‖_* ≤ Ψ(X; L) ≤ α Tr L + β/2·Tr XᵀL⁻¹X to 1e-6, and at the proof's L the last is "
        "√(2αβ)‖X‖_* to 1e-9."
    ),
    run=run,
    seconds=45,
    quick_seconds=8,
)
