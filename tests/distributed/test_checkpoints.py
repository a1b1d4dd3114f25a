"""A checkpoint of any layout goes on in any other, on more or fewer ranks, as if never broken.

The gradients are prescribed, so that every layout has the same ones; steps 0…3, saved after 2.
"""

import pytest
import torch
from checkpointing import figures, resumable, whole_state

ALONE = (1, "alone", "local")
LAYOUTS = [(kind, p) for kind in ("ddp", "fsdp", "hsdp", "twice") for p in ("local", "owner")]


@pytest.fixture
def run(ranks2, ranks4, tmp_path):
    """A function that takes the steps in a layout: its number of ranks, kind and placement."""

    def run(layout, **options):
        ranks, kind, placement = layout
        options |= {"kind": kind, "placement": placement, "folder": str(tmp_path)}
        if ranks == 1:
            return [resumable(**options)]
        return {2: ranks2, 4: ranks4}[ranks]("resumable", **options)

    return run


def check_same(results, expected):
    for weights in results:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


F64, BF16 = {"dtype": torch.float64}, {"dtype": torch.bfloat16}
CASES = [  # saved in a layout, loaded in others, with these options
    *(
        ((4, *layout), [(2, *layout), ALONE], {"through": through})
        for layout in LAYOUTS[:4]
        for through in ("tree", "flat", "file")
    ),
    *(
        ((4, "twice", placement), [(4, "twice", placement), (2, "fsdp", "owner")], {})
        for placement in ("local", "owner")
    ),
    *(
        (ALONE, [(4, "ddp", "owner"), (4, "hsdp", "owner")], F64 | {"method": method})
        for method in ("muon", "pion")
    ),
    ((4, "fsdp", "owner"), [(2, "ddp", "owner")], BF16 | {"stochastic_rounding": True}),
    *(
        (layout, [layout, ALONE], {"through": through, "average": 0.2} | dtype)
        for layout in ((2, "fsdp", "local"), (2, "ddp", "owner"))
        for through in ("tree", "file")
        for dtype in ({}, BF16)
    ),
]


@pytest.mark.parametrize(("saved", "loaded", "options"), CASES, ids=str)
def test_a_run_that_is_saved_goes_on_in_another_layout(run, saved, loaded, options):
    (expected,) = run(ALONE, **options)
    if "average" in options:
        assert all(torch.equal(expected[n], expected[f"again {n}"]) for n in ("tall", "bias"))
        assert not torch.equal(expected["tall"], expected["average of tall"])
    check_same(run(saved, saves_at=2, **options), expected)
    for layout in loaded:
        check_same(run(layout, loads=True, start=2, **options), expected)


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
    options = {"certify": certify, "gradient_bound": 9.0 * certify}
    expected = resumable("alone", "local", None, dtype=torch.float64, **options)
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
            assert "full_state_dict=True loses the states that other ranks own" in message


@pytest.mark.parametrize(("kind", "placement"), LAYOUTS)
def test_diagnostics_and_certificates_are_those_of_one_process_on_every_rank(
    ranks4, kind, placement
):
    measured, certified = figures("alone", "local", certify=True)
    for values, certificates in ranks4("figures", kind=kind, placement=placement, certify=True):
        assert values == pytest.approx(measured, rel=1e-9, abs=1e-12)
        assert certificates == certified
        assert len(certificates) == 5
