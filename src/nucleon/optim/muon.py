"""Muon: the O2NC optimizer of Follow-the-Leader (Algorithm 1)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final, get_args

from torch import Tensor

from nucleon.linalg.half import half_polar
from nucleon.linalg.polar import polar_polynomial, polar_svd
from nucleon.optim.base import MatrixOptimizer, Situation
from nucleon.optim.methods import check_method, chosen_method
from nucleon.optim.options import Options
from nucleon.optim.polynomials import polynomials

PolarMethod = Literal["auto", "half", "polar-express", "newton-schulz", "muon", "svd"]
POLAR_METHODS: tuple[PolarMethod, ...] = get_args(PolarMethod)


@final
class Muon(MatrixOptimizer):
    """P = polar(Ĝ): Follow-the-Leader over the operator-norm ball, without a regret guarantee.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, or groups of them.
        lr: learning rate, a number or a one-element tensor (0.02, usual in practice; the theory's
            is its radius D, see `plan`).
        momentum: β₁ of Ĝ ← β₁Ĝ + G (0.95, usual in practice; the theory's is its discount γ).
        method: of the polar factor. "auto", the default, is "half" or "polar-express", see
            `chosen_method`; "half", the float16 Gram recursion (measured: the fastest on CUDA);
            "polar-express", the optimal quintics (measured: the smallest error of a five-step
            method, both `benchmarks/step.py`);
            "newton-schulz", the paper's cubic; "muon", Jordan's quintic, which leaves the ball;
            "svd", exact and slow.
        options: see `nucleon.optim.Options`.
    """

    name: ClassVar[str] = "muon"
    has_gram: ClassVar[bool] = False
    theorem: ClassVar[str] = "none"
    uncertified: ClassVar[str | None] = "the nuclear norm is not smooth, the regret can be linear"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        *,
        method: PolarMethod = "auto",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, options, lr=lr, momentum=momentum, method=method)

    def admissibility(self, group: Mapping[str, Any], m: int, n: int) -> None:
        """None: the nuclear norm is not smooth."""

    def _check_options(self, group: Mapping[str, Any]) -> None:
        check_method(group, POLAR_METHODS)

    def _direction(self, total: Tensor, smoothing: Tensor, situation: Situation) -> Tensor:
        return polar_direction(total, situation.group)


def polar_direction(total: Tensor, group: Mapping[str, Any]) -> Tensor:
    """polar(S) by the fixed-step method of a group."""
    m, n = total.shape[-2:]
    method = chosen_method(group, m, n, total.device, total.dtype)
    if method == "svd":
        return polar_svd(total)
    if method == "half":
        return half_polar(total, polynomials(method, group["iterations"]))
    return polar_polynomial(total, polynomials(method, group["iterations"]))
