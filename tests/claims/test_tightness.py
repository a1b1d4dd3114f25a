"""tightness: the quick claim holds, its numbers are right, and wrong learners or bounds fail it."""

import functools
import math

import pytest
import torch

from nucleon.claims import CLAIMS, Settings, Silent
from nucleon.claims.games import tightness
from nucleon.online import theory
from nucleon.online.learners import GBPA
from nucleon.online.potentials import Admissibility, Gaussian

F64 = torch.float64


@functools.cache
def quick():
    return tightness.run(Settings(quick=True), Silent())


def failed(result):
    return {check.name for check in result.checks if not check.passed}


def test_the_quick_claim_holds():
    result = quick()
    assert CLAIMS["tightness"].run is tightness.run
    assert result.passed, failed(result)
    assert result.tables and result.figures and result.records and result.notes
    for panel in result.figures[0].panels:
        assert all(len(s.x) == len(s.y) > 1 for s in panel.series)


def test_random_signs_by_hand():
    """1×1: E|Σε_t| = T·C(T−1, ⌊(T−1)/2⌋)/2^(T−1), over FAML's 2√(1+T)."""
    found = tightness.random_signs("FAML", (1, 1), 10, Settings())
    exact = 10 * math.comb(9, 4) / 2**9 / (2 * math.sqrt(11))
    error = math.sqrt(10 - (10 * math.comb(9, 4) / 2**9) ** 2) / math.sqrt(tightness.SIGNS)
    assert found.ratio == pytest.approx(exact, abs=4 * error / (2 * math.sqrt(11)))


# ---- faults that it must catch ------------------------------------------------------------------


def times(factor):
    def fault(patch):
        exact = theory.gbpa_bound
        patch.setattr(theory, "gbpa_bound", lambda *a, **k: factor * exact(*a, **k))

    return fault


def scaled_smoothing(patch):
    exact = GBPA.smoothing
    patch.setattr(GBPA, "smoothing", lambda self: 4 * exact(self))


def late_smoothing(patch):
    """Λ from M_{t−1}."""
    exact = GBPA._absorb

    def absorb(self, gradient):
        before = self.gram
        exact(self, gradient)
        self.late = before

    def smoothing(self):
        eye = torch.eye(self.gram.shape[-1], dtype=F64)
        return (self.late + eye) / self.eta**2

    patch.setattr(GBPA, "_absorb", absorb)
    patch.setattr(GBPA, "smoothing", smoothing)


def gaussian_alpha(patch):
    def constants(self, m, n):
        width = self.padded_width(m, n)
        return Admissibility(math.sqrt(width), 1 / math.sqrt(width - m - 1))

    patch.setattr(Gaussian, "admissibility", constants)


def uphill(patch):
    exact = GBPA._act
    patch.setattr(GBPA, "_act", lambda self: -exact(self))


FAULTS = {
    "the bound × 0.8": times(0.8),
    "the bound × 4": times(4),
    "Λ × 4": scaled_smoothing,
    "Λ from M_(t−1)": late_smoothing,
    "Gaussian α = √n": gaussian_alpha,
    "uphill": uphill,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_claim(fault, monkeypatch):
    kept = tightness.kept
    small = lambda key, settings: [c for c in kept(key, settings) if c.shape == (1, 1)]  # noqa: E731
    monkeypatch.setattr(tightness, "kept", small)
    FAULTS[fault](monkeypatch)
    assert not tightness.run(Settings(quick=True), Silent()).passed
