"""The numbers of `docs/promises.md` are those that the tests of this folder hold to."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soundness import oracle
from soundness.cases import FULL_STEPS

PAGE = (Path(__file__).parents[2] / "docs/promises.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and "---" not in line
]


def test_every_promise_names_its_test():
    tables = [t for t in PAGE.split("\n\n") if "| shown by |" in t]
    for row in (line for table in tables for line in table.splitlines()[2:]):
        assert "test_" in row or "the same" in row or ", as above" in row, row
    assert len(tables) == 7


SHORT = {"A": "test_range_augmented.py", "R": "test_range.py"}
"""The letters of the page for files of `tests/linalg`."""
TESTS = Path(__file__).parents[1]
LINALG = TESTS / "linalg"


@pytest.mark.skipif(not (LINALG / "test_range.py").exists(), reason="comes with these files")
def test_every_test_on_the_page_exists_in_its_file():
    """A name without a file is of the file that was named last in its paragraph or row."""
    found = 0
    for part in re.split(r"\n\n|\n\|", PAGE):
        file = None
        for path, letter, name in re.findall(
            r"`(tests/[\w/]+\.py)(?=`|::)|\b([AR])(?=, as above|::)|\b(test_\w+)\b(?!\.py)", part
        ):
            if path or letter:
                file = TESTS.parent / path if path else LINALG / SHORT[letter]
                continue
            assert file is not None, f"{name} is named without its file"
            assert f"def {name}(" in file.read_text(encoding="utf-8"), f"{file} has no {name}"
            found += 1
    assert found > 50


def test_the_steps_of_a_matrix_without_gradients_are_those_of_the_page():
    momenta = next(row for row in ROWS if row[0] == "β₁")[1:]
    steps = next(row for row in ROWS if row[0].startswith("steps of full length"))[1:]
    assert {float(m): int(s) for m, s in zip(momenta, steps, strict=True)} == FULL_STEPS


def test_the_lengths_of_steps_are_those_of_the_page():
    first, last = (i for i, row in enumerate(ROWS) if row[0] == "`method`")
    found = {}
    for methods, *entries in ROWS[first + 1 : last]:
        for method in re.findall(r'"([\w-]+)"', methods):
            found[method] = [float(entry) for entry in entries]
    del found["auto"]  # one of the others
    for method, entries in found.items():
        dtypes = (torch.float64, torch.float32)
        expected = [oracle.contract(method, dtype) for dtype in dtypes]
        assert entries == pytest.approx(expected, rel=0.01), method
    assert len(found) == 8


@pytest.mark.parametrize(
    ("dtype", "text"), [(torch.float32, "3.1e-16"), (torch.float64, "1.0e-146")]
)
def test_the_smallest_moments_are_those_of_the_page(dtype, text):
    limits = torch.finfo(dtype)
    assert f"{math.sqrt(limits.tiny / limits.eps):.1e}" == text
    assert text in PAGE


COUNTED = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=7, database=None)
@given(st.integers())
def test_function(_): pass

def test_run(record_property):
    record_property("runs", 5)
"""


def test_the_soak_counts_what_it_does(tmp_path):
    """By the words in which hypothesis reports its examples, which it may change."""
    (tmp_path / "test_counted.py").write_text(COUNTED)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "soundness.conftest", str(tmp_path)]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, check=True)
    counts = re.findall(r"^ +(\d+) (.+)$", done.stdout, re.MULTILINE)
    assert counts == [("7", "examples of functions"), ("5", "runs")], done.stdout
