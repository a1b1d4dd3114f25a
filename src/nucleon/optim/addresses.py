"""Where the matrices of a stack lie in memory: tables of addresses, which kernels follow.

A kernel that is given the address of anything irregular would take the whole process down.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nucleon.optim.stacks import Layout, Stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def places_in(layout: Layout, tensors: Sequence[Tensor], device: torch.device) -> list[int] | None:
    """Where the runs of a stack lie in tensors like its parameters; None where it is irregular.

    Irregular are tensors that are not contiguous, of other dtypes, on another device, or without a
    storage of their own as some subclasses are.
    """
    dtype, size = tensors[0].dtype, tensors[0].element_size()
    starts = [tensor.data_ptr() for tensor in tensors]
    if dtype not in DTYPES or not all(starts) or not _regular(tensors, dtype, device):
        return None
    pairs = zip(starts, layout.offsets, strict=True)
    return [start + size * offset for start, offsets in pairs for offset in offsets]


def boundary(places: Sequence[int], size: int) -> int:
    """What all addresses of entries of so many bytes are multiples of: 16, as wide loads want.

    Or the size of an entry: parts of a flat buffer, as of gradients, may begin anywhere in it.
    """
    return 16 if math.gcd(16, *places) == 16 else size


def _regular(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    found = {(t.dtype, t.device, t.is_contiguous()) for t in tensors}
    return found == {(dtype, device, True)}


def of_states(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[int] | None:
    """Where each run has its total, skipped, quiet and Gram; None if one is irregular.

    Kind after kind; without a Gram the second stands for it.
    """
    layout, device = stack.layout, stack.params[0].device
    totals = layout and places_in(layout, [state["total"] for state in states], device)
    if layout is None or totals is None:
        return None
    skipped, quiet = (
        _owned(stack, layout, stack.own(s[name] for s in states), torch.int64)
        for name in ("skipped", "quiet")
    )
    grams = _owned(stack, layout, stack.grams(states), torch.float32) if has_gram else skipped
    if skipped is None or quiet is None or grams is None or (has_gram and boundary(grams, 4) < 16):
        return None
    return [*totals, *skipped, *quiet, *grams]


def _owned(
    stack: Stack, layout: Layout, tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[int] | None:
    """Where the runs lie in tensors of each piece, an entry per matrix; None if irregular."""
    if not _regular(tensors, dtype, stack.params[0].device):
        return None
    size = tensors[0].nbytes // stack.pieces[0].count
    return [
        tensor.data_ptr() + size * start
        for piece, tensor in zip(stack.pieces, tensors, strict=True)
        for start in range(0, piece.count, layout.each)
    ]


def tensors_of(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[Tensor]:
    """The tensors that `of_states` looks at, and the parameters."""
    names = ("total", "skipped", "quiet")
    found = [*stack.params, *(s[name] for name in names for s in states)]
    if has_gram:
        found += [s[key] for key, s in zip(stack.gram_keys, states, strict=True)]
    return found


def table(places: Sequence[int], device: torch.device) -> Tensor:
    """Addresses as a tensor on the device; kept, as most of them are the same at every step."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():  # filled when the graph is replayed, not now
            return _filled(tuple(places), device)
        return _kept(tuple(places), device, torch.cuda.current_stream().cuda_stream)


@lru_cache(maxsize=1024)
def _kept(places: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _filled(places, device)


def _filled(places: tuple[int, ...], device: torch.device) -> Tensor:
    from nucleon.optim import triton_step

    return triton_step.filled(places, device)
