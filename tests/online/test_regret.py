"""The ledger against sums in NumPy, and Lemma 3.1 term by term."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import LEARNERS, nuclear
from nucleon.certificate import Certificate
from nucleon.online.learners import FTRL
from nucleon.online.potentials import Hyperbolic
from nucleon.online.regret import Ledger, decompose

F64 = torch.float64


def gradients_of(rounds, shape, seed=0):
    g = np.random.default_rng(seed).standard_normal((rounds, *shape)) + 0.2
    return torch.from_numpy(g / np.linalg.svd(g, compute_uv=False).max())


# ---- the ledger --------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    shape=st.sampled_from([(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2), (3, 2, 4)]),
    rounds=st.integers(1, 12),
    discount=st.sampled_from([1.0, 0.9, 0.3]),
    radius=st.sampled_from([1e-3, 1.0, 40.0]),
    scale=st.sampled_from([1e-30, 1.0, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
)
def test_the_ledger_is_the_definition(shape, rounds, discount, radius, scale, dtype, seed):
    rng = np.random.default_rng(seed)
    gradients, actions = scale * rng.standard_normal((2, rounds, *shape))
    gradients = torch.from_numpy(gradients).to(dtype)
    actions = torch.from_numpy(actions / scale).to(dtype)
    ledger = Ledger(shape, radius=radius, discount=discount)
    for gradient, action in zip(gradients, actions, strict=True):
        ledger.record(gradient, action)
    g, x = gradients.double().numpy(), actions.double().numpy()
    weights = discount ** np.arange(rounds)[::-1]
    losses = np.einsum("t,t...ij,t...ij->...", weights, g, x)
    total = np.einsum("t,t...->...", weights, g)
    size = np.einsum("t,t...->...", weights, np.abs(g * x).sum((-2, -1))) + radius * nuclear(total)
    assert ledger.regret().shape == shape[:-2] and ledger.regret().dtype == F64
    # 12 rounds of 20 products: a hundred float64 roundings of the absolute sum at the very most.
    error = np.abs(ledger.regret().numpy() - (losses + radius * nuclear(total)))
    assert (error <= 100 * 2.0**-52 * size).all()


def test_a_ledger_goes_on_from_its_state():
    gradients, actions = gradients_of(10, (2, 3)), gradients_of(10, (2, 3), seed=1)
    whole, half = Ledger((2, 3), discount=0.7), Ledger((2, 3), discount=0.7)
    for t in range(10):
        whole.record(gradients[t], actions[t])
        if t < 5:
            half.record(gradients[t], actions[t])
    rest = Ledger((2, 3), discount=0.7)
    rest.restore(half.tensors())
    for t in range(5, 10):
        rest.record(gradients[t], actions[t])
    assert torch.equal(rest.regret(), whole.regret()) and rest.rounds == 10
    assert half.rounds == 5


@pytest.mark.parametrize(
    ("radius", "gradient", "action", "words"),
    [
        (1.0, 1e308, 0.0, "finite"),
        (1e300, 1e10, 0.0, "finite"),
        (1.0, 1e200, 1e150, "finite"),
        (1.0, 1e170, 0.0, "Gram matrix"),
        *((1.0, bad, 0.0, "finite") for bad in (math.nan, math.inf)),
        *((1.0, 0.0, bad, "finite") for bad in (math.nan, math.inf)),
    ],
)
def test_a_round_whose_regret_is_no_number_is_not_entered(radius, gradient, action, words):
    ledger = Ledger((2, 3), radius=radius)
    ledger.record(torch.ones(2, 3, dtype=F64), torch.zeros(2, 3, dtype=F64))
    before = ledger.regret()
    with pytest.raises(ValueError, match=words):
        ledger.record(
            torch.full((2, 3), gradient, dtype=F64), torch.full((2, 3), action, dtype=F64)
        )
    for pair in ((torch.ones(3, 2), torch.ones(2, 3)), (torch.ones(2, 3), torch.ones(3))):
        with pytest.raises(ValueError, match="shape"):
            ledger.record(*pair)
    assert ledger.rounds == 1 and torch.equal(ledger.regret(), before)


# ---- Lemma 3.1 ---------------------------------------------------------------------------------


def game(name, rounds, shape, **options):
    """A learner with one Z in all rounds, its gradients and its actions."""
    fixed = {"samples": 3, "redraw": False} if name == "ftpl" else {}
    learner = LEARNERS[name](shape, dtype=F64, **{**fixed, **options})
    gradients = gradients_of(rounds, shape[-2:])
    gradients = gradients.unsqueeze(1).expand(rounds, *shape) if len(shape) == 3 else gradients
    actions = []
    for gradient in gradients:
        actions.append(learner.play())
        learner.observe(gradient)
    return learner, gradients, torch.stack(actions)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("discount", [1.0, 0.85])
@pytest.mark.parametrize("name", LEARNERS)
def test_regret_is_the_sum_of_its_terms_and_each_is_in_its_bound(name, discount, shape):
    options = {"discount": discount, "radius": 2.0, "gradient_bound": 1.3}
    learner, gradients, actions = game(name, 12, shape, **options)
    terms = decompose(learner.potential, gradients, actions, **options)
    # FTRL: |⟨G, X̃ − X̂⟩| ≤ ‖G‖_{A⁻¹}·2√(2·gap) a round, with A ⪰ √2·G·I and ‖G‖_F ≤ √3.
    drift = 12 * 2.0 * math.sqrt(3) * 2 * (2 * terms.gap.item()) ** 0.5
    assert terms.mismatch.abs().max() <= 1e-10 + drift
    assert drift < 0.05 * terms.regret.min()
    if name == "ftl":
        assert terms.bregman_bound.isinf().all() and terms.stability.abs().max() <= 1e-13
    elif name != "ftpl":
        for kind, excess in terms.excess.items():
            assert excess <= 1e-10 + terms.gap, kind


def test_a_discount_over_many_rounds_does_not_overflow():
    options = {"discount": 0.1, "gradient_bound": 1.3}
    learner, gradients, actions = game("faml", 400, (3, 5), **options)  # 10⁴⁰⁰ between its ends
    terms = decompose(learner.potential, gradients, actions, **options)
    assert terms.regret == pytest.approx(learner.ledger.regret().item(), rel=1e-12)
    assert terms.mismatch.abs() <= 1e-10
    assert max(terms.excess.values()) <= 1e-10


def test_wrong_actions_do_not_pass():
    learner, gradients, actions = game("faml", 12, (3, 5))
    assert decompose(learner.potential, gradients, actions).mismatch.abs() <= 1e-10
    wrong = decompose(learner.potential, gradients, 0.99 * actions)
    assert wrong.mismatch.abs() > 1e-3
    other = decompose(learner.potential, gradients, actions, gradient_bound=1.5)
    assert other.mismatch.abs() > 1e-3


def test_a_wrong_constant_does_not_pass():
    class Overstated(Hyperbolic):
        def admissibility(self, m, n):
            return type(super().admissibility(m, n))(0.9, 0.9)

    # Small gradients against a small bound: B → ½Tr GᵀΛ^(-1/2)G, β = 1 attained.
    gradients = 1e-3 * gradients_of(6, (2, 4))
    gradients[0] = 0
    _, _, actions = game("faml", 6, (2, 4))
    terms = decompose(Overstated(), gradients, actions, eta=1.0)
    assert terms.excess["bregman"] > 0
    terms = decompose(Hyperbolic(), gradients, actions, eta=1.0)
    assert terms.excess["bregman"] <= 1e-12


def test_ftpl_terms_take_the_noise_of_the_learner():
    for shape in ((3, 5), (2, 3, 4)):
        learner, gradients, actions = game("ftpl", 8, shape, stream=11)
        terms = decompose(learner.potential, gradients, actions, stream=11)
        assert terms.mismatch.abs().max() <= 1e-10
        assert decompose(learner.potential, gradients, actions).mismatch.abs().min() > 1e-3


def test_a_lazy_solver_shows_its_gap():
    gradients = gradients_of(10, (3, 5))
    learner = FTRL((3, 5), tolerance=0.2, max_iterations=1, dtype=F64)
    actions = []
    for gradient in gradients:
        actions.append(learner.play())
        learner.observe(gradient)
    terms = decompose(learner.potential, gradients, torch.stack(actions))
    exact = decompose(FTRL((3, 5)).potential, gradients, torch.stack(actions))
    assert terms.gap > 1e-4 > 1e-6 > exact.gap
    # Its actions are not the maximizers, which the lemma notices.
    assert exact.mismatch.abs() > 1e-4


@pytest.mark.parametrize(
    ("gradients", "actions"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4)),
        (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)),
        (torch.zeros(5, 3, 4), torch.zeros(5, 4, 3)),
    ],
)
def test_a_game_that_is_none_is_refused(gradients, actions):
    with pytest.raises(ValueError, match="T ≥ 2"):
        decompose(Hyperbolic(), gradients, actions)


# ---- certificates ------------------------------------------------------------------------------


def test_a_certificate_says_what_it_is():
    regret, bound = torch.tensor([1.0, 4.0], dtype=F64), torch.tensor([2.0, 5.0], dtype=F64)
    whole = Certificate(regret, bound, "Theorem 3.2")
    assert whole.holds and whole.slack.tolist() == [1.0, 1.0]
    assert str(whole).splitlines() == [
        "Certificate holds",
        "  regret    1, 50% of the bound; of 2 games number 0 is nearest to its bound",
        "  bound     2",
        "  theorem   Theorem 3.2",
    ]
    assert not Certificate(regret, bound - 2, "Theorem 3.2").holds
    assert "the regret is above the bound" in repr(Certificate(regret, bound - 2, "Theorem 3.2"))
    refused = Certificate(regret, bound, "none", refusal="because " * 20)
    assert not refused.holds and str(refused).startswith("Certificate does not hold: because")
    assert max(map(len, str(refused).splitlines())) <= 88


@pytest.mark.parametrize(
    ("largest", "excess", "told"),
    [
        (0.4, 0.0, "Every norm is within gradient_bound=0.5, the largest 0.4."),
        (3.9, 6.8, "exceed gradient_bound=0.5, by 680%; that added 6.8 to the bound."),
        (0.50015, 0.01, "within gradient_bound=0.5 but for at most 0.03%; that added 0.01"),
    ],
)
def test_a_certificate_says_how_gradients_kept_to_their_bound(largest, excess, told):
    one = torch.ones((), dtype=F64)
    certificate = Certificate(
        regret=one,
        bound=8 * one,
        theorem="Theorem 3.2",
        largest=largest * one,
        excess=excess * one,
        gradient_bound=0.5 * one,
        lower=one / 8,
        skipped=2,
    )
    words = " ".join(str(certificate).split())
    assert told in words
    assert "Flipping signs of these gradients could force 0.125." in words
    assert "Steps left out of the regret, as not finite: 2." in words
