"""Float32 products are float32 products, whatever the user allows elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and its CPU counterparts off inside, and restore the user's setting after.

    A Gram matrix rounded to ten bits is not positive semidefinite, and the iterations amplify its
    errors. A compiled function keeps the setting it was compiled under: the compiler cannot follow
    a change of it.
    """
    if torch.compiler.is_compiling():
        yield
        return
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
    """Products in the dtype of their operands: no autocast either."""
    with torch.autocast(device.type, enabled=False), full_float32():
        yield
