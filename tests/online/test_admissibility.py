"""The search: it must reach what is attained, exceed nothing that is true, refute what is false."""

import math

import pytest
import torch
from torch import Tensor

from nucleon.online import admissibility
from nucleon.online.admissibility import AdmissibilitySearch, search_admissibility
from nucleon.online.potentials import (
    Admissibility,
    Gaussian,
    Hyperbolic,
    Nuclear,
    Potential,
    Regularized,
)

F64 = torch.float64


def check(found: AdmissibilitySearch) -> None:
    assert found.alpha.holds and found.beta.holds and found.holds
    assert found.feasibility <= 1 + 1e-9
    assert found.dominance >= 0
    assert found.homogeneous


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (3, 2)])
def test_regularized_attains_one_half_and_one(shape: tuple[int, int]) -> None:
    """If ‖L⁻¹S‖_op ≤ 1, Ψ = ½Tr SᵀL⁻¹S + ½Tr L: β is attained there, α at S = 0."""
    found = search_admissibility(Regularized(), *shape, starts=4, steps=25)
    check(found)
    assert found.alpha.closeness >= 0.99
    assert found.beta.closeness >= 1 - 1e-6
    assert found.alpha.margin < 1e-6 and found.beta.margin < 1e-3


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 3), (4, 2)])
def test_hyperbolic_comes_close_to_one_and_one(shape: tuple[int, int]) -> None:
    """At S = 0 the stability ratio is 1, and the Hessian form is Tr DᵀL⁻¹D."""
    found = search_admissibility(Hyperbolic(), *shape)
    check(found)
    assert found.alpha.closeness >= 0.999
    assert found.beta.closeness >= 0.995


@pytest.mark.parametrize("n", [3, 5])
def test_gaussian_finds_the_closed_form_of_a_single_row(n: int) -> None:
    """At S = 0 the ratios are E|z| and (1 − 1/n)E[1/|z|] for z normal in n dimensions."""
    found = search_admissibility(Gaussian(), 1, n)
    check(found)
    chi = math.sqrt(2) * math.gamma((n + 1) / 2) / math.gamma(n / 2)
    inverse = math.gamma((n - 1) / 2) / (math.sqrt(2) * math.gamma(n / 2))
    # The ratio is largest at S = 0; ascent with noisy gradients ends within a few percent of it.
    for estimate, exact in ((found.alpha, chi), (found.beta, (1 - 1 / n) * inverse)):
        assert 0.93 * exact <= estimate.interval[1]
        assert estimate.interval[0] <= exact


class Altered(Potential):
    """A multiple of a potential, with constants of its own."""

    def __init__(self, base: Potential, stated: Admissibility, factor: float = 1.0) -> None:
        self.base, self.stated, self.factor = base, stated, factor

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return self.factor * self.base.value(s, smoothing)

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return self.factor * self.base.gradient(s, smoothing)

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        return self.factor * self.base.value_at_root(s, root)

    def admissibility(self, m: int, n: int) -> Admissibility:
        return self.stated


def test_constants_one_percent_too_small_are_refuted() -> None:
    found = search_admissibility(Altered(Hyperbolic(), Admissibility(0.99, 1.0)), 2, 4)
    assert not found.alpha.holds and found.beta.holds and not found.holds
    found = search_admissibility(Altered(Hyperbolic(), Admissibility(1.0, 0.99)), 2, 4)
    assert found.alpha.holds and not found.beta.holds and not found.holds


def test_lost_dominance_and_feasibility_are_seen() -> None:
    stated = Admissibility(2.0, 2.0)
    half, twice = (Altered(Hyperbolic(), stated, factor) for factor in (0.5, 2.0))
    found = search_admissibility(half, 2, 4, starts=4, steps=10)
    assert found.dominance < 0 and found.feasibility <= 0.5 + 1e-9 and not found.holds
    found = search_admissibility(twice, 2, 4, starts=4, steps=10)
    assert found.dominance > 0 and found.feasibility > 1 and not found.holds


class Damped(Altered):
    """The hyperbolic potential at L²/(L + 10⁻⁶), for one row: β = 1 + 10⁻⁶/L, without a bound."""

    def root(self, root: Tensor) -> Tensor:
        return root.square() / (root + 1e-6)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return self.value_at_root(s, smoothing.sqrt())

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        return self.base.value_at_root(s, self.root(root))

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return self.base.gradient(s, self.root(smoothing.sqrt()).square())


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_lost_at_small_smoothings_is_refuted(seed: int) -> None:
    """If Λ is large beside 10⁻¹², the ratios are those of (1, 1)."""
    result = search_admissibility(Damped(Hyperbolic(), Admissibility(1.0, 1.0)), 1, 3, seed=seed)
    assert result.alpha.holds and not result.beta.holds and not result.holds
    assert result.beta.found > 2
    assert result.inhomogeneity > 1e-3 and not result.homogeneous


def points(kind: str, m: int = 3, n: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    parameters = admissibility._Parameters.random(6, m, n, generator)
    made = admissibility._Stability if kind == "stability" else admissibility._Smoothness
    return made.of(parameters)


def test_the_points_of_the_search_satisfy_the_definition() -> None:
    _, lower, upper, unit = points("stability")
    assert unit.max() / unit.min() > 1e15
    eigenvalues = torch.linalg.eigvalsh(torch.stack([lower, upper - lower]))
    assert (eigenvalues > -1e-12 * torch.linalg.matrix_norm(upper, ord=2)[:, None]).all()
    traces = (upper - lower).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(traces / unit, torch.ones(6, dtype=F64), rtol=0, atol=1e-10)
    _, root, d, unit = points("smoothness")
    quadratic = (d * torch.linalg.solve(root, d)).sum((-2, -1))
    torch.testing.assert_close(quadratic, unit, rtol=1e-8, atol=0)


@pytest.mark.parametrize("potential", [Regularized(tolerance=1e-12), Hyperbolic()])
@pytest.mark.parametrize("kind", ["stability", "smoothness"])
def test_ascent_and_measurement_agree(potential: Potential, kind: str) -> None:
    """The searched ratio is the mean of the measured one over both directions."""
    made = points(kind)
    both = [made, made._replace(direction=-made.direction)] if kind == "smoothness" else [made]
    measured = [one.measured(potential) for one in both]
    mean = torch.stack([ratio for ratio, _ in measured]).mean(0)
    error = torch.stack([error for _, error in measured]).amax(0)
    assert ((made.ratio(potential) - mean).abs() <= error).all()


def test_the_search_repeats_itself() -> None:
    options = {"starts": 2, "steps": 5, "replicates": 8}
    one, two = (search_admissibility(Gaussian(), 2, 4, **options) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("potential", [Nuclear(), Gaussian(width=3)])
def test_a_potential_without_constants_is_refused(potential: Potential) -> None:
    with pytest.raises(ValueError, match="states no admissibility constants for 3×3"):
        search_admissibility(potential, 3, 3)


@pytest.mark.parametrize("option", [{"starts": 0}, {"m": 0}, {"replicates": 1}])
def test_bad_options_are_named(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} must"):
        search_admissibility(Hyperbolic(), **{"m": 2, "n": 4, **option})  # type: ignore[arg-type]


class Sampled(Potential):
    """The Gaussian potential with a seed of its own, as a plain class with no value_at_root."""

    is_random = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def redrawn(self, draw: int) -> "Sampled":
        return Sampled(self.seed + draw)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return Gaussian(seed=self.seed).value(s, smoothing)

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        return Gaussian(seed=self.seed).gradient(s, smoothing)

    def admissibility(self, m: int, n: int) -> Admissibility | None:
        return Gaussian().admissibility(m, n)


def test_a_random_potential_is_measured_with_its_interval() -> None:
    options = {"starts": 2, "steps": 4, "replicates": 32}
    found = search_admissibility(Sampled(), 1, 3, **options)
    check(found)
    # 8 and 32 replicates of 16 samples of a number near one: hundredths, not 1e-13.
    assert 1e-3 < found.alpha.margin < 0.5 and 1e-3 < found.beta.margin < 1
