"""Pion: the O2NC optimizer of FTPL (Algorithm 2), Muon with a perturbed direction.

An unrelated optimizer of the same name exists (arXiv 2605.12492).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.optim.base import MatrixOptimizer, Situation
from nucleon.optim.methods import check_method
from nucleon.optim.muon import POLAR_METHODS, PolarMethod, polar_direction
from nucleon.optim.options import Options
from nucleon.potentials import Admissibility, Gaussian, cholesky_root


@final
class Pion(MatrixOptimizer):
    """P = mean over k draws of polar([Ĝ 0] + LZ)'s leading block, LLᵀ = Λ = c(G²β₁⁻²I + M̂).

    L is Cholesky's factor of Λ + δ·diag Λ, δ = 8m·eps, so that a singular Λ has one too. The noise
    Z is a function of (seed, parameter, step, sample) alone.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, or groups of them.
        lr: learning rate, a number or a one-element tensor (0.02, usual in practice; the theory's
            is its radius D, see `plan`).
        momentum: β₁ of Ĝ ← β₁Ĝ + G (0.95, usual in practice; the theory's is its discount γ).
        beta2: β₂ of M̂ ← β₂M̂ + GGᵀ; None is β₁² at every step, the theory's (None).
        smoothing_scale: c. "theory" is 1/η² = β/α of the Gaussian smoothing, with Ĝ padded by zero
            columns to the width max(n, 2m, m+2) where that holds (default); "literal" is 1 without
            padding, Algorithm 2 as printed, whose noise is about n^¼·(n−m)^¼ times larger; or a
            number, with the padding.
        gradient_bound: G ≥ ‖G_t‖_op; the theorem needs it, 0 is Algorithm 2 as printed (0.0).
        samples: k (1, the cheapest; the theorem takes the mean over infinitely many).
        antithetic: draw Z in pairs Z, −Z; needs an even k (False, as printed).
        method: of the polar factors, as for `Muon` ("auto").
        options: see `nucleon.optim.Options`.
    """

    name: ClassVar[str] = "pion"
    has_gram: ClassVar[bool] = True
    has_gram_form: ClassVar[bool] = False
    theorem: ClassVar[str] = "Theorem 3.2 with the constants of Theorem 4.1, discounted"
    uncertified: ClassVar[str | None] = "the gradients of a run depend on the noise that was drawn"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        *,
        beta2: float | None = None,
        smoothing_scale: float | Literal["theory", "literal"] = "theory",
        gradient_bound: float = 0.0,
        samples: int = 1,
        antithetic: bool = False,
        method: PolarMethod = "auto",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            options,
            lr=lr,
            momentum=momentum,
            beta2=beta2,
            smoothing_scale=smoothing_scale,
            gradient_bound=gradient_bound,
            samples=samples,
            antithetic=antithetic,
            method=method,
        )

    def _check_options(self, group: Mapping[str, Any]) -> None:
        check_method(group, POLAR_METHODS)
        if isinstance(group["smoothing_scale"], str):
            _checks.choice("smoothing_scale", group["smoothing_scale"], ("theory", "literal"))
        else:
            _checks.nonnegative("smoothing_scale", group["smoothing_scale"])
        Gaussian(samples=group["samples"], antithetic=group["antithetic"])  # checks the pair

    def admissibility(self, group: Mapping[str, Any], m: int, n: int) -> Admissibility | None:
        """Theorem 4.1 at the padded width; None as printed, where that is below m+2."""
        width = perturbation(group["smoothing_scale"], m, n)[1]
        return Gaussian(width=width).admissibility(m, n)

    def smoothing_scale(self, group: Mapping[str, Any], m: int, n: int) -> float:
        """1/η² of the padded Gaussian smoothing, 1 as printed, or the given number."""
        return perturbation(group["smoothing_scale"], m, n)[0]

    def _direction(self, total: Tensor, smoothing: Tensor, situation: Situation) -> Tensor:
        group, (m, n) = situation.group, total.shape[-2:]
        width = perturbation(group["smoothing_scale"], m, n)[1]
        root, _ = cholesky_root(smoothing)
        padded = torch.nn.functional.pad(total, (0, width - n))
        samples, mean = group["samples"], torch.zeros_like(total)
        for sample in range(samples):
            # One draw at a time: k of them at once would need k times the memory.
            draw, sign = (sample // 2, (-1) ** sample) if group["antithetic"] else (sample, 1)
            z = noise.normal(
                tuple(padded.shape),
                seed=group["seed"],
                stream=situation.stream,
                step=situation.step,
                sample=draw,
                dtype=total.dtype,
                device=total.device,
            )
            direction = polar_direction(padded + sign * (root @ z), group)
            mean += direction[..., :n] / samples
        return mean


def perturbation(
    smoothing_scale: float | Literal["theory", "literal"], m: int, n: int
) -> tuple[float, int]:
    """The factor c on G²β₁⁻²I + M̂ and the width n′ of the perturbed matrix, for m×n, m ≤ n."""
    if smoothing_scale == "literal":
        return 1.0, n
    potential = Gaussian()
    width = potential.padded_width(m, n)
    if smoothing_scale == "theory":
        admissibility = potential.admissibility(m, n)
        assert admissibility is not None  # the padded width is at least m + 2
        return admissibility.beta / admissibility.alpha, width
    return float(smoothing_scale), width
