"""An operation of torch on each tensor of a list: one launch for all of them.

A compiler is given them one by one instead. On CUDA that of torch 2.11 fails at lists of matrices
that are transposed elsewhere. It may also compute what is copied into a state from that state a
second time, after the copy, so that a gradient enters its moment twice: always where a list has one
entry, and without lists where the moment has several uses, unless it is `settled`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def each(
    operation: str, tensors: Sequence[Tensor], *others: Sequence[Any], **more: Any
) -> list[Tensor]:
    """`operation`, "add_" say, of each of `tensors` and the entry of each of `others` for it."""
    if not torch.compiler.is_compiling():
        found = getattr(torch, f"_foreach_{operation}")(tensors, *others, **more)
        return list(found or tensors)  # some versions return None for what is done in place
    rows = zip(tensors, *others, strict=True)
    return [getattr(tensor, operation)(*rest, **more) for tensor, *rest in rows]


def settled(x: Tensor) -> Tensor:
    """`x`, of which a compiler knows no more than that it is there: it computes it once."""
    return _settled(x) if torch.compiler.is_compiling() else x


@torch.library.custom_op("nucleon::settled", mutates_args=())
def _settled(x: Tensor) -> Tensor:
    return x.clone()


@_settled.register_fake
def _(x: Tensor) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(x)
