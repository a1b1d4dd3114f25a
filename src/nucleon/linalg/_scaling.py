"""Exact rescaling by powers of two, so that no Gram product overflows or underflows."""

import torch
from torch import Tensor

from nucleon import _checks

REMAINDER_SCALE = 2048.0
"""Factor on a stored remainder of float16, 2¹¹ times smaller than its number: else subnormal."""


def exponent(x: Tensor) -> Tensor:
    """Return the integer e, (…, 1, 1), 2^(e-1) ≤ max|x| < 2^e; 0 for a zero matrix."""
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    has_frexp = x.device.type in _checks.COMPLETE
    return torch.frexp(largest).exponent if has_frexp else exponent_bits(largest)


def exponent_bits(x: Tensor) -> Tensor:
    """Return the exponent of `torch.frexp` for numbers x ≥ 0, by integer operations alone."""
    x = x.detach().to(_checks.work_dtype(x.dtype))
    word, digits, bias = (
        (torch.int64, 52, 1022) if x.dtype == torch.float64 else (torch.int32, 23, 126)
    )
    bits = x.view(word)
    # A subnormal number is its bits, as an integer, times 2^-(bias + digits).
    subnormal = bits >> digits == 0
    normal = torch.where(subnormal, bits.to(x.dtype), x).view(word)
    e = (normal >> digits) - bias - torch.where(subnormal, bias + digits, 0)
    return torch.where((bits > 0) & x.isfinite(), e, 0).to(torch.int32)


def shift(x: Tensor, e: Tensor) -> Tensor:
    """Return x·2^e, exact unless subnormal; in two halves, because 2^e alone may overflow."""
    half = torch.div(e, 2, rounding_mode="floor")
    # As floats: with integer exponents ldexp has no gradient for e < 0 and broadcasts one way only.
    return torch.ldexp(torch.ldexp(x, half.to(x.dtype)), (e - half).to(x.dtype))


def unit_scale(s: Tensor) -> Tensor:
    """Return `s` times the power of two that brings its largest entry into [½, 1)."""
    return shift(s, -exponent(s))


def joint_unit_scale(s: Tensor, smoothing: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s·2^-e, Λ·4^-e) with the smallest e that brings both largest entries under 1."""
    e_smoothing = torch.div(exponent(smoothing) + 1, 2, rounding_mode="floor")  # ceil of the half
    # A zero matrix has no scale of its own: it must not pin the exponent at 0.
    zero = is_zero(smoothing)
    e_s = torch.where(is_zero(s), e_smoothing, exponent(s))
    e = torch.maximum(e_s, torch.where(zero, e_s, e_smoothing))
    # Only a zero Λ meets an e so small that 4^-e overflows, and 0·inf is not 0.
    return shift(s, -e), shift(smoothing, -2 * torch.where(zero, 0, e))


def is_zero(x: Tensor) -> Tensor:
    """Return True, (…, 1, 1), for a matrix without a nonzero entry."""
    return x.abs().amax(dim=(-2, -1), keepdim=True) == 0
