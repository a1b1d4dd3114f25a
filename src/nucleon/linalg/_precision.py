"""Precision: float64 where a device has it, full float32 products, and floors for rounding."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on a device that may have none."""
    return torch.float64 if device.type in _checks.COMPLETE else torch.float32


def exact(x: Tensor) -> Tensor:
    """Return `x` in float64, on the CPU where its own device may have none."""
    return _checks.decomposable(x).double()


# A backend of torch, the name of a setting, and the values that will do.
_SETTINGS: tuple[tuple[Any, str, Sequence[object]], ...] = (
    (torch.backends.cuda.matmul, "fp32_precision", ("ieee", "none")),
    (torch.backends.mkldnn.matmul, "fp32_precision", ("ieee", "none")),  # pyright: ignore[reportAttributeAccessIssue]
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", (False,)),
)


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32, its CPU counterparts and float16 sums off, and restore the user's setting after.

    A Gram matrix rounded to ten bits is not positive semidefinite, and the iterations amplify its
    errors.
    """
    settings = ((*at, getattr(*at[:2])) for at in _SETTINGS)
    changed = [at for at in settings if at[3] not in at[2]]
    for backend, name, good, _ in changed:
        setattr(backend, name, good[0])
    try:
        yield
    finally:
        for backend, name, _, value in changed:
            setattr(backend, name, value)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply in the dtype of the operands, sum float16 in float32, and switch autocast off."""
    with torch.autocast(device.type, enabled=False), full_float32():
        yield


def check_method(
    dtype: torch.dtype,
    side: int,
    method: str,
    methods: Sequence[str],
    steps: int | None,
    rank_tolerance: float | None,
) -> float:
    """Check the options of a matrix function; return the least relative singular value that counts.

    The first of its methods is exact, takes no steps, and counts singular values above √side·eps.
    The iterations count those from √eps on.
    """
    _checks.choice("method", method, methods)
    exact, eps = method == methods[0], torch.finfo(dtype).eps
    if steps is not None:
        if exact:
            raise ValueError(
                f"steps does not apply to method={method!r}, got {steps!r}; leave it out, or pass "
                f"method={methods[1]!r}"
            )
        _checks.count("steps", steps)
    if rank_tolerance is None:
        return math.sqrt(side) * eps if exact else math.sqrt(eps)
    cut = _checks.fraction("rank_tolerance", rank_tolerance, closed="0" if exact else "")
    if not exact and cut < eps:
        raise ValueError(
            f"rank_tolerance must be ≥ the rounding unit {eps:.3g} of {dtype}, got {cut!r}"
        )
    return cut


@lru_cache
def floor(dtype: torch.dtype) -> float:
    """Return δ/‖A‖_F of the coupled iteration, as much as rounding may take from A.

    It keeps every eigenvalue of A + δI positive, and so the iteration bounded.
    """
    return _checks.ROUNDING * torch.finfo(dtype).eps


@lru_cache
def roundings(discount: float) -> float:
    """Return the multiple of eps·‖A‖_F that sums A ← γA + GGᵀ, γ < 1, may lack beyond `floor`.

    A step rounds each entry by eps/2 of itself, to the same side for ever where the gradients stay
    the same: 1/(1 − γ) of these errors add up. Up to γ = 0.984 `floor` has room for them.
    """
    lost = 0.5 / max(1 - discount, 2.0**-53)
    return lost if lost > _checks.ROUNDING else 0.0
