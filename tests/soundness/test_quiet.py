"""Matrices that get no gradients: how far they still move, and that they come to rest."""

import pytest
import torch

import nucleon
from soundness import cases
from soundness.cases import DTYPES, FULL_STEPS, METHODS, Setting
from soundness.marks import SETTINGS, SOAK


def shapes(setting):
    """A tall stack alone, or what the float16 recursion is for."""
    return None if setting.options["method"] == "half" else [(2, 7, 5)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_without_gradients_stays_finite_and_in_the_ball(setting, record_property):
    """At every step, through rest and fading, and with a gradient that returns."""
    steps = 40 if setting.options["method"] == "half" and not SOAK else 80
    watched = cases.check_quiet_run(setting, steps, cases.small(setting), shapes(setting))
    assert all(state["skipped"].sum() == 0 for state in watched.states)
    record_property("quiet steps", watched.steps - 4)


@pytest.mark.skipif(not SOAK, reason="takes long: `make soak`")
@pytest.mark.parametrize("setting", SETTINGS if SOAK else [], ids=str)
def test_a_thousand_quiet_steps(setting, record_property):
    """From gradients of size one until nothing is left of them."""
    steps = {0.5: 200, 0.0: 100}.get(setting.options.get("momentum", 0.95), 1000)
    steps = min(steps, 400) if setting.options["method"] == "half" else steps  # 64 rows and more
    watched = cases.check_quiet_run(setting, steps, 1.0, shapes(setting))
    record_property("quiet steps", watched.steps - 4)
    record_property("long quiet runs", 1)


@pytest.mark.parametrize("momentum", FULL_STEPS)
@pytest.mark.parametrize("make", METHODS, ids=lambda c: c.__name__)
def test_a_matrix_rests_after_so_many_steps(make, momentum, record_property):
    """int(1/ln(1/β₁)) steps of full length after the last gradient, and none after that."""
    if not SOAK and momentum > 0.99 and make is not nucleon.Leon:
        pytest.skip("a thousand steps: one of the three will do, `make soak` has all")
    for dtype in DTYPES if SOAK else (torch.float32,):
        cases.check_rest(Setting(make, dtype, options={"method": "newton-schulz"}), momentum)
        record_property("quiet steps", FULL_STEPS[momentum] + 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_gradient_bound_the_direction_falls_as_the_momentum(dtype):
    cases.check_decay(Setting(nucleon.Leon, dtype))


@pytest.mark.parametrize("missing", [False, True], ids=["zero", "None"])
@pytest.mark.parametrize("dtype", DTYPES if SOAK else DTYPES[2:3], ids=str)
@pytest.mark.parametrize("make", METHODS, ids=lambda c: c.__name__)
def test_an_expert_without_tokens_stops(make, dtype, missing, record_property):
    steps = 1000 if SOAK else 60
    cases.check_expert(Setting(make, dtype), missing=missing, steps=steps)
    record_property("quiet steps", steps)


def test_weight_decay_goes_on_at_rest():
    weight = torch.nn.Parameter(torch.ones(4, 5))
    optimizer = nucleon.Leon([weight], lr=0.1, momentum=0.0, weight_decay=0.5)
    for _ in range(7):
        weight.grad = torch.zeros(4, 5)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 5), 0.95**7))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-45, 1e18])
def test_adamw_beside_matrices_stays_finite_without_gradients(scale):
    params = [torch.nn.Parameter(torch.zeros(s)) for s in ((4, 6), (7,))]
    rest = {"params": params[1:], "route": "adamw", "weight_decay": 0.01}
    optimizer = nucleon.Leon([{"params": params[:1]}, rest], momentum=0.5)
    for step in range(2000 if SOAK else 300):
        for p in params:
            p.grad = torch.randn(p.shape) * (scale if step < 3 else 0.0)
        optimizer.step()
        assert all(p.isfinite().all() for p in params)
        assert all(v.isfinite().all() for p in params for v in optimizer.state[p].values())
