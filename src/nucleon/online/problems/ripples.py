"""Robust matrix sensing with nonconvex ripples (Appendix H), many instances at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import noise

DEPTH, FREQUENCY, MINIMUM = 0.9, 3.0, 0.5

_NOISE_SEED = 0x726970706C6573  # apart from Pion's noise, which users also seed from 0 up
_MEASUREMENTS, _START = 0, 1


@dataclass(frozen=True, eq=False)
class Ripples:
    """f(X) = ½ + mean over k of |r_k|·(1 − 0.9 cos 3r_k), with the residuals r_k = ⟨A_k, X⟩.

    A V-shaped valley with a kink at every r_k = 0 and ripples all over it. The minimum is ½, at
    X = 0 and wherever all residuals vanish. All methods are plain torch, so autograd works too.

    Args:
        measurements: the matrices A_k, (…, k, m, n); leading dimensions are separate instances.
    """

    measurements: Tensor

    def value(self, x: Tensor) -> Tensor:
        """Return f(X) of each instance: (…, m, n) → (…)."""
        residual = self.residuals(x)
        return (residual.abs() * (1 - DEPTH * torch.cos(FREQUENCY * residual))).mean(-1) + MINIMUM

    def gradient(self, x: Tensor) -> Tensor:
        """Return ∇f(X) of each instance; at a kink the subgradient that takes sign(0) = 0.

        ∇f = mean over k of (sign(r_k)·(1 − 0.9 cos 3r_k) + 2.7 |r_k| sin 3r_k)·A_k
        """
        residual = self.residuals(x)
        phase = FREQUENCY * residual
        slope = residual.sign() * (1 - DEPTH * torch.cos(phase))
        slope = slope + DEPTH * FREQUENCY * residual.abs() * torch.sin(phase)
        count, rows, columns = self.measurements.shape[-3:]
        total = torch.einsum("...k,...ke->...e", slope, self.measurements.flatten(-2))  # (…, mn)
        return total.unflatten(-1, (rows, columns)) / count

    def residuals(self, x: Tensor) -> Tensor:
        """Return r_k = ⟨A_k, X⟩ of each instance: (…, m, n) → (…, k)."""
        # Unlike matmul, einsum copies no measurements when x has more leading dimensions.
        return torch.einsum("...ke,...e->...k", self.measurements.flatten(-2), x.flatten(-2))


def random_ripples(
    seeds: Sequence[int], *, shape: tuple[int, int] = (20, 20), measurements: int = 100
) -> Ripples:
    """Return an instance for each seed, with independent standard normal measurements, float64.

    An instance is a function of its seed alone, whatever the others are.

    Args:
        seeds: one integer an instance.
        shape: of X; the paper's is 20×20 (default).
        measurements: how many; the paper has 100 (default).
    """
    return Ripples(_normal(seeds, (measurements, *shape), _MEASUREMENTS))


def random_start(seeds: Sequence[int], *, shape: tuple[int, int] = (20, 20)) -> Tensor:
    """Return standard normal matrices (i, m, n), one for each seed, float64."""
    return _normal(seeds, shape, _START)


def _normal(seeds: Sequence[int], shape: tuple[int, ...], step: int) -> Tensor:
    """Return noise of `shape` for each seed, a stream of its own."""
    size, stream = (len(seeds), *shape), torch.tensor(list(seeds), dtype=torch.int64)
    return noise.normal(size, seed=_NOISE_SEED, stream=stream, step=step, dtype=torch.float64)
