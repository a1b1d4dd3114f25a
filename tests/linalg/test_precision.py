"""The user's float32 precision is neither relied on nor changed."""

import pytest
import torch

import nucleon
from nucleon import linalg
from nucleon.linalg._precision import full_float32

BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@pytest.fixture(params=["highest", "high", "medium"])
def setting(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


def test_inside_it_is_full_and_after_it_is_as_before(setting):
    before = [b.fp32_precision for b in BACKENDS]
    with full_float32():
        assert all(b.fp32_precision in ("none", "ieee") for b in BACKENDS)
    with pytest.raises(KeyError), full_float32():
        raise KeyError
    assert [b.fp32_precision for b in BACKENDS] == before
    assert torch.get_float32_matmul_precision() == setting


def test_results_do_not_depend_on_the_setting(setting):
    s = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    smoothing = s @ s.mT

    def results():
        param = torch.nn.Parameter(torch.zeros_like(s))
        param.grad = s.clone()
        nucleon.Leon([param]).step()
        yield param.detach()
        yield linalg.polar(s, "polar-express")
        yield linalg.augmented_polar(s, smoothing, "polar-express")
        yield linalg.inverse_sqrt(smoothing, "newton-schulz")

    under_the_setting = [*results()]
    torch.set_float32_matmul_precision("highest")
    assert all(map(torch.equal, under_the_setting, results()))
