"""The inner AdamW against `torch.optim.AdamW`, and what torch's does not have: skipping."""

import math

import pytest
import torch

import nucleon
from nucleon.optim.engines import adamw
from optim import adamw_cases as cases
from optim.test_contract import NoHostRead, as_on_a_device
from soaking import some

CPU = torch.device("cpu")


def test_is_bit_for_bit_torchs_on_the_cpu():
    ours, theirs = cases.parameters(CPU), cases.parameters(CPU)
    one = cases.optimizer_of(ours, weight_decay=0.1)
    two = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, foreach=False)
    for round_ in range(50):
        for params, optimizer in ((ours, one), (theirs, two)):
            cases.give_gradients(params, round_)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_the_float32_moments_of_torch(dtype):
    """The oracle: torch's AdamW on float32 weights that are rounded to half after every step."""
    ours = cases.parameters(CPU, dtype)
    theirs = [p.detach().float().requires_grad_() for p in ours]
    one = cases.optimizer_of(ours, weight_decay=0.1)
    two = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for round_ in range(10):
        cases.give_gradients(ours, round_)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.float()
        one.step()
        two.step()
        with torch.no_grad():
            for q in theirs:
                q.copy_(q.to(dtype))
    for p, q in zip(ours, theirs, strict=True):
        assert one.state[p]["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(p.detach().float(), q.detach())


def test_mixed_dtypes_share_a_group():
    ours, alone = (
        [*cases.parameters(CPU, shapes=[(3, 2)]), *cases.parameters(CPU, torch.float64, [(3, 2)])]
        for _ in range(2)
    )
    for params in (ours, alone):
        cases.give_gradients(params, 0)
    cases.optimizer_of(ours).step()
    for p, q in zip(ours, alone, strict=True):
        cases.optimizer_of([q]).step()
        assert torch.equal(p, q)


def test_the_gradient_itself_is_not_written_to():
    params = cases.parameters(CPU)
    cases.give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    cases.optimizer_of(params, maximize=True).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


def test_nothing_is_read_back():
    params = cases.parameters(CPU)
    optimizer = cases.optimizer_of(params)
    cases.give_gradients(params, 0)
    with as_on_a_device(), NoHostRead():  # raises on the first host read
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("case", cases.BY_TORCH.values(), ids=cases.BY_TORCH)
def test_a_case_of_the_torch_path(case):
    check, options = case
    check(CPU, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(cases.CASES))
def test_the_kernels_in_the_interpreter(case, check_in_interpreter):
    check_in_interpreter("optim.adamw_cases", case)


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
        nucleon.Muon([{"params": params, "route": "adamw", option: value}])
    nucleon.Muon([{"params": params, "route": "adamw"}])
