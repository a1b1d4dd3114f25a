"""Products of the iterations, fused where torch can; none synchronizes."""

import importlib.util
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import widest
from nucleon.linalg._scaling import REMAINDER_SCALE

Kind = Literal["", "remainder", "shifted"]

LONGEST_SUM = 64
"""Columns per row that `add_gram` leaves to one product: for few rows BLAS adds the terms one by
one, and the rounding of equal ones goes to the same side for ever."""


def add_product(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return βC + αAB for stacks (…, m, n) that share their leading dimensions, in one pass."""
    if c.ndim == 2:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    if c.ndim == 3:
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    count = c.shape[:-2].numel()
    flat = (x.reshape(count, *x.shape[-2:]) for x in (c, a, b))
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).reshape(c.shape)


def add_gram(c: Tensor, x: Tensor) -> Tensor:
    """Return C + XXᵀ for stacks (…, m, n); of few long rows in parts, see `LONGEST_SUM`."""
    m, n = x.shape[-2:]
    length = LONGEST_SUM * m
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
    """Add value·I to A in place; a tensor has one entry a matrix, (…)."""
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(value.unsqueeze(-1) if isinstance(value, Tensor) and value.ndim else value)
    return a


def lifted(a: Tensor) -> Tensor:
    """Return A + δI ⪰ 0 where the rounding of subnormal entries made A indefinite; unchecked.

    That rounding is absolute, `floor` is relative: a discounted sum may lack 32m times the smallest
    number of the dtype in its least eigenvalue. δ is this or, where it is less, Gershgorin's bound
    max_i (Σ_j≠i |a_ij| − a_ii)₊ of a negative eigenvalue. So a zero or a diagonal matrix does not
    change, nor does one whose entries are well above the subnormal numbers.
    """
    m, info = a.shape[-1], torch.finfo(a.dtype)
    fixed = a.detach()
    diagonal = fixed.diagonal(dim1=-2, dim2=-1)
    missing = (fixed.abs().sum(-1) - diagonal - diagonal).amax(-1)  # 2a_ii may overflow
    most = _checks.ROUNDING * m * info.tiny * info.eps
    return add_to_diagonal(a.clone(), missing.clamp(0.0, most))


def raised(a: Tensor, share: float) -> Tensor:
    """Return A + share·‖A‖_F·I of matrices (…, m, m), A positive semidefinite up to rounding."""
    least = torch.finfo(a.dtype).tiny
    size = a.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(least)  # squares may overflow
    norm = torch.linalg.matrix_norm(a / size[..., None, None])
    return add_to_diagonal(a.clone(), share * norm * size)


def symmetric_product(a: Tensor, b: Tensor, addend: Tensor | None = None, **terms: Any) -> Tensor:
    """Return the first of `symmetric_pair`, αs^p ABᵀ + βs^q C + δI."""
    return symmetric_pair(a, b, addend, **terms, kind="")[0]


def symmetric_pair(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    second_shift: float = 0.0,
    scale: Tensor | None = None,
    powers: tuple[int, int] = (0, 0),
    kind: Kind = "remainder",
) -> tuple[Tensor, Tensor]:
    """Return Y = αs^p ABᵀ + βs^q C + δI, (b, m, m), symmetric in half the arithmetic, and a second.

    ABᵀ is symmetric for B = A, for commuting symmetric A and B, and for A = BR with symmetric R;
    one triangle is computed and mirrored, also where rounding would make the two differ.

    A and B are (b, m, k) float16, summed in float32; C, `addend`, is (b, m, m) and symmetric,
    float16 or float32. δ is `shift`, σ `second_shift`, (p, q) `powers`, each 0, 1 or 2, and s
    `scale`, (b,) float32, a factor that only the device knows; αs^p is a normal number. The second
    result is by `kind`: "remainder", the part of Y that rounding lost, times 2048; "shifted",
    Y + σI; "", nothing.
    """
    if _launches(a):
        from nucleon.linalg import triton_symmetric

        out = a.new_empty((a.shape[0], a.shape[1], a.shape[1]))
        second = torch.empty_like(out) if kind else out
        factors = {"alpha": alpha, "beta": beta, "shift": shift, "second_shift": second_shift}
        operands: dict[str, Any] = {"scale": scale, "powers": powers, "kind": kind, **factors}
        operands["addend"] = None if addend is None else addend.contiguous()
        triton_symmetric.symmetric(a.contiguous(), b.contiguous(), out, second, **operands)
        return out, second
    # All tiles, in float32, with the lower triangle mirrored.
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
    out = total.to(a.dtype)
    if kind == "remainder":
        return out, ((total - out.float()) * REMAINDER_SCALE).to(a.dtype)
    return out, add_to_diagonal(out.clone(), second_shift) if kind == "shifted" else out


def squares(x: Tensor) -> Tensor:
    """Return ‖X‖_F² of each matrix, (b,) float64: the square of a float32 norm may overflow.

    float32 on a device without float64, for norms from 1e-19 to 1e19.
    """
    if _launches(x):
        from nucleon.linalg import triton_symmetric

        return triton_symmetric.squares(x.contiguous())
    return x.to(widest(x.device)).square().sum(dim=(-2, -1))


def scaled_half(x: Tensor, factor: Tensor) -> Tensor:
    """Return float16(factor·X) for (b,) factors and (b, m, n)."""
    if _launches(x):
        from nucleon.linalg import triton_symmetric

        return triton_symmetric.scaled_half(x.contiguous(), factor)
    return (x * factor[:, None, None]).half()


def _launches(x: Tensor) -> bool:
    """Return True if Triton kernels compute with a tensor."""
    return x.numel() > 0 and x.is_cuda and triton_works()


@cache
def triton_works() -> bool:
    """Return True if Triton is installed and compiles half-precision products for the GPU."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
