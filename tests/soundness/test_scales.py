"""Gradients from the smallest number of their dtype to the largest, steady and in turn."""

import pytest
import torch

from soundness import cases
from soundness.marks import SETTINGS, SOAK


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_scale_is_stepped_or_skipped(setting, record_property):
    """Each step is judged: Ĝ, M̂, P and ‖P‖ where all fit the dtype, no bit changed where not."""
    for kind in ("steady", "alternating", "mixed"):
        watched = cases.check_scales(setting, kind, steps=6 if SOAK else 3)
        record_property("steps of matrices", watched.judged)
    skipped = watched.states[0]["skipped"]
    if setting.dtype in (torch.float32, torch.float64) and setting.has_gram:
        narrow = setting.options["method"] == "half" and setting.dtype == torch.float64
        assert bool(skipped.any()) != narrow  # the largest squares do not fit
