import math

import pytest
import scipy.stats
import torch
from torch.nn.functional import cross_entropy

import nucleon
from nucleon.claims import CLAIMS, Settings
from nucleon.claims.applications import app_training
from nucleon.claims.applications.app_training import digits, fit, network, rate_curve

RATES = [2.0**k for k in range(-3, 3)]


def curve(means, method="Leon", accuracy=0.97):
    """A method with these mean losses, each that of two seeds."""
    losses = torch.tensor(means, dtype=torch.float64)[:, None] * torch.tensor([0.9, 1.1])
    accuracies = torch.full_like(losses, accuracy)
    return rate_curve(method, RATES, losses, accuracies)


def test_good_rates_end_where_the_broken_line_crosses():
    """By hand: log-linear from 0.1 at 2⁰ to 0.2 on either side crosses 0.125 after log₂ 1.25."""
    found = curve([0.8, 0.4, 0.2, 0.1, 0.2, 0.4])
    assert found.best == 3
    assert found.span == pytest.approx((-math.log2(1.25), math.log2(1.25)))
    assert found.width == pytest.approx(2 * math.log2(1.25))
    assert not found.cut


def test_a_range_that_leaves_the_grid_says_so_and_a_second_valley_does_not_count():
    assert curve([0.1, 0.11, 0.12, 0.9, 0.1001, 0.1]).span[0] == -3
    assert curve([0.1, 0.11, 0.12, 0.9, 0.1001, 0.1]).cut
    found = curve([0.11, 0.9, 0.1, 0.11, 0.9, 0.11])
    assert -2 < found.span[0] < -1
    assert 0 < found.span[1] < 1


def test_checks_can_fail_each_by_itself():
    def passed(muon, leon):
        others = {n: curve([0.3, 0.2, 0.1, 0.1, 0.2, 0.3], n) for n in ("Pion", "AdamW")}
        curves = {"Muon": muon, "Leon": leon, **others}
        return [check.passed for check in app_training.curve_checks(curves, quick=False)]

    wide, narrow = [0.11, 0.1, 0.1, 0.1, 0.1, 0.11], [0.9, 0.9, 0.9, 0.1, 0.9, 0.9]
    assert passed(curve(wide), curve(wide)) == [True, True, True]
    assert passed(curve(wide), curve(narrow)) == [True, False, True]
    # Twice the loss, seed by seed: an excess of 0.9 and 1.1, a standard error of 0.1.
    assert passed(curve(wide), curve([2 * x for x in wide])) == [False, True, True]
    assert passed(curve(wide), curve(wide, accuracy=0.9)) == [True, True, False]


def test_leon_must_be_shown_not_to_be_worse():
    """Against SciPy's one-sided t-test of the paired excess; means that agree are not enough."""
    generator = torch.Generator().manual_seed(0)
    for spread, seeds in ((0.05, 5), (0.3, 5), (0.3, 100), (0.3, 1)):
        drawn = 1 + spread * torch.randn(2, 1, seeds, generator=generator)
        muon, leon = 0.1 * drawn.double()
        leon += muon.mean() - leon.mean()
        limit = app_training._limit(*(rate_curve("", [1.0], x, x) for x in (leon, muon)))
        excess = ((leon - muon) / muon.mean())[0].numpy()
        if seeds == 1:
            assert limit == math.inf
            continue
        test = scipy.stats.ttest_1samp(excess, app_training.EQUAL - 1, alternative="less")
        assert (limit < app_training.EQUAL) == (test.pvalue < 0.05) == ((spread, seeds) != (0.3, 5))


def test_the_seeds_nobody_had_looked_at(monkeypatch):
    monkeypatch.setattr(app_training, "STEPS", (1, 1))
    assert app_training.FIRST_SEED == 1000

    def seeds(**chosen):
        records = CLAIMS["app-training"].run(Settings(quick=True, **chosen)).records
        return records[0]["seeds"]

    assert seeds() == [1000]
    assert seeds(seeds=2, first_seed=7) == [1007, 1008]


def test_every_example_is_seen_once_before_one_is_seen_twice():
    data = digits()
    count = len(data.targets)
    rows = data.batches(3, 2 * count // app_training.BATCH + 1).flatten()
    assert rows[:count].unique().numel() == rows[count : 2 * count].unique().numel() == count
    assert not torch.equal(rows[:count], rows[count : 2 * count])
    assert (count, len(data.test_targets)) == (1438, 359)


@pytest.mark.parametrize("name", list(app_training.METHODS))
def test_the_stack_is_the_training_loop_at_each_rate_on_each_seed(name):
    """Against a plain loop over one network at a time."""
    data, steps = digits(), 4
    rates, seeds = [0.01, 0.05], [3, 4]
    losses, accuracies = fit(data, name, rates, seeds, steps)
    assert losses.shape == accuracies.shape == (2, 2)
    for i, rate in enumerate(rates):
        for j, seed in enumerate(seeds):
            model = network(seed)
            if name == "AdamW":
                optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
            else:
                make = getattr(nucleon, name).for_model
                optimizer = make(model, lr=rate, aux_lr=app_training.AUX_RATE, head="4")
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
            for rows in data.batches(seed, steps):
                optimizer.zero_grad()
                cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
                optimizer.step()
                schedule.step()
            expected = cross_entropy(model(data.test_inputs), data.test_targets).item()
            # Pion's noise is that of the stack's slice; with four steps at these rates it moves the
            # loss by less than the rates do. The others agree up to float32 rounding, 1e-7 a
            # product, which four steps and AdamW's division by small gradients amplify.
            tolerance = 0.05 if name == "Pion" else 1e-3
            assert losses[i, j].item() == pytest.approx(expected, rel=tolerance)


def test_a_diverged_run_counts_as_the_worst():
    losses, _ = fit(digits(), "AdamW", [1e30, 0.01], [0], 3)
    assert losses[0, 0] == app_training.WORST
    assert losses[1, 0] < 3


def test_one_seed_refutes_nothing(monkeypatch):
    monkeypatch.setattr(app_training, "STEPS", (3, 3))
    result = CLAIMS["app-training"].run(Settings(seeds=1))
    assert len(result.checks) == 3 + 3 + 3
    assert result.checks[0].name.endswith("95 % limit") and not result.checks[0].passed
    assert all(check.passed for check in result.checks[3:])  # the steps of Muon, Pion and Leon
    assert not result.checks[2].passed  # three steps teach nobody
