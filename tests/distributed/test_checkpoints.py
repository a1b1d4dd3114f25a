"""A checkpoint of any layout goes on in any other, on more or fewer ranks, as if never broken.

The gradients are prescribed, so that every layout has the same ones; steps 0…3, saved after 2.
"""

import pytest
import torch
from checkpointing import figures, resumable, whole_state


def unbroken(**options):
    return resumable("alone", "local", None, **options)


def check_same(results, expected):
    for weights in results:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


LAYOUTS = [(kind, p) for kind in ("ddp", "fsdp", "hsdp", "twice") for p in ("local", "owner")]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("through", ["tree", "flat", "file"])
@pytest.mark.parametrize(("kind", "placement"), LAYOUTS[:4])
def test_saved_on_four_ranks_and_loaded_on_two_and_on_one(
    ranks4, ranks2, tmp_path, kind, placement, through
):
    options = {"folder": str(tmp_path), "through": through}
    expected = unbroken()
    check_same(ranks4("resumable", kind=kind, placement=placement, saves_at=2, **options), expected)
    rest = {"loads": True, "start": 2, **options}
    check_same(ranks2("resumable", kind=kind, placement=placement, **rest), expected)
    check_same([resumable("alone", "local", **rest)], expected)


@pytest.mark.parametrize("placement", ["local", "owner"])
def test_rows_that_are_cut_twice(ranks4, ranks2, tmp_path, placement):
    options, expected = {"folder": str(tmp_path)}, unbroken()
    saved = ranks4("resumable", kind="twice", placement=placement, saves_at=2, **options)
    check_same(saved, expected)
    rest = {"loads": True, "start": 2, **options}
    check_same(ranks4("resumable", kind="twice", placement=placement, **rest), expected)
    check_same(ranks2("resumable", kind="fsdp", placement="owner", **rest), expected)


@pytest.mark.parametrize("method", ["muon", "pion"])
def test_every_method_and_back_to_more_ranks(ranks4, tmp_path, method):
    """One process saves, four go on."""
    options = {"folder": str(tmp_path), "method": method, "dtype": torch.float64}
    expected = unbroken(method=method, dtype=torch.float64)
    resumable("alone", "local", saves_at=2, **options)
    rest = {"loads": True, "start": 2, **options}
    check_same(ranks4("resumable", kind="ddp", placement="owner", **rest), expected)
    check_same(ranks4("resumable", kind="hsdp", placement="owner", **rest), expected)


def test_bf16_weights_keep_their_float32_moments(ranks4, ranks2, tmp_path):
    options = {"folder": str(tmp_path), "dtype": torch.bfloat16, "stochastic_rounding": True}
    expected = unbroken(dtype=torch.bfloat16, stochastic_rounding=True)
    check_same(ranks4("resumable", kind="fsdp", placement="owner", saves_at=2, **options), expected)
    rest = {"loads": True, "start": 2, **options}
    check_same(ranks2("resumable", kind="ddp", placement="owner", **rest), expected)


@pytest.mark.parametrize("through", ["tree", "file"])
@pytest.mark.parametrize(("kind", "placement"), [("fsdp", "local"), ("ddp", "owner")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_saved_cut_and_joined(ranks2, tmp_path, kind, placement, through, dtype):
    options = {"folder": str(tmp_path), "through": through, "average": 0.2, "dtype": dtype}
    expected = unbroken(average=0.2, dtype=dtype)
    assert all(torch.equal(expected[n], expected[f"again {n}"]) for n in ("tall", "bias"))
    assert not torch.equal(expected["tall"], expected["average of tall"])
    check_same(ranks2("resumable", kind=kind, placement=placement, saves_at=2, **options), expected)
    rest = {"loads": True, "start": 2, **options}
    check_same(ranks2("resumable", kind=kind, placement=placement, **rest), expected)
    check_same([resumable("alone", "local", **rest)], expected)


@pytest.mark.parametrize(("kind", "placement"), LAYOUTS)
def test_the_consolidated_state_is_that_of_one_process(ranks4, kind, placement):
    expected = whole_state("alone", "local")
    first, *others = ranks4("whole_state", kind=kind, placement=placement)
    assert others == [{}] * 3
    assert first["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert first["state"][key].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(first["state"][key][name], value)


def test_a_part_of_a_state_is_refused_with_the_remedy(ranks2, tmp_path):
    for ok, message in ranks2.try_all("half_a_state", folder=str(tmp_path)):
        assert not ok
        assert "another rank owned" in message
        assert "consolidate" in message


@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_full_state_dict(ranks2, kind, certify):
    expected = unbroken(dtype=torch.float64, certify=certify, gradient_bound=9.0 * certify)
    for resumed in ("local", "owner"):
        options = {"placement": "local", "resumed": resumed, "certify": certify}
        check_same(ranks2("full_state", kind=kind, **options), expected)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_full_state_dict_of_owners_is_refused(ranks2, kind, certify, used):
    """torch would put zeros in the place of what the other ranks own."""
    for resumed in ("local", "owner"):
        arguments = {"kind": kind, "placement": "owner", "resumed": resumed, "used": used}
        for ok, message in ranks2.try_all("full_state", certify=certify, **arguments):
            assert not ok
            assert (
                "ValueError: full_state_dict=True loses the states that other ranks own" in message
            )


@pytest.mark.parametrize(("kind", "placement"), LAYOUTS)
def test_diagnostics_and_certificates_are_those_of_one_process_on_every_rank(
    ranks4, kind, placement
):
    measured, certified = figures("alone", "local", certify=True)
    for values, certificates in ranks4("figures", kind=kind, placement=placement, certify=True):
        assert values == pytest.approx(measured, rel=1e-9, abs=1e-12)
        assert certificates == certified
        assert len(certificates) == 5
