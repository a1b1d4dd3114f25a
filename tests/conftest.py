"""Set-up of the whole suite: repeatable examples and fixed seeds."""

import gc
import os

import pytest
import torch
from hypothesis import Phase, settings

# A million objects come with the tests' imports and stay: the collector need not see them.
gc.disable()

# The README's test command must give the same verdict twice; `--hypothesis-profile=explore` looks
# for new counterexamples instead, "quick" tries a tenth of the examples, "verdict" does not stop to
# make the one it found smaller, and "soak" looks far longer; NUCLEON_SOAK=1 or HYPOTHESIS_PROFILE
# choose them.
settings.register_profile("nucleon", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile(
    "verdict", settings.get_profile("nucleon"), phases=(Phase.explicit, Phase.generate)
)
settings.register_profile("quick", settings.get_profile("nucleon"), max_examples=10)
settings.register_profile("soak", settings.get_profile("explore"), max_examples=5000)
usual = "soak" if os.environ.get("NUCLEON_SOAK") == "1" else "nucleon"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))


# ---- groups: tests that share a worker, under `--dist loadgroup` ----

FIRST = ("distributed/", "claims/", "optim/test_fused.py", "integrations/test_census.py")
"""Files that start first, as they take longest."""


def group_of(nodeid):
    """Return a name for the tests that share the pools of ranks, the run of a claim, or a file."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    if file.startswith("distributed/"):
        return "ranks"
    if file == "claims/test_claims.py" and "[" in test:
        return test.partition("[")[2]  # the result of a claim is computed once
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Group by the address of a test: the marks of xdist 3.8 are lost with pytest 9.2."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(FIRST))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# torch.manual_seed leaves a note, with a stack of its calls, for each kind of device that has not
# been used yet: a millisecond, before each of ten thousand tests.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed():
    seed(0)
