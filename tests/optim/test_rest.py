"""Cases of fading, resting and skipping beside those of `tests/soundness`."""

import math

import pytest
import torch

import nucleon


def weights(count=1):
    return [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(count)]


def gradient(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def moved(optimizer, weight, given):
    """Return True if a step with this gradient changes the weight."""
    before = weight.detach().clone()
    weight.grad = given
    optimizer.step()
    return not torch.equal(weight, before)


@pytest.mark.parametrize(("momentum", "steps"), [(0.5, 1), (0.8, 4), (0.9, 9)])
def test_pion_rests_under_a_bound(momentum, steps):
    """Its samples stay as long as they were: k full steps, β₁ᵏ ≥ 1/e, until a gradient returns."""
    assert momentum**steps >= 1 / math.e > momentum ** (steps + 1)
    (weight,) = weights()
    optimizer = nucleon.Pion([weight], momentum=momentum, gradient_bound=1.0, method="svd")
    for seed in (0, 1):
        assert moved(optimizer, weight, gradient(seed))
        found = [moved(optimizer, weight, torch.zeros(3, 4)) for _ in range(steps + 3)]
        assert found == [True] * steps + [False] * 3


def test_a_direction_that_is_not_finite_is_skipped():
    class Odd(nucleon.Muon):
        def direction(self, total, smoothing, context):
            p = super().direction(total, smoothing, context)
            return torch.where(total[:, :1, :1] > 0, p, torch.nan)

    params = weights(2)
    optimizer = Odd(params, method="svd")
    params[1].grad = torch.ones(3, 4)
    assert not moved(optimizer, params[0], -torch.ones(3, 4))
    assert params[1].any()
    states = [optimizer.state[p] for p in params]
    assert [s["skipped"].item() for s in states] == [1, 0]
    assert [optimizer.diagnostics()[f"muon/{i}/skipped"] for i in (0, 1)] == [1, 0]
    assert [bool(s["total"].any()) for s in states] == [False, True]
    states[0]["total"].fill_(-1.0)
    assert all(map(math.isfinite, optimizer.diagnostics().values()))


@pytest.mark.parametrize(
    ("make", "method"),
    [(nucleon.Leon, m) for m in ("auto", "eigh", "coupled")]
    + [(nucleon.Pion, m) for m in ("auto", "svd")]
    + [(nucleon.Muon, m) for m in ("auto", "svd")],
)
@pytest.mark.parametrize("place", ["total", "gram", "smoothing_scale"])
def test_diagnostics_of_a_matrix_that_would_be_skipped(make, method, place):
    """Nothing is raised, no figure is a NaN, its update is none, and its neighbour has its own."""
    params = weights(2)
    optimizer = make(params, method=method)
    if place not in ("total", *make.own_options) and place not in optimizer.state[params[0]]:
        return
    params[1].grad = gradient()
    assert moved(optimizer, params[0], 1e10 * gradient(1))
    plain = optimizer.diagnostics()
    if place == "smoothing_scale":  # cM̂ is beyond the largest number for the first of them alone
        optimizer.param_groups[0][place] = 1e25
    else:
        optimizer.state[params[0]][place][..., 0, 1] = torch.nan
    found = optimizer.diagnostics()
    assert all(map(math.isfinite, found.values())), found
    assert found[f"{make.name}/0/update_norm"] < 1e-30  # a bound, which is not zero
    theirs = f"{make.name}/1/update_norm"
    assert 1e-30 < found[theirs] <= 1.001 * plain[theirs]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_bound": 1e-8},
        {"gradient_bound": 0.01},  # within G/(1−β₁) once it has fallen: it must not wake then
        {"gradient_bound": 1.0, "smoothing_scale": 0.0},
    ],
)
def test_a_bound_that_gradients_exceed_does_not_keep_a_matrix_moving(options):
    """Nor one that does not smooth: 19 steps of full length, as without any."""
    param = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = nucleon.Leon([param], lr=1.0, scale="none", **options)
    found = [
        moved(optimizer, param, torch.eye(4, 6) * (0.0 if step else 10.0)) for step in range(240)
    ]
    assert found == [True] * 20 + [False] * 220


@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("momentum", "scale"), [(0.9, 1.0), (0.95, 1.0), (0.95, 1e-4), (0.5, 9.0)])
def test_the_drift_under_a_bound_that_is_kept(momentum, scale, momentum_dtype):
    """Nothing rests, and Σ‖P‖_op ≤ (1 + ln⁺x)/(1−β₁), x = β₁‖Ĝ‖_op/(√c·G).

    As ‖P‖_op ≤ min(1, x·β₁ᵏ): ln x/ln(1/β₁) steps of full length, and then a geometric sum. The
    gradients are as large as the bound, and the same for ever: no others make Ĝ larger.
    """
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    options = {"momentum": momentum, "momentum_dtype": momentum_dtype, "smoothing_scale": scale}
    optimizer = nucleon.Leon([weight], lr=1.0, scale="none", gradient_bound=2.0, **options)
    for _ in range(int(16 / (1 - momentum))):
        moved(optimizer, weight, 2 * torch.eye(3, 4))
    total = optimizer.state[weight]["total"].double()
    x = momentum * torch.linalg.matrix_norm(total, 2).item() / (math.sqrt(scale) * 2.0)
    drift, steps = 0.0, int((math.log(x) + 6 if x > 1 else 6) / (1 - momentum))
    for k in range(1, steps):
        with torch.no_grad():
            weight.zero_()
        assert moved(optimizer, weight, torch.zeros(3, 4)), k
        drift += torch.linalg.matrix_norm(weight.detach(), 2).item()
    assert drift <= 1.01 * (1 + max(0.0, math.log(x))) / (1 - momentum)
    assert x < 2 or drift > 1 / -math.log(momentum)  # further than a matrix without a bound
