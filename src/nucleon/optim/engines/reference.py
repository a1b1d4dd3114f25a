"""The step in torch, as the paper writes it; every other engine is tested against it.

For each matrix W (m×n, transposed when tall) and its gradient G,

    Ĝ ← β₁Ĝ + G          M̂ ← β₂M̂ + GGᵀ          (sums, not averages)
    S = Ĝ, or β₁Ĝ + G with `nesterov`
    P = direction(S, Λ),   Λ = c(G_max²β₁⁻²I + M̂),   c = `smoothing_scale`
    W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W

It supports every optimizer, dtype, device, axes spec and certificate. Skipping and resting are
arithmetic, not branches, so that the host does not wait for the masks, see `rest`. On a CPU the
masking passes are left out if no matrix skips or rests.
"""

import math
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import cast

import torch
from torch import Tensor

from nucleon import moments, noise
from nucleon.linalg._precision import exact_products
from nucleon.optim.engines import ledger, rest
from nucleon.optim.engines.work import (
    EXPONENTIAL_STREAM,
    Context,
    Hyperparameters,
    Matrices,
    Settings,
)
from nucleon.optim.matrices import shards

_ROUNDING_SEED = 0x5EED


def step(work: Matrices, settings: Settings) -> None:
    """Update matrices that are whole on this rank."""
    gradients, mask = gradients_of(work)
    if gradients:
        move(work, settings, *advance(work, settings, gradients, mask))


def gradients_of(work: Matrices) -> tuple[list[Tensor], Tensor | None]:
    """Return a gradient per piece, and the mask of matrices with one, (b,), or None if all have.

    Without any gradient the list is empty.
    """
    gradients: list[Tensor | None] = [*map(_GRAD, work.params)]
    present = [gradient is not None for gradient in gradients]
    if all(present):
        return cast(list[Tensor], gradients), None
    if not any(present):
        return [], None
    both = zip(gradients, work.params, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in both], work.stack.mask(present)


_GRAD = attrgetter("grad")
_TOTAL, _QUIET, _SKIPPED = map(itemgetter, ("total", "quiet", "skipped"))


def advance(
    work: Matrices,
    settings: Settings,
    gradients: Sequence[Tensor],
    has_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Update the state by gradients, one per piece; return P and the mask of stepped matrices.

    A matrix without a gradient, by the mask `has_gradient` (b,), is unchanged; None: all have one.
    """
    with exact_products(gradients[0].device):
        stack, states, hyper = work.stack, work.states, settings[work.stack.kind]
        gradient = stack.gather(gradients)
        gradient = gradient if hyper.sign > 0 else -gradient
        old, old_gram = moments_of(work)
        old_quiet = stack.gather_own(map(_QUIET, states))

        total = moments.accumulate_total(old, gradient, hyper.momentum)
        gram = old_gram
        if work.optimizer.has_gram:
            gram = moments.accumulate_gram(old_gram, gradient, hyper.gram_discount)
        ahead = hyper.momentum * total + gradient if hyper.lookahead else total
        smoothing = smoothing_of(gram, hyper)

        # Masks (b,): finite → usable, with a gradient → moving, neither faded nor resting
        # → computed, with a finite P. Usable and computed matrices are stepped, others skipped.
        size, largest = rest.frobenius(total), rest.largest(total)
        finite = _finite(work, hyper, largest, ahead if hyper.lookahead else None, gram)
        quiet = rest.quiet_steps(old_quiet, gradient)
        usable = finite if has_gradient is None else has_gradient & finite
        faded = rest.faded(size, gram)
        moving = usable & ~(faded | rest.resting(quiet, size, hyper.rest))
        inputs = rest.masked(moving, ahead), rest.masked(moving, smoothing)
        direction = _direction(work, settings, *inputs)
        all_move = rest.everywhere(moving)
        if not all_move:  # a hook may return NaN for S = 0
            direction = rest.masked(moving, direction)
        computed = rest.largest(direction) < math.inf
        stepped = usable & computed

        if settings.group["certify"]:
            ledger.record(work, settings, rest.masked(stepped, gradient), direction, stepped)
        if not (all_move and bool(computed.all())):
            each, keeps = stepped[:, None, None], (~faded)[:, None, None]
            total = torch.where(each, total * keeps, old)
            gram = torch.where(each, gram * keeps, old_gram) if gram.numel() else gram
        stack.scatter(total, map(_TOTAL, states))
        if work.optimizer.has_gram:
            torch._foreach_copy_(stack.grams(states), gram.split(stack.counts))
        stack.scatter_own(torch.where(stepped, quiet, old_quiet), map(_QUIET, states))
        skipped = ~stepped if has_gradient is None else has_gradient & ~stepped
        counts = stack.own(map(_SKIPPED, states))
        torch._foreach_add_(counts, skipped.long().split(stack.counts))
        return direction, stepped


def _finite(
    work: Matrices, hyper: Hyperparameters, largest: Tensor, ahead: Tensor | None, gram: Tensor
) -> Tensor:
    """Return the mask of matrices with finite moments and Λ, (b,), by their largest entries.

    A non-finite gradient makes Ĝ non-finite, and Ĝ must also fit the dtype of its state. A
    non-finite M̂ is found by the test of Λ, also with c = 0.
    """
    finite = largest.to(work.states[0]["total"].dtype) < math.inf
    if ahead is not None:
        finite = finite & (rest.largest(ahead) < math.inf)
    if gram.numel():
        finite = finite & (hyper.smoothing * (rest.largest(gram) + hyper.shift) < math.inf)
    return finite


def _direction(work: Matrices, settings: Settings, total: Tensor, smoothing: Tensor) -> Tensor:
    """Return P of the optimizer's `direction`; raise if its shape is not that of S.

    `diagnostics` and all steps call it but those of the CUDA engine.
    """
    shape = total.shape  # before the hook: it may work in place
    context = Context(settings.group, work.stack, work.states, settings[work.stack.kind])
    direction = work.optimizer.direction(total, smoothing, context)
    is_tensor = isinstance(direction, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_tensor or direction.shape != shape:
        returned = tuple(direction.shape) if is_tensor else type(direction).__name__
        raise ValueError(
            f"{work.optimizer.__class__.__name__}.direction returned {returned} for S of the shape "
            f"{tuple(shape)}; return P, a tensor in the shape of S"
        )
    return direction


def moments_of(work: Matrices) -> tuple[Tensor, Tensor]:
    """Return Ĝ (b, m, n) and M̂ (b, m, m) of the present state; M̂ is empty without a Gram."""
    stack, states = work.stack, work.states
    total = stack.gather(map(_TOTAL, states))
    gram = torch.cat(stack.grams(states)) if work.optimizer.has_gram else total.new_empty(0)
    return total, gram


def smoothing_of(gram: Tensor, hyper: Hyperparameters) -> Tensor:
    """Return Λ = c(G²β₁⁻²I + M̂), raised by the possible rounding of M̂; empty without a Gram."""
    if not gram.numel():
        return gram
    eta = hyper.smoothing**-0.5 if hyper.smoothing else math.inf
    return moments.smoothing(gram, gradient_bound=hyper.raised_bound, eta=eta)


def present_direction(work: Matrices, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return (S, Λ, P) of the present state, S = Ĝ, zero where a step would skip."""
    hyper = settings[work.stack.kind]
    with exact_products(work.params[0].device):
        total, gram = moments_of(work)
        finite = _finite(work, hyper, rest.largest(total), None, gram)
        total, smoothing = (
            rest.masked(finite, total),
            rest.masked(finite, smoothing_of(gram, hyper)),
        )
        # Copies, since a hook may write into them.
        direction = _direction(work, settings, total.clone(), smoothing.clone())
    quiet = work.stack.gather_own(s["quiet"] for s in work.states)
    resting = rest.resting(quiet, rest.frobenius(total), hyper.rest)
    moves = ~resting & (rest.largest(direction) < math.inf)
    return total, smoothing, rest.masked(moves, direction)


# ------------------------------------------------------------------ the weights


def move(work: Matrices, settings: Settings, direction: Tensor, stepped: Tensor) -> None:
    """Update W ← W − lr·s·scale·P − lr·wd·W for the `stepped` matrices, (b,)."""
    stack, dithers = work.stack, dithered(work, settings)
    direction = direction.to(stack.work_dtype)
    reads = settings.group["weight_decay"] or dithers
    weights = stack.gather(stack.params) if reads else direction
    change = _change(work, settings, direction, weights, stepped[:, None, None])
    if dithers:
        stack.scatter(_round(weights - change, _dither(work, settings)), stack.params)
    else:
        torch._foreach_sub_(*stack.regions(stack.params, change))


def move_boxes(
    work: Matrices, settings: Settings, directions: Sequence[Tensor], stepped: Tensor
) -> None:
    """Update this rank's shard of the parameter of each piece, like `move`.

    The update is elementwise; the dither is drawn for the whole parameter and then cut.
    """
    stack, dithers = work.stack, dithered(work, settings)
    bits = stack.boxes(_dither(work, settings)) if dithers else [None] * len(directions)
    # The entries of a parameter that belong to other pieces must not change.
    many = any(math.prod(stack.shape) < p.numel() for p in stack.params)
    each = stepped[:, None, None]
    oks = stack.boxes(each.expand(-1, *sorted(stack.shape))) if many else stepped.unbind()
    for param, direction, ok, low in zip(stack.params, directions, oks, bits, strict=True):
        weights = shards.local(param)
        change = _change(work, settings, direction, weights.to(direction.dtype), ok)
        if low is None:
            weights.sub_(change)
        else:
            weights.copy_(_round(weights - change, low))


def rates(work: Matrices, settings: Settings) -> tuple[float | Tensor, float | Tensor]:
    """Return lr·s·scale, the rate of P, and lr·`weight_decay`, the rate of W."""
    group, scale = settings.group, settings[work.stack.kind].scale
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor):  # reading a tensor on the host does not synchronize
        lr = float(lr) if lr.is_cpu and not work.params[0].is_cpu else lr.reshape(())
    length = _length(work, settings) if group["step_length"] == "exponential" else 1.0
    return lr * length * scale, lr * decay if decay else 0.0


def _length(work: Matrices, settings: Settings) -> Tensor:
    """Draw s ~ Exp(1), one for all matrices of a step, since the lemma scales the whole update."""
    param = work.params[0]
    return noise.exponential(
        (),
        seed=settings.group["seed"],
        stream=EXPONENTIAL_STREAM,
        step=work.states[0]["step"],
        dtype=torch.float64 if param.dtype == torch.float64 else torch.float32,
        device=param.device,
    )


def _change(
    work: Matrices, settings: Settings, direction: Tensor, weights: Tensor, stepped: Tensor
) -> Tensor:
    rate, decay = rates(work, settings)
    change = direction * rate
    if isinstance(decay, Tensor) or decay != 0.0:
        change = change + decay * weights
    # A mask by multiplication would keep NaN, since 0·NaN is NaN.
    return change if rest.everywhere(stepped) else change.masked_fill_(stepped == 0, 0.0)


def dithered(work: Matrices, settings: Settings) -> bool:
    """Return True if the weights are rounded at random."""
    return settings.group["stochastic_rounding"] and work.params[0].dtype == torch.bfloat16


def _dither(work: Matrices, settings: Settings) -> Tensor:
    """Draw a number 0 … 65535 for each entry, uniformly."""
    stream = work.stack.gather_own(state["stream"] for state in work.states)
    uniform = noise.uniform(
        (len(stream), *sorted(work.stack.shape)),
        seed=settings.group["seed"] ^ _ROUNDING_SEED,
        stream=stream,
        step=work.states[0]["step"],
        device=stream.device,
        dtype=torch.float32,
    )
    return (uniform * 65536.0).to(torch.int32).clamp_max(65535)


def _round(weights: Tensor, dither: Tensor) -> Tensor:
    """Round float32 to bf16, up or down with probabilities that make the mean exact."""
    # The lower 16 bits plus the dither carry with probability bits/2¹⁶.
    return ((weights.view(torch.int32) + dither) & -65536).view(torch.float32)
