import pytest
from typer.testing import CliRunner

from nucleon.cli import reproduce as verb
from nucleon.cli.app import app


@pytest.fixture
def command(monkeypatch):
    """Run the command line, with other claims than the paper's if some are given."""

    def call(*arguments, claims=()):
        if claims:
            monkeypatch.setattr(verb, "CLAIMS", {c.id: c for c in claims})
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return call


@pytest.fixture
def runs():
    """The folders of an id's runs, drafts not among them."""

    def found(root, name="toy"):
        return sorted(p for p in (root / name).iterdir() if not p.name.startswith("."))

    return found
