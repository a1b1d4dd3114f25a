import pytest

from nucleon.claims import Figure, Panel, Progress, Series, Settings
from nucleon.cli.jobs import check
from nucleon.report.runs import load
from toys import EVIL, toy


def saved(root, claim):
    return load(check(claim, Settings(), root, Progress(), debug=True).folder)


def curves(run):
    """Two panels on shared axes, two series in each."""
    x = [float(t) for t in range(1, 101)]
    root, line = [t**0.5 for t in x], [t * 2 for t in x]
    panels = tuple(
        Panel(
            title, "round t", "regret", (Series("faml", x, root, style=4), Series("ftl", x, line))
        )
        for title in ("alternating", "gaussian")
    )
    yield Figure("curves", "Regret", "As it grows.", panels, True)


@pytest.fixture(scope="session")
def some_runs(tmp_path_factory):
    """A run that holds, one that does not and says evil words, and one without checks."""
    root = tmp_path_factory.mktemp("runs")
    return [
        saved(root, toy(name="good", words="plain words")),
        saved(root, toy(passed=False, name="lemma-decomposition", words=EVIL)),
        saved(root, toy(name="curves", words="Curves", run=curves)),
    ]
