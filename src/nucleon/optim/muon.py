"""Muon: the O2NC optimizer of Follow-the-Leader (Algorithm 1)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final

from torch import Tensor

from nucleon import _checks
from nucleon.linalg.polar import polar_polynomial, polar_svd
from nucleon.optim.base import MatrixOptimizer, Situation
from nucleon.optim.options import Options
from nucleon.optim.polynomials import polynomials

PolarMethod = Literal["polar-express", "newton-schulz", "muon", "svd"]
POLAR_METHODS: tuple[PolarMethod, ...] = ("polar-express", "newton-schulz", "muon", "svd")


@final
class Muon(MatrixOptimizer):
    """P = polar(Ĝ): Follow-the-Leader over the operator-norm ball, without a regret guarantee.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, or groups of them.
        lr: learning rate, a number or a one-element tensor (0.02, usual in practice; the theory's
            is its radius D, see `plan`).
        momentum: β₁ of Ĝ ← β₁Ĝ + G (0.95, usual in practice; the theory's is its discount γ).
        method: of the polar factor: "polar-express", the optimal quintics (default: measured, the
            smallest error of a five-step method, `benchmarks/step.py`);
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
        method: PolarMethod = "polar-express",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, options, lr=lr, momentum=momentum, method=method)

    def admissibility(self, group: Mapping[str, Any], m: int, n: int) -> None:
        """None: the nuclear norm is not smooth."""

    def _check_options(self, group: Mapping[str, Any]) -> None:
        _checks.choice("method", group["method"], POLAR_METHODS)

    def _direction(self, total: Tensor, smoothing: Tensor, situation: Situation) -> Tensor:
        return polar_direction(total, situation.group["method"], situation.group["iterations"])


def polar_direction(total: Tensor, method: PolarMethod, iterations: int) -> Tensor:
    """polar(S) by one of the fixed-step methods of the optimizers."""
    if method == "svd":
        return polar_svd(total)
    return polar_polynomial(total, polynomials(method, iterations))
