"""The products that the iterations are made of, fused where torch can; no sync."""

import importlib.util
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest

Precision = Literal["tf32", "tf32x3", "ieee"]
OPERANDS = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that `symmetric_product` multiplies; it sums in float32."""

REMAINDER_SCALE = 2048.0
"""A remainder is stored times 2¹¹: it is that much below its value and would be subnormal."""

LONGEST_SUM = 64
"""Columns per row that `add_gram` leaves to one product: for few rows BLAS adds the terms one by
one, and the rounding of equal ones goes to the same side for ever."""


def add_product(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """βC + αAB for stacks (…, m, n) that share their leading dimensions, in one pass."""
    if c.ndim == 2:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    if c.ndim == 3:
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    count = c.shape[:-2].numel()
    flat = (x.reshape(count, *x.shape[-2:]) for x in (c, a, b))
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).reshape(c.shape)


def add_gram(c: Tensor, x: Tensor) -> Tensor:
    """C + XXᵀ for stacks (…, m, n); of few long rows in parts, see `LONGEST_SUM`."""
    m, n = x.shape[-2:]
    length = LONGEST_SUM * max(m, 1)
    if m < 16:
        x = x.contiguous()  # of few rows that lie transposed BLAS adds even short sums one by one
    if n <= length:
        return add_product(c, x, x.mT)
    whole, rest = x.split([n - n % length, n % length], dim=-1)
    parts = whole.unflatten(-1, (-1, length)).movedim(-2, -3)  # (…, n/length, m, length)
    flat = parts.reshape(-1, m, length)
    sums = torch.bmm(flat, flat.mT).view(*parts.shape[:-1], m).sum(-3)
    return add_product(c + sums, rest, rest.mT)


def add_to_diagonal(a: Tensor, value: float | Tensor) -> Tensor:
    """A + value·I in place; a tensor has one entry a matrix, (…)."""
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(value.unsqueeze(-1) if isinstance(value, Tensor) and value.ndim else value)
    return a


def lifted(a: Tensor) -> Tensor:
    """A + δI ⪰ 0 where the rounding of subnormal entries made A indefinite; unchecked, no sync.

    That rounding is absolute, `floor` is relative: a discounted sum may lack 32m times the smallest
    number of the dtype in its least eigenvalue. δ is this or, where it is less, Gershgorin's bound
    max_i (Σ_j≠i |a_ij| − a_ii)₊ on what is missing. So a zero or a diagonal matrix gets nothing,
    and numbers well above the subnormal ones nothing that their rounding keeps.
    """
    m, info = a.shape[-1], torch.finfo(a.dtype)
    if not m:
        return a
    fixed = a.detach()
    diagonal = fixed.diagonal(dim1=-2, dim2=-1)
    missing = (fixed.abs().sum(-1) - diagonal - diagonal).amax(-1)  # 2a_ii may overflow
    most = _checks.ROUNDING * m * info.tiny * info.eps
    return add_to_diagonal(a.clone(), missing.clamp(0.0, most))


def quintic_factor(b: Tensor, c1: float, c3: float, c5: float) -> Tensor:
    """T = c₁I + c₃B + c₅B², the factor that one odd polynomial puts on X, B = XXᵀ."""
    t = add_product(b, b, b, beta=c3, alpha=c5) if c5 else c3 * b
    t.diagonal(dim1=-2, dim2=-1).add_(c1)
    return t


def symmetric_product(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    scale: Tensor | None = None,
    powers: tuple[int, int] = (0, 0),
    dtype: torch.dtype | None = None,
    precision: Precision = "tf32",
) -> Tensor:
    """αs^p ABᵀ + βs^q C + δI, (b, m, m), for products that are symmetric: half the arithmetic.

    ABᵀ is symmetric for B = A, for commuting symmetric A and B, and for A = BR with symmetric R;
    one triangle is computed and mirrored, also where rounding would make the two differ.

    Args:
        a: (b, m, k), float16, bfloat16 or float32, accumulated in float32; float64 is refused.
        b: of the same shape and dtype.
        addend: C, symmetric, (b, m, m).
        alpha: α.
        beta: β.
        shift: δ.
        scale: s, (b,) float32, a factor that only the device knows; αs^p is a normal number.
        powers: (p, q), each 0, 1 or 2.
        dtype: of the result; None is that of `a`.
        precision: of float32 operands: "tf32", "tf32x3" or "ieee".
    """
    return _symmetric(
        a, b, addend, scale, [alpha, beta, shift], list(powers), dtype or a.dtype, precision, ""
    )[0]


def symmetric_pair(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    second_shift: float | None = None,
    scale: Tensor | None = None,
    powers: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """`symmetric_product` and what its rounding lost, times 2048; or it and itself + shift·I."""
    kind = "remainder" if second_shift is None else "shifted"
    factors = [alpha, beta, 0.0, second_shift or 0.0]
    return _symmetric(a, b, addend, scale, factors, list(powers), a.dtype, "tf32", kind)


def squares(x: Tensor) -> Tensor:
    """‖X‖_F² of each matrix, (b,) float64: the square of a float32 norm may overflow float32.

    float32 on a device without float64, for norms from 1e-19 to 1e19.
    """
    if x.numel() and _launches(x):
        from nucleon.linalg import triton_symmetric

        return triton_symmetric.squares(x.contiguous())
    return x.to(widest(x.device)).square().sum(dim=(-2, -1))


def scaled_half(x: Tensor, factor: Tensor) -> Tensor:
    """float16(factor·X) for (b,) factors and (b, m, n)."""
    if x.numel() and _launches(x):
        from nucleon.linalg import triton_symmetric

        return triton_symmetric.scaled_half(x.contiguous(), factor)
    return (x * factor[:, None, None]).half()


def _launches(x: Tensor) -> bool:
    """True where elementwise passes are Triton kernels."""
    return x.is_cuda and triton_works()


def _check_operands(a: Tensor, b: Tensor, addend: Tensor | None) -> None:
    """Raise on what torch would broadcast or round in silence, and Triton read out of bounds."""
    if a.dtype not in OPERANDS:
        raise TypeError(
            f"a must be of float16, bfloat16 or float32, got {a.dtype}; the sums are of float32: "
            f"convert it first, a.float(), or multiply with torch.matmul"
        )
    if a.ndim != 3:
        raise ValueError(f"a must be a stack (b, m, k), got shape {tuple(a.shape)}; reshape it")
    if b is not a and (b.shape != a.shape or b.dtype != a.dtype):
        raise ValueError(
            f"b must be as a, {tuple(a.shape)} of {a.dtype}, got {tuple(b.shape)} of {b.dtype}; "
            f"expand or convert it"
        )
    count, m, _ = a.shape
    if addend is not None and addend.shape != (count, m, m):
        raise ValueError(
            f"addend must have shape {(count, m, m)}, got {tuple(addend.shape)}; expand it"
        )


def _symmetric_torch(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    scale: Tensor | None,
    factors: list[float],
    powers: list[int],
    dtype: torch.dtype,
    precision: str,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Compute the product in torch: all tiles, in float32, the lower triangle mirrored."""
    alpha, beta, shift, *rest = factors
    s = a.new_ones(1, 1, 1, dtype=torch.float32) if scale is None else scale[:, None, None]
    total = (a.float() @ b.float().mT) * alpha
    for _ in range(powers[0]):
        total = total * s
    if addend is not None:
        plus = addend.float()  # s before β, and one s at a time: either alone may leave the range
        for factor in [s, beta, s] if powers[1] == 2 else [s, beta][1 - powers[1] :]:
            plus = plus * factor
        total = total + plus
    total = add_to_diagonal(total.tril() + total.tril(-1).mT, shift)
    out = total.to(dtype)
    if kind == "remainder":
        return out, ((total - out.float()) * REMAINDER_SCALE).to(dtype)
    if kind == "shifted":
        return out, add_to_diagonal(out.clone(), rest[0])
    return out, out.new_empty(0)


def _symmetric(a: Tensor, b: Tensor, addend: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """`_symmetric_torch` with its arguments, by Triton where that works; operands are checked."""
    _check_operands(a, b, addend)
    if not a.is_cuda or not triton_works():
        return _symmetric_torch(a, b, addend, *rest)
    from nucleon.linalg import triton_symmetric

    scale, factors, powers, dtype, precision, kind = rest
    a, b = a.contiguous(), b.contiguous()
    addend = None if addend is None else addend.contiguous()
    out = a.new_empty((a.shape[0], a.shape[1], a.shape[1]), dtype=dtype)
    second = torch.empty_like(out) if kind else out.new_empty(0)
    if out.numel():
        last = (factors, powers, precision, kind, REMAINDER_SCALE)
        triton_symmetric.symmetric(a, b, addend, scale, out, second, *last)
    return out, second


@cache
def triton_works() -> bool:
    """Triton is installed and the GPU is one it compiles half-precision products for."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
