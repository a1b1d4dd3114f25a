"""Leon: the O2NC optimizer of FAML (Algorithm 3), Muon with a smoothed direction."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import exact
from nucleon.linalg.augmented import augmented_coupled, augmented_polynomial, augmented_svd
from nucleon.linalg.half import half_augmented
from nucleon.optim.base import MatrixOptimizer, Situation
from nucleon.optim.methods import check_method, chosen_method
from nucleon.optim.options import Options
from nucleon.optim.polynomials import polynomials
from nucleon.potentials import Admissibility, Hyperbolic

LeonMethod = Literal["auto", "half", "polar-express", "newton-schulz", "coupled", "eigh"]
LEON_METHODS: tuple[LeonMethod, ...] = get_args(LeonMethod)


@final
class Leon(MatrixOptimizer):
    """P = (ĜĜᵀ + Λ)^(-1/2) Ĝ with Λ = c(G²β₁⁻²I + M̂): FAML over the operator-norm ball.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, or groups of them.
        lr: learning rate, a number or a one-element tensor (0.02, usual in practice; the theory's
            is its radius D, see `plan`).
        momentum: β₁ of Ĝ ← β₁Ĝ + G (0.95, usual in practice; the theory's is its discount γ).
        beta2: β₂ of M̂ ← β₂M̂ + GGᵀ; None is β₁² at every step, the theory's (None).
        smoothing_scale: c = 1/η²; the theorem's is 1, more smooths more, 0 is Muon (1.0).
        gradient_bound: G ≥ ‖G_t‖_op; the theorem needs it, 0 is Algorithm 3 as printed (0.0).
        method: "auto", the default, is "half" or "polar-express", see `chosen_method`; "half", the
            float16 Gram recursion (measured: the fastest on CUDA), where M̂ too is made of
            gradients rounded to float16; "polar-express", the augmented
            recursion with optimal quintics (measured: the fastest on the CPU with an error below
            torch's Muon, both `benchmarks/step.py`);
            "newton-schulz", with the paper's cubic; "coupled", the coupled inverse root;
            "eigh", exact and slow.
        options: see `nucleon.optim.Options`.
    """

    name: ClassVar[str] = "leon"
    has_gram: ClassVar[bool] = True
    theorem: ClassVar[str] = "Theorem 3.2 with the constants of Theorem 4.2, discounted"
    uncertified: ClassVar[str | None] = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        *,
        beta2: float | None = None,
        smoothing_scale: float = 1.0,
        gradient_bound: float = 0.0,
        method: LeonMethod = "auto",
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
            method=method,
        )

    def admissibility(self, group: Mapping[str, Any], m: int, n: int) -> Admissibility | None:
        """(1, 1), Theorem 4.2."""
        return Hyperbolic().admissibility(m, n)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        check_method(group, LEON_METHODS)
        _checks.nonnegative("smoothing_scale", group["smoothing_scale"])

    def _direction(self, total: Tensor, smoothing: Tensor, situation: Situation) -> Tensor:
        return augmented_direction(total, smoothing, situation.group)


def augmented_direction(total: Tensor, smoothing: Tensor, group: Mapping[str, Any]) -> Tensor:
    """(SSᵀ + Λ)^(-1/2) S by the fixed-step method of a group."""
    iterations: int = group["iterations"]
    m, n = total.shape[-2:]
    method = chosen_method(group, m, n, total.device, total.dtype)
    if method == "eigh":
        cut = math.sqrt(total.shape[-2]) * torch.finfo(total.dtype).eps
        return augmented_svd(exact(total), exact(smoothing), cut).to(total)
    if method == "coupled":
        return augmented_coupled(total, smoothing, 3 * iterations)
    if method == "half":
        return half_augmented(total, smoothing, polynomials(method, iterations))
    # Five quintics amplify the rounding of B too little to matter; more of them need restarts.
    every = 5 if method == "newton-schulz" or iterations <= 5 else 2
    return augmented_polynomial(
        total,
        smoothing,
        polynomials(method, iterations),
        restarts=range(every, iterations, every),
    )
