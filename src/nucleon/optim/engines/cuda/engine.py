"""The CUDA engine of matrices: the step of a stack in a few passes over its gradients.

The operands of the float16 recursion are computed from the gradients and moments of the parameters,
without a float32 copy of the stack:

    sum_squares   ‖S‖_F, ‖G‖_F and ‖Ĝ‖_F of each matrix, which show non-finite ones
    advance       Ĝ ← β₁Ĝ + G;  S and G in float16, short side first
    symmetric     M̂ ← β₂M̂ + GGᵀ in place, and the first Gram matrix of the recursion
    move          W ← W − lr·s·scale·P − lr·`weight_decay`·W

Matrices below 64 rows have one kernel, `kernels.step_small`; `perturbed` has the kernels of noise.
The equations and the rules of skipping and resting are those of `reference`, which needs more
passes. The mask `taken` is its `stepped`. The `kernel` of a direction selects this engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon.linalg import half
from nucleon.linalg._precision import exact_products
from nucleon.linalg.kernels import triton_works
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import addresses
from nucleon.optim.engines.cuda.addresses import Side, block_layout, dense, restrided
from nucleon.optim.engines.cuda.program import Launches, Program, Recording
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
from nucleon.optim.polar_methods import HALF_ROWS, chosen_method, polynomials

MOST_NOISE = 2**30
"""Entries of all samples of a matrix, which are drawn at once: 4 GiB with all operands."""
LONGEST = 2**16
"""Most columns of a matrix below 64 rows: one program reads them in turn."""


def runs_on(device: torch.device) -> bool:
    """Return True if the kernels run on a device."""
    return device.type == "cuda" and triton_works()


def unreadable(param: Tensor) -> str | None:
    """Return the reason why the kernels cannot read a parameter of any strides, or None."""
    if not runs_on(param.device):
        return "no Triton" if param.device.type == "cuda" else "not on CUDA"
    return None if param.dtype in addresses.DTYPES else f"{_name(param.dtype)} weights"


def refusal(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block
) -> str | None:
    """Return the reason why this engine does not step such matrices of a parameter, or None.

    Under "owner" the same holds for the matrices of other ranks.
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
    if block_layout(param, block) is None:
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


def sides(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, block: Block
) -> tuple[Side, Side] | None:
    """Return the sides that the matrices of a stack share; None if this engine steps none."""
    if refusal(optimizer, group, param, block) is not None:
        return None
    layout = block_layout(param, block)
    assert layout is not None
    return layout.short, layout.long


def restride(stack: Stack, states: Sequence[State]) -> None:
    """Copy every Ĝ into the strides of its parameter, whose memory format may have changed."""
    for param, state in zip(stack.params, states, strict=True):
        if "total" in state:
            state["total"] = restrided(state["total"], param)


def step(work: Matrices, settings: Settings) -> None:
    """Step matrices that are whole on this rank, on the stream of their lane."""
    gradients = [param.grad for param in work.params]
    if all(gradient is None for gradient in gradients):
        return
    with work.lanes.entered(work):
        # The kernels of the weights do not round at random.
        if reference.dithered(work, settings) or not _stepped(work, settings, gradients):
            whole, mask = reference.gradients_of(work)
            reference.move(work, settings, *advance(work, settings, whole, mask))


def _stepped(work: Matrices, settings: Settings, gradients: Sequence[Tensor | None]) -> bool:
    """Step a stack by kernels alone; return False, with nothing changed, if they cannot."""
    launches, present = _launches(work, settings), [gradient is not None for gradient in gradients]
    launches.masked = launches.masked or not all(present)
    bound = launches.bound(work, settings, gradients, masked=launches.masked, moves=True)
    if bound is None:
        return False
    program, places, _ = bound
    rates, device = reference.rates(work, settings), work.params[0].device
    if torch.cuda.is_current_stream_capturing():  # the caller's graph
        launch(program, addresses.table(places, device), work.stack.mask(present), *rates)
        return True
    if launches.recording is None:
        launches.recording = Recording(work, len(places))
    inputs = launches.recording
    table, mask = inputs.table.tensor, inputs.mask.tensor
    inputs.table.set(places, lambda: addresses.send(places, table))
    inputs.rates.fill(*rates)
    if program.masked:
        inputs.mask.set(present, lambda: mask.copy_(work.stack.mask(present)))
    inputs.replay.run(
        program,
        lambda: launch(program, table, mask, *inputs.rates.tensor.unbind()),
        work.lanes.pools if program.captured else None,
        device,
    )
    return True


def advance(
    work: Matrices,
    settings: Settings,
    gradients: Sequence[Tensor],
    has_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Update the state by gradients, one per piece; return P and the mask of stepped matrices."""
    masked = has_gradient is not None
    bound = _launches(work, settings).bound(work, settings, gradients, masked=masked, moves=False)
    if bound is None:
        return reference.advance(work, settings, gradients, has_gradient)
    program, places, _ = bound
    return direction(program, addresses.table(places, gradients[0].device), has_gradient)


def _launches(work: Matrices, settings: Settings) -> Launches:
    if not isinstance(work.cache, Launches):
        work.cache = Launches(work, settings)
    return work.cache


# ---------------------------------------------------------------------- the launches


def launch(
    program: Program, table: Tensor, mask: Tensor, rate: float | Tensor, decay: float | Tensor
) -> None:
    """Launch the whole step; the last addresses of the table are those of the weights."""
    from nucleon.optim.engines.cuda import kernels

    runs = program.layout.runs
    states, weights = table[: program.kinds * runs], table[program.kinds * runs :]
    directions, taken = direction(program, states, mask if program.masked else None)
    with torch.cuda.device_of(table):
        kernels.moved(program, weights, directions, taken, rate, decay)


def direction(
    program: Program, table: Tensor, has_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Update the moments by a table; return P (b, m, n) and the mask of stepped matrices, (b,).

    Every step of this engine calls it; `diagnostics` call `reference.present_direction`.
    """
    from nucleon.optim.engines.cuda import kernels, perturbed

    # Triton launches on the current device; products of float16 are summed in float32.
    with torch.cuda.device_of(table), exact_products(table.device):
        if program.kernel == "perturbed":
            return perturbed.compute(program, table, has_gradient)
        if program.small:
            return kernels.small(program, table, has_gradient)
        start, taken = kernels.begin(program, table, has_gradient)
        recursion = half.augmented_factors if program.has_gram else half.polar_factors
        q, x = recursion(start, polynomials("half", program.iterations))
        return q @ x, taken
