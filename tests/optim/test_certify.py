"""Certificates of training runs: regret against its definition, bound against the theory."""

import pytest
import torch

import nucleon
from nucleon.online.learners import FAML
from nucleon.online.regret import Ledger
from nucleon.optim import of_potential
from nucleon.optim.leon import hyperbolic
from optim import certificate_oracle

COVERED = {"gradient_bound": 1.0}
UNBOUNDED = {  # options, the warning when the optimizer is made, the refusal of its certificate
    "Muon": (nucleon.Muon, {}, "no theorem applies to muon, since the nuc", "not smooth"),
    "Pion": (nucleon.Pion, COVERED, "no theorem applies to pion", "depend on the noise"),
    "no bound": (nucleon.Leon, {}, "pass gradient_bound=G", "gradient_bound"),
    "nesterov": (nucleon.Leon, COVERED | {"nesterov": True}, "pass nesterov=False", "nesterov"),
    "no smoothing": (nucleon.Leon, COVERED | {"smoothing_scale": 0.0}, "and smoo", "smoothing"),
    "beta2": (nucleon.Leon, COVERED | {"beta2": 0.5}, "pass beta2=None", "beta2"),
}


@pytest.mark.parametrize("case", UNBOUNDED)
def test_a_run_without_a_theorem_warns_and_is_measured_without_a_certificate(case, recwarn):
    make, options, warning, refusal = UNBOUNDED[case]
    param = torch.nn.Parameter(torch.zeros(3, 5))
    with pytest.warns(UserWarning, match=warning) as warnings:
        optimizer = make([param], certify=True, **options)
    assert warnings[0].filename == __file__
    for gradient in bounded_gradients((3, 5), 3):
        param.grad = gradient.float()
        optimizer.step()
    (certificate,) = optimizer.certificates().values()
    assert certificate.regret.isfinite().all()
    assert not certificate.holds and refusal in certificate.refusal
    recwarn.clear()
    covered = nucleon.Leon([param], certify=True, **COVERED)
    make([param], **options)
    assert not recwarn.list
    if make is nucleon.Leon:
        with pytest.warns(UserWarning, match=warning):
            group = {"gradient_bound": 0.0, **options}
            covered.add_param_group({"params": [torch.zeros(2, 2)], **group})


def bounded_gradients(shape, rounds, seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(rounds, *shape, generator=generator, dtype=torch.float64)
    return g / torch.linalg.matrix_norm(g, ord=2)[..., None, None]


def exact_leon(params, **options):
    given = {"gradient_bound": 1.0, "method": "eigh", "momentum": 0.9, "certify": True}
    return nucleon.Leon(params, lr=0.1, **(given | options))


@pytest.mark.parametrize("make", [nucleon.Leon, nucleon.Pion])
def test_gradients_of_low_rank_are_certified(make):
    """Their float32 Gram matrix has eigenvalues below 0, by more than a rounding of float64."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = make([param], gradient_bound=1.0, certify=True)
    column = bounded_gradients((64, 1), 1)[0]
    for row in bounded_gradients((1, 64), 20):
        param.grad = (column * row).float()
        optimizer.step()
    (exactly,) = optimizer.certificates().values()
    gram = optimizer.state[param]["gram"]
    gram.diagonal(dim1=-2, dim2=-1).sub_(1e-6 * gram.abs().max())  # as some processors round
    assert torch.linalg.eigvalsh(gram.double()).min() < 0
    (certificate,) = optimizer.certificates().values()
    torch.testing.assert_close(certificate.bound, exactly.bound, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_leons_certificate_is_famls(scale):
    """The optimizer and the learner play the same game: same regret, same bound."""
    shape = (4, 6)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = exact_leon([param], smoothing_scale=scale)
    learner = FAML(shape, discount=0.9, eta=scale**-0.5, dtype=torch.float64)
    ledger = Ledger(shape, discount=0.9)
    for gradient in bounded_gradients(shape, 30):
        ledger.record(gradient, learner.play())
        learner.observe(gradient)
        param.grad = gradient.clone()
        optimizer.step()
    (certificate,) = optimizer.certificates().values()
    assert certificate.regret.item() == pytest.approx(ledger.regret().item(), abs=1e-9)
    # Equal at η = 1; elsewhere ours bounds ‖G_1‖_* from above, discounted by 0.9^29.
    assert certificate.bound.item() == pytest.approx(learner.bound().item(), rel=1e-2)
    assert certificate.bound.item() >= learner.bound().item() - 1e-9
    assert certificate.holds


@pytest.mark.parametrize("make", [nucleon.Muon, nucleon.Leon, nucleon.Pion])
def test_the_ledger_of_large_gradients_can_be_loaded(make):
    """‖G‖_F² leaves float32 where the entries of G do not."""
    params = [torch.nn.Parameter(torch.zeros(32, 64)) for _ in "ab"]
    one, two = (make([p], certify=True) for p in params)
    params[0].grad = 1e18 * torch.randn(32, 64)
    one.step()
    assert all(x.isfinite().all() for x in one.state[params[0]].values())
    two.load_state_dict(one.state_dict())


def test_without_certify_there_is_no_certificate():
    optimizer = nucleon.Leon([torch.nn.Parameter(torch.zeros(2, 3))])
    assert optimizer.certificates() == {}


def certified(make=exact_leon, **options):
    """The certificate of a short run, with its optimizer."""
    param = torch.nn.Parameter(torch.zeros((3, 5), dtype=torch.float64))
    optimizer = make([param], **options)
    for gradient in bounded_gradients((3, 5), 5):
        param.grad = gradient
        optimizer.step()
    (certificate,) = optimizer.certificates().values()
    return certificate, optimizer


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
MEASURED = [  # shape, dtype, size of all entries, gradient_bound, momentum, steps
    # Ĝ and M̂ below tiny/eps become zero; the gradients of the game do not.
    ((1, 1), F32, 1e-17, 3.2e-16, 0.95, 60),
    ((2, 3), F32, 1e-17, 3.2e-16, 0.95, 60),
    ((1, 1), BF16, 1e-17, 3.2e-16, 0.95, 60),
    ((1, 1), F64, 1e-147, 1.1e-146, 0.95, 60),
    # Ĝ in float32 loses half a unit of its last place at every step.
    ((1, 1), F32, 0.7, 1.0, 0.9999, 400),
    ((1, 1), F32, 0.7, 1.0, 1 - 2.5e-7, 400),
]


@pytest.mark.parametrize(("shape", "dtype", "size", "bound", "momentum", "steps"), MEASURED)
def test_moments_that_fade_or_round_are_measured_in_float64(
    shape, dtype, size, bound, momentum, steps, monkeypatch
):
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = exact_leon([param], gradient_bound=bound, momentum=momentum)
    gradient = torch.full(shape, size, dtype=dtype)
    with certificate_oracle.applied_directions(monkeypatch) as log:
        for _ in range(steps):
            param.grad = gradient.clone()
            optimizer.step()
    (certificate,) = optimizer.certificates().values()
    options = {"discount": momentum, "smoothing": 1.0, "gradient_bound": bound}
    rounds = [gradient.double().numpy()] * steps, [p[0] for p in log[param]]
    regret, most, *_ = certificate_oracle.certified(*rounds, **options)
    assert optimizer.state[param]["total"].any() == (size == 0.7) and regret > 0
    assert certificate.regret.item() == pytest.approx(regret, rel=1e-9)
    assert certificate.bound.item() == pytest.approx(most, rel=1e-9)
    assert certificate.holds == (regret <= most)


CHANGES = {"gradient_bound": 9.0, "momentum": 0.5, "smoothing_scale": 2.0, "nesterov": True}


@pytest.mark.parametrize("option", CHANGES)
def test_a_change_of_the_game_restarts_the_sums(option, monkeypatch):
    """The certificate measures the rounds since, also through a saved state, and does not hold."""
    param = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    optimizer = exact_leon([param], gradient_bound=2.0)
    gradients = list(bounded_gradients((3, 5), 9))
    group, before = optimizer.param_groups[0], optimizer.param_groups[0][option]

    for step, gradient in enumerate(gradients[:4]):
        group[option] = CHANGES[option] if step in (2, 3) else before
        param.grad = gradient.clone()
        optimizer.step()
    group[option] = before
    with certificate_oracle.applied_directions(monkeypatch) as log:
        param.grad = gradients[4].clone()
        last = -optimizer.state[param]["ledger.played"].numpy()
        optimizer.step()
        again = exact_leon([param], gradient_bound=2.0)
        again.load_state_dict(optimizer.state_dict())
        for gradient in gradients[5:]:
            param.grad = gradient.clone()
            again.step()
    (certificate,) = again.certificates().values()
    options = {"discount": 0.9, "smoothing": 1.0, "gradient_bound": 2.0, "action": last}
    rounds = gradients[4:], [p[0] for p in log[param]]
    regret, bound, *_ = certificate_oracle.certified(*rounds, **options)
    assert certificate.regret.item() == pytest.approx(regret, rel=1e-12)
    assert certificate.bound.item() == pytest.approx(bound, rel=1e-12)
    assert not certificate.holds and certificate.theorem == "none"
    assert "changed at step 5" in certificate.refusal


def test_options_edited_after_the_last_step_change_nothing():
    before, optimizer = certified(gradient_bound=1.0)
    optimizer.param_groups[0].update(gradient_bound=9.0, momentum=0.5, smoothing_scale=2.0)
    (after,) = optimizer.certificates().values()
    assert after.holds and after.bound.equal(before.bound) and after.regret.equal(before.regret)


@pytest.mark.parametrize("certify", [False, True])
def test_certify_is_settled_when_the_group_is_added(certify):
    param = torch.nn.Parameter(torch.zeros(3, 5))
    optimizer = exact_leon([param], certify=certify)
    optimizer.param_groups[0]["certify"] = not certify
    param.grad = torch.ones(3, 5)
    with pytest.raises(ValueError, match=f"pass certify={not certify} when"):
        optimizer.step()


def test_an_action_outside_the_ball_is_not_certified():
    class Long(nucleon.Leon):
        @of_potential(theorem="its own, which it does not keep", constants=hyperbolic)
        def direction(self, total, smoothing, context):
            return 1.5 * super().direction(total, smoothing, context) + torch.eye(3, 5).to(total)

    options = {"gradient_bound": 1.0, "certify": True, "method": "eigh"}
    certificate, _ = certified(make=lambda p, **o: Long(p, **{**options, **o}))
    assert not certificate.holds and "outside the ball" in certificate.refusal


def test_a_certificate_says_how_tight_it_is():
    certificate, optimizer = certified(gradient_bound=1.0)
    (state,) = optimizer.state.values()
    trace = state["ledger.gram"].diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(certificate.lower, (trace / 2).sqrt())
    assert 0 < certificate.lower.item() < certificate.bound.item()
    assert 0 < certificate.share.item() <= 1


@pytest.mark.slow
def test_the_first_gradient_is_the_first_however_long_ago():
    """γ^{t-1}‖G_1‖_F at γ = ¼ is below every float64 after 540 steps, and does not begin anew."""
    param = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
    optimizer = exact_leon([param], momentum=0.25)
    firsts = []
    for t in range(560):
        param.grad = torch.full_like(param, 0.0 if t == 0 else 0.5)
        optimizer.step()
        firsts.append(optimizer.state[param]["ledger.first"].item())
    expected = [0.0, *(0.5**0.5 * 0.25**t for t in range(559))]
    assert firsts == pytest.approx(expected, rel=1e-12, abs=0)
    assert firsts[-1] == 0.0


def test_bfloat16_is_held_to_its_own_promise():
    """‖P‖_op up to 1.01: with little smoothing it is above the 1.001 of float32's iterations."""
    param = torch.nn.Parameter(torch.zeros(64, 96))
    options = {"method": "bfloat16", "smoothing_scale": 1e-4, "gradient_bound": 3.0}
    optimizer = nucleon.Leon([param], certify=True, **options)
    norms = []
    for seed in range(10):
        drawn = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
        param.grad = 2.9 * drawn / torch.linalg.matrix_norm(drawn, 2)
        optimizer.step()
        norms.append(optimizer.diagnostics()["leon/0/update_norm"])
    assert max(norms) > 1.001
    (certificate,) = optimizer.certificates().values()
    assert certificate.refusal is None
