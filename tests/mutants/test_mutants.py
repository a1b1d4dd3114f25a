"""Every named mutant of the source is caught by the tests that are named beside it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from catalogue import MUTANTS

import nucleon

SOURCE = Path(nucleon.__file__).parent
REPOSITORY = Path(__file__).parents[2]
WRONG_PACKAGE, TESTS_FAILED = 99, 1

# The copy must win over the installed package, and a failure to do so must not look like a catch.
RUN = f"""
import sys
sys.path.insert(0, sys.argv[1])
import nucleon, pytest
if not nucleon.__file__.startswith(sys.argv[1]):
    sys.exit({WRONG_PACKAGE})
sys.exit(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run(package_parent, tests):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUN, str(package_parent), *tests],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_is_caught(mutant, tmp_path):
    package = tmp_path / "nucleon"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / mutant.file
    text = file.read_text(encoding="utf-8")
    found = text.count(mutant.old)
    assert found == 1, f"{mutant.old!r} occurs {found} times in {mutant.file}: update the catalogue"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    result = run(tmp_path, mutant.tests)
    assert result.returncode == TESTS_FAILED, (
        f"{' '.join(mutant.tests)} did not notice (exit status {result.returncode}):\n"
        f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
    )


def test_names_are_unique_and_edits_are_edits():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.old != m.new and m.tests for m in MUTANTS)
