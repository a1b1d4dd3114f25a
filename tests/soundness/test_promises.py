"""The numbers of `docs/promises.md` are those that the tests of this folder hold to."""

import math
import re
from pathlib import Path

import pytest
import torch

from soundness import oracle
from soundness.cases import FULL_STEPS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and "---" not in line
]


def test_every_promise_names_a_test():
    for section in ("Every step", "What is skipped", "A matrix without gradients", "Resuming"):
        text = re.split(r"^## ", PAGE.partition(f"## {section}\n")[2], flags=re.M)[0]
        promises = re.split(r"^- ", text, flags=re.M)[1:]
        assert promises and all("`tests/" in promise for promise in promises), section


def test_the_steps_of_a_matrix_without_gradients_are_those_of_the_page():
    sentence = re.search(r"For β₁ = ([^=]+?)\s+these are ([^=]+?) steps", PAGE)
    momenta, steps = (re.findall(r"[\d.]+", part) for part in sentence.groups())
    page = {float(momentum): int(step) for momentum, step in zip(momenta, steps, strict=True)}
    assert page | {0.0: 0} == FULL_STEPS


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
