"""Options certain to overflow are refused before anything changes; others may change midway."""

import copy

import pytest
import torch

import nucleon
from soundness import skips
from soundness.cases import DTYPES, METHODS, Setting, drawn

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
    with pytest.raises(ValueError, match=rf"{match}=.*layer\.weight"):
        make(params, **options)


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
    with pytest.raises(ValueError, match=r"parameter 1, saved in torch.float64, is not finite in"):
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
