"""The step in torch, top to bottom as the paper writes it: every other engine is held against it.

For each matrix W (m×n, transposed when tall) and its gradient G,

    Ĝ ← β₁Ĝ + G          M̂ ← β₂M̂ + GGᵀ          (sums, not averages)
    S = Ĝ, or β₁Ĝ + G with `nesterov`
    P = direction(S, Λ),   Λ = c(G_max²β₁⁻²I + M̂),   c = `smoothing_scale`
    W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W

It serves any optimizer, dtype, device and axes, and keeps certificates. Skipping and resting are
arithmetic, not branches: the host never learns which matrices they concern, see `rest`. On a CPU,
where it knows, a step that concerns none saves the passes over the stack that mask it.
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
    """One step of matrices that are here whole."""
    gradients, mask = gradients_of(work)
    if gradients:
        move(work, settings, *advance(work, settings, gradients, mask))


def gradients_of(work: Matrices) -> tuple[list[Tensor], Tensor | None]:
    """Return a gradient per piece, and which matrices have one, (b,); None: all have.

    Without any gradient the list is empty.
    """
    gradients: list[Tensor | None] = [*map(_GRAD, work.params)]
    there = [gradient is not None for gradient in gradients]
    if all(there):
        return cast(list[Tensor], gradients), None
    if not any(there):
        return [], None
    both = zip(gradients, work.params, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in both], work.stack.mask(there)


_GRAD = attrgetter("grad")
_TOTAL, _QUIET, _SKIPPED = map(itemgetter, ("total", "quiet", "skipped"))


def advance(
    work: Matrices,
    settings: Settings,
    gradients: Sequence[Tensor],
    has_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Enter gradients, one per piece, into the state; return P and which matrices move, (b,).

    A matrix without a gradient, by the mask (b,), is left alone; None says that all have one.
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

        size, largest = rest.frobenius(total), rest.largest(total)
        finite = _finite(work, hyper, largest, ahead if hyper.lookahead else None, gram)  # (b,)
        quiet = rest.quiet_steps(old_quiet, gradient)
        usable = finite if has_gradient is None else has_gradient & finite
        faded = rest.faded(size, gram)
        moving = usable & ~(faded | rest.resting(quiet, size, hyper.rest))
        kept = rest.kept(moving, ahead), rest.kept(moving, smoothing)
        direction = _direction(work, settings, *kept)
        all_move = rest.everywhere(moving)
        if not all_move:  # of S = 0 a hook may make anything, as 0/0
            direction = rest.kept(moving, direction)
        computed = rest.largest(direction) < math.inf
        taken = usable & computed

        if settings.group["certify"]:
            ledger.record(work, settings, rest.kept(taken, gradient), direction, taken)
        if not (all_move and bool(computed.all())):
            each, keeps = taken[:, None, None], (~faded)[:, None, None]
            total = torch.where(each, total * keeps, old)
            gram = torch.where(each, gram * keeps, old_gram) if gram.numel() else gram
        stack.scatter(total, map(_TOTAL, states))
        if work.optimizer.has_gram:
            torch._foreach_copy_(stack.grams(states), stack.split(gram))
        stack.scatter_own(torch.where(taken, quiet, old_quiet), map(_QUIET, states))
        skipped = ~taken if has_gradient is None else has_gradient & ~taken
        stack.add_own(skipped.long(), map(_SKIPPED, states))
        return direction, taken


def _finite(
    work: Matrices, hyper: Hyperparameters, largest: Tensor, ahead: Tensor | None, gram: Tensor
) -> Tensor:
    """Return which matrices have finite moments and Λ, (b,), by their largest entries.

    A gradient that is not finite shows in Ĝ, which must also fit the dtype it is kept in, and an M̂
    that is not shows in Λ, also with c = 0.
    """
    found = largest.to(work.states[0]["total"].dtype) < math.inf
    if ahead is not None:
        found = found & (rest.largest(ahead) < math.inf)
    if gram.numel():
        found = found & (hyper.smoothing * (rest.largest(gram) + hyper.shift) < math.inf)
    return found


def _direction(work: Matrices, settings: Settings, total: Tensor, smoothing: Tensor) -> Tensor:
    """Return P of the optimizer's `direction`; raise where it has not the shape of S."""
    shape = total.shape  # before the hook: it may work in place
    context = Context(settings.group, work.stack, work.states, settings[work.stack.kind])
    found = work.optimizer.direction(total, smoothing, context)
    is_tensor = isinstance(found, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_tensor or found.shape != shape:
        returned = tuple(found.shape) if is_tensor else type(found).__name__
        raise ValueError(
            f"{work.optimizer.__class__.__name__}.direction returned {returned} for S of the shape "
            f"{tuple(shape)}; return P, a tensor in the shape of S"
        )
    return found


def moments_of(work: Matrices) -> tuple[Tensor, Tensor]:
    """Return Ĝ (b, m, n) and M̂ (b, m, m) of the present state; M̂ is empty without a Gram."""
    stack, states = work.stack, work.states
    total = stack.gather(map(_TOTAL, states))
    gram = torch.cat(stack.grams(states)) if work.optimizer.has_gram else total.new_empty(0)
    return total, gram


def smoothing_of(gram: Tensor, hyper: Hyperparameters) -> Tensor:
    """Λ = c(G²β₁⁻²I + M̂), M̂ with what rounding may have taken; empty without a Gram."""
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
        total, smoothing = rest.kept(finite, total), rest.kept(finite, smoothing_of(gram, hyper))
        # Copies, since a hook may write into them.
        direction = _direction(work, settings, total.clone(), smoothing.clone())
    quiet = work.stack.gather_own(s["quiet"] for s in work.states)
    resting = rest.resting(quiet, rest.frobenius(total), hyper.rest)
    moves = ~resting & (rest.largest(direction) < math.inf)
    return total, smoothing, rest.kept(moves, direction)


# ------------------------------------------------------------------ the weights


def move(work: Matrices, settings: Settings, direction: Tensor, taken: Tensor) -> None:
    """W ← W − lr·s·scale·P − lr·wd·W for the matrices that are `taken`, (b,)."""
    stack, dithers = work.stack, dithered(work, settings)
    direction = direction.to(stack.work_dtype)
    reads = settings.group["weight_decay"] or dithers
    weights = stack.gather(stack.params) if reads else direction
    change = _change(work, settings, direction, weights, taken[:, None, None])
    if dithers:
        stack.scatter(_round(weights - change, _dither(work, settings)), stack.params)
    else:
        torch._foreach_sub_(*stack.regions(stack.params, change))


def move_boxes(
    work: Matrices, settings: Settings, directions: Sequence[Tensor], taken: Tensor
) -> None:
    """Do the same to what this rank holds of the parameter of each piece.

    It is elementwise, so each rank can do it to its own; the dither is drawn for the whole.
    """
    stack, dithers = work.stack, dithered(work, settings)
    bits = stack.boxes(_dither(work, settings)) if dithers else [None] * len(directions)
    # Where a piece is not all of its parameter, the rest of it must stay as it is.
    many = any(math.prod(stack.shape) < p.numel() for p in stack.params)
    each = taken[:, None, None]
    oks = stack.boxes(each.expand(-1, *sorted(stack.shape))) if many else taken.unbind()
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
    if isinstance(lr, Tensor):  # one on the host is a number: reading it waits for nothing
        lr = float(lr) if lr.is_cpu and not work.params[0].is_cpu else lr.reshape(())
    length = _length(work, settings) if group["step_length"] == "exponential" else 1.0
    return lr * length * scale, lr * decay if decay else 0.0


def _length(work: Matrices, settings: Settings) -> Tensor:
    """Draw s ~ Exp(1), one for all matrices of a step: the lemma scales the whole update."""
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
    work: Matrices, settings: Settings, direction: Tensor, weights: Tensor, taken: Tensor
) -> Tensor:
    rate, decay = rates(work, settings)
    change = direction * rate
    if isinstance(decay, Tensor) or decay != 0.0:
        change = change + decay * weights
    # 0 times what is not finite is not 0.
    return change if rest.everywhere(taken) else change.masked_fill_(taken == 0, 0.0)


def dithered(work: Matrices, settings: Settings) -> bool:
    """Return whether the weights are rounded at random."""
    return settings.group["stochastic_rounding"] and work.params[0].dtype == torch.bfloat16


def _dither(work: Matrices, settings: Settings) -> Tensor:
    """Draw 0 … 65535 for each entry, each as likely."""
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
    """float32 → bf16, up or down with probabilities that make the mean exact."""
    # The bits that bf16 lacks carry with their own probability.
    return ((weights.view(torch.int32) + dither) & -65536).view(torch.float32)
