"""What the tests of this folder are run over, and which of it is expected to fail."""

import os

import pytest

from soundness import cases

SOAK = os.environ.get("NUCLEON_SOAK") == "1"
"""Long runs of every setting instead of short ones of some."""
SETTINGS = [*cases.settings("cpu")] if SOAK else cases.some_settings("cpu")


def param(*values, due: str | None, name: str):
    """A parameter of a test, expected to fail where a mend is `due`."""
    marks = [] if due is None else [pytest.mark.xfail(reason=due, strict=True)]
    return pytest.param(*values, marks=marks, id=name)


def known(setting: cases.Setting, *, tiny: bool):
    """A setting as a parameter."""
    return param(setting, due=cases.mends(setting, tiny=tiny), name=str(setting))
