"""Set-up of the whole suite: repeatable examples and fixed seeds."""

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture(scope="session")
def check_in_interpreter():
    """A function that runs a case in a process with Triton's interpreter, see `interpreting`."""
    if importlib.util.find_spec("triton") is None or not hasattr(os, "fork"):
        pytest.skip("needs Triton and os.fork")
    # A process of its own: Triton decides at import whether it compiles or interprets.
    import nucleon

    here = Path(__file__).parent
    paths = os.pathsep.join([str(Path(nucleon.__file__).parents[1]), str(here)])
    process = subprocess.Popen(
        [sys.executable, str(here / "interpreting.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def run(cases, name):
        print(cases, name, sep="\t", file=process.stdin, flush=True)
        lines = [""]
        while not lines[-1].startswith("exit"):
            lines.append(process.stdout.readline())
            assert lines[-1], f"the process has ended: {''.join(lines)}"
        assert lines[-1] == "exit 0\n", "".join(lines)

    yield run
    process.kill()
    process.communicate()
