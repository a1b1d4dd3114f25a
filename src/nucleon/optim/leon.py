"""Leon: the O2NC optimizer of FAML (Algorithm 3), Muon with a smoothed direction."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack, get_args

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.certificate import Admissibility
from nucleon.linalg._precision import exact, roundings
from nucleon.linalg.augmented import (
    augmented_bfloat16,
    augmented_coupled,
    augmented_polynomial,
    augmented_svd,
)
from nucleon.linalg.half import half_augmented
from nucleon.linalg.kernels import raised
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.work import Context, of_potential
from nucleon.optim.options import LR, GramOptions, ModelOptions, added_by
from nucleon.optim.polar_methods import check_method, method_for, polynomials

LeonMethod = Literal[
    "auto", "half", "polar-express", "bfloat16", "newton-schulz", "coupled", "eigh"
]


class LeonOptions(GramOptions, total=False):
    """Options of `Leon`, each settable per parameter group."""

    smoothing_scale: Annotated[float, 1.0]
    """c = 1/η² of Λ = c(G²β₁⁻²I + M̂); a larger c smooths more, 0 is Muon (default 1.0: the
    theorem's)."""
    method: Annotated[LeonMethod, "auto"]
    """"auto", the default, is "half" or "polar-express", see `nucleon.optim.polar_methods`; "half",
    the float16 Gram recursion (measured: the fastest on CUDA), with M̂ of gradients rounded to
    float16; "polar-express", the augmented recursion with optimal quintics (measured: the fastest
    of float32 on the CPU, both `benchmarks/step.py`); "bfloat16", the same quintics on Cholesky's
    factor of ĜĜᵀ + Λ by products of bfloat16 (measured: two thirds of the time on a CPU with such
    products); "newton-schulz", the augmented recursion with the paper's cubic; "coupled", the
    coupled inverse root; "eigh", exact and slow."""


class LeonModelOptions(LeonOptions, ModelOptions, total=False):
    """Keyword arguments of `Leon.for_model`."""


def hyperbolic(_: Mapping[str, Any], m: int, n: int) -> Admissibility | None:
    """Return (1, 1), Theorem 4.2."""
    return Admissibility(1.0, 1.0)


class Leon(MatrixOptimizer):
    """P = (ĜĜᵀ + Λ)^(-1/2) Ĝ with Λ = c(G²β₁⁻²I + M̂): FAML over the operator-norm ball.

    Its arguments are those of `MatrixOptimizer`, with the options of `LeonOptions`.
    """

    name: ClassVar[str] = "leon"
    own_options: ClassVar[Mapping[str, Any]] = added_by(LeonOptions)
    has_gram: ClassVar[bool] = True

    def __init__(
        self, params: Any, lr: float | Tensor = LR, **options: Unpack[LeonOptions]
    ) -> None:
        super().__init__(params, lr, **options)

    if TYPE_CHECKING:  # the options by their types; the method itself is inherited

        @classmethod
        def for_model(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls, model: nn.Module, lr: float | Tensor = LR, **options: Unpack[LeonModelOptions]
        ) -> Self:
            """See `MatrixOptimizer.for_model`."""
            ...

    @of_potential(
        kernel="augmented",
        settles=True,
        constants=hyperbolic,
        theorem="Theorem 3.2 with the constants of Theorem 4.2, discounted",
    )
    def direction(self, total: Tensor, smoothing: Tensor, context: Context) -> Tensor:
        """Return (SSᵀ + Λ)^(-1/2) S by the method of the group."""
        beta2 = context.hyperparameters.gram_decay
        return augmented_direction(total, smoothing, context.options, beta2)

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check `method` and `smoothing_scale`."""
        check_method(group, get_args(LeonMethod))
        _checks.nonnegative("smoothing_scale", group["smoothing_scale"])


def augmented_direction(
    total: Tensor, smoothing: Tensor, group: Mapping[str, Any], beta2: float
) -> Tensor:
    """Return (SSᵀ + Λ)^(-1/2) S by the fixed-step method of a group, Λ of a sum with β₂."""
    iterations: int = group["iterations"]
    m, n = total.shape[-2:]
    method = method_for(group["method"], iterations, m, n, total.device, total.dtype)
    if method == "eigh":
        cut = math.sqrt(total.shape[-2]) * torch.finfo(total.dtype).eps
        return augmented_svd(exact(total), exact(smoothing), cut).to(total)
    if lost := roundings(beta2):
        smoothing = raised(smoothing, lost * torch.finfo(total.dtype).eps)
    if method == "coupled":
        return augmented_coupled(total, smoothing, 3 * iterations)
    quintics = polynomials(method, iterations)
    if method == "half":
        return half_augmented(total, smoothing, quintics)
    if method == "bfloat16":
        return augmented_bfloat16(total, smoothing, quintics)
    # Five quintics reach the singular values that float32 resolves in B; more need restarts.
    every = 5 if method == "newton-schulz" or iterations <= 5 else 2
    restarts = range(every, iterations, every)
    return augmented_polynomial(total, smoothing, quintics, restarts=restarts)
