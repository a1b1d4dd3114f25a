"""Gradients from the smallest number of their dtype to the largest, steady and in turn."""

import pytest
import torch
from soundness import cases
from soundness.test_quiet import QUIET, known


@pytest.mark.parametrize("kind", ["steady", "alternating", "mixed"])
@pytest.mark.parametrize("setting", [known(s, tiny=True) for s in QUIET])
def test_every_scale_is_stepped_or_skipped(setting, kind, record_property):
    """Each step is judged: Ĝ, M̂, P and ‖P‖ where all fit the dtype, no bit changed where not."""
    watched = cases.scale_run(setting, kind)
    record_property("steps of matrices", watched.judged)
    skipped = watched.states[0]["skipped"]
    if setting.dtype in (torch.float32, torch.float64) and setting.has_gram:
        narrow = setting.options["method"] == "half" and setting.dtype == torch.float64
        assert bool(skipped.any()) != narrow  # the largest squares do not fit
