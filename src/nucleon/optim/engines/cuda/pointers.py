"""Where the tensors of a stack lie in memory: tables of addresses, which the kernels follow.

A kernel that is given the address of anything irregular would take the whole process down, so what
does not lie as the layout has it, of one dtype and on one device, has no pointers.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from nucleon.optim.engines.cuda.layout import Layout, lies
from nucleon.optim.matrices.stacks import Stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_tensors(
    layout: Layout, tensors: Sequence[Tensor | None], device: torch.device
) -> list[int] | None:
    """Where the runs of a stack lie in tensors like its parameters; None where one is irregular.

    A tensor that is missing has the address 0.
    """
    pairs = zip(tensors, layout.strides, strict=True)
    there = [(tensor, strides) for tensor, strides in pairs if tensor is not None]
    if not there:
        return [0] * layout.runs
    dtype, size = there[0][0].dtype, there[0][0].element_size()
    if dtype not in DTYPES or not all(lies(tensor, strides) for tensor, strides in there):
        return None
    if {(tensor.dtype, tensor.device) for tensor, _ in there} != {(dtype, device)}:
        return None
    starts = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if not all(start for start, t in zip(starts, tensors, strict=True) if t is not None):
        return None  # some subclasses have no storage of their own
    runs = zip(starts, layout.offsets, strict=True)
    return [start and start + size * offset for start, offsets in runs for offset in offsets]


def alignment(pointers: Sequence[int], size: int) -> int:
    """What all addresses of entries of so many bytes are multiples of: 16, as wide loads want.

    Or the size of an entry: parts of a flat buffer, as of gradients, may begin anywhere in it.
    """
    return 16 if math.gcd(16, *pointers) == 16 else size


def of_states(
    stack: Stack, layout: Layout, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[int] | None:
    """Where each run has its total, skipped, quiet and Gram; None if one is irregular.

    Kind after kind; without a Gram the second stands for it.
    """
    device = stack.params[0].device
    totals = of_tensors(layout, [state["total"] for state in states], device)
    skipped, quiet = (
        _owned(stack, layout, stack.own(s[name] for s in states), torch.int64)
        for name in ("skipped", "quiet")
    )
    grams = _owned(stack, layout, stack.grams(states), torch.float32) if has_gram else skipped
    if totals is None or skipped is None or quiet is None or grams is None:
        return None
    if has_gram and alignment(grams, 4) < 16:
        return None
    return [*totals, *skipped, *quiet, *grams]


def _owned(
    stack: Stack, layout: Layout, tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[int] | None:
    """Where the runs lie in tensors of each piece, an entry per matrix; None if irregular."""
    found = {(t.dtype, t.device, t.is_contiguous()) for t in tensors}
    if found != {(dtype, stack.params[0].device, True)}:
        return None
    size = tensors[0].nbytes // stack.pieces[0].count
    return [
        tensor.data_ptr() + size * start
        for piece, tensor in zip(stack.pieces, tensors, strict=True)
        for start in range(0, piece.count, layout.each)
    ]


def signature(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool
) -> list[object]:
    """All that the pointers of states and weights depend on; an address says the device as well."""
    names = ("total", "skipped", "quiet")
    tensors = [*stack.params, *(s[name] for name in names for s in states)]
    if has_gram:
        tensors += [s[key] for key, s in zip(stack.gram_keys, states, strict=True)]
    looks = Tensor.data_ptr, attrgetter("dtype"), Tensor.stride
    return [*chain.from_iterable(map(look, tensors) for look in looks)]


def table(pointers: Sequence[int], device: torch.device) -> Tensor:
    """Addresses as a tensor on the device; kept, as most of them are the same at every step."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():  # filled when the graph is replayed, not now
            return _filled(tuple(pointers), device)
        return _kept(tuple(pointers), device, torch.cuda.current_stream().cuda_stream)


@lru_cache(maxsize=1024)
def _kept(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _filled(pointers, device)


def _filled(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    from nucleon.optim.engines.cuda.fill import filled

    return filled(pointers, device)
