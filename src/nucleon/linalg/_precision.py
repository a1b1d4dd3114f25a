"""Float32 products are float32 products, and float64 is where the device has it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


Setting = tuple[Any, str, Sequence[object]]
"""A backend of torch, the name of a setting, and the values that will do."""
_SETTINGS: tuple[Setting, ...] = (
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
    before: list[tuple[Any, str, object]] = []
    for backend, name, good in _SETTINGS:
        value = getattr(backend, name)
        if value not in good:
            before.append((backend, name, value))
            setattr(backend, name, good[0])
    try:
        yield
    finally:
        for backend, name, value in before:
            setattr(backend, name, value)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply in the dtype of the operands, sum float16 in float32, and switch autocast off."""
    with torch.autocast(device.type, enabled=False), full_float32():
        yield
