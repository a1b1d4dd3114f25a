"""prop-tradeoff: αβ ≥ ½ for random admissible mixtures of smoothings (Proposition 3.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims import agreement
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread, worst
from nucleon.claims.oracle import bounds, lemma, mixtures
from nucleon.claims.shown import Figure, Panel, Series, Table, records
from nucleon.online import theory
from nucleon.online.admissibility import AdmissibilitySearch, search_admissibility
from nucleon.online.potentials import Admissibility, Hyperbolic, Potential, Regularized

F64 = torch.float64
SHAPE = (2, 3)
MIXTURES, QUICK_MIXTURES = 6, 2
POINTS = 200
COMPARED = 8  # of them, with the reference
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
    cauchy: float
    """αβ/(Σw√(α_iβ_i))²."""
    apart: float
    """The largest relative distance of constants, Ψ and ceilings to the reference's."""


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
        records=records(
            measured,
            {
                "weights": lambda m: list(m.mixture.weights),
                "scales": lambda m: list(m.mixture.scales),
                "alpha": lambda m: [m.stated.alpha, m.found.alpha.found],
                "beta": lambda m: [m.stated.beta, m.found.beta.found],
                "dominance": lambda m: m.dominance,
                "ceiling": lambda m: m.ceiling,
            },
        ),
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
    """Search and inequalities of one mixture, and the reference's values at the same points."""
    stated = mixture.admissibility(*SHAPE)
    options = QUICK_SEARCH if quick else SEARCH
    found = search_admissibility(mixture, *SHAPE, seed=seed, **options)
    x, roots = points(seed)
    constants = {"alpha": stated.alpha, "beta": stated.beta}
    ceiling = theory.admissibility_tradeoff(x, roots, **constants).right
    value = mixture.value_at_root(x, roots)
    parts = again(mixture)
    pair = mixtures.constants(parts)
    best = torch.from_numpy(mixtures.best_root(x.numpy(), pair))
    tight = theory.admissibility_tradeoff(x, best, **constants)
    norms = torch.linalg.svdvals(x).sum(-1)
    few = x[:COMPARED].numpy(), roots[:COMPARED].numpy()
    differences = (
        stated.alpha / pair[0] - 1,
        stated.beta / pair[1] - 1,
        value[:COMPARED].numpy() / mixtures.value(parts, *few) - 1,
        ceiling.numpy() / mixtures.ceiling(x.numpy(), roots.numpy(), pair) - 1,
        tight.left.numpy() / norms.numpy() - 1,
    )
    return Measured(
        mixture,
        stated,
        found,
        (value / norms).min().item(),
        (value / ceiling).max().item(),
        (tight.right / tight.left).mean().item() / math.sqrt(2 * stated.product),
        stated.product / mixtures.least_product(parts),
        worst(map(agreement.largest, differences)),
    )


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Random X and roots L of sizes over two decades."""
    x = noise.normal((POINTS, *SHAPE), seed=seed, stream=8, dtype=F64)
    factor = noise.normal((POINTS, SHAPE[0], SHAPE[0]), seed=seed, stream=9, dtype=F64)
    sizes = 10 ** (2 * noise.uniform((POINTS, 1, 1), seed=seed, stream=10, dtype=F64) - 1)
    return x, sizes * (factor @ factor.mT + 0.1 * torch.eye(SHAPE[0], dtype=F64))


def again(mixture: Mixture) -> list[mixtures.Part]:
    """The reference's parts of a mixture."""
    regularized = (lemma.regularized_value, bounds.REGULARIZED)
    kinds = (regularized, (lemma.hyperbolic_value, bounds.HYPERBOLIC), regularized)
    weighted = zip(kinds, mixture.weights, mixture.scales, strict=True)
    return [(*kind, weight, scale) for kind, weight, scale in weighted]


def checks(measured: list[Measured]) -> tuple[Check, ...]:
    """No pair below ½, none refuted, found from below, and the proof's inequalities."""
    products = [m.stated.product for m in measured]
    above = [
        estimate.interval[0] / estimate.stated
        for m in measured
        for estimate in (m.found.alpha, m.found.beta)
    ]
    upper = [m.found.alpha.interval[1] * m.found.beta.interval[1] for m in measured]
    return (
        Check.at_least("smallest αβ stated", products, 0.5),
        Check.at_least("smallest αβ/(Σw√(α_iβ_i))²", (m.cauchy for m in measured), 1 - 1e-12),
        Check.at_most(
            "α, β, Ψ and ceilings against the reference's", (m.apart for m in measured), ROUNDING
        ),
        Check.at_most("largest constant found/stated, lower end", above, 1.0),
        Check.at_least("smallest αβ found, upper end", upper, 0.5 * CLOSE**2),
        Check.at_least("smallest Ψ/‖X‖_*", (m.dominance for m in measured), 1 - ROUNDING),
        Check.at_most("largest Ψ/ceiling", (m.ceiling for m in measured), 1 + ROUNDING),
        Check.at_most(
            "ceiling/(√(2αβ)‖X‖_*) at the proof's L, farthest from 1",
            (abs(m.least - 1) for m in measured),
            1e-9,
        ),
    )


def _table(measured: list[Measured]) -> Table:
    def list_of(values: tuple[float, ...]) -> str:
        return ", ".join(f"{v:.2g}" for v in values)

    return Table.listing(
        "Mixtures of Regularized, Hyperbolic and Regularized",
        measured,
        {
            "weights": lambda m: list_of(m.mixture.weights),
            "scales": lambda m: list_of(m.mixture.scales),
            "α stated": lambda m: m.stated.alpha,
            "α found": lambda m: m.found.alpha.found,
            "β stated": lambda m: m.stated.beta,
            "β found": lambda m: m.found.beta.found,
            "αβ stated": lambda m: m.stated.product,
            "αβ found": lambda m: m.found.alpha.found * m.found.beta.found,
        },
    )


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


CLAIM = Claim(
    id="prop-tradeoff",
    title="No mixture of smoothings has αβ below ½",
    statement="Every admissible smoothing of the nuclear norm has αβ ≥ ½, mixtures included.",
    place="Proposition 3.3; the mixtures are ours",
    tolerance=(
        "For random mixtures of three smoothings at scales over two decades the stated αβ is at "
        f"least ½, a search refutes no constant and finds no product below ½·{CLOSE:g}²; on random "
        "points ‖X‖_* ≤ Ψ(X; L) ≤ α Tr L + β/2·Tr XᵀL⁻¹X to 1e-6, and at the proof's L the last is "
        "√(2αβ)‖X‖_* to 1e-9; α, β, Ψ and the ceilings are the reference's to 1e-6."
    ),
    run=run,
    seconds=45,
    quick_seconds=9,
)
