"""Options certain to overflow are refused before anything changes; others may change midway."""

import copy
import math
import re

import pytest
import torch

import nucleon
from soundness import skips
from soundness.cases import DTYPES, METHODS, Setting, drawn
from soundness.watch import same_bits, snapshot

every_method = pytest.mark.parametrize("make", METHODS, ids=lambda c: c.__name__)
WITH_GRAM = [nucleon.Leon, nucleon.Pion]


@pytest.mark.parametrize("make", WITH_GRAM, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("dtype", "options", "match"),
    [
        (torch.float32, {"gradient_bound": 1e20}, "gradient_bound"),
        (torch.float32, {"gradient_bound": 1e200}, "gradient_bound"),
        (torch.bfloat16, {"gradient_bound": 1e19, "momentum": 0.01}, "gradient_bound"),
        (torch.float64, {"gradient_bound": 1e200}, "gradient_bound"),
        (torch.float32, {"gradient_bound": 1.01e-17}, "gradient_bound"),
        (torch.bfloat16, {"gradient_bound": 1.01e-17}, "gradient_bound"),
        (torch.float64, {"gradient_bound": 1e-147}, "gradient_bound"),
        (torch.float32, {"smoothing_scale": 1e-310}, "smoothing_scale"),
        (torch.float16, {"smoothing_scale": 1e-40}, "smoothing_scale"),
        (torch.float32, {"smoothing_scale": 1e39}, "smoothing_scale"),
        (torch.float64, {"smoothing_scale": 1e-310}, "smoothing_scale"),
        (torch.float64, {"smoothing_scale": 1e200, "gradient_bound": 1e100}, "gradient_bound"),
    ],
    ids=str,
)
def test_options_that_overflow_or_vanish_are_refused(make, dtype, options, match):
    params = [("layer.weight", torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype)))]
    with pytest.raises(ValueError, match=rf"{match}=.*layer\.weight") as refusal:
        make(params, **options)
    if least := re.search(r"pass at least (\S+),", str(refusal.value)):
        make(params, gradient_bound=float(least[1]))


@pytest.mark.parametrize("make", WITH_GRAM, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"gradient_bound": 1e18}),
        (torch.float64, {"gradient_bound": 1e150}),
        (torch.float32, {"smoothing_scale": 0.0}),
        (torch.float32, {"smoothing_scale": 1e-37}),
        (torch.float32, {"smoothing_scale": 1e36}),
    ],
    ids=str,
)
def test_options_at_the_ends_of_their_range_take_sound_steps(make, dtype, options):
    watched = Setting(make, dtype, options=options).watched([(4, 6)])
    for seed in range(3):
        watched.step(*drawn(watched, seed))
    assert all(state["skipped"].sum() == 0 for state in watched.states)
    watched.quiet(3)


@every_method
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_state_that_is_not_finite_is_refused_and_nothing_changes(make, value):
    setting = Setting(make)
    donor, _ = skips.trained(setting, [(4, 6), (2, 5, 3)])
    for name in ("total", "gram"):
        saved = copy.deepcopy(donor.state_dict())
        if name not in saved["state"][1]:
            continue
        saved["state"][1][name].view(-1)[-1] = value
        saved["param_groups"][0]["lr"] = 123.0
        optimizer, params = skips.trained(setting, [(4, 6), (2, 5, 3)], steps=2)
        before = snapshot(optimizer, params)
        with pytest.raises(ValueError, match=f"'{name}'.*not finite.*parameter 1"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5
        for a, b in zip(before, snapshot(optimizer, params), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@every_method
def test_a_run_that_rests_resumes_bit_for_bit(make):
    """The count of quiet steps is saved: a resumed matrix rests when the first one does."""
    setting = Setting(make, options={"momentum": 0.9})
    one, params = skips.trained(setting, [(4, 6)])
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for step in range(15):
        for p in (*params, *others):
            p.grad = torch.zeros_like(p)
        if step == 4:  # in the middle of its nine steps
            two = make(others)
            with torch.no_grad():
                others[0].copy_(params[0])
            two.load_state_dict(copy.deepcopy(one.state_dict()))
        one.step()
        if step >= 4:
            two.step()
    for a, b in zip(snapshot(one, params), snapshot(two, others), strict=True):
        assert a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    assert one.state[params[0]]["quiet"].item() == 16


@every_method
def test_options_may_change_on_a_running_optimizer(make):
    """Every step before and after is that of the oracle with the options of its own time."""
    methods = [m for m in METHODS[make] if m != "half"]
    watched = Setting(make).watched()
    for step in range(24):
        watched.group["method"] = methods[step // 3 % len(methods)]
        watched.group["momentum"] = (0.95, 0.5, 0.0, 0.999)[step // 2 % 4]
        watched.group["nesterov"] = step % 5 == 0
        if make is not nucleon.Muon:
            watched.group["smoothing_scale"] = (1.0, 0.0, 1e6, 1e-6)[step // 4 % 4]
            watched.group["beta2"] = (None, 0.5, 0.999)[step % 3]
        quiet = step % 6 in (4, 5)
        watched.step(*drawn(watched, step, 0.0 if quiet else 10.0 ** (step % 7 - 3)))


@every_method
def test_rate_and_decay_may_change_on_a_running_optimizer(make):
    """W ← W − lr·scale·P − lr·weight_decay·W with P of another run whose rate is one."""
    shape, scale = (8, 5), math.sqrt(8 / 5)
    watched = Setting(make, torch.float64).watched([shape])
    weight = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = make([weight])
    expected = weight.detach().clone()
    for step in range(12):
        (gradient,) = drawn(watched, step)
        lr, decay = (0.0, 0.02, 1.0)[step % 3], (0.0, 0.5)[step // 3 % 2]
        optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        weight.grad = gradient.clone()
        optimizer.step()
        watched.step(gradient)
        p = -watched.params[0].detach()
        expected = expected - lr * scale * p - lr * decay * expected
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@every_method
@pytest.mark.parametrize("saved", DTYPES, ids=str)
@pytest.mark.parametrize("own", DTYPES, ids=str)
def test_a_state_of_another_dtype_goes_on_in_that_of_the_run(make, saved, own):
    donor, _ = skips.trained(Setting(make, saved), [(4, 6), (4, 6)])
    optimizer, params = skips.trained(Setting(make, own), [(4, 6), (4, 6)])
    kept = {name: value.dtype for name, value in optimizer.state[params[0]].items()}
    state = copy.deepcopy(donor.state_dict())
    state["state"][1]["total"] = state["state"][1]["total"].half()  # and of one that no run has
    state["state"][1]["quiet"] = state["state"][1]["quiet"].bool()
    optimizer.load_state_dict(state)
    for p in params:
        assert {name: value.dtype for name, value in optimizer.state[p].items()} == kept
    skips.give_gradients(params, 5)
    optimizer.step()
    for p in params:
        assert p.isfinite().all() and not optimizer.state[p]["skipped"].any()


@every_method
def test_a_state_that_does_not_fit_the_dtype_of_the_run_is_refused(make):
    donor, _ = skips.trained(Setting(make, torch.float64), [(4, 6)])
    optimizer, params = skips.trained(Setting(make), [(4, 6)])
    before = snapshot(optimizer, params)
    state = copy.deepcopy(donor.state_dict())
    state["state"][0]["total"][0, 0] = 1e39
    said = r"'total'.*not finite in torch.float32 for parameter 0; they are in torch.float64: load"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(state)
    for a, b in zip(before, snapshot(optimizer, params), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("make", METHODS)
def test_a_model_that_is_cast_during_a_run_goes_on(make, dtypes):
    """As one with the new dtype that loads the state; AdamW's part too."""
    old, new = dtypes
    model = torch.nn.ModuleList([torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)]).to(old)

    def step(optimizer, params, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    params = list(model.parameters())
    optimizer = make.for_model(model, head=None)
    step(optimizer, params, 0)
    twin = copy.deepcopy(model).to(new)
    other = make.for_model(twin, head=None)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.zero_grad()
    model.to(new)
    for seed in (1, 2):
        step(optimizer, params, seed)
        step(other, list(twin.parameters()), seed)
    for p, q in zip(params, twin.parameters(), strict=True):
        assert p.dtype == new and torch.allclose(p, q, rtol=0, atol=1e-6)
        kept, loaded = optimizer.state[p], other.state[q]
        assert {k: v.dtype for k, v in kept.items()} == {k: v.dtype for k, v in loaded.items()}


@pytest.mark.parametrize("make", METHODS)
def test_a_cast_that_moments_do_not_fit_is_refused_and_nothing_changes(make):
    """The first could be cast, the second not: neither is."""
    params = [torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)) for _ in range(2)]
    optimizer = make([{"params": [param]} for param in params])
    for param, size in zip(params, (0.1, 1e50), strict=True):
        param.grad = torch.full_like(param, size)
    optimizer.step()
    for param in params:
        param.grad, param.data = None, param.data.float()
        param.grad = torch.ones_like(param)
    before = copy.deepcopy([(param.data, optimizer.state[param]) for param in params])
    with pytest.raises(ValueError, match=r"1 is torch.float32 now, which cannot hold its"):
        optimizer.step()
    for param, (weight, state) in zip(params, before, strict=True):
        assert torch.equal(param, weight)
        for entry, value in optimizer.state[param].items():
            assert value.dtype == state[entry].dtype and torch.equal(value, state[entry])


def test_a_wider_momentum_is_not_cast_again_with_every_list_of_work():
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = nucleon.Muon([weight], momentum_dtype=torch.float64)
    kept = optimizer.state[weight]
    for largest in (100, 1000):
        weight.grad = torch.ones_like(weight)
        optimizer.param_groups[0]["largest_stack"] = largest
        optimizer.step()
    assert optimizer.state[weight] is kept and kept["total"].dtype == torch.float64
