"""In-place arithmetic on lists of tensors: one launch for all of them.

A compiler is given an operation for each instead. On CUDA that of torch 2.11 fails at transposed
matrices in such a list, and where the list has one entry it may compute what it copies into a state
from that state a second time, after the copy: a gradient would enter its moment twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Each of `into` becomes its value."""
    _apply("copy_", into, values)


def add(into: Sequence[Tensor], values: Sequence[Tensor] | Sequence[int]) -> None:
    """Each of `into` grows by its value."""
    _apply("add_", into, values)


def subtract(from_: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Each of `from_` shrinks by its value."""
    _apply("sub_", from_, values)


def _apply(operation: str, into: Sequence[Tensor], values: Sequence[Any]) -> None:
    if not torch.compiler.is_compiling():
        getattr(torch, f"_foreach_{operation}")(into, values)
        return
    for tensor, value in zip(into, values, strict=True):
        getattr(tensor, operation)(value)
