"""Follow the perturbed leader: GBPA with Gaussian smoothing, on matrices and on vectors.

    X_{t+1} = −D·E polar([S_t 0] + LZ)'s leading block,  LLᵀ = Λ_t           (Theorem 4.1)
    x_{t+1} = −D·E[(s_t + ℓ_tu)/‖s_t + ℓ_tu‖],  u ~ N(0, I_d),  ℓ_t = √Λ_t

The second is the first on a row without padding (Abernethy et al. 2016). Its mean is along s with
a length that depends on κ = ‖s‖/ℓ alone,

    √(2/π)·κ·∫_0^{π/2} exp(−κ²sin²θ/2) cos^dθ dθ

(Kummer's function ₁F₁(½; d/2+1; −κ²/2) by its integral). So it needs no sampling: the learner that
plays it is deterministic, and its bound holds against every stream.
"""

import math
from functools import cache
from typing import ClassVar, Unpack, final

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.polar import Method as PolarMethod
from nucleon.online import theory
from nucleon.online.learners.base import dimension_of
from nucleon.online.learners.gbpa import GBPA, GameOptions
from nucleon.online.potentials import Admissibility, Gaussian
from nucleon.online.regret import Shape

_NODES = 64
_TAIL = 12.0  # e^(−72) of the integrand's peak is left out beyond so many deviations


@final
class FTPL(GBPA):
    """Follow the perturbed leader: X_{t+1} = −D·mean of polar([S_t 0] + LZ)'s leading block.

    The theorem is on the mean over Z against gradients fixed before Z is drawn. Against gradients
    that answer the sampled actions the regret is linear in T: `certificate(delta=δ)` adds as much
    to the bound, `certificate()` refuses, and with `redraw=False` both refuse.

    Args:
        samples: draws of Z per round (default 16).
        seed: of the noise, a function of (seed, stream, round, sample) alone (default 0).
        stream: identity of the (first) game in the noise, each has its own (default 0).
        redraw: a new Z every round; False keeps one for the whole game (default True).
        antithetic: draw Z in pairs Z, −Z; needs an even number of samples (default False).
        width: n′ of the perturbed matrix; None is max(n, 2m, m+2), see `potentials.Gaussian`.
        method: of the polar factors (default "svd").
    """

    name: ClassVar[str] = "ftpl"
    theorem: ClassVar[str] = "Theorem 3.2 with the constants of Theorem 4.1"
    potential: Gaussian

    def __init__(
        self,
        shape: Shape,
        *,
        samples: int = 16,
        seed: int = 0,
        stream: int = 0,
        redraw: bool = True,
        antithetic: bool = False,
        width: int | None = None,
        method: PolarMethod = "svd",
        **options: Unpack[GameOptions],
    ) -> None:
        super().__init__(shape, Gaussian(samples, seed, antithetic, width, method), **options)
        self.stream = _checks.count("stream", stream, minimum=0)
        self.redraw = redraw

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        step = self.rounds if self.redraw else 0
        return self.potential.gradient(total, smoothing, step=step, stream=self.stream)

    @property
    def samples_drawn(self) -> int:
        """Independent samples that an action is the mean of: antithetic pairs count once."""
        return self.potential.samples // (2 if self.potential.antithetic else 1)

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret of a game; None where one does."""
        if self.constants is None:
            return "the perturbed matrix needs at least m+2 columns; pass a larger width"
        if not self.redraw and not oblivious:
            return "one draw of noise serves all rounds, and the gradients may depend on it"
        return super().refusal(oblivious=oblivious, delta=delta)


@final
class GaussianFTPL(GBPA):
    """x_{t+1} = −D·E[(s_t + ℓ_tu)/‖s_t + ℓ_tu‖], without sampling.

    Matrix FTPL on a row without padding, with the exact constants α = E‖u‖, β = E‖u‖⁻¹ in place of
    Theorem 4.1's.

    Args:
        shape: (1, d) or (d, 1) with d ≥ 2, or (b, 1, d) for b games at once.
        options: see `GameOptions`; `gradient_bound` is G ≥ ‖g_t‖₂.
    """

    name: ClassVar[str] = "gaussian-ftpl"
    theorem: ClassVar[str] = "Theorem 3.2 with m = 1 and Gaussian smoothing of the ℓ2 norm"

    def __init__(self, shape: Shape, **options: Unpack[GameOptions]) -> None:
        dimension = dimension_of(shape)
        constants = Admissibility(*theory.gaussian_ftpl_constants(dimension))
        if options.get("eta") is None:
            options["eta"] = constants.eta
        super().__init__(shape, Gaussian(width=dimension), **options)
        self.constants = constants

    @property
    def is_random(self) -> bool:
        """False: it plays the mean."""
        return False

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
        length = mean_cosine(norm / smoothing.sqrt(), total.shape[-1])
        return total * torch.where(norm > 0, length / norm, 0.0)


def mean_cosine(ratio: Tensor, dimension: int) -> Tensor:
    """Return the length of E[(s + u)/‖s + u‖], u ~ N(0, I), for ratio = ‖s‖ ≥ 0 of any shape.

    Gauss–Legendre over the part of the integrand above e^(−72): (1 − x²)^{d/2} ≤ e^{−dx²/2} makes
    it at most exp(−(κ² + d)x²/2) at x = sin θ.
    """
    nodes, weights = (v.to(ratio.device) for v in _gauss_legendre())
    end = (_TAIL / (ratio.square() + dimension).sqrt()).clamp(max=1.0).asin().unsqueeze(-1)
    angle = end * (nodes + 1) / 2
    exponent = -0.5 * (ratio.unsqueeze(-1) * angle.sin()).square()
    integral = (exponent.exp() * angle.cos() ** dimension * weights).sum(-1)
    return math.sqrt(2 / math.pi) * ratio * integral * end.squeeze(-1) / 2


@cache
def _gauss_legendre() -> tuple[Tensor, Tensor]:
    """Return nodes and weights on [−1, 1], from the Jacobi matrix (Golub and Welsch 1969)."""
    k = torch.arange(1, _NODES, dtype=torch.float64, device="cpu")
    off = (k / (4 * k**2 - 1).sqrt()).diag(1)
    nodes, vectors = torch.linalg.eigh(off + off.mT)
    return nodes, 2 * vectors[0].square()
