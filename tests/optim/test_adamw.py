"""The inner AdamW against `torch.optim.AdamW`, and what torch's does not have: skipping."""

import math
from types import SimpleNamespace

import pytest
import torch

import nucleon
from nucleon.optim import options
from nucleon.optim.engines import adamw
from nucleon.optim.engines.work import Work
from nucleon.optim.state import new_adamw_state
from optim import adamw_cases
from optim.test_contract import NoHostRead
from soaking import some

SHAPES = [(), (1,), (7,), (4, 6), (2, 3, 5), (0, 3)]
GROUP = {**options.ADAMW_DEFAULTS, "maximize": False}


def make(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def give_gradients(params, round_, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + round_)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


@torch.no_grad()
def step(params, states, group):
    adamw.step(Work(adamw, 0, params, states), SimpleNamespace(group=group))


def check_close(actual, expected, steps=1):
    """Each step adds at most a few roundings of the weight and of the change."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * steps * eps, atol=4 * steps * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("betas", "eps", "decay"),
    [((0.9, 0.999), 1e-8, 0.0), ((0.8, 0.95), 1e-3, 0.1), ((0.0, 0.9), 1e-8, 0.5)],
)
def test_equals_torch_step_for_step(dtype, maximize, betas, eps, decay):
    ours, theirs = make(dtype), make(dtype)
    options = {"lr": 0.01, "betas": betas, "eps": eps, "weight_decay": decay}
    group = {**GROUP, **options, "maximize": maximize}
    states = [new_adamw_state(p) for p in ours]
    oracle = torch.optim.AdamW(theirs, **options, maximize=maximize)
    for round_ in range(25):
        give_gradients(ours, round_, scale=10.0 ** (round_ % 5 - 2))
        give_gradients(theirs, round_, scale=10.0 ** (round_ % 5 - 2))
        step(ours, states, group)
        oracle.step()
        for p, q in zip(ours, theirs, strict=True):
            check_close(p.detach(), q.detach(), round_ + 1)
    for p, q, state in zip(ours, theirs, states, strict=True):
        if not p.numel():
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            check_close(state[key], oracle.state[q][key], 25)
        assert state["step"].item() == oracle.state[q]["step"].item() == 25
        assert state["skipped"].item() == 0


def test_is_bit_for_bit_torchs_on_the_cpu():
    ours, theirs = make(), make()
    group = {**GROUP, "weight_decay": 0.1}
    states = [new_adamw_state(p) for p in ours]
    oracle = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, foreach=False)
    for round_ in range(50):
        give_gradients(ours, round_)
        give_gradients(theirs, round_)
        step(ours, states, group)
        oracle.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_the_float32_moments_of_torch(dtype):
    """The oracle: torch's AdamW on float32 weights that are rounded to half after every step."""
    ours = make(dtype)
    group = {**GROUP, "weight_decay": 0.1}
    states = [new_adamw_state(p) for p in ours]
    theirs = [p.detach().float().requires_grad_() for p in ours]
    oracle = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1)
    for round_ in range(10):
        give_gradients(ours, round_)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.float()
        step(ours, states, group)
        oracle.step()
        with torch.no_grad():
            for q in theirs:
                q.copy_(q.to(dtype))
    for p, q, state in zip(ours, theirs, states, strict=True):
        assert state["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(p.detach().float(), q.detach())


def test_mixed_dtypes_share_a_group():
    ours = [make(torch.float32, shapes=[(3, 2)])[0], make(torch.float64, shapes=[(3, 2)])[0]]
    alone = [p.detach().clone().requires_grad_() for p in ours]
    states = [new_adamw_state(p) for p in ours]
    give_gradients(ours, 0)
    give_gradients(alone, 0)
    step(ours, states, GROUP)
    for p, q in zip(ours, alone, strict=True):
        step([q], [new_adamw_state(q)], GROUP)
        assert torch.equal(p, q)


def test_the_gradient_itself_is_not_written_to():
    params = make()
    states = [new_adamw_state(p) for p in params]
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    step(params, states, {**GROUP, "maximize": True})
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


def test_nothing_is_read_back():
    params = make()
    states = [new_adamw_state(p) for p in params]
    give_gradients(params, 0)
    with NoHostRead():  # raises on the first host read
        step(params, states, GROUP)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("case", adamw_cases.BY_TORCH.values(), ids=adamw_cases.BY_TORCH)
def test_a_case_of_the_torch_path(case):
    run, options = case
    run(torch.device("cpu"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(adamw_cases.CASES))
def test_the_kernels_in_the_interpreter(case, interpreter):
    interpreter("optim.adamw_cases", case)


def test_devices_and_dtypes_are_stepped_apart():
    kinds = [("cpu", None), ("meta", None), ("cpu", torch.float64), ("cpu", None)]
    params = [torch.zeros(2, device=device, dtype=dtype) for device, dtype in kinds]
    assert adamw.buckets(params) == [[0, 3], [1], [2]]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("betas", 0.9, ValueError),
        ("betas", (0.9,), ValueError),
        ("betas", (0.9, 1.0), ValueError),
        ("betas", (-0.1, 0.9), ValueError),
        ("betas", ("0.9", 0.99), TypeError),
        ("eps", -1e-8, ValueError),
        ("weight_decay", math.nan, ValueError),
        ("maximize", 1, TypeError),
    ],
)
def test_bad_options_are_named(option, value, error):
    params = [torch.zeros(3, requires_grad=True)]
    with pytest.raises(error, match=option):
        nucleon.Muon([{"params": params, "route": "adamw", **GROUP, option: value}])
    nucleon.Muon([{"params": params, "route": "adamw", **GROUP}])
