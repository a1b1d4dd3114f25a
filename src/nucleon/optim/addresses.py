"""Where the matrices of a stack lie in memory: tables of addresses, which kernels follow.

A kernel that is given the address of anything irregular would take the whole process down.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nucleon.optim.stacks import Layout, Stack, gram_key

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def places_in(layout: Layout, tensors: Sequence[Tensor], device: torch.device) -> list[int] | None:
    """Where the runs of a stack lie in tensors like its parameters; None where it is irregular.

    Irregular are tensors that are not contiguous, of other dtypes, on another device, or without a
    storage of their own as some subclasses are.
    """
    dtype, size = tensors[0].dtype, tensors[0].element_size()
    found: list[int] = []
    for tensor, offsets in zip(tensors, layout.offsets, strict=True):
        start = tensor.data_ptr()
        if not start or not _regular(tensor, dtype, device):
            return None
        found += [start + size * offset for offset in offsets]
    return None if dtype not in DTYPES else found


def boundary(places: Sequence[int], size: int) -> int:
    """What all addresses of entries of so many bytes are multiples of: 16, as wide loads want.

    Or the size of an entry: parts of a flat buffer, as of gradients, may begin anywhere in it.
    """
    return size if any(place % 16 for place in places) else 16


def _regular(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()


def of_states(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[int] | None:
    """Where each run has its total, skipped and Gram, kind after kind; None if one is irregular.

    Without a Gram the second stands for it.
    """
    layout, device = stack.layout, stack.params[0].device
    totals = layout and places_in(layout, [state["total"] for state in states], device)
    if layout is None or totals is None:
        return None
    skipped: list[int] = []
    grams: list[int] = []
    square = 4 * min(stack.shape) ** 2
    for piece, state in zip(stack.pieces, states, strict=True):
        starts, first = range(piece.start, piece.stop, layout.each), piece.block.first
        count = state["skipped"]
        if not _regular(count, torch.int64, device):
            return None
        skipped += [count.data_ptr() + 8 * (first + start) for start in starts]
        if has_gram:
            gram = state[gram_key(piece.block)]
            if not _regular(gram, torch.float32, device):
                return None
            grams += [gram.data_ptr() + square * start for start in starts]
    if any(place % 16 for place in grams):
        return None
    return [*totals, *skipped, *(grams or skipped)]


def tensors_of(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[Tensor]:
    """The tensors that `of_states` looks at, and the parameters."""
    found = [state[key] for state in states for key in ("total", "skipped")]
    if has_gram:
        pairs = zip(stack.pieces, states, strict=True)
        found += [state[gram_key(piece.block)] for piece, state in pairs]
    return [*found, *stack.params]


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
