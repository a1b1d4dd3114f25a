import itertools

import pytest
import torch

from nucleon.claims import CLAIMS, Progress, Settings
from nucleon.claims.processes import fig_ripples
from nucleon.optim import Leon

CLAIM = CLAIMS["fig-ripples"]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(fig_ripples, "STEPS", 6)


def test_upward_movement_counts_the_increases_only():
    losses = torch.tensor([[5.0, 1.0], [3.0, 2.0], [4.0, 4.0], [1.0, 7.0]])
    assert fig_ripples.upward(losses).tolist() == [1.0, 6.0]


def test_descend_is_the_optimizer_at_each_rate_on_each_instance(short):
    """Against a loop of its own with autograd, one matrix and one rate at a time."""
    seeds, rates = range(2), (0.003, 0.02)
    problem = fig_ripples.random_ripples(seeds)
    start = fig_ripples.random_start(seeds)
    losses = fig_ripples.descend(problem, start, "Leon", rates, 0)
    assert losses.shape == (7, 2, 2)
    for i, (r, rate) in itertools.product(seeds, enumerate(rates)):
        x = torch.nn.Parameter(start[i].clone())
        optimizer = Leon([x], rate, momentum=0.9, beta2=0.9, method="eigh", scale="none")
        single = fig_ripples.Ripples(problem.measurements[i])
        for t in range(7):
            optimizer.zero_grad()
            loss = single.value(x)
            loss.backward()
            # Six steps hardly amplify the rounding of the first: a Lipschitz constant of about
            # 3·|r| ≈ 100 for the slope leaves 1e-15·100 a step.
            assert loss.item() == pytest.approx(losses[t, i, r].item(), rel=1e-8)
            optimizer.step()


def test_instances_do_not_depend_on_their_number(short):
    two, three = (CLAIM.run(Settings(seeds=n, quick=True)).records for n in (2, 3))
    for few, many in zip(two, three, strict=True):
        assert (few["method"], few["rate"]) == (many["method"], many["rate"])
        assert few["final"] == pytest.approx(many["final"][:2], rel=1e-8)


def test_a_full_run_holds_all_methods_and_all_rates(short):
    result = CLAIM.run(Settings(seeds=1))
    pairs = [(r["method"], r["rate"]) for r in result.records]
    assert pairs == list(itertools.product(fig_ripples.METHODS, (0.003, 0.01, 0.03, 0.1)))
    for record in result.records:
        losses = [loss for (loss,) in record["losses"]]
        assert len(losses) == 7 and record["final"] == losses[-1:]
        rises = (max(0, b - a) for a, b in itertools.pairwise(losses))
        assert record["upward"] == [pytest.approx(sum(rises))]
    (figure,) = result.figures
    assert len(figure.panels) == 4
    for series in (s for panel in figure.panels for s in panel.series):
        assert len(series.x) == len(series.y) == len(series.low) == len(series.high)


def test_a_run_leaves_the_number_of_threads_as_it_was(short):
    seen = []

    class Watch(Progress):
        def advance(self, amount, stage):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        CLAIM.run(Settings(seeds=1, quick=True), Watch())
        assert torch.get_num_threads() == 2
        assert set(seen) == {1}
    finally:
        torch.set_num_threads(before)
