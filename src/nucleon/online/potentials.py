"""Smoothings Ψ(S; Λ) of the nuclear norm: their values, gradients and admissibility constants.

Each potential takes the total S (…, m, n), wide or tall, and the smoothing Λ = LLᵀ, an m×m matrix
on the rows of S that broadcasts over the batch. Its gradient lies in the ball ‖X‖_op ≤ 1: it is the
negative of an action.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, final, get_args

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.certificate import Admissibility, ftpl_constants, padded_width
from nucleon.linalg.augmented import METHODS as AUGMENTED_METHODS
from nucleon.linalg.augmented import AugmentedMethod, augmented_polar
from nucleon.linalg.polar import METHODS as POLAR_METHODS
from nucleon.linalg.polar import Method as PolarMethod
from nucleon.linalg.polar import polar
from nucleon.linalg.projections import QuadraticSolution, Solver, quadratic_projection
from nucleon.linalg.roots import cholesky_root, psd_eigh


class Potential(ABC):
    """A smoothing Ψ(S; Λ) ≥ ‖S‖_* of the nuclear norm, with equality at Λ = 0.

    A subclass defines `value`, `gradient` and `admissibility`; all else has a default.
    `nucleon.online.learners.GBPA` plays it.
    """

    homogeneous: ClassVar[bool] = False
    """True declares ∇Ψ(cS; c²Λ) = ∇Ψ(S; Λ) for c > 0. Definition 3.1 does not imply it, and the
    bound of a discounted game needs it: without the declaration it names this as a condition."""

    @abstractmethod
    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return Ψ(S; Λ), shape (…), differentiable in `s`."""

    @abstractmethod
    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return ∇Ψ(S; Λ), the derivative of `value` in S: (…, m, n) with operator norm ≤ 1."""

    @abstractmethod
    def admissibility(self, m: int, n: int) -> Admissibility | None:
        """Return (α, β) for m×n matrices; None where the potential is not admissible."""

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Return Ψ(S; L²) for a symmetric root L ⪰ 0, differentiable in both where `value` is.

        Definition 3.1 speaks of L, and `search_admissibility` ascends in it. Override this where
        `value` decomposes Λ: repeated eigenvalues have no derivative.
        """
        square = root @ root
        return self.value(s, (square + square.mT) / 2)

    @property
    def is_random(self) -> bool:
        """True if `value` and `gradient` are estimates from samples (default False)."""
        return False

    def redrawn(self, draw: int) -> "Potential":
        """Return the potential with other samples for each number `draw`.

        The default is this one, which is right where nothing is random and where every call draws.
        """
        return self

    def options(self) -> dict[str, Any]:
        """Return its attributes as plain values; they distinguish it within its class."""
        plain = (bool, int, float, str, type(None))
        return {
            name: value if isinstance(value, plain) else repr(value)
            for name, value in getattr(self, "__dict__", {}).items()
        }


@final
@dataclass(frozen=True)
class Nuclear(Potential):
    """The nuclear norm itself, Ψ = ‖S‖_* and ∇Ψ = polar(S): the smoothing is checked, then ignored.

    Args:
        method: of the polar factor (default `"svd"`).
    """

    homogeneous: ClassVar[bool] = True
    method: PolarMethod = "svd"

    def __post_init__(self) -> None:
        _checks.choice("method", self.method, POLAR_METHODS)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return ‖S‖_*."""
        _check(s, smoothing)
        return _nuclear_norm(s)

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return polar(S), and 0 for S = 0."""
        _check(s, smoothing)
        return polar(s, method=self.method)

    def admissibility(self, m: int, n: int) -> None:
        """Return None: the nuclear norm is not smooth, and FTL's regret is linear."""

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Return ‖S‖_* whatever the root."""
        return _nuclear_norm(s)


@final
@dataclass(frozen=True)
class Regularized(Potential):
    """Ψ = max_{‖X‖_op ≤ 1} ⟨S,X⟩ − ½Tr XᵀLX + ½Tr L with L = Λ^(1/2); ∇Ψ is the maximizer.

    The maximum comes from a solver that stops at a duality gap, so `value` may lie below Ψ, and
    `gradient` be suboptimal, by that gap; `solve` returns it.

    Args:
        solver: of the quadratic projection (default `"douglas-rachford"`, the fastest on
            ill-conditioned smoothings; the paper names the other two).
        tolerance: on the gap relative to the maximum of ⟨S,X⟩ − ½Tr XᵀLX (default 1e-8).
        max_iterations: of the solver (default 5000).
    """

    homogeneous: ClassVar[bool] = True
    solver: Solver = "douglas-rachford"
    tolerance: float = 1e-8
    max_iterations: int = 5000

    def __post_init__(self) -> None:
        _checks.choice("solver", self.solver, get_args(Solver))
        _checks.positive("tolerance", self.tolerance)
        _checks.count("max_iterations", self.max_iterations)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return the maximum, up to the solver's gap."""
        _check(s, smoothing)
        return self.value_at_root(s.double(), _symmetric_root(smoothing)).to(s.dtype)

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return the maximizer, up to the solver's gap."""
        return self.solve(s, smoothing).x

    def admissibility(self, m: int, n: int) -> Admissibility:
        """Return (½, 1), Proposition 3.3: no smoothing has a smaller αβ."""
        return Admissibility(0.5, 1.0)

    def solve(self, s: Tensor, smoothing: Tensor, start: Tensor | None = None) -> QuadraticSolution:
        """Return the maximizer with its gap and iterations; `value` is −max, of the minimization.

        Args:
            s: the total S, (…, m, n).
            smoothing: Λ, (…, m, m).
            start: a first guess (…, m, n), such as the previous maximizer.
        """
        _check(s, smoothing)
        guess = None if start is None else start.double()
        solution = self._solve(s.double(), _symmetric_root(smoothing), guess)
        return replace(solution, x=solution.x.to(s.dtype))

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Return the maximum; by the envelope theorem its maximizer is constant in derivatives."""
        x = self._solve(s.detach(), root.detach(), None).x
        trace = root.diagonal(dim1=-2, dim2=-1).sum(-1)
        return ((s - root @ x / 2) * x).sum((-2, -1)) + trace / 2

    def _solve(self, s: Tensor, root: Tensor, start: Tensor | None) -> QuadraticSolution:
        solution = quadratic_projection(
            -s,
            root,
            solver=self.solver,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            start=start,
        )
        if not solution.converged.all():
            warnings.warn(
                f"the quadratic projection stopped after {self.max_iterations} iterations at a "
                f"relative gap of {solution.relative_gap.max().item():.3g}, above the tolerance "
                f"{self.tolerance:g}; raise max_iterations, or take the gap from solve()",
                stacklevel=3,
            )
        return solution


@final
@dataclass(frozen=True)
class Gaussian(Potential):
    """Ψ = E‖[S 0] + LZ‖_* over Gaussian Z (m×n′), L = chol(Λ); ∇Ψ = leading m×n block of E polar.

    The zero columns change no nuclear norm, and make the theorem, which needs n′ ≥ m+2, hold for
    square and tall matrices too. The expectation is a mean over samples, so `value` and `gradient`
    are estimates with an error of order 1/√samples; with equal (seed, stream, step) the second is
    the exact derivative of the first. `antithetic` makes Ψ ≥ ‖S‖_* hold for the estimate too.

    Args:
        samples: draws of Z to average over (default 16).
        seed: of the noise, which is a function of (seed, stream, step, sample) alone (default 0).
        antithetic: draw Z in pairs Z, −Z; needs an even number of samples (default False).
        width: n′ ≥ n; None is max(n, 2m, m+2), where the theorem's dimensional factor
            (n′/(n′−m−1))^¼ is at most √2. A larger one brings αβ to 1 as 1 + √(m/n′) does, at a
            cost proportional to n′; `width=n` is the paper's potential without padding.
        method: of the polar factors (default `"svd"`).
    """

    homogeneous: ClassVar[bool] = True
    samples: int = 16
    seed: int = 0
    antithetic: bool = False
    width: int | None = None
    method: PolarMethod = "svd"

    def __post_init__(self) -> None:
        _checks.count("samples", self.samples)
        if self.antithetic and self.samples % 2:
            raise ValueError(
                f"antithetic samples come in pairs, got samples={self.samples}; "
                f"pass samples={self.samples + 1} or antithetic=False"
            )
        if self.width is not None:
            _checks.count("width", self.width)
        _checks.choice("method", self.method, POLAR_METHODS)

    def padded_width(self, m: int, n: int) -> int:
        """Return the width n′ of the perturbed matrix for m×n totals."""
        if self.width is None:
            return padded_width(m, n)
        if self.width < n:
            raise ValueError(
                f"width must be at least the number of columns {n}, got {self.width}; "
                f"pass None for max(n, 2m, m+2)"
            )
        return self.width

    def value(
        self, s: Tensor, smoothing: Tensor, *, step: int = 0, stream: int | Tensor = 0
    ) -> Tensor:
        """Return the mean of ‖[S 0] + LZ‖_* over the samples; arguments as for `gradient`."""
        perturbed = self._perturbed(s, self._checked_root(s, smoothing), step, stream)
        return _nuclear_norm(perturbed).mean(0).to(s.dtype)

    def gradient(
        self, s: Tensor, smoothing: Tensor, *, step: int = 0, stream: int | Tensor = 0
    ) -> Tensor:
        """Return the mean of the leading m×n block of polar([S 0] + LZ) over the samples.

        Args:
            s: the total S, (…, m, n).
            smoothing: Λ, (…, m, m).
            step: the round; each has its own noise (default 0).
            stream: identity of the game; a tensor gives one to each matrix of the batch, an integer
                numbers them from there in row-major order (default 0).
        """
        perturbed = self._perturbed(s, self._checked_root(s, smoothing), step, stream)
        directions = polar(perturbed, method=self.method)
        return directions[..., : s.shape[-1]].mean(0).to(s.dtype)

    def admissibility(self, m: int, n: int) -> Admissibility | None:
        """Return (√m+√n′, 1/√(n′−m−1)), Theorem 4.1 at the padded width; None where n′ < m+2."""
        width = self.padded_width(m, n)
        if width < m + 2:
            return None
        return Admissibility(*ftpl_constants(m, width))

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Return the mean of ‖[S 0] + LZ‖_* over the samples: LZ and chol(L²)Z have one law."""
        return _nuclear_norm(self._perturbed(s, root, step=0, stream=0)).mean(0)

    @property
    def is_random(self) -> bool:
        """True: the expectation is a mean over samples."""
        return True

    def redrawn(self, draw: int) -> "Gaussian":
        """Return the potential with another seed, a hash of this one and the number."""
        return replace(self, seed=noise.derived_seed(self.seed, draw))

    def _perturbed(self, s: Tensor, root: Tensor, step: int, stream: int | Tensor) -> Tensor:
        """Return the matrices [S 0] + LZ, (samples, …, m, n′), in the working dtype."""
        batch, (m, n) = s.shape[:-2], s.shape[-2:]
        width = self.padded_width(m, n)
        if batch and not (isinstance(stream, Tensor) and stream.ndim):
            stream = stream + torch.arange(batch.numel(), device=s.device).reshape(batch)
        draws = self.samples // 2 if self.antithetic else self.samples
        z = noise.normal(
            (draws, *batch, m, width),
            seed=self.seed,
            stream=stream,
            step=step,
            sample=torch.arange(draws, device=s.device).reshape(-1, *(1 for _ in batch)),
            dtype=root.dtype,
            device=s.device,
        )
        perturbation = root @ z
        if self.antithetic:
            perturbation = torch.cat([perturbation, -perturbation])
        return torch.nn.functional.pad(s.to(root.dtype), (0, width - n)) + perturbation

    def _checked_root(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return a root of Λ in the working dtype: Cholesky's, or `eigh`'s where that fails."""
        _check(s, smoothing)
        root, failed = cholesky_root(smoothing.to(_checks.work_dtype(s.dtype)))
        if not failed.any():
            return root
        values, vectors = psd_eigh(smoothing.double())
        other = (vectors * values.sqrt().unsqueeze(-2)).to(root.dtype)
        return torch.where(failed[..., None, None], other, root)


@final
@dataclass(frozen=True)
class Hyperbolic(Potential):
    """Ψ = Tr √(SSᵀ + Λ) = ‖[S L]‖_* and ∇Ψ = (SSᵀ + Λ)^(-1/2) S, the augmented polar factor.

    `value` takes singular values of [S L] in float64: its relative error is of order eps at any
    condition number, where the eigenvalues of SSᵀ + Λ lose half of the digits. At Λ = ε²I it is
    Σ√(σ² + ε²), and its gradient the regularized polar factor of arXiv 2605.23871.

    Args:
        method: of the augmented polar factor (default `"eigh"`).
    """

    homogeneous: ClassVar[bool] = True
    method: AugmentedMethod = "eigh"

    def __post_init__(self) -> None:
        _checks.choice("method", self.method, AUGMENTED_METHODS)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return Tr √(SSᵀ + Λ)."""
        _check(s, smoothing)
        return self.value_at_root(s.double(), _symmetric_root(smoothing)).to(s.dtype)

    def gradient(self, s: Tensor, smoothing: Tensor) -> Tensor:
        """Return (SSᵀ + Λ)^(-1/2) S."""
        return augmented_polar(s, smoothing, method=self.method)

    def admissibility(self, m: int, n: int) -> Admissibility:
        """Return (1, 1), Theorem 4.2."""
        return Admissibility(1.0, 1.0)

    def value_at_root(self, s: Tensor, root: Tensor) -> Tensor:
        """Return ‖[S L]‖_*."""
        return _nuclear_norm(torch.cat([s, root.expand(*s.shape[:-1], s.shape[-2])], dim=-1))


POTENTIALS: Mapping[str, type[Potential]] = MappingProxyType(
    {potential.__name__: potential for potential in (Nuclear, Regularized, Gaussian, Hyperbolic)}
)
"""Every potential of the paper by the name that the command line uses."""


def _symmetric_root(smoothing: Tensor) -> Tensor:
    """Return Λ^(1/2) in float64."""
    values, vectors = psd_eigh(smoothing.double())
    return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT


def _nuclear_norm(x: Tensor) -> Tensor:
    """Return ‖X‖_* without the exact rescaling of `linalg`, which autograd cannot follow."""
    return torch.linalg.svdvals(x.to(_checks.work_dtype(x.dtype))).sum(-1).to(x.dtype)


def _check(s: Tensor, smoothing: Tensor) -> None:
    _checks.matrix("s", s)
    _checks.acting_on("smoothing", smoothing, s)
