"""Programs of the ranks in the tests: train a model in some layout, and return all of it."""

import math
import os
import time
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import nucleon
from nucleon.optim.engines.ranks import wire
from nucleon.optim.matrices import shards

TENSOR_PARALLEL = {
    "up": ColwiseParallel(),
    "middle": RowwiseParallel(),
    "again": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Halved(nucleon.Leon):
    """A method of the user's own."""

    name = "halved"

    def direction(self, total, smoothing, context):
        return super().direction(total, smoothing, context) / 2


MAKE = {"muon": nucleon.Muon, "leon": nucleon.Leon, "pion": nucleon.Pion, "halved": Halved}


@lru_cache  # every process group that is made keeps threads of its own
def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


class Net(nn.Module):
    """Matrices of several shapes, wide, tall and square, odd sizes, a stack, and vectors."""

    def __init__(self, dtype):
        super().__init__()
        self.up = nn.Linear(6, 20, dtype=dtype)
        self.middle = nn.Linear(20, 20, dtype=dtype)
        self.again = nn.Linear(20, 20, dtype=dtype)
        self.down = nn.Linear(20, 5, dtype=dtype)
        self.experts = nn.Parameter(torch.zeros(3, 5, 7, dtype=dtype))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            for p in self.parameters():
                nn.init.normal_(p, std=0.3)

    def forward(self, x):
        x = self.up(x).tanh()
        x = self.again(self.middle(x).tanh()).tanh()
        return torch.einsum("bi,eij->bej", self.down(x), self.experts).square().mean()


def make_optimizer(method, model, **options):
    """Group by the number of axes: a stack may lie on another mesh than the matrices."""
    if "average" in options:  # whose model it must know
        axes = {"*experts": {"axes": "b r c"}}
        return MAKE[method].for_model(model, lr=0.05, head=None, overrides=axes, **options)
    params = list(model.named_parameters())
    groups = [{"params": [item for item in params if item[1].ndim == n]} for n in (2, 3, 1)]
    groups[2] |= {"route": "adamw", "lr": 1e-2}
    return MAKE[method](groups, lr=0.05, weight_decay=0.1, **options)


def batch(step, rank, size, dtype):
    """The part of a batch that one of `size` ranks sees; all of it together is the same batch."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 6, generator=generator, dtype=dtype).chunk(size)[rank]


def long_side(param):
    """Return the axis that FSDP2 cuts; None is its own choice, the first axis."""
    return Shard(1) if param.ndim == 2 and param.shape[0] <= param.shape[1] else None


def layout(model, kind):
    """Spread the model over the ranks; returns what is called, and the share of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model), (rank, size)
    if kind == "tp":  # every rank sees the whole batch
        parallelize_module(model, mesh_of(size), TENSOR_PARALLEL)
        return model, (0, 1)
    if kind == "both":
        share = both_ways(model, TENSOR_PARALLEL)
        assert [type(p).__name__ for p in model.up.weight.placements] == ["_StridedShard", "Shard"]
        return model, (share, 2)
    mesh = mesh_of(2, size // 2) if kind == "hsdp" else mesh_of(size)
    for module in (model.up, model.middle, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=long_side if kind == "long" else None)
    return model, (rank, size)


def both_ways(model, plan):
    """Tensor parallel within, FSDP2 without: some matrices are cut twice along their rows."""
    mesh = mesh_of(2, dist.get_world_size() // 2)
    parallelize_module(model, mesh["inner"], plan)
    fully_shard(model, mesh=mesh["outer"])
    return mesh["outer"].get_local_rank()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(method, kind, steps=3, evaluates=False, **options):
    """Train in a layout; the whole weights, and the losses of the average if it is evaluated."""
    model, losses = Net(torch.float64), []
    called, share = layout(model, kind)
    optimizer = make_optimizer(method, model, **options)
    for step in range(steps):
        called(batch(step, *share, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad(), optimizer.averaged():
                losses.append(called(batch(9, 0, 1, torch.float64)).item())
    if evaluates:
        averages, fresh = optimizer.averaged_state_dict(model), Net(torch.float64)
        fresh.load_state_dict({name: whole(value) for name, value in averages.items()})
        losses.append(fresh(batch(9, 0, 1, torch.float64)).item())
    return {name: whole(p) for name, p in model.named_parameters()}, losses


def train_alone(method, steps=3, shares=1):
    """The same in one process; gradients are averaged over `shares` parts, as DDP does."""
    model = Net(torch.float64)
    optimizer = make_optimizer(method, model)
    for step in range(steps):
        for rank in range(shares):
            (model(batch(step, rank, shares, torch.float64)) / shares).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- prescribed gradients


SHAPES = {"tall": (12, 5), "wide": (4, 11), "square": (8, 8), "odd": (7, 3), "stack": (3, 4, 6)}


def gradient_of(name, step, dtype):
    seed = 1000 * step + sorted(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def spread(tensor, kind):
    """A parameter that every rank makes alike, placed as `kind` says."""
    if kind == "plain":
        return tensor.clone()
    size = dist.get_world_size()
    if kind == "hsdp":
        mesh, placed = mesh_of(2, size // 2), [Replicate(), Shard(0)]
    elif kind == "2d":
        mesh, placed = mesh_of(2, size // 2), [Shard(1), Shard(0)]
    elif kind == "twice":
        mesh, placed = mesh_of(2, size // 2), [_StridedShard(0, split_factor=size // 2), Shard(0)]
    else:
        mesh, placed = mesh_of(size), [Shard({"rows": 0, "columns": 1}[kind])]
    return place(tensor, mesh, placed)


def place(tensor, mesh, placed):
    """A tensor that every rank has, cut: also what distribute_tensor does not cut unevenly."""
    held = distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)
    return held.redistribute(placements=placed)


def prescribed(
    method,
    kinds,
    steps=4,
    dtype=torch.float32,
    missing=(),
    absent_on=(),
    zero=(),
    bad=(),
    frozen=(),
    changes=(),
    **options,
):
    """Steps on given gradients: the same bits whoever computes them. Returns whole weights.

    `missing` (name, step): no rank has that gradient. `absent_on` (name, step, rank): one has none.
    `zero` (name, step, row): 0 from that row on. `bad` (name, step): it holds a NaN. `frozen`
    (name, step): it is unfrozen, on all ranks, before that step. `changes` (step, option, value):
    it has that value from that step on.
    """
    layouts = dict.fromkeys(SHAPES, kinds)
    if not isinstance(kinds, str):
        layouts = {name: kinds[i % len(kinds)] for i, name in enumerate(SHAPES)}
    if layouts["stack"] == "columns":
        layouts["stack"] = "rows"
    params = {
        name: spread(torch.full(shape, 0.5, dtype=dtype), layouts[name]).requires_grad_()
        for name, shape in SHAPES.items()
    }
    for name, _ in frozen:
        params[name].requires_grad_(False)
    optimizer = MAKE[method](list(params.items()), lr=0.05, weight_decay=0.1, **options)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        for name, p in params.items():
            gradient = gradient_of(name, step, dtype)
            if (name, step) in bad:
                gradient[..., 0, 0] = float("nan")
            for row in (r for n, s, r in zero if (n, s) == (name, step)):
                gradient[row:] = 0.0
            p.requires_grad_(step >= dict(frozen).get(name, 0))
            p.grad = spread(gradient, layouts[name]) if p.requires_grad else None
            if (name, step) in missing or (name, step, rank) in absent_on:
                p.grad = None
        optimizer.param_groups[0].update({o: value for s, o, value in changes if s == step})
        optimizer.step()
    skipped = {n: optimizer.state[p].get("skipped") for n, p in params.items()}
    return {n: whole(p) for n, p in params.items()}, skipped


def train_scaled(placement, bad, scale):
    """DDP under GradScaler, where rank `bad` overflows at the second of four steps; None: never.

    With `scale` None the scaler is left out, and the second step too. Returns the weights, the
    number of steps that were taken, and the last scale.
    """
    model = Net(torch.float32)
    called, share = layout(model, "ddp")
    optimizer = make_optimizer("leon", model, placement=placement)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for step in range(4):
        loss = called(batch(step, *share, torch.float32))
        if step == 1 and share[0] == bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if scale is not None or step != 1:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    taken = {int(state["step"]) for state in optimizer.state.values()}
    return {name: whole(p) for name, p in model.named_parameters()}, taken, scaler.get_scale()


def replicated(placement, route):
    """A weight that every rank has whole, on a batch that DTensor cut: its gradient is a sum of
    parts still to be added up. Returns the weights after two steps here, and in one process."""
    mesh = mesh_of(dist.get_world_size())
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    here = distribute_tensor(start.clone(), mesh, [Replicate()]).requires_grad_()
    alone = start.clone().requires_grad_()
    for param, inputs in ((here, distribute_tensor(x, mesh, [Shard(0)])), (alone, x)):
        chosen = placement if param is here else "local"
        optimizer = nucleon.Leon([{"params": [param], "route": route}], placement=chosen)
        for _ in range(2):
            nn.functional.linear(inputs, param).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return here.to_local().detach().clone(), alone.detach()


def vectors(kind, bad, absent=None):
    """AdamW on a vector of five and one of one, so that some ranks hold nothing of them.

    At step 1 a gradient has a NaN where `bad`, and none comes on the rank `absent`. Returns what
    is whole after four steps, and what each rank counted.
    """
    params = [spread(torch.full((n,), 0.5), kind).requires_grad_() for n in (5, 1)]
    optimizer = nucleon.Leon([{"params": params, "route": "adamw", "lr": 0.1}])
    for step in range(4):
        for p in params:
            gradient = gradient_of("tall", step, torch.float32)[0][: p.numel()].clone()
            if step == 1 and bad and p.numel() == 5:
                gradient[0] = float("nan")
            p.grad = spread(gradient, kind)
            if step == 1 and absent is not None and dist.get_rank() == absent:
                p.grad = None
        optimizer.step()
    counts = [(s["step"].item(), s["skipped"].item()) for s in optimizer.state.values()]
    return [whole(p) for p in params], counts


class Attention(nn.Module):
    """Logits of `heads` query and half as many key heads of 3 rows."""

    def __init__(self, heads=4):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.q_proj = nn.Linear(8, 3 * heads, dtype=torch.float64)
            self.k_proj = nn.Linear(8, 3 * heads // 2, dtype=torch.float64)
        self.head_dim = 3

    def forward(self, x):
        q, k = (linear(x).unflatten(-1, (-1, 3)) for linear in (self.q_proj, self.k_proj))
        k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
        return torch.einsum("qhi,khi->hqk", q, k) * 3**-0.5


def clipped(kind, recorded):
    """The projections after a clip, whole; of several ranks each pair has a batch of its own."""
    model = Attention()
    first = [p.detach().clone() for p in model.parameters()]
    clip = nucleon.optim.QKClip(0.2)
    share = 0 if kind == "alone" else dist.get_rank() % 2
    if kind == "both":
        share = both_ways(model, {name: ColwiseParallel() for name in ("q_proj", "k_proj")})
    elif kind == "tp":
        mesh = mesh_of(2, dist.get_world_size() // 2)
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj")}
        parallelize_module(model, mesh["inner"], plan)
        share = mesh["outer"].get_local_rank()
    clip.watch("a", model.q_proj, model.k_proj, head_size=3)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = [x, 2 * x] if kind == "alone" else [(1 + share) * x]
    for inputs in batches:
        logits = model(inputs)
        if recorded:
            clip.record("a", logits)
        logits.sum().backward()
    if kind == "rows":  # shards of a model that ran whole
        for linear in (model.q_proj, model.k_proj):
            for name, p in list(linear.named_parameters()):
                setattr(linear, name, nn.Parameter(spread(p.detach(), "rows")))
    clip.step()
    return first, [whole(p) for p in model.parameters()]


def wide_gradients(kind, placement):
    """bf16 weights with float32 gradients: the state is that of one process."""
    found = []
    for layout_, chosen in (("plain", "local"), (kind, placement)):
        param = spread(torch.ones(12, 5, dtype=torch.bfloat16), layout_).requires_grad_()
        param.grad_dtype = torch.float32
        param.grad = spread(gradient_of("tall", 0, torch.float32), layout_)
        optimizer = nucleon.Leon([param], placement=chosen)
        optimizer.step()
        found.append(optimizer.state[param].get("total"))
    return found


def later(what):
    """One good step, then a rank goes its own way."""
    params = [torch.ones(4, 5, requires_grad=True)]
    optimizer = nucleon.Leon(params, placement="owner", certify=True, gradient_bound=9.0)
    for step in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        nucleon.optim.check_ranks(optimizer)
        if step == 0 and what == "lr":
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        elif step == 0:
            width = 6 + dist.get_rank() * (what == "group")
            params.append(torch.ones(4, width, requires_grad=True))
            optimizer.add_param_group({"params": params[1:]})
    return [param.tolist() for param in params]


def weighted(shapes, method, sharded, placement, wire_dtype=None, dtype=torch.float32, replicas=1):
    """Make an optimizer of weights with gradients; shards are cut along the long side."""
    size = dist.get_world_size()
    mesh = mesh_of(*(replicas, size // replicas)[replicas == 1 :]) if sharded else None
    torch.manual_seed(0)

    def spread(x):
        if mesh is None:
            return x
        axis = 0 if x.shape[0] > x.shape[1] else 1
        return distribute_tensor(x, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(axis)])

    weights = [spread(torch.randn(m, n, dtype=dtype)).requires_grad_() for m, n, _ in shapes]
    for p in weights:
        p.grad = spread(torch.randn(p.shape, dtype=dtype))
    group = {"params": weights, "axes": [axes for _, _, axes in shapes]}
    options = {"placement": placement, "wire_dtype": wire_dtype, "method": "polar-express"}
    return MAKE[method]([group], **options)


@contextmanager
def traffic():
    """Count the bytes that this rank sends, with collectives as rings.

    Every rank but the last passes a broadcast on, a gathered tensor moves all parts but one, and an
    all-reduce sends these twice.
    """
    sent, rank, size = [], dist.get_rank(), dist.get_world_size()

    def others(x):
        axes = zip(x.placements, x.device_mesh.shape, strict=True)
        parts = math.prod(n for placed, n in axes if shards.axis_cut(placed) is not None)
        return (parts - 1) * shards.local(x).nbytes

    costs = {
        "exchange": lambda sends, *_: sum(x.nbytes for _, x in sends),
        "broadcast": lambda x, source, _: x.nbytes * ((rank + 1) % size != source),
        "add_up": lambda x, groups, _: sum(
            2 * (ranks - 1) * x.nbytes // ranks for ranks in map(dist.get_world_size, groups)
        ),
        "gather": others,
    }

    def counted(name):
        call = getattr(wire, name)
        return lambda *arguments: sent.append(costs[name](*arguments)) or call(*arguments)

    with mock.patch.multiple(wire, **{name: counted(name) for name in costs}):
        yield sent


def cost_of_a_step(**options):
    """Return the bytes that this rank sends in a step, its flops and the bytes of its moments."""
    from torch.utils.flop_counter import FlopCounterMode

    optimizer = weighted(**options)
    optimizer.step()
    with FlopCounterMode(display=False) as counter, traffic() as sent:
        optimizer.step()
    moments = (s[k] for s in optimizer.state.values() for k in ("total", "gram") if k in s)
    kept = sum(getattr(x, "_local_tensor", x).nbytes for x in moments)
    return sum(sent), counter.get_total_flops(), kept


def weights_after(**options):
    """Return the whole weights after two steps."""
    optimizer = weighted(**options)
    for _ in range(2):
        optimizer.step()
    return [whole(p) for p in optimizer.param_groups[0]["params"]]


def unsupported(case):
    placed = [Partial()] if case == "partial" else [_StridedShard(0, split_factor=3)]
    mesh, part = mesh_of(dist.get_world_size()), torch.zeros(4, 6)
    param = DTensor.from_local(part, mesh, placed, run_check=False).requires_grad_()
    return nucleon.Leon([("w", param)], placement="owner")


def diverge():
    """Two shapes of plain tensors whose gradients differ from the third step on, as without DDP.

    Returns the number of steps that were taken, which is that before the error.
    """
    params = [torch.zeros(4, 5, requires_grad=True), torch.zeros(3, 7, requires_grad=True)]
    optimizer = nucleon.Leon(params)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(8):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) if step > 1 else torch.ones_like(p)
        optimizer.step()
        try:
            nucleon.optim.check_ranks(optimizer)
        except RuntimeError as error:
            raise RuntimeError(f"after {step} steps: {error}") from error


def fail(fault, kind, rank):
    """One good step of all ranks, then one of them dies, or does nothing for a long time."""
    param = spread(torch.zeros(9, 5), kind).requires_grad_()
    optimizer = nucleon.Leon([param], placement="owner")
    param.grad = torch.ones_like(param)
    optimizer.step()
    if dist.get_rank() == rank:
        if fault == "dies":
            os._exit(3)
        time.sleep(600)
    start = time.monotonic()
    try:
        for _ in range(3):
            optimizer.step()
    except RuntimeError as error:
        raise RuntimeError(f"{error} after {time.monotonic() - start:.1f} s") from error
