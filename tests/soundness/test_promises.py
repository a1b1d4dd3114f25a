"""The numbers of `docs/promises.md` are those that the tests of this folder hold to."""

import math
import re
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
    """That the tests exist is looked at in `tests/test_docs.py`."""
    shown = False
    for row in ROWS:
        if row[-1] == "shown by":
            shown = True
        elif not row[-1].startswith("`tests/"):
            shown = False
        assert not shown or row[-1] == "shown by" or "::test_" in row[-1], row
    assert sum(row[-1] == "shown by" for row in ROWS) == 4


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
    assert len(found) == 7


@pytest.mark.parametrize(
    ("dtype", "text"), [(torch.float32, "3.1e-16"), (torch.float64, "1.0e-146")]
)
def test_the_smallest_moments_are_those_of_the_page(dtype, text):
    limits = torch.finfo(dtype)
    assert f"{math.sqrt(limits.tiny / limits.eps):.1e}" == text
    assert text in PAGE
