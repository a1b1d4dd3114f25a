"""The step in torch, top to bottom as the paper writes it: every other engine is held against it.

For each matrix W (m×n, transposed when tall) and its gradient G,

    Ĝ ← β₁Ĝ + G          M̂ ← β₂M̂ + GGᵀ          (sums, not averages)
    S = Ĝ, or β₁Ĝ + G with `nesterov`
    P = direction(S, Λ),   Λ = c(G_max²β₁⁻²I + M̂),   c = `smoothing_scale`
    W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W

It takes any method, dtype, device and axes, and keeps certificates. Skipping and resting are
arithmetic, not branches: the host never learns which matrices they concern, see `rest`. On a CPU,
where it knows, a step that concerns none saves the passes over the stack that mask it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nucleon import moments, noise
from nucleon.linalg._precision import exact_products
from nucleon.optim.engines import ledger, rest
from nucleon.optim.engines.work import Hyperparameters, Matrices
from nucleon.optim.matrices import shards

_ROUNDING_SEED = 0x5EED


def step(work: Matrices) -> None:
    """One step of matrices that are here whole; another engine may compute the direction."""
    there = [param.grad is not None for param in work.params]
    if not any(there):
        return
    mask = None if all(there) else work.stack.mask(there)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.params]
    move(work, *work.computer.advance(work, gradients, mask))


def advance(
    work: Matrices, gradients: Sequence[Tensor], has_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Enter gradients, one per piece, into the state; (P, which matrices are to be moved, (b,)).

    A matrix without a gradient, by the mask (b,), is left alone; None says that all have one.
    """
    with exact_products(gradients[0].device):
        stack, states, hyper = work.stack, work.states, work.hyperparameters
        gradient = stack.gather(gradients)
        gradient = gradient if hyper.sign > 0 else -gradient
        old, old_gram = moments_of(work)
        old_quiet = stack.gather_own([s["quiet"] for s in states])

        total = moments.accumulate_total(old, gradient, hyper.momentum)
        gram = old_gram
        if work.optimizer.has_gram:
            gram = moments.accumulate_gram(old_gram, gradient, hyper.gram_discount)
        ahead = hyper.momentum * total + gradient if hyper.lookahead else total
        smoothing = smoothing_of(gram, hyper)

        size, largest = rest.frobenius(total), rest.largest(total)
        finite = _finite(work, largest, ahead if hyper.lookahead else None, gram)  # (b,)
        quiet = rest.quiet_steps(old_quiet, gradient)
        usable = finite if has_gradient is None else has_gradient & finite
        faded = rest.faded(size, gram)
        moving = usable & ~(faded | rest.resting(quiet, size, hyper.rest))
        direction = _direction(work, rest.kept(moving, ahead), rest.kept(moving, smoothing))
        all_move = rest.everywhere(moving)
        if not all_move:  # of S = 0 a hook may make anything, as 0/0
            direction = rest.kept(moving, direction)
        computed = rest.largest(direction) < math.inf
        taken = usable & computed
        masked = not (all_move and bool(computed.all()))

        if work.group["certify"]:
            ledger.record(work, rest.kept(taken, gradient), direction, taken)
        if masked:
            each, kept = taken[:, None, None], (~faded)[:, None, None]
            total = torch.where(each, total * kept, old)
            gram = torch.where(each, gram * kept, old_gram) if gram.numel() else gram
        stack.scatter(total, [s["total"] for s in states])
        if work.optimizer.has_gram:
            torch._foreach_copy_(stack.grams(states), stack.split(gram))
        stack.scatter_own(torch.where(taken, quiet, old_quiet), [s["quiet"] for s in states])
        skipped = ~taken if has_gradient is None else has_gradient & ~taken
        counts = stack.own([s["skipped"] for s in states])
        torch._foreach_add_(counts, stack.split(skipped.long()))
        return direction, taken


def _finite(work: Matrices, largest: Tensor, ahead: Tensor | None, gram: Tensor) -> Tensor:
    """Where all that a step is made of is finite, (b,): largest entries say it for all.

    A gradient that is not finite shows in Ĝ, which must also fit the dtype it is kept in, and an M̂
    that is not shows in Λ, also with c = 0.
    """
    hyper = work.hyperparameters
    found = largest.to(work.states[0]["total"].dtype) < math.inf
    if ahead is not None:
        found = found & (rest.largest(ahead) < math.inf)
    if gram.numel():
        found = found & (hyper.smoothing * (rest.largest(gram) + hyper.shift) < math.inf)
    return found


def _direction(work: Matrices, total: Tensor, smoothing: Tensor) -> Tensor:
    """P of the method's hook; raises where it has not the shape of S."""
    shape = total.shape  # before the hook: it may work in place
    found = work.optimizer.direction(total, smoothing, work.context)
    is_tensor = isinstance(found, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_tensor or found.shape != shape:
        returned = tuple(found.shape) if is_tensor else type(found).__name__
        raise ValueError(
            f"{work.optimizer.__class__.__name__}.direction returned {returned} for S of the shape "
            f"{tuple(shape)}; return P, a tensor in the shape of S"
        )
    return found


def moments_of(work: Matrices) -> tuple[Tensor, Tensor]:
    """Ĝ (b, m, n) and M̂ (b, m, m) of the present state; M̂ is empty without a Gram."""
    stack, states = work.stack, work.states
    total = stack.gather([s["total"] for s in states])
    gram = torch.cat(stack.grams(states)) if work.optimizer.has_gram else total.new_empty(0)
    return total, gram


def smoothing_of(gram: Tensor, hyper: Hyperparameters) -> Tensor:
    """Λ = c(G²β₁⁻²I + M̂), M̂ with what rounding may have taken; empty without a Gram."""
    if not gram.numel():
        return gram
    eta = hyper.smoothing**-0.5 if hyper.smoothing else math.inf
    return moments.smoothing(gram, gradient_bound=hyper.raised_bound, eta=eta)


def present_direction(work: Matrices) -> tuple[Tensor, Tensor, Tensor]:
    """(S, Λ, P) of the present state, S = Ĝ; zero where a step would skip; nothing changes."""
    hyper = work.hyperparameters
    with exact_products(work.params[0].device):
        total, gram = moments_of(work)
        finite = _finite(work, rest.largest(total), None, gram)
        total, smoothing = rest.kept(finite, total), rest.kept(finite, smoothing_of(gram, hyper))
        # Copies, since a hook may write into them.
        direction = _direction(work, total.clone(), smoothing.clone())
    quiet = work.stack.gather_own(s["quiet"] for s in work.states)
    resting = rest.resting(quiet, rest.frobenius(total), hyper.rest)
    moves = ~resting & (rest.largest(direction) < math.inf)
    return total, smoothing, rest.kept(moves, direction)


# ------------------------------------------------------------------ the weights


def move(work: Matrices, direction: Tensor, taken: Tensor) -> None:
    """W ← W − lr·s·scale·P − lr·wd·W for the matrices that are `taken`, (b,)."""
    stack, dither = work.stack, _dither(work)
    direction = direction.to(stack.work_dtype)
    reads = work.group["weight_decay"] or dither is not None
    weights = stack.gather(stack.params) if reads else direction
    change = _change(work, direction, weights, taken[:, None, None])
    if dither is None:
        torch._foreach_sub_(*stack.regions(stack.params, change))
    else:
        stack.scatter(_round(weights - change, dither), stack.params)


def move_boxes(work: Matrices, directions: Sequence[Tensor], taken: Tensor) -> None:
    """The same, to what this rank holds of the parameter of each piece.

    It is elementwise, so each rank can do it to its own; the dither is drawn for the whole.
    """
    stack, dither = work.stack, _dither(work)
    bits = stack.boxes(dither) if dither is not None else [None] * len(directions)
    # Where a piece is not all of its parameter, the rest of it must stay as it is.
    many = any(math.prod(stack.shape) < p.numel() for p in stack.params)
    each = taken[:, None, None]
    oks = stack.boxes(each.expand(-1, *sorted(stack.shape))) if many else taken.unbind()
    for param, direction, ok, low in zip(stack.params, directions, oks, bits, strict=True):
        weights = shards.local(param)
        change = _change(work, direction, weights.to(direction.dtype), ok)
        if low is None:
            weights.sub_(change)
        else:
            weights.copy_(_round(weights - change, low))


def _change(work: Matrices, direction: Tensor, weights: Tensor, taken: Tensor) -> Tensor:
    rate, decay = work.rates()
    change = direction * rate
    if isinstance(decay, Tensor) or decay != 0.0:
        change = change + decay * weights
    # 0 times what is not finite is not 0.
    return change if rest.everywhere(taken) else change.masked_fill_(taken == 0, 0.0)


def _dither(work: Matrices) -> Tensor | None:
    """0 … 65535 for each entry, each as likely; None where nothing is rounded at random."""
    if not work.group["stochastic_rounding"] or work.params[0].dtype != torch.bfloat16:
        return None
    context = work.context
    stream = context.stream
    uniform = noise.uniform(
        (len(stream), *sorted(work.stack.shape)),
        seed=context.seed ^ _ROUNDING_SEED,
        stream=stream,
        step=context.step,
        device=stream.device,
        dtype=torch.float32,
    )
    return (uniform * 65536.0).to(torch.int32).clamp_max(65535)


def _round(weights: Tensor, dither: Tensor) -> Tensor:
    """float32 → bf16, up or down with probabilities that make the mean exact."""
    # The bits that bf16 lacks carry with their own probability.
    return ((weights.view(torch.int32) + dither) & -65536).view(torch.float32)
