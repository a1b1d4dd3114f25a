"""The optimizers on CUDA: as on the CPU, without a host synchronization, captured and compiled."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import nucleon
from nucleon import noise
from nucleon.optim.average import share
from nucleon.optim.polar_methods import polynomials

METHODS = {
    "muon": lambda p, **k: nucleon.Muon(p, **k),
    "leon": lambda p, **k: nucleon.Leon(p, **k),
    "pion": lambda p, **k: nucleon.Pion(p, **k),
    "pion-samples": lambda p, **k: nucleon.Pion(p, samples=2, **k),
    "leon-exponential": lambda p, **k: nucleon.Leon(p, step_length="exponential", **k),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
SHAPES = [(24, 64), (64, 24), (24, 64), (32, 32), (3, 24, 64), (1, 1)]
LR, BF16 = 0.1, torch.bfloat16


def parameters(device, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes
    ]


def give_gradients(params, step):
    """Draw equal bits on every device; in place where a gradient exists, as a graph needs it."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.copy_(gradient)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


def tolerance(steps, slack=1.0):
    """Two roundings of one step differ by the products' √n·eps times what the quintics make of it.

    A perturbation of a small singular value grows with the slope of the composition at 0, the
    product of the linear coefficients; larger ones are pulled to 1. `slack` is the random length.
    """
    slope = math.prod(a for a, _, _ in polynomials("polar-express", 5))
    return slack * steps * LR * slope * math.sqrt(64) * torch.finfo(torch.float32).eps


def assert_close(a, b, atol, rtol=1e-6):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.detach().cpu(), y.detach().cpu(), rtol=rtol, atol=atol)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_cuda_equals_cpu(make, dtype):
    here, there = parameters("cpu", dtype), parameters("cuda", dtype)
    train(make(here, lr=LR), here, 3)
    train(make(there, lr=LR), there, 3)
    # A different rounding of the direction moves a weight to a neighbour: 2⁻⁸ of it, each step.
    rtol = 3 * 2.0**-8 if dtype == BF16 else 1e-6
    assert_close(here, there, tolerance(3, slack=4.0), rtol=rtol)


def test_the_profiler_sees_a_synchronization():
    x = torch.ones(3, device="cuda")
    assert host_waits(lambda: x.sum().item())


@every_method
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "momentum_dtype": BF16}])
def test_the_profiler_sees_no_synchronization(make, options):
    params = parameters("cuda")
    optimizer = make(params, lr=LR, **options)
    train(optimizer, params, 2)
    give_gradients(params, 2)
    assert host_waits(optimizer.step) == set()


def host_waits(call):
    """CUDA calls that make the host wait, and copies to it, while `call` runs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("the call"):
            call()
        torch.cuda.synchronize()
    (whole,) = (
        e
        for e in trace.events()
        if e.name == "the call"
        and e.cpu_parent is None
        and e.device_type == torch.autograd.DeviceType.CPU
    )
    inside = {
        e.name
        for e in trace.events()
        if whole.time_range.start <= e.time_range.start <= whole.time_range.end
    }
    copies = {e.name for e in trace.events() if "DtoH" in e.name}
    return {name for name in inside if "Synchronize" in name} | copies


FLOAT32 = {"method": "polar-express"}
LEONS = {
    "default": FLOAT32,
    "unsmoothed": {"smoothing_scale": 0.0, **FLOAT32},
    "unsmoothed-7": {"smoothing_scale": 0.0, "iterations": 7},
    "coupled": {"method": "coupled"},
}
TF32 = {
    "muon": lambda p, **k: nucleon.Muon(p, **FLOAT32, **k),
    "pion": lambda p, **k: nucleon.Pion(p, **FLOAT32, **k),
    **{f"leon-{n}": lambda p, o=o, **k: nucleon.Leon(p, **o, **k) for n, o in LEONS.items()},
}


@pytest.mark.parametrize("make", TF32.values(), ids=TF32)
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_tf32_of_the_user_is_kept_and_does_no_harm(make, condition):
    """‖P‖_op ≤ 1 + 1e-3 is promised whatever the user's setting, which the step leaves alone."""
    torch.backends.cuda.matmul.allow_tf32 = True
    weight = torch.nn.Parameter(torch.zeros(256, 512, device="cuda"))
    optimizer = make([weight], lr=1.0, momentum=0.0, scale="none")
    weight.grad = with_condition(256, 512, condition)
    optimizer.step()
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.linalg.matrix_norm(weight.detach().double(), 2) <= 1 + 1e-3


def with_condition(m, n, condition):
    generator = torch.Generator().manual_seed(5)
    u = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.logspace(0, -math.log10(condition), m, dtype=torch.float64)
    return ((u * spectrum) @ v.mT).float().cuda()


def test_random_words_are_the_same_on_both_devices():
    stream = torch.arange(3)
    here = noise.signs((3, 7, 11), seed=5, stream=stream, step=2, device="cpu")
    there = noise.signs((3, 7, 11), seed=5, stream=stream.cuda(), step=2, device="cuda")
    assert torch.equal(here, there.cpu())
    uniform = [noise.uniform((999,), seed=5, device=d).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*uniform)
    normal = [noise.normal((999,), seed=5, device=d).cpu() for d in ("cpu", "cuda")]
    # Logarithm, cosine and root are each right to 2 units in the last place, up to 6.66.
    torch.testing.assert_close(*normal, rtol=8 * 2.0**-24, atol=8 * 2.0**-24)


@every_method
def test_grad_scaler_skips_an_overflow_and_goes_on(make):
    params = parameters("cuda")
    optimizer = make(params, lr=LR)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = sum((p.square() * factor).sum() for p in params)
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        assert all(p.isfinite().all() for p in params)
        moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
        assert not any(moved) if step == 1 else all(moved)
    assert scaler.get_scale() < 2.0**10


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_state_saved_on_the_cpu_goes_on_on_the_gpu(make, dtype):
    here = parameters("cpu", dtype)
    first = make(here, lr=LR)
    train(first, here, 2)
    there = [torch.nn.Parameter(p.detach().cuda()) for p in here]
    second = make(there, lr=0.7)
    second.load_state_dict(first.state_dict())
    for a, b in zip(here, there, strict=True):
        for name, value in second.state[b].items():
            assert value.is_cuda and value.dtype == first.state[a][name].dtype
            assert torch.equal(value.cpu(), first.state[a][name])
    train(first, here, 2, start=2)
    train(second, there, 2, start=2)
    rtol = 1e-6 if dtype == torch.float32 else 2 * 2.0**-8
    assert_close(here, there, tolerance(2, slack=4.0), rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("average", [0.1, 50])
def test_the_average_without_a_sync_and_in_a_captured_graph(dtype, average):
    torch.manual_seed(0)
    params = [torch.randn(96, 64), torch.randn(64, 128), torch.randn(7)]
    params = [p.cuda().to(dtype).requires_grad_() for p in params]
    groups = [{"params": params[:2]}, {"params": params[2:], "route": "adamw"}]
    optimizer = nucleon.Muon(groups, average=average)
    twins = [p.detach().double() for p in params]
    averaging, t = optimizer._averaging, 0

    def follow():
        nonlocal t
        t += 1
        part = share(average, torch.tensor(float(t), dtype=torch.float64, device="cuda"))
        for twin, p in zip(twins, params, strict=True):
            twin += part * (p.detach().double() - twin)

    for step in range(8):
        for p in params:
            p.grad = torch.randn_like(p)
        torch.cuda.set_sync_debug_mode("error" if step > 4 else "default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        follow()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and enters nothing
        averaging.update(optimizer.state, optimizer._worklist)
    for _ in range(5):
        with torch.no_grad():
            params[0].mul_(1.25)
        graph.replay()
        follow()
    states = [optimizer.state[p] for p in params]
    assert {int(state["averaged"]) for state in states} == {13}
    for twin, state in zip(twins, states, strict=True):
        torch.testing.assert_close(state["average"].double(), twin, rtol=1e-5, atol=1e-6)
    raw = [p.detach().clone() for p in params]
    with optimizer.averaged():
        for p, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(
                p.detach().float(), twin.to(dtype).float(), rtol=1e-2, atol=1e-5
            )
    assert all(map(torch.equal, raw, params))
