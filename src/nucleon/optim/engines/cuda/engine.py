"""The CUDA engine of matrices: the step of a stack in a few passes over its gradients.

Where the direction is the float16 recursion, its operands are made from the parameters' own
gradients and moments, without a float32 copy of the stack (`small` has matrices below 64 rows,
`perturbed` those with noise):

    sum_squares   ‖S‖_F, ‖G‖_F and ‖Ĝ‖_F of each matrix, S = βĜ + G, and from them which are finite
    advance       Ĝ ← βĜ + G;  S and G in float16, short side first
    M̂ ← β₂M̂ + GGᵀ in place, and with it the first Gram matrix of the recursion
    move          W ← W − lr·s·scale·P − lr·`weight_decay`·W

The equations and the rules of skipping and resting are those of `reference`, which does the same in
more passes. A method offers this engine by naming its recursion as `kernel`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon.linalg.kernels import triton_works
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import graphs, pointers
from nucleon.optim.engines.cuda.job import LONGEST, MOST_NOISE, aligned
from nucleon.optim.engines.cuda.launch import compute
from nucleon.optim.engines.cuda.layout import Side, dense, place_of, restrided
from nucleon.optim.engines.work import (
    KERNELS,
    HasDirection,
    Matrices,
    Settings,
    State,
    facts_of,
    sums_long,
)
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import Stack
from nucleon.optim.polar_methods import HALF_ROWS, chosen_method


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are at hand."""
    return device.type == "cuda" and triton_works()


def unreadable(param: Tensor) -> str | None:
    """Why the kernels cannot read a parameter, wherever its entries lie; None where they can."""
    if not runs_on(param.device):
        return "no Triton" if param.device.type == "cuda" else "not on CUDA"
    return None if param.dtype in pointers.DTYPES else f"{_name(param.dtype)} weights"


def refusal(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block
) -> str | None:
    """Why this engine does not step such matrices of a parameter; None where it does.

    Under "owner" the same is true of matrices that it computes for other ranks.
    """
    if (reason := unreadable(param)) is not None:
        return reason
    kernel = facts_of(optimizer).kernel
    if KERNELS.get(kernel or "") != optimizer.has_gram:
        return f"{optimizer.name} has no kernel"
    if group["certify"]:
        return "certify=True"
    if group["momentum_dtype"] == torch.float64:
        return "momentum_dtype=float64"
    if not dense(param):
        return "its memory has gaps"
    if place_of(param, block) is None:
        return "its entries are not apart by two strides per side"
    m, n = sorted((block.rows, block.columns))
    draws = optimizer.draws(group, m, n) if kernel == "perturbed" else None
    if kernel == "perturbed" and draws is None:
        return f"{optimizer.name} draws no noise"
    wide = n if draws is None else draws.width
    chosen = chosen_method(group, m, wide, param.device, param.dtype)
    if draws is not None and draws.samples * m * wide > MOST_NOISE:
        return f"{draws.samples} samples of {m}×{wide} at once"
    if chosen == "half" and kernel == "augmented" and sums_long(group):
        return "beta2 above 0.984"  # Λ needs what the kernels do not add
    if chosen == "half":
        return None
    if draws is not None:
        return f"{optimizer.name} by {chosen!r} for {m}×{n}"
    if chosen != "polar-express" or m >= HALF_ROWS:
        return f"method={chosen!r} for {m}×{n}"
    if n > LONGEST:
        return f"{m}×{n} is too long for one program"
    narrow = group["momentum_dtype"] not in (None, torch.float32)
    return f"momentum_dtype={_name(group['momentum_dtype'])} below 64 rows" if narrow else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block
) -> tuple[Side, Side] | None:
    """What the matrices of a stack must share: how their sides lie; None where not served."""
    if refusal(optimizer, group, param, block) is not None:
        return None
    place = place_of(param, block)
    assert place is not None
    return place.short, place.long


def restride(stack: Stack, states: Sequence[State]) -> None:
    """Give every Ĝ the strides of its parameter, whose memory format may have changed."""
    for param, state in zip(stack.params, states, strict=True):
        if "total" in state:
            state["total"] = restrided(state["total"], param)


def step(work: Matrices, settings: Settings) -> None:
    """One step of matrices that are here whole, on the stream of their lane."""
    gradients = [param.grad for param in work.params]
    there = [gradient is not None for gradient in gradients]
    if not any(there):
        return
    with work.lanes.entered(work):
        if not reference.dithered(work, settings):  # the kernels do not round at random
            cache = graphs.cache_of(work, settings)
            regular, dtype = pointers.regular(
                gradients, work.params, cache.in_axis_order.strides, cache.gradient_dtypes
            )
            if graphs.step(work, settings, regular, dtype, None if all(there) else there):
                return
        whole, mask = reference.gradients_of(work)
        reference.move(work, settings, *advance(work, settings, whole, mask))


def advance(
    work: Matrices,
    settings: Settings,
    gradients: Sequence[Tensor],
    has_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Enter gradients, one per piece, into the state; (P in float16, which are to be moved)."""
    cache, device = graphs.cache_of(work, settings), gradients[0].device
    regular, dtype = pointers.regular(
        gradients, work.params, cache.in_axis_order.strides, cache.gradient_dtypes
    )
    job = graphs.job_of(work, settings, dtype, masked=has_gradient is not None, moves=False)
    new = pointers.of_tensors(job.layout, regular, device)
    kinds = {"has_gram": job.has_gram, "has_noise": job.draws is not None}
    old = pointers.of_states(work.stack, job.layout, work.states, **kinds)
    narrow = job.small and job.total != torch.float32  # an option was changed since
    if new is None or old is None or narrow:
        return reference.advance(work, settings, gradients, has_gradient)
    addresses = [*new, *old]
    return compute(aligned(job, addresses), pointers.table(addresses, device), has_gradient)
