"""The step of a stack in a few passes over its gradients, however many parameters they are of.

Where the direction is the float16 recursion, its operands are made from the parameters' own
gradients and moments, without a float32 copy of the stack:

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
from nucleon.optim.engines.cuda.job import aligned, job_of
from nucleon.optim.engines.cuda.launch import compute
from nucleon.optim.engines.cuda.layout import layout_of, strides
from nucleon.optim.engines.work import Matrices, Method, has_gradient
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import Stack
from nucleon.optim.methods import chosen_method


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are at hand."""
    return device.type == "cuda" and triton_works()


def serves(method: Method, group: Mapping[str, Any], param: Tensor, block: Block) -> bool:
    """Whether this engine steps such matrices of a parameter, or computes them for other ranks."""
    if method.kernel is None or "direction" in method.__dict__:  # a hook that was assigned
        return False
    if group["certify"] or not runs_on(param.device):
        return False
    if param.dtype not in pointers.DTYPES or group["momentum_dtype"] == torch.float64:
        return False
    here = not shards.sharded(param)
    if here and group["stochastic_rounding"] and param.dtype == torch.bfloat16:
        return False
    if (here and not param.is_contiguous()) or strides(block, tuple(param.shape)) is None:
        return False
    m, n = sorted((block.rows, block.columns))
    return chosen_method(group, m, n, param.device, param.dtype) == "half"


def can_follow(stack: Stack) -> bool:
    """Whether one rule says where the matrices of a stack lie."""
    return layout_of(stack) is not None


def step(work: Matrices) -> None:
    """One step of matrices that are here whole."""
    there = has_gradient(work)
    if not any(there):
        return
    gradients = _regular([p.grad for p in work.params])
    if not graphs.step(work, gradients, None if all(there) else there):
        reference.step(work)  # a state was replaced by a tensor that the kernels cannot follow


def advance(
    work: Matrices, gradients: Sequence[Tensor], has_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Enter gradients, one per piece, into the state; (P in float16, which are to be moved)."""
    job = job_of(work, gradients[0].dtype, masked=has_gradient is not None)
    device = gradients[0].device
    new = pointers.of_tensors(job.layout, _regular(gradients), device)
    old = pointers.of_states(work.stack, job.layout, work.states, has_gram=job.has_gram)
    if new is None or old is None:
        return reference.advance(work, gradients, has_gradient)
    found = [*new, *old]
    return compute(aligned(job, found), pointers.table(found, device), has_gradient)


def _regular(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients as the kernels read them: contiguous and of one dtype; most are so already."""
    dtype = next(g.dtype for g in gradients if g is not None)
    if dtype not in pointers.DTYPES:
        dtype = torch.float32
    return [None if g is None else g.to(dtype).contiguous() for g in gradients]
