"""Muon: the O2NC optimizer of Follow-the-Leader (Algorithm 1)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack, get_args

from torch import Tensor, nn

from nucleon.linalg.coefficients import Quintic, custom
from nucleon.linalg.half import half_polar
from nucleon.linalg.polar import polar_bfloat16, polar_polynomial, polar_svd
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.engines.work import Context, of_potential
from nucleon.optim.options import LR, ModelOptions, Options, added_by
from nucleon.optim.polar_methods import (
    check_coefficients,
    check_method,
    method_for,
    polynomials,
)

PolarMethod = Literal["auto", "half", "polar-express", "bfloat16", "newton-schulz", "muon", "svd"]


class MuonOptions(Options, total=False):
    """Options of `Muon`, each settable per parameter group."""

    method: Annotated[PolarMethod, "auto"]
    """Algorithm of the polar factor. "auto", the default, is "half" or "polar-express", see
    `nucleon.optim.polar_methods`; "half", the float16 Gram recursion (measured: the fastest on
    CUDA); "polar-express", the optimal quintics (measured: the smallest error of a five-step
    method, both `benchmarks/step.py`); "bfloat16", the same by products of bfloat16 (measured: half
    the time on a CPU that has them); "newton-schulz", the paper's cubic; "muon", Jordan's quintic,
    which leaves the ball; "svd", exact and slow."""
    coefficients: Annotated[Sequence[Quintic] | None, None]
    """Triples (a, b, c) in the place of `method`: X ← aX + bXXᵀX + c(XXᵀ)²X, one a step from
    X = Ĝ/‖Ĝ‖_F, the last repeated up to `iterations`; `[(3.4445, -4.775, 2.0315)]` is the
    `ns_coefficients` of torch's Muon. They may leave the ball: ‖P‖_op is at most
    `nucleon.linalg.coefficients.largest(…)`, which `explain()` shows (default None)."""


class MuonModelOptions(MuonOptions, ModelOptions, total=False):
    """Keyword arguments of `Muon.for_model`."""


class Muon(MatrixOptimizer):
    """P = polar(Ĝ): Follow-the-Leader over the operator-norm ball, without a regret guarantee.

    Its arguments are those of `MatrixOptimizer`, with the options of `MuonOptions`.
    """

    name: ClassVar[str] = "muon"
    own_options: ClassVar[Mapping[str, Any]] = added_by(MuonOptions)

    def __init__(
        self, params: Any, lr: float | Tensor = LR, **options: Unpack[MuonOptions]
    ) -> None:
        super().__init__(params, lr, **options)

    if TYPE_CHECKING:  # the options by their types; the method itself is inherited

        @classmethod
        def for_model(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls, model: nn.Module, lr: float | Tensor = LR, **options: Unpack[MuonModelOptions]
        ) -> Self:
            """See `MatrixOptimizer.for_model`."""
            ...

    @of_potential(
        kernel="polar", uncertified="the nuclear norm is not smooth, the regret can be linear"
    )
    def direction(self, total: Tensor, smoothing: Tensor, context: Context) -> Tensor:
        """Return polar(S) by the method of the group."""
        return polar_direction(total, context.options)

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check `method` and its iterations, or `coefficients`."""
        check_method(group, get_args(PolarMethod))
        if group.get("coefficients") is not None:
            check_coefficients(group)


def polar_direction(total: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return polar(S) by the fixed-step method of a group."""
    (m, n), iterations = total.shape[-2:], group["iterations"]
    if group.get("coefficients") is not None:
        return polar_polynomial(total, custom(group["coefficients"], iterations))
    method = method_for(group.get("method", "auto"), iterations, m, n, total.device, total.dtype)
    if method == "svd":
        return polar_svd(total)
    quintics = polynomials(method, iterations)
    if method == "half":
        return half_polar(total, quintics)
    if method == "bfloat16":
        return polar_bfloat16(total, quintics)
    return polar_polynomial(total, quintics)
