"""Float32 products are float32 products, and float64 is where the device has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks


def widest(device: torch.device) -> torch.dtype:
    """What sums are kept in: float64, or float32 on a device that may have none."""
    return torch.float64 if _checks.complete(device) else torch.float32


def exact(x: Tensor) -> Tensor:
    """`x` in float64, on the CPU where its own device may have none."""
    return _checks.decomposable(x).double()


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and its CPU counterparts off inside, and restore the user's setting after.

    A Gram matrix rounded to ten bits is not positive semidefinite, and the iterations amplify its
    errors.
    """
    backends: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,  # pyright: ignore[reportAttributeAccessIssue]
    )
    before = [backend.fp32_precision for backend in backends]
    if all(setting in ("none", "ieee") for setting in before):
        yield
        return
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, setting in zip(backends, before, strict=True):
            backend.fp32_precision = setting


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products in the dtype of their operands, those of float16 summed in float32; no autocast."""
    with torch.autocast(device.type, enabled=False), full_float32(), _wide_sums():
        yield


@contextmanager
def _wide_sums() -> Iterator[None]:
    """Sum products of float16 in float32 inside, and restore the user's setting after."""
    backend = torch.backends.cuda.matmul
    if not backend.allow_fp16_accumulation:
        yield
        return
    backend.allow_fp16_accumulation = False
    try:
        yield
    finally:
        backend.allow_fp16_accumulation = True
