"""Training runs in one chart and one table."""

import math
from dataclasses import replace

import pytest

from nucleon.claims import Figure, Panel, Result, Series
from nucleon.report import render
from nucleon.report.overview import overview
from nucleon.report.plots import drawing


@pytest.fixture
def trained(some_runs, tmp_path):
    """Make a training run of its curves and options."""

    def make(training=((1, 2, 3), (3.0, 2.0, 1.5)), held_out=None, name="run", **options):
        series = [Series("training", *training)]
        series += [Series("held out", *held_out)] if held_out else []
        panels = (Panel("loss", "step", "nats", tuple(series)),)
        result = Result(checks=(), figures=(Figure("loss", "Loss", "", panels),))
        base = some_runs[0]
        about = {"id": "train", "seconds": 2.0, "options": {"optimizer": "leon", **options}}
        return replace(
            base,
            folder=tmp_path / name,
            manifest={**base.manifest, **about},
            result=result,
            drawings=(b"<svg/>",),
        )

    return make


def test_the_table_says_how_each_ended(trained):
    first = trained(held_out=((1, 2, 3), (5.0, 2.0, 4.0)), lr=0.1)
    second = trained(training=((1, 4), (2.0, math.nan)), lr=None, optimizer="sgd")
    figure, table = overview([first, second])
    assert table.columns[:5] == ("run", "steps", "held-out loss", "best", "at step")
    assert table.rows[0] == ("leon, lr 0.1", 3, 4.0, 2.0, 2, 1.5, 0.1, 1.5, 2.0)
    name, steps, *rest = table.rows[1]
    assert (name, steps, rest[:3], rest[4:]) == ("sgd", 4, ["–"] * 3, ["–", 2.0, 2.0])
    assert math.isnan(rest[3])  # it diverged, and that is said
    held_out, training = figure.panels
    assert [s.name for s in held_out.series] == ["leon, lr 0.1"]
    assert [s.name for s in training.series] == ["leon, lr 0.1", "sgd"]


def test_runs_are_named_by_what_tells_them_apart(trained):
    runs = [trained(seed=0, width=8), trained(seed=1, width=8), trained(seed=1, width=8, name="b")]
    names = [row[0] for row in overview(runs)[1].rows]
    assert names == ["leon, seed 0", "leon, seed 1 (run)", "leon, seed 1 (b)"]


def test_one_run_needs_no_overview(trained, some_runs):
    assert overview([trained()]) is None
    assert overview(some_runs) is None
    without_curves = replace(trained(), result=Result(checks=()), drawings=())
    assert overview([trained(), without_curves]) is None
    assert 'class="overview"' not in render([trained()])


def test_the_page_has_the_runs_in_one_chart(trained):
    page = render([trained(lr=0.1), trained(lr=0.2)])
    shown = page.partition('<section class="overview"')[2].partition("</section>")[0]
    assert "leon, lr 0.1" in shown and "leon, lr 0.2" in shown
    assert shown.count("<figure>") == 1
    assert page.count("<article") == 2


@pytest.mark.parametrize("name", ["$\\frac{", "_hidden", "<script>", "é" * 200, "a\nb"])
def test_whatever_a_run_is_called_it_is_drawn(trained, name):
    wild = trained(training=((1, 2, 1e300), (1e308, math.inf, -1e308)), optimizer=name)
    figure, _ = overview([wild, trained(training=((0,), (math.nan,)))])
    assert b"<svg" in drawing(figure)
    assert render([wild, trained()]).count("<script>") == 1  # the page's own


def test_runs_whose_curves_are_of_something_else_have_no_overview(trained):
    """As a stranger may write them: the page is there without it."""

    def forged(name):
        (figure,) = trained().result.figures
        series = tuple(replace(s, name="temperature") for s in figure.panels[0].series)
        figure = replace(figure, panels=(replace(figure.panels[0], series=series),))
        return replace(trained(name=name), result=Result(checks=(), figures=(figure,)))

    runs = [forged("a"), forged("b")]
    assert overview(runs) is None
    assert render(runs).count("<article") == 2
