"""Cases of AdamW, for its torch path, for its kernels in the interpreter, and on a GPU.

Parameters are many, small and of odd sizes, beside one of several chunks. A twin takes the same
gradients by the torch path of `engines.adamw`, another by `torch.optim.AdamW`.
"""

import math
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import nucleon
from nucleon.optim.engines import adamw
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine
from nucleon.optim.engines.ranks import wire
from nucleon.optim.matrices import shards

SHAPES = [(), (1,), (7,), (0, 3), (768,), (4, 6), (2, 3, 5), (1023,), (3, 1024), (3, 4099), (16, 3)]
EPS = torch.finfo(torch.float32).eps


def parameters(device, dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    return [p.requires_grad_() for p in found]


def give_gradients(params, round_, *, at=0, missing=(), maker=None):
    """New gradients, each from entry `at` of a buffer of its own; none for those `missing`."""
    generator = torch.Generator().manual_seed(1000 + round_)
    for i, p in enumerate(params):
        drawn = torch.randn(p.shape, generator=generator) * 10.0 ** (round_ % 4 - 2)
        buffer = torch.empty(at + p.numel(), dtype=p.dtype, device=p.device)
        gradient = buffer[at:].view(p.shape).copy_(drawn)
        p.grad = None if i in missing else gradient if maker is None else maker(gradient)


def optimizer_of(params, *, fast=True, **options):
    """AdamW alone, by the public class; `fast` is False for the torch path."""
    group = {"params": params, "route": "adamw", "lr": 1e-2, **options}
    found = nucleon.Muon([group])
    if not fast:
        found._twin = mock.patch.object(cuda_adamw, "serves", lambda params: False)
    return found


def step(optimizer):
    """One step, and which engine has taken it."""
    twin = getattr(optimizer, "_twin", None)
    if twin is None and not engine.runs_on(optimizer.param_groups[0]["params"][0].device):
        optimizer.step()  # the torch path itself is tried
        return
    if twin is None:
        with mock.patch.object(adamw, "update", side_effect=AssertionError("the torch path")):
            optimizer.step()
        return
    kernels = "nucleon.optim.engines.cuda.adamw_kernels.look_at"
    with twin, mock.patch(kernels, side_effect=AssertionError("a kernel")):
        optimizer.step()


def check_close(ours, theirs, steps):
    """Compare weights of one dtype; each step rounds a dozen times, half precision once more."""
    eps = torch.finfo(theirs.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=4 * steps * eps, atol=4 * steps * eps)


def agree(device, *, steps=3, dtype=torch.float32, at=0, missing=(), shapes=SHAPES, **options):
    """The kernels take the steps of the torch path."""
    ours, theirs = (parameters(device, dtype, shapes) for _ in range(2))
    one, two = optimizer_of(ours, **options), optimizer_of(theirs, fast=False, **options)
    for round_ in range(steps):
        for params, optimizer in ((ours, one), (theirs, two)):
            give_gradients(params, round_, at=at, missing=missing if round_ % 2 else ())
            step(optimizer)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        a, b = one.state[p], two.state[q]
        count = (steps + 1) // 2 if i in missing else steps
        assert a["step"].item() == b["step"].item() == count
        assert a["skipped"].item() == b["skipped"].item() == 0
        for name in ("exp_avg", "exp_avg_sq"):
            assert a[name].dtype == torch.float32
            check_close(a[name], b[name], steps)
        check_close(p.detach(), q.detach(), steps)


def agrees_with_torch(device, *, dtype=torch.float32, steps=4, **options):
    """The kernels take the steps of torch's own AdamW, one parameter joining later."""
    ours, theirs = parameters(device, dtype), parameters(device, dtype)
    one = optimizer_of(ours, **options)
    two = torch.optim.AdamW(theirs, **{"lr": 1e-2, "weight_decay": 0.0, **options})
    for round_ in range(steps):
        late = (5,) if round_ < 2 else ()
        for params, optimizer in ((ours, one), (theirs, two)):
            give_gradients(params, round_, missing=late)
            optimizer.step()
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        state = one.state[p]
        assert state["step"].item() == (steps - 2 if i == 5 else steps)
        assert state["skipped"].item() == 0
        check_close(p.detach(), q.detach(), steps)
        for name in ("exp_avg", "exp_avg_sq") if p.numel() else ():
            check_close(state[name], two.state[q][name], steps)


def bits(optimizer, params):
    """The bytes of everything that a skipped step must leave alone, for each parameter."""
    names = ("exp_avg", "exp_avg_sq", "step")
    return [
        [
            x.detach().clone().view(-1).view(torch.uint8)
            for x in (p, *(optimizer.state[p][n] for n in names))
        ]
        for p in params
    ]


def plant_zeros(params, optimizer):
    """Zeros of either sign in the weights, and −0 in the first moments."""
    with torch.no_grad():
        for p in params:
            flat = p.view(-1)
            flat[:3], flat[3:5] = -0.0, 0.0
            optimizer.state[p]["exp_avg"].view(-1)[1:4] = -0.0


def skips(device, bad, *, dtype=torch.float32, first=False, at=0, eps=1e-8):
    """A gradient with one bad entry leaves its parameter alone, bit for bit, and no other."""
    params, clean = parameters(device, dtype), parameters(device, dtype)
    one, two = (optimizer_of(some, weight_decay=0.1, eps=eps) for some in (params, clean))
    for some, optimizer in ((params, one), (clean, two)):
        for round_ in range(0 if first else 2):
            give_gradients(some, round_, at=at)
            step(optimizer)
    for some, optimizer in ((params, one), (clean, two)):
        plant_zeros(some, optimizer)
    before = bits(one, params)
    for some in (params, clean):
        give_gradients(some, 7, at=at)
    spoiled = [2, 9]  # of one chunk, and of the last of several
    for i in spoiled:
        params[i].grad.view(-1)[-1] = bad
    step(one)
    step(two)
    after, expected = bits(one, params), bits(two, clean)
    for i, p in enumerate(params):
        kept = before[i] if i in spoiled else expected[i]
        assert all(map(torch.equal, after[i], kept)), (i, bad)
        assert one.state[p]["skipped"].item() == (i in spoiled)


def limits(device):
    """The largest float32 whose square is finite is taken, the next one is not."""
    largest = torch.tensor(math.sqrt(torch.finfo(torch.float32).max), device=device)
    largest = largest if largest.square().isfinite() else largest.nextafter(largest * 0)
    assert largest.square().isfinite()
    beyond = largest.nextafter(largest * math.inf)
    assert beyond.square().isinf()
    params = parameters(device, shapes=[(5,), (5,)])
    optimizer = optimizer_of(params)
    for p, size in zip(params, (largest, beyond), strict=True):
        p.grad = torch.full_like(p, 1.0) * size
    step(optimizer)
    assert [optimizer.state[p]["skipped"].item() for p in params] == [0, 1]
    assert all(p.isfinite().all() for p in params)


def digits(device):
    """Against float64, from the first step on, where 1 − β₂ᵗ = 0.001; steps of size 1."""
    weight = torch.zeros(3, device=device, requires_grad=True)
    exact = torch.zeros(3, device=device, dtype=torch.float64, requires_grad=True)
    one, two = optimizer_of([weight], lr=1.0), torch.optim.AdamW([exact], lr=1.0, weight_decay=0.0)
    for gradient in ([1.0, -2.0, 3.0], [0.5, 0.25, -1.0]):
        for p, optimizer in ((weight, one), (exact, two)):
            p.grad = torch.tensor(gradient, dtype=p.dtype, device=device)
            optimizer.step()
    assert (weight - exact).abs().max() <= 2 * 12 * EPS  # a dozen roundings per step


def layouts(device):
    """Dense in any order of the axes; a gradient that lies otherwise is brought into that order."""
    made = (
        lambda x: x,
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack([x, x], -1)[..., 0],  # with gaps
        lambda x: x[:1].expand_as(x),  # one row for all
    )
    for of_weight in made[:2]:
        for of_gradient in made:
            found = []
            for fast in (True, False):
                (p,) = parameters(device, shapes=[(5, 13)])
                p.data = of_weight(p.detach())
                optimizer = optimizer_of([p], fast=fast, weight_decay=0.1)
                for round_ in range(2):
                    give_gradients([p], round_, maker=of_gradient)
                    step(optimizer)
                assert p.stride() == of_weight(p.detach()).stride()
                found.append(p.detach())
            check_close(*found, 2)


class Wrapped(torch.Tensor):
    """A tensor around another one, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def handed_over(device):
    """Gaps, no memory and float64, which the kernels do not serve, take the torch path."""
    found = []
    for fast in (True, False):
        gaps, whole = parameters(device, shapes=[(5, 26), (7,)])
        gaps = gaps.detach()[:, ::2].requires_grad_()
        half, wide = (whole.detach().to(d).requires_grad_() for d in (torch.float16, torch.float64))
        params = [gaps, whole, half, wide]
        optimizer = optimizer_of(params, fast=fast)
        for name in ("exp_avg", "exp_avg_sq"):  # with the gaps of the weights
            optimizer.state[gaps][name] = torch.zeros(5, 26, device=device)[:, ::2]
        for round_ in range(2):
            give_gradients(params, round_)
            half.grad = Wrapped(half.grad)
            optimizer.step() if fast else step(optimizer)
        assert all(optimizer.state[p]["step"].item() == 2 for p in params)
        found.append(params)
    for p, q in zip(*found, strict=True):
        assert torch.equal(p, q)


def forgets(device):
    """With β₁ = 0, m is the gradient bit for bit, whatever it was before."""
    params = parameters(device)
    optimizer = optimizer_of(params, betas=(0.0, 0.9))
    for scale in (1e4, 1e-3):
        for p in params:
            p.grad = scale * p.detach()
        step(optimizer)
    assert all(torch.equal(optimizer.state[p]["exp_avg"], p.grad) for p in params)


def moved_elsewhere(device):
    """Weights and states at other addresses are found again, and states may lie otherwise."""
    found = []
    for fast in (True, False):
        params = parameters(device, shapes=[(4, 6), (9,)])
        optimizer = optimizer_of(params, fast=fast)
        for round_ in range(4):
            give_gradients(params, round_)
            step(optimizer)
            if round_ == 0:
                for p in params:
                    p.data = p.detach().clone()
            if round_ == 1:
                own = optimizer.state[params[0]]
                own["exp_avg"] = own["exp_avg"].clone()
            if round_ == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        found.append(params)
    for p, q in zip(*found, strict=True):
        check_close(p.detach(), q.detach(), 4)


def scheduled(device):
    """The rate may be a tensor, on the device or not, and change between steps."""
    for make in (
        lambda: torch.tensor(0.01, dtype=torch.float64, device=device),
        lambda: torch.tensor([0.01], device=device),
        lambda: torch.tensor(0.01),
    ):
        ours, theirs = parameters(device), parameters(device)
        rate = make()
        one = optimizer_of(ours, lr=rate, weight_decay=0.2)
        two = torch.optim.AdamW(theirs, lr=rate.item(), weight_decay=0.2)
        for round_ in range(3):
            for params, optimizer in ((ours, one), (theirs, two)):
                give_gradients(params, round_)
                optimizer.step()
            rate.mul_(0.5)
            two.param_groups[0]["lr"] *= 0.5
        for p, q in zip(ours, theirs, strict=True):
            check_close(p.detach(), q.detach(), 3)


def changed(device):
    """Every option may change between steps, or stay for some."""
    ours, theirs = (parameters(device, shapes=[(7,), (4, 6), (1023,)]) for _ in range(2))
    one, two = optimizer_of(ours), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0)
    changes = ({"lr": 0.02}, {}, {"betas": (0.8, 0.9)}, {"weight_decay": 0.3}, {}, {"lr": 0.001})
    changes += ({"eps": 1e-3}, {"maximize": True, "lr": 0.01}, {}, {"maximize": False})
    for round_, options in enumerate(changes):
        for params, optimizer in ((ours, one), (theirs, two)):
            optimizer.param_groups[0].update(options)
            give_gradients(params, round_, missing=(1,) if round_ == 4 else ())
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        check_close(p.detach(), q.detach(), len(changes))


def defaults(device):
    """The default dtype and device of the user do not matter."""
    before = torch.get_default_dtype()
    found = []
    for dtype, where in ((before, "cpu"), (torch.float64, device)):
        params = parameters(device)
        optimizer = optimizer_of(params)
        give_gradients(params, 0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(where):
                step(optimizer)
        finally:
            torch.set_default_dtype(before)
        found.append(params)
    assert all(map(torch.equal, *found))


def nothing_there(device):
    """Without a gradient nothing changes; a parameter that never had one has no step."""
    params = parameters(device, shapes=[(3,), (4,)])
    optimizer = optimizer_of(params)
    give_gradients(params, 0, missing=(1,))
    step(optimizer)
    before = bits(optimizer, params)
    give_gradients(params, 1, missing=(0, 1))
    step(optimizer)
    for old, new in zip(before, bits(optimizer, params), strict=True):
        assert all(map(torch.equal, old, new))
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 0]


def without_a_square(device):
    """With eps = 0 gradients whose squares are 0 in float32 move nothing, as 0/0 would."""
    params = parameters(device, shapes=[(3,), (4,), (5,)])
    optimizer = optimizer_of(params, eps=0.0)
    old = [p.detach().clone() for p in params]
    for _ in range(5):
        for p, size in zip(params, (0.0, 1e-23, 1.0), strict=True):
            p.grad = torch.full_like(p, size)
        step(optimizer)
    assert all(map(torch.equal, params[:2], old))
    assert params[2].isfinite().all() and not torch.equal(params[2], old[2])


def sharded(device):
    """Local parts of DTensors, beside plain parameters, take the same steps and skips."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        shapes = [(4, 6), (7,), (9, 5)]
        found = []
        for fast in (True, False):
            drawn = parameters(device, shapes=shapes)
            params = [distribute_tensor(p.detach(), mesh, [Shard(0)]) for p in drawn[:2]]
            params = [*(p.requires_grad_() for p in params), drawn[2]]
            optimizer = optimizer_of(params, fast=fast, weight_decay=0.1)
            for round_ in range(3):
                give_gradients(drawn, round_)
                for p, q in zip(params[:2], drawn, strict=False):
                    p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
                if round_ == 1:  # a bad one, and one that is on other ranks only
                    params[0].grad.to_local()[1, 2] = math.nan
                    params[1].grad = None
                with mock.patch.object(wire, "add_up", everywhere):
                    step(optimizer)
            found.append((params, optimizer))
        (ours, one), (theirs, two) = found
        for p, q, skipped in zip(ours, theirs, (1, 0, 0), strict=True):
            a, b = one.state[p], two.state[q]
            assert a["step"].item() == b["step"].item() == 3 - skipped
            assert a["skipped"].item() == b["skipped"].item() == skipped
            check_close(shards.local(p).detach(), shards.local(q).detach(), 3)
    finally:
        dist.destroy_process_group()


def everywhere(counts, groups, what):
    """As if another rank had all gradients: each is there."""
    counts[0] += 1
    return counts


def averages(device, dtype):
    """The kernel of the average: whole chunks and their ends, at any offset."""
    from nucleon.optim.engines.cuda import adamw_kernels  # needs Triton

    flat = torch.randn(20_000).to(device, dtype)
    weights = [flat[1:4098], flat[4100:4107], flat[5000:13_192].view(64, 128), flat[:0]]
    means = [torch.randn(w.shape).to(device) for w in weights]
    part = torch.tensor(0.3, device=device)
    expected = [mean.lerp(w.float(), part) for mean, w in zip(means, weights, strict=True)]
    adamw_kernels.enter_average(adamw_kernels.average_table(weights, means).to(device), part, dtype)
    for mean, other in zip(means, expected, strict=True):
        torch.testing.assert_close(mean, other)


OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3},
    "climbing": {"weight_decay": 0.5, "maximize": True},
    "no memory": {"betas": (0.0, 0.9)},
    "long memory": {"betas": (0.95, 0.9999), "weight_decay": 0.01},
}
CASES = {
    **{f"skips {bad}": (skips, {"bad": bad}) for bad in (math.nan, math.inf, -math.inf, 1e30)},
    **{f"torch, {name}": (agrees_with_torch, options) for name, options in OPTIONS.items()},
    "some missing": (agree, {"missing": (0, 4, 9)}),
    "gradients anywhere": (agree, {"at": 1, "weight_decay": 0.1}),
    "float16": (agree, {"dtype": torch.float16, "weight_decay": 0.1}),
    "float16 anywhere": (agree, {"dtype": torch.float16, "at": 3}),
    "eps 0": (agree, {"eps": 0.0}),
    "skips at first": (skips, {"bad": math.nan, "first": True, "eps": 0.0}),
    "skips anywhere": (skips, {"bad": math.inf, "at": 1}),
    "skips float16": (skips, {"bad": math.inf, "dtype": torch.float16}),
    "limits": (limits, {}),
    "digits": (digits, {}),
    "forgets": (forgets, {}),
    "layouts": (layouts, {}),
    "handed over": (handed_over, {}),
    "changed": (changed, {}),
    "moved elsewhere": (moved_elsewhere, {}),
    "scheduled": (scheduled, {}),
    "sharded": (sharded, {}),
    "defaults": (defaults, {}),
    "nothing there": (nothing_there, {}),
    "without a square": (without_a_square, {}),
    "averages": (averages, {"dtype": torch.float32}),
    "averages float16": (averages, {"dtype": torch.float16}),
}
BY_TORCH = {  # what says something of the torch path
    name: case
    for name, case in CASES.items()
    if case[0] in (skips, agrees_with_torch, limits, digits, forgets, changed, scheduled)
    or case[0] in (defaults, nothing_there, without_a_square)
}
BY_TORCH |= {
    f"torch in {dtype}, {name}": (agrees_with_torch, {"dtype": dtype, "steps": 25, **options})
    for name, options in OPTIONS.items()
    for dtype in (torch.float32, torch.float64)
}
