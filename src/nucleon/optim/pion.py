"""Pion: the O2NC optimizer of FTPL (Algorithm 2), Muon with a perturbed direction.

An unrelated optimizer of the same name exists (arXiv 2605.12492).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack, get_args

import torch
from torch import Tensor, nn

from nucleon import _checks, noise
from nucleon.certificate import Admissibility, ftpl_constants, padded_width
from nucleon.linalg.roots import cholesky_root
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.work import Context, Draws, of_potential
from nucleon.optim.muon import PolarMethod, polar_direction
from nucleon.optim.options import LR, GramOptions, ModelOptions, added_by
from nucleon.optim.polar_methods import check_method

PionScale = float | Literal["theory", "literal"]


class PionOptions(GramOptions, total=False):
    """Options of `Pion`, each settable per parameter group."""

    smoothing_scale: Annotated[PionScale, "theory"]
    """c of Λ = c(G²β₁⁻²I + M̂). "theory" is 1/η² = β/α of the Gaussian smoothing, with Ĝ padded by
    zero columns to the width max(n, 2m, m+2) where that holds (default); "literal" is 1 without
    padding, Algorithm 2 as printed, whose noise is about n^¼·(n−m)^¼ times larger; or a number,
    with the padding."""
    samples: Annotated[int, 1]
    """k (default 1, the cheapest; the theorem takes the mean over infinitely many)."""
    method: Annotated[PolarMethod, "auto"]
    """Algorithm of the polar factors, as for `Muon` (default "auto")."""


class PionModelOptions(PionOptions, ModelOptions, total=False):
    """Keyword arguments of `Pion.for_model`."""


def padded_gaussian(group: Mapping[str, Any], m: int, n: int) -> Admissibility | None:
    """Return (α, β) of Theorem 4.1 at the width of the perturbed matrix; None below m + 2."""
    width = perturbation(group["smoothing_scale"], m, n)[1]
    return Admissibility(*ftpl_constants(m, width)) if width >= m + 2 else None


class Pion(MatrixOptimizer):
    """P = mean over k draws of polar([Ĝ 0] + LZ)'s leading block, LLᵀ = Λ = c(G²β₁⁻²I + M̂).

    L is Cholesky's factor of Λ + δ·diag Λ, δ = 8m·eps, which also exists for a singular Λ. The
    noise Z is a function of (seed, parameter, step, sample) alone.

    Its arguments are those of `MatrixOptimizer`, with the options of `PionOptions`.
    """

    name: ClassVar[str] = "pion"
    own_options: ClassVar[Mapping[str, Any]] = added_by(PionOptions)
    has_gram: ClassVar[bool] = True

    def __init__(
        self, params: Any, lr: float | Tensor = LR, **options: Unpack[PionOptions]
    ) -> None:
        super().__init__(params, lr, **options)

    if TYPE_CHECKING:  # the options by their types; the method itself is inherited

        @classmethod
        def for_model(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls, model: nn.Module, lr: float | Tensor = LR, **options: Unpack[PionModelOptions]
        ) -> Self:
            """See `MatrixOptimizer.for_model`."""
            ...

    @of_potential(
        kernel="perturbed",
        constants=padded_gaussian,
        theorem="Theorem 3.2 with the constants of Theorem 4.1, discounted",
        uncertified="the gradients of a run depend on the noise of earlier steps",
    )
    def direction(self, total: Tensor, smoothing: Tensor, context: Context) -> Tensor:
        """Return the mean of polar factors of perturbed matrices."""
        draws, n = context.hyperparameters.draws, total.shape[-1]
        assert draws is not None  # by `draws` below
        root, _ = cholesky_root(smoothing)
        padded = torch.nn.functional.pad(total, (0, draws.width - n))
        mean = torch.zeros_like(total)
        for sample in range(draws.samples):
            # One draw at a time; k draws at once would need k times the memory.
            z = noise.normal(
                tuple(padded.shape),
                seed=draws.seed,
                stream=context.stream,
                step=context.step,
                sample=sample,
                dtype=total.dtype,
                device=total.device,
            )
            direction = polar_direction(padded + root @ z, context.options)
            mean += direction[..., :n] / draws.samples
        return mean

    def smoothing_scale(self, group: Mapping[str, Any], m: int, n: int) -> float:
        """Return 1/η² of the padded Gaussian smoothing, 1 as printed, or the given number."""
        return perturbation(group["smoothing_scale"], m, n)[0]

    def draws(self, group: Mapping[str, Any], m: int, n: int) -> Draws:
        """Return as many draws as `samples`, of the padded width."""
        width = perturbation(group["smoothing_scale"], m, n)[1]
        return Draws(group["seed"], group["samples"], width)

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check `method`, `smoothing_scale` and `samples`."""
        check_method(group, get_args(PolarMethod))
        if isinstance(group["smoothing_scale"], str):
            _checks.choice("smoothing_scale", group["smoothing_scale"], ("theory", "literal"))
        else:
            _checks.nonnegative("smoothing_scale", group["smoothing_scale"])
        _checks.count("samples", group["samples"])


@lru_cache
def perturbation(smoothing_scale: PionScale, m: int, n: int) -> tuple[float, int]:
    """Return the factor c on G²β₁⁻²I + M̂ and the width n′ of the perturbed m×n matrix, m ≤ n."""
    if smoothing_scale == "literal":
        return 1.0, n
    width = padded_width(m, n)
    if smoothing_scale == "theory":
        alpha, beta = ftpl_constants(m, width)
        return beta / alpha, width
    return float(smoothing_scale), width
