"""The whole step of a stack as one CUDA graph: one launch instead of thirty, without being asked.

A graph holds the addresses it was captured with, so everything that may move or change is read from
small tensors that stay where they are: a table of pointers, to gradients among others, the mask of
those that are there, and the two rates of the update. What is baked in, the `Job`, is compared at
every step; where it changes from step to step, as with a schedule of the momentum, nothing is
captured.

The graphs of an optimizer share pools of memory, which it keeps: one of the largest stack among
them, and a small one for each of the `lanes` of small stacks. Those with large products are not
captured: their kernels take longer than the launches, and between the steps their memory is free
for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import launch, pointers
from nucleon.optim.engines.cuda.capture import captured
from nucleon.optim.engines.cuda.job import Job, aligned
from nucleon.optim.engines.cuda.layout import Layout, layout_of
from nucleon.optim.engines.work import Matrices, Settings, facts_of
from nucleon.optim.polar_methods import chosen_method

LARGEST = 2**35
"""bm³ of a stack that is captured, b matrices of short side m: 0.1 ms per product on an H200."""

Rates = tuple[float | Tensor, float | Tensor]


@dataclass
class Recording:
    """A stack's step as it was seen last: first run, then captured, then replayed."""

    job: object
    addresses: list[int]
    table: Tensor
    """`addresses` on the device: gradients, `pointers.of_states`, weights."""
    rates: Tensor
    """(2,): on the direction, and of the decay."""
    mask: Tensor
    """(b,): which matrices have a gradient."""
    known: Rates | None = None
    """What the rates hold, where the host knows it."""
    there: Sequence[bool] | None = None
    """What the mask holds."""
    graph: torch.cuda.CUDAGraph | None = None
    fails: bool = False


@dataclass
class Cache:
    """What this engine keeps of a stack between steps."""

    in_axis_order: Layout
    """The order of the parameters' axes, in which its direction is sent to other ranks."""
    in_memory_order: Layout
    """As the step that moves the weights reads it, unless noise has an order."""
    small: bool
    """Whether its direction is that of `small`."""
    gradient_dtypes: Sequence[torch.dtype]
    """What its gradients may be of; others are copied."""
    inputs: tuple[object, ...] = ()
    """What `job` was made of."""
    job: Job | None = None
    masked: bool = False
    """Whether a gradient was ever missing: then the kernels ask."""
    recording: Recording | None = None
    tensors: Sequence[Tensor] = ()
    """`pointers.held` when they were found regular: nothing else can be at their addresses."""
    seen: Sequence[int] = ()
    """Their addresses."""
    addresses: Sequence[int] = ()
    """Of the runs of states and weights, as the kernels follow them."""


def cache_of(work: Matrices, settings: Settings) -> Cache:
    """What is kept of a stack, from its first step on."""
    if not isinstance(work.cache, Cache):
        ordered, param = layout_of(work.stack), work.params[0]
        drawn = facts_of(work.optimizer).kernel == "perturbed"
        stored = layout_of(work.stack, in_order=drawn)
        assert ordered is not None and stored is not None  # or it has another engine
        method = chosen_method(settings.group, *work.stack.shape, param.device, param.dtype)
        small = method != "half"
        dtypes = (torch.float32,) if small else pointers.DTYPES
        work.cache = Cache(ordered, stored, small, dtypes)
    return work.cache


def job_of(
    work: Matrices, settings: Settings, gradient: torch.dtype, *, masked: bool, moves: bool = True
) -> Job:
    """The job of a stack under the present options: nearly always that of the last step.

    `moves` says whether the step moves the weights, and no one else asks for the direction.
    """
    cache, total = cache_of(work, settings), work.states[0]["total"].dtype
    decays, hyper = bool(settings.group["weight_decay"]), settings[work.stack.kind]
    inputs = (gradient, total, masked, moves, decays, hyper)
    if cache.job is None or cache.inputs != inputs:
        kernel = facts_of(work.optimizer).kernel
        assert kernel is not None  # or it has another engine
        cache.inputs = inputs
        cache.job = Job(
            *sorted(work.stack.shape),
            layout=cache.in_memory_order if moves else cache.in_axis_order,
            recursion=kernel,
            small=cache.small,
            gradient=gradient,
            total=total,
            weight=work.params[0].dtype,
            has_gram=work.optimizer.has_gram,
            masked=masked,
            decays=decays,
            iterations=settings.group["iterations"],
            hyper=hyper,
        )
    return cache.job


Pools = dict[torch.cuda.Stream, tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]]
"""For each stream that replays, the stream that captures, and the first graph with the pool."""


def step(
    work: Matrices,
    settings: Settings,
    gradients: Sequence[Tensor | None],
    dtype: torch.dtype,
    there: Sequence[bool] | None,
) -> bool:
    """The step of a stack; False, with nothing changed, where its state cannot be followed.

    The gradients are regular ones of `dtype`, see `pointers.regular`; `there` says which of them
    are there, None: all. Once some were missing the kernels ask.
    """
    cache = cache_of(work, settings)
    cache.masked = cache.masked or there is not None
    job = job_of(work, settings, dtype, masked=cache.masked)
    addresses = _addresses(work, cache, job, gradients)
    if addresses is None:
        return False
    job = aligned(job, addresses)
    rates = reference.rates(work, settings)
    there = there or [True] * len(gradients)
    if torch.cuda.is_current_stream_capturing():  # the caller's graph
        table = pointers.table(addresses, work.params[0].device)
        launch.step(job, table, work.stack.mask(there), *rates)
        return True
    recording = _recording(work, cache, job, addresses)
    _set_rates(recording, rates)
    if cache.masked and recording.there != there:
        recording.mask.copy_(work.stack.mask(there))
        recording.there = there
    if recording.graph is not None:
        recording.graph.replay()
    else:
        _launch(recording, job)
    return True


def _addresses(
    work: Matrices, cache: Cache, job: Job, gradients: Sequence[Tensor | None]
) -> list[int] | None:
    """Of gradients, states and weights; None where one is irregular."""
    stack, device = work.stack, work.params[0].device
    new = pointers.of_regular(job.layout, gradients)
    kinds = {"has_gram": job.has_gram, "has_noise": job.draws is not None}
    tensors = pointers.held(stack, work.states, **kinds)
    seen = [*map(Tensor.data_ptr, tensors)]
    if job.small and job.total != torch.float32:  # an option was changed since
        return None
    if cache.seen != seen:  # to find them again costs a step its time
        moments = pointers.of_states(stack, job.layout, work.states, **kinds)
        target = pointers.of_tensors(job.layout, stack.params, device)
        if moments is None or target is None:
            return None
        cache.tensors, cache.seen, cache.addresses = tensors, seen, [*moments, *target]
    return None if new is None else [*new, *cache.addresses]


def captures(job: Job) -> bool:
    """Whether launches take long beside the kernels."""
    return job.directions * job.m**3 <= LARGEST


def _recording(work: Matrices, cache: Cache, job: Job, addresses: list[int]) -> Recording:
    """What is known of a stack, with its table brought up to date; captured the second time."""
    device = work.params[0].device
    found = cache.recording
    if found is None or found.job != job:
        table = pointers.table(addresses, device)
        rates = torch.empty(2, dtype=torch.float32, device=device)
        mask = torch.ones(job.layout.count, dtype=torch.bool, device=device)
        found = Recording(job, addresses, table, rates, mask)
        cache.recording = found
        return found
    if found.addresses != addresses:
        pointers.send(addresses, found.table)
        found.addresses = addresses
    if found.graph is None and not found.fails and captures(job):
        _capture(work.lanes.pools, found, job)
    return found


def _set_rates(recording: Recording, rates: Rates) -> None:
    known = None if any(isinstance(rate, Tensor) for rate in rates) else rates
    if known is not None and recording.known == known:
        return
    for target, rate in zip(recording.rates, rates, strict=True):
        target.copy_(rate) if isinstance(rate, Tensor) else target.fill_(rate)
    recording.known = known


def _launch(recording: Recording, job: Job) -> None:
    launch.step(job, recording.table, recording.mask, *recording.rates.unbind())


def _capture(pools: Pools, recording: Recording, job: Job) -> None:
    """Record the launches of a stack that has been run before: they are compiled and tuned."""
    device = recording.table.device
    # A pool dies with the last graph in it, so the first one is kept as long as the worklist.
    # Graphs that share a pool must not run at once: one pool for each stream they are replayed on.
    caller = torch.cuda.current_stream(device)
    stream, first = pools.get(caller) or (torch.cuda.Stream(device), None)
    recording.graph = captured(lambda: _launch(recording, job), stream, first)
    if recording.graph is None:  # it is launched one by one instead, which shows what is wrong
        recording.fails = True
    else:
        pools.setdefault(caller, (stream, recording.graph))
