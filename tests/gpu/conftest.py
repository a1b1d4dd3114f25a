"""Everything in this folder needs a CUDA device; without one it is a single skipped test."""

import pytest
import torch

collect_ignore_glob = ["test_device.py" if torch.cuda.is_available() else "test_gpu_*.py"]


@pytest.fixture(autouse=True)
def _user_settings():
    """Full float32 products unless a test asks otherwise, and the user's setting afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
