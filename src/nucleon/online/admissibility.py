"""Admissibility by search: how large the two ratios of Definition 3.1 can be made.

Each ratio is searched where its denominator is c; its infinitesimal form (the derivative in L, the
Hessian in S) is then the limit of S and L large beside c. A homogeneous potential, with
Ψ(cS; cL) = cΨ(S; L), has the same ratios at every c. Definition 3.1 does not ask for that, so the
starts spread c over many decades. Gradient ascent from random starts looks for large ratios; the
points it finds are measured again through `value` and `gradient`, on samples that the search has
not seen, because the largest of many noisy numbers overstates itself.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.online.potentials import Potential, Regularized

_LARGEST = math.log(1e4)  # of the log-scale of L: 1e-4 from the infinitesimal, 12 digits left
_RATE = 0.1  # Adam's, on parameters of order one
_SPREAD = math.log(1e8)  # c of the starts is from its inverse to it
_HOMOGENEOUS = 1e-6  # largest change of ∇Ψ: scaling by powers of two leaves solvers their digits
_DEVIATIONS = 3.2905  # of the intervals: 99.9 % of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """A constant of Definition 3.1: what the theory states and what the search found."""

    stated: float
    """The theory's constant, an upper bound of the ratio at every point."""
    found: float
    """The ratio at the best point found, measured on fresh samples."""
    margin: float
    """Half the confidence interval, plus what the solver's gap and rounding can add."""
    point: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    """(S, L₁, L₂) of an α, (X, L, Y − X) of a β."""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval found ± margin."""
        return self.found - self.margin, self.found + self.margin

    @property
    def closeness(self) -> float:
        """found/stated: 1 where the theory's constant is attained."""
        return self.found / self.stated

    @property
    def holds(self) -> bool:
        """False where the whole interval lies above the stated constant: a refutation."""
        return self.interval[0] <= self.stated


@dataclass(frozen=True)
class AdmissibilitySearch:
    """Results of a search against each of the four properties of Definition 3.1."""

    alpha: Estimate
    """Upper stability."""
    beta: Estimate
    """Smoothness."""
    feasibility: float
    """The largest ‖∇Ψ‖_op over the points of the search; at most 1 up to rounding."""
    dominance: float
    """The smallest (Ψ − ‖S‖_* + margin)/Ψ over those points; at least 0."""
    inhomogeneity: float
    """The largest ‖∇Ψ(cS; c²Λ) − ∇Ψ(S; Λ)‖_F over those points and powers c of 2; of a random
    potential, its lower confidence limit."""

    @property
    def homogeneous(self) -> bool:
        """True if no point refutes ∇Ψ(cS; c²Λ) = ∇Ψ(S; Λ), which discounted games need."""
        return self.inhomogeneity <= _HOMOGENEOUS

    @property
    def holds(self) -> bool:
        """No point of the search refutes any of the four properties."""
        ball = self.feasibility <= 1 + 1e-9
        return self.alpha.holds and self.beta.holds and ball and self.dominance >= 0


def search_admissibility(
    potential: Potential,
    m: int,
    n: int,
    *,
    starts: int = 8,
    steps: int = 100,
    replicates: int = 128,
    seed: int = 0,
) -> AdmissibilitySearch:
    """Maximize the ratios of Definition 3.1 over m×n totals and their smoothings, in float64.

    The points of the search also test the homogeneity ∇Ψ(cS; c²Λ) = ∇Ψ(S; Λ).

    Args:
        potential: any but one without constants, such as `Nuclear`. One that is random says so
            (`is_random`), and `redrawn` gives it other samples.
        m: rows.
        n: columns.
        starts: random starting points, of many scales, for each of the two ratios (default 8).
        steps: of gradient ascent (default 100); each draws new samples.
        replicates: independent draws of the potential's samples in the final measurement, at least
            8 and a quarter of them to choose among the points (default 128; one if nothing is
            random). Intervals are of 99.9 % where their mean is normal.
        seed: of the starting points.
    """
    stated = potential.admissibility(_checks.count("m", m), _checks.count("n", n))
    if stated is None:
        raise ValueError(
            f"{potential} states no admissibility constants for {m}×{n} matrices, there is nothing "
            f"to search; pass a smooth potential, for Gaussian of width at least m+2"
        )
    _checks.count("starts", starts)
    _checks.count("replicates", replicates, minimum=8)  # a quarter has a standard deviation
    generator = torch.Generator().manual_seed(seed)
    stability, smoothness = (_Parameters.random(starts, m, n, generator) for _ in range(2))
    draws = map(potential.redrawn, itertools.count(1))
    measure = _Measurement(draws, replicates if potential.is_random else 1)
    stable = _ascend(_Stability.of, stability, draws, steps)
    smooth = _ascend(_Smoothness.of, smoothness, draws, steps)
    pairs = zip(smooth, smooth._replace(direction=-smooth.direction), strict=True)
    points = [_Stability.of(stability), stable, _Smoothness.of(smoothness), smooth]
    s, root = (torch.cat([getattr(p, name) for p in points]) for name in ("s", "root"))
    square = _square(root)
    value, margin = measure(lambda drawn: _value(drawn, s, root), share=0.25)
    return AdmissibilitySearch(
        alpha=_estimate(stable, stated.alpha, measure),
        beta=_estimate(_Smoothness(*map(torch.cat, pairs)), stated.beta, measure),
        feasibility=operator_norm(next(draws).gradient(s, square)).max().item(),
        dominance=((value - nuclear_norm(s) + margin) / value).min().item(),
        inhomogeneity=_inhomogeneity(s, square, measure),
    )


class _Parameters(NamedTuple):
    """Free parameters of a batch of points: three matrices and the log-scales of L, S and c."""

    total: Tensor
    """T, (b, m, n)."""
    factor: Tensor
    """A, (b, m, m)."""
    other: Tensor
    """(b, m, max(m, n)): the increment of L, or the direction in S."""
    scales: Tensor
    """(3, b, 1, 1)."""

    @classmethod
    def random(cls, batch: int, m: int, n: int, generator: torch.Generator) -> Self:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        matrices = normal(batch, m, n), normal(batch, m, m), normal(batch, m, max(m, n))
        unit = _SPREAD * torch.linspace(-1, 1, batch, dtype=torch.float64).reshape(1, -1, 1, 1)
        return cls(*matrices, torch.cat([2 * normal(2, batch, 1, 1), unit]))

    def placed(self, *, relative: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return S = c·e^scale T, L = c·aaᵀ, a = e^{scale/2}A and c.

        The scale of S is on top of that of L where `relative`.
        """
        root, total = self.scales[:2]
        total = root + total if relative else total
        unit, factor = self.scales[2].exp(), (root.clamp(max=_LARGEST) / 2).exp() * self.factor
        s = unit * total.clamp(max=_LARGEST).exp() * self.total
        return s, unit * factor @ factor.mT, factor, unit


class _Stability(NamedTuple):
    """Points (S, L₁, L₂) with 0 ⪯ L₁ ⪯ L₂ and Tr L₂ − Tr L₁ = c."""

    s: Tensor
    root: Tensor
    larger: Tensor
    unit: Tensor
    """c, (b,)."""

    @classmethod
    def of(cls, p: _Parameters) -> Self:
        s, root, _, unit = p.placed(relative=False)
        b = p.other / torch.linalg.matrix_norm(p.other, keepdim=True)
        return cls(s, root, root + unit * b @ b.mT, unit[..., 0, 0])

    def ratio(self, potential: Potential) -> Tensor:
        """Return (Ψ(S; L₂) − Ψ(S; L₁))/c, differentiable."""
        larger = potential.value_at_root(self.s, self.larger)
        return (larger - potential.value_at_root(self.s, self.root)) / self.unit

    def measured(self, potential: Potential) -> tuple[Tensor, Tensor]:
        """Return the ratio through the public functions, and a bound on its numerical error."""
        value, error = _value(potential, self.s, self.larger)
        below, its_error = _value(potential, self.s, self.root)
        return (value - below) / self.unit, (error + its_error) / self.unit


class _Smoothness(NamedTuple):
    """Points (X, L) and directions D with Tr DᵀL⁻¹D = c: D = cAE for L = cAAᵀ and ‖E‖_F = 1."""

    s: Tensor
    root: Tensor
    direction: Tensor
    unit: Tensor
    """c, (b,)."""

    @classmethod
    def of(cls, p: _Parameters) -> Self:
        s, root, factor, unit = p.placed(relative=True)
        e = p.other[..., : p.total.shape[-1]]
        e = e / torch.linalg.matrix_norm(e, keepdim=True)
        return cls(s, root, unit * factor @ e, unit[..., 0, 0])

    def ratio(self, potential: Potential) -> Tensor:
        """Return (Ψ(X+D) − 2Ψ(X) + Ψ(X−D))/c, differentiable.

        It is the mean of the ratio 2·Bregman(Y‖X) over Y = X ± D and tends to the Hessian form, so
        it has the same supremum; and its derivatives need no second derivative of Ψ.
        """
        ahead = potential.value_at_root(self.s + self.direction, self.root)
        behind = potential.value_at_root(self.s - self.direction, self.root)
        return (ahead + behind - 2 * potential.value_at_root(self.s, self.root)) / self.unit

    def measured(self, potential: Potential) -> tuple[Tensor, Tensor]:
        """Return 2·Bregman(X+D‖X)/c through the public functions, and a bound on its error."""
        ahead, error = _value(potential, self.s + self.direction, self.root)
        here, its_error = _value(potential, self.s, self.root)
        gradient = potential.gradient(self.s, _square(self.root))
        slope = (gradient * self.direction).sum((-2, -1))
        # ½‖X̂ − X‖²_L ≤ gap, and |⟨X̂ − X, D⟩| ≤ ‖X̂ − X‖_L·√(Tr DᵀL⁻¹D).
        drift = (2 * self.unit * _gap(potential, self.s, self.root)).sqrt()
        errors = 2 * (error + its_error + drift)
        return 2 * (ahead - here - slope) / self.unit, errors / self.unit


_P = TypeVar("_P", _Stability, _Smoothness)


class _Measurement(NamedTuple):
    """Means over independent draws of a potential, with the half-width of their interval."""

    draws: Iterator[Potential]
    replicates: int

    def __call__(
        self, of: Callable[[Potential], tuple[Tensor, Tensor]], share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the mean of `of` and its margin: sampling error and numerical error."""
        count = max(1, round(share * self.replicates))
        results = [of(next(self.draws)) for _ in range(count)]
        values = torch.stack([value for value, _ in results])
        error = torch.stack([error for _, error in results]).amax(0)
        if count == 1:
            return values[0], error
        return values.mean(0), error + _DEVIATIONS * values.std(0) / math.sqrt(count)


def _ascend(
    points: Callable[[_Parameters], _P], start: _Parameters, draws: Iterator[Potential], steps: int
) -> _P:
    """Climb by `steps` of Adam, with a rate that falls to zero as a cosine; return the points."""
    parameters = _Parameters(*(p.clone().requires_grad_() for p in start))
    optimizer = torch.optim.Adam(parameters, lr=_RATE, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        optimizer.zero_grad()
        points(parameters).ratio(next(draws)).sum().backward()
        for p in parameters:  # where a decomposition has no derivative, this step stays
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.nan_to_num(0.0, 0.0, 0.0)
        optimizer.step()
        schedule.step()
    return points(_Parameters(*(p.detach() for p in parameters)))


def _estimate(points: _Stability | _Smoothness, stated: float, measure: _Measurement) -> Estimate:
    """Choose the best point on some fresh samples, then measure it on others."""
    ratio, margin = measure(points.measured, share=0.25)
    index = int((ratio - margin).argmax())
    best = type(points)(*(part[index] for part in points))
    ratio, margin = measure(best.measured)
    return Estimate(stated, ratio.item(), margin.item(), tuple(best[:3]))


def _inhomogeneity(s: Tensor, square: Tensor, measure: _Measurement) -> float:
    """Return the largest ‖∇Ψ(cS; c²Λ) − ∇Ψ(S; Λ)‖_F over the points, c from 2⁻²⁰ to 2²⁰.

    Of each difference the part along that of one draw is measured on others.
    """
    c = 2.0 ** torch.linspace(-20, 20, len(s), dtype=s.dtype).round()[:, None, None]

    def difference(potential: Potential) -> Tensor:
        return potential.gradient(c * s, c**2 * square) - potential.gradient(s, square)

    first = difference(next(measure.draws))
    direction = first / torch.linalg.matrix_norm(first, keepdim=True).clamp(min=1e-300)

    def along(potential: Potential) -> tuple[Tensor, Tensor]:
        size = (difference(potential) * direction).sum((-2, -1))
        return size, torch.zeros_like(size)

    size, margin = measure(along, share=0.25)
    return (size - margin).max().item()


def _value(potential: Potential, s: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return Ψ(S; L²), and what the solver's gap and rounding can take from it or add to it."""
    value = potential.value(s, _square(root))
    rounding = 32 * sum(s.shape[-2:]) * torch.finfo(s.dtype).eps * value
    return value, rounding + _gap(potential, s, root)


def _gap(potential: Potential, s: Tensor, root: Tensor) -> Tensor:
    if isinstance(potential, Regularized):
        return potential.solve(s, _square(root)).gap
    return s.new_zeros(s.shape[:-2])


def _square(root: Tensor) -> Tensor:
    """Return Λ = L², symmetric to the last bit."""
    square = root @ root
    return (square + square.mT) / 2
