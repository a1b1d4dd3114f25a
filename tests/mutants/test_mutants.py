"""Every named mutant of the source is caught by the test that is named beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from catalogue import MUTANTS

import nucleon

SOURCE = Path(nucleon.__file__).parent
REPOSITORY = Path(__file__).parents[2]
TESTS_FAILED = 1
SETTINGS = {
    "HYPOTHESIS_PROFILE": "verdict",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # but Hypothesis', whose examples are those of the test
}

# Importing torch takes longer than most tests: a server imports everything but nucleon once, and
# forks for each mutant; what is frozen the collector of a fork leaves alone. The copy must win over
# the installed package, and neither a failure to do so (98) nor a run that does not end (killed by
# the alarm) may look like a catch. A second server has Triton's interpreter, which Triton chooses
# when it is imported: the tests of its kernels find that and start no process of their own.
SERVER = """
import gc, os, signal, sys
import cvxpy, hypothesis, mpmath, numpy, pytest, scipy.linalg, scipy.stats, torch
import torch._dynamo, torch.distributed.tensor  # at the first step
gc.freeze()

for line in sys.stdin:
    parent, test = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        log = os.open(os.path.join(parent, "log"), os.O_CREAT | os.O_WRONLY)
        for stream, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(target, stream)
        sys.path.insert(0, parent)
        import nucleon
        status = 98
        if nucleon.__file__.startswith(parent):
            options = "-x -q --tb=no -p no:cacheprovider -p _hypothesis_pytestplugin"
            status = pytest.main([*options.split(), test])
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server_for():
    """The server that runs a test; each is started for the first test that needs it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | SETTINGS
    servers = {}

    def server(test):
        interprets = "1" if "in_the_interpreter" in test else "0"
        if interprets not in servers:
            servers[interprets] = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                cwd=REPOSITORY,
                env=environment | {"TRITON_INTERPRET": interprets},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return servers[interprets]

    yield server
    for process in servers.values():
        process.stdin.close()
        process.wait(timeout=60)


def link(folder, copy, *, but):
    """A folder of links to all that is in another, but what matches one of these patterns."""
    copy.mkdir()
    for entry in set(folder.iterdir()).difference(*map(folder.glob, but)):
        (copy / entry.name).symlink_to(entry)


def mutated(mutant, package):
    """A copy of the package with the fault: links, also to what is compiled, and one file."""
    folder, copy = SOURCE, package
    *folders, file = Path(mutant.file).parts
    for name in folders:
        link(folder, copy, but=[name])
        folder, copy = folder / name, copy / name
    link(folder, copy, but=[file, "__pycache__"])
    if (folder / "__pycache__").exists():
        own = file.removesuffix("py") + "*"
        link(folder / "__pycache__", copy / "__pycache__", but=[own])
    text = (folder / file).read_text(encoding="utf-8")
    found = text.count(mutant.old)
    assert found == 1, f"{mutant.old!r} occurs {found} times in {mutant.file}: update the catalogue"
    (copy / file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def outcome(test, parent, server_for):
    """The exit status of a test with the package of a folder, and what was printed."""
    server = server_for(test)
    print(parent, test, sep="\t", file=server.stdin, flush=True)
    status = int(server.stdout.readline())
    return status, (parent / "log").read_text(encoding="utf-8", errors="replace")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_is_caught(mutant, tmp_path, server_for):
    mutated(mutant, tmp_path / "nucleon")
    status, log = outcome(mutant.test, tmp_path, server_for)
    assert status == TESTS_FAILED, f"{mutant.test} did not notice (status {status}):\n{log[-2000:]}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    "test",
    [
        "tests/test_checks.py::test_broadcasting_goes_one_way",
        "tests/optim/test_fused.py::test_the_fused_step_in_the_interpreter[bounded]",
        "tests/linalg/test_kernels.py::test_the_triton_kernels_in_the_interpreter",
    ],
)
def test_what_has_no_fault_passes(test, tmp_path, server_for):
    """Else a server that is broken would catch everything."""
    (tmp_path / "nucleon").symlink_to(SOURCE)
    status, log = outcome(test, tmp_path, server_for)
    assert status == 0, log[-2000:]


def test_names_are_unique_and_edits_are_edits():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.old != m.new for m in MUTANTS)
