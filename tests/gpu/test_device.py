"""Stands for the whole folder where there is no CUDA device."""

import pytest
import torch


@pytest.mark.skip(reason="`python -m pytest tests/gpu` needs a CUDA device; `make gpu` runs it")
def test_cuda_device():
    assert torch.cuda.is_available()
