"""Where the tensors of a stack lie in memory: tables of addresses, which the kernels follow.

A kernel that is given the address of anything irregular would take the whole process down, so what
does not lie as the layout has it, of one dtype and on one device, has no pointers.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from nucleon.optim.engines.cuda.layout import Layout, empty_like, has_strides, strides_of
from nucleon.optim.matrices.stacks import Stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE = attrgetter("dtype")


def regular(
    gradients: Sequence[Tensor | None],
    params: Sequence[Tensor],
    strides: Sequence[object],
    allowed: Collection[torch.dtype] = DTYPES,
) -> tuple[Sequence[Tensor | None], torch.dtype]:
    """Gradients of one dtype in the strides of their parameters, most as they are; their dtype.

    Args:
        gradients: one per parameter, or None.
        params: whole, or what this rank holds of them.
        strides: a tuple of those that all gradients mostly have.
        allowed: the dtypes that the kernels take; others become float32.
    """
    there = [g for g in gradients if g is not None]
    dtypes = set(map(_DTYPE, there)) or {params[0].dtype}
    dtype = dtypes.pop()
    if dtypes or dtype not in allowed:
        dtype = torch.float32
    elif len(there) == len(params) and tuple(map(Tensor.stride, there)) == strides:
        return there, dtype
    found = [*gradients]
    other: list[tuple[Tensor, Tensor]] = []
    for i, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
        if gradient is None:
            continue
        if gradient.dtype == dtype and has_strides(gradient, param.shape, strides_of(param)):
            continue
        found[i] = new = empty_like(param, dtype)
        other.append((new, gradient))
    if other:
        torch._foreach_copy_([new for new, _ in other], [old for _, old in other])
    return found, dtype


def of_tensors(
    layout: Layout, tensors: Sequence[Tensor | None], device: torch.device
) -> list[int] | None:
    """Where the runs of a stack lie in tensors like its parameters; None where one is irregular.

    A tensor that is missing has the address 0.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    forms = zip(tensors, layout.shapes, layout.strides, strict=True)
    if not all(has_strides(tensor, *form) for tensor, *form in forms if tensor is not None):
        return None
    kinds = {(tensor.dtype, tensor.device) for tensor in there}
    if len(kinds) > 1 or any(t not in DTYPES or d != device for t, d in kinds):
        return None
    return of_regular(layout, tensors)


def of_regular(layout: Layout, tensors: Sequence[Tensor | None]) -> list[int] | None:
    """The same of tensors that are known to have the strides of their parameters."""
    size = next((tensor.element_size() for tensor in tensors if tensor is not None), 0)
    starts = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if 0 in starts and not all(s for s, t in zip(starts, tensors, strict=True) if t is not None):
        return None  # some subclasses have no storage of their own
    runs = zip(starts, layout.offsets, strict=True)
    return [start and start + size * offset for start, offsets in runs for offset in offsets]


def alignment(pointers: Sequence[int], size: int) -> int:
    """What all addresses of entries of so many bytes are multiples of: 16, as wide loads want.

    Or the size of an entry: parts of a flat buffer, as of gradients, may begin anywhere in it.
    """
    return 16 if math.gcd(16, *pointers) == 16 else size


def of_states(
    stack: Stack,
    layout: Layout,
    states: Sequence[Mapping[str, Tensor]],
    *,
    has_gram: bool,
    has_noise: bool,
) -> list[int] | None:
    """Where each run has its total, skipped, quiet and Gram; None if one is irregular.

    Kind after kind; without a Gram the second stands for it. With noise, stream and step follow,
    the latter that of the first parameter, as all have the same.
    """
    device = stack.params[0].device
    totals = of_tensors(layout, [state["total"] for state in states], device)
    skipped, quiet = (
        _owned(stack, layout, stack.own(s[name] for s in states), torch.int64)
        for name in ("skipped", "quiet")
    )
    grams = skipped
    if has_gram:
        square = (min(stack.shape),) * 2
        grams = _owned(stack, layout, stack.grams(states), torch.float32, square)
    if totals is None or skipped is None or quiet is None or grams is None:
        return None
    found = [*totals, *skipped, *quiet, *grams]
    if not has_noise:
        return found
    step = states[0]["step"]
    streams = _owned(stack, layout, stack.own(s["stream"] for s in states), torch.int64)
    if streams is None or (step.dtype, step.device) != (torch.int64, device):
        return None
    return [*found, *streams, *[step.data_ptr()] * layout.runs]


def _owned(
    stack: Stack,
    layout: Layout,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    entry: tuple[int, ...] = (),
) -> list[int] | None:
    """Where the runs lie in tensors of each piece, an entry per matrix; None if irregular."""
    device, pieces = stack.params[0].device, stack.pieces
    found = {(t.dtype, t.device, t.is_contiguous()) for t in tensors}
    shaped = all(t.shape == (p.count, *entry) for t, p in zip(tensors, pieces, strict=True))
    if found != {(dtype, device, True)} or not shaped:
        return None
    size = tensors[0].nbytes // pieces[0].count
    return [
        tensor.data_ptr() + size * start
        for piece, tensor in zip(pieces, tensors, strict=True)
        for start in range(0, piece.count, layout.each)
    ]


def held(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], *, has_gram: bool, has_noise: bool
) -> list[Tensor]:
    """The weights and states of a stack: all that `of_states` and the weights' pointers are of."""
    names = ("total", "skipped", "quiet", *(("stream", "step") if has_noise else ()))
    found = [*stack.params, *(s[name] for name in names for s in states)]
    if has_gram:
        found += [s[key] for key, s in zip(stack.gram_keys, states, strict=True)]
    return found


def table(pointers: Sequence[int], device: torch.device) -> Tensor:
    """Addresses as a tensor on the device; the host does not wait for it."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():  # filled when the graph is replayed, not now
            from nucleon.optim.engines.cuda.fill import filled

            return filled(tuple(pointers), device)
        return _pinned(pointers).to(device, non_blocking=True)


def send(pointers: Sequence[int], table: Tensor) -> None:
    """Put addresses into a table that stays where it is; the host does not wait for it."""
    with torch.cuda.device_of(table):
        table.copy_(_pinned(pointers), non_blocking=True)


def _pinned(pointers: Sequence[int]) -> Tensor:
    return torch.tensor(pointers, device="cpu").pin_memory()
