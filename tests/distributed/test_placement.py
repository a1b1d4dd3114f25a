"""Any layout and placement gives what one process gives, with real processes over gloo."""

import pytest
import torch
from cases import clipped, prescribed, train_alone, vectors

METHODS = ("muon", "leon", "pion", "halved")
LAYOUTS = ("plain", "rows", "columns", "hsdp", "2d", "twice", ("plain", "rows", "columns"))


def check_same_bits(results, expected):
    for weights, _ in results:
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_every_layout_repeats_one_process_bit_for_bit(ranks4, kinds, placement):
    for method in METHODS:
        expected, _ = prescribed(method, "plain")
        check_same_bits(
            ranks4("prescribed", method=method, kinds=kinds, placement=placement), expected
        )


HALF = {"dtype": torch.bfloat16, "stochastic_rounding": True, "nesterov": True}
FROZEN = {"frozen": (("wide", 1), ("square", 2))}
CASES = {  # layouts, options in one process, and those of the ranks that differ
    "half precision": (("plain", "rows", "hsdp"), HALF, {}),
    "bf16 momentum": (("plain", "rows", "hsdp"), HALF | {"momentum_dtype": torch.bfloat16}, {}),
    # Four 4×6 matrices of one parameter, each in a call of its own: none decays more than once.
    "a cut stack": (("rows",), {"largest_stack": 24}, {}),
    # The momentum is that of the owner's state; the scale, of the weights that all ranks move.
    "another momentum": (("plain", "rows"), {"changes": [(2, "momentum", 0.5)]}, {}),
    "another scale": (("plain", "rows"), {"changes": [(2, "scale", "match-adamw")]}, {}),
    # 7 rows over 4 ranks: rank 3 has one row. The others must not wait for it.
    "a gradient missing on one rank": (
        ("rows",),
        {"zero": [("odd", step, 6) for step in range(4)]},
        {"zero": (), "absent_on": [("odd", step, 3) for step in range(4)]},
    ),
    "unfrozen": (("plain", "rows"), FROZEN, {}),
    "unfrozen, missing on one rank": (
        ("plain",),
        FROZEN,
        {"absent_on": [("square", 2, 1)], "placement": "owner"},
    ),
}


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("case", CASES)
def test_what_one_process_does_is_repeated_bit_for_bit(ranks4, case, placement):
    layouts, options, other = CASES[case]
    expected, _ = prescribed("leon", "plain", **options)
    if "changes" in options:
        before, _ = prescribed("leon", "plain")
        assert not any(torch.equal(before[name], value) for name, value in expected.items())
    given = {"placement": placement} | options | other
    for kinds in layouts:
        check_same_bits(ranks4("prescribed", method="leon", kinds=kinds, **given), expected)


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("kinds", ["plain", "rows"])
def test_missing_and_bad_gradients_are_those_of_one_process(ranks4, kinds, placement):
    faults = {"missing": [("wide", 1), ("stack", 2)], "bad": [("tall", 1), ("odd", 2)]}
    expected, skipped = prescribed("leon", "plain", **faults)
    results = ranks4("prescribed", method="leon", kinds=kinds, placement=placement, **faults)
    check_same_bits(results, expected)
    assert skipped["tall"].item() == 1
    for name, value in skipped.items():  # every parameter is counted by its owner, or by all
        kept = [s[name] for _, s in results if s[name] is not None]
        assert kept
        assert all(torch.equal(k, value) for k in kept)


@pytest.mark.parametrize(
    ("placement", "route"),
    [("local", "matrix"), ("owner", "matrix"), ("local", "adamw")],
)
def test_a_gradient_in_parts_is_added_up(ranks4, placement, route):
    """The sum of four parts in another order, float64, two steps."""
    for here, alone in ranks4("replicated", placement=placement, route=route):
        torch.testing.assert_close(here, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [False, True])
def test_vectors_are_counted_and_skipped_alike_on_every_rank(ranks4, bad):
    """Also where a rank holds nothing: any of them may be the one that writes a checkpoint."""
    expected, counts = vectors("plain", bad)
    for absent in (None, 3):  # the last rank, which holds nothing
        for found, counted in ranks4("vectors", kind="rows", bad=bad, absent=absent):
            assert counted == counts
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", ["replicated", "rows", "tp", "both"])
def test_heads_are_clipped_as_in_one_process(ranks4, kind, recorded):
    """Float64 rounding of logits of order 1, which a rank computes of its own heads."""
    before, expected = clipped("alone", recorded)
    ratios = (expected[0] / before[0]).flatten(1).mean(1)
    assert len(set(ratios.view(4, 3)[:, 0].tolist())) > 2  # heads that are shrunk differently
    for _, found in ranks4("clipped", kind=kind, recorded=recorded):
        for got, value in zip(found, expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", ["plain", "rows"])
def test_gradients_wider_than_their_weights_are_not_rounded(ranks2, kind):
    results = ranks2("wide_gradients", kind=kind, placement="owner")
    kept = [(alone, here) for alone, here in results if here is not None]
    assert len(kept) == 1
    assert torch.equal(*kept[0])


def test_a_bf16_wire_rounds_the_direction_alike_on_every_rank(ranks4):
    options = {"method": "leon", "kinds": "plain", "placement": "owner"}
    full = ranks4("prescribed", **options)
    half = ranks4("prescribed", **options, wire_dtype=torch.bfloat16)
    for (a, _), (b, _) in zip(full, half, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=4 * 0.05 * 2**-8 * 1.2)
            assert torch.equal(b[name], half[0][0][name])


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "long", "tp", "both"])
def test_training_in_a_layout_is_training_alone(ranks4, kind, placement):
    """Gradients are summed in another order: float64 rounding, amplified by a few steps."""
    expected = train_alone("leon", shares={"tp": 1, "both": 2}.get(kind, 4))
    for weights, _ in ranks4("train", method="leon", kind=kind, placement=placement):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_scaled_loss_that_overflows_on_one_rank_is_skipped_on_all(ranks2, placement, bad):
    """A power of two as a scale changes no bit: the weights are those without scaler and step."""
    expected, _, _ = ranks2("train_scaled", placement="local", bad=None, scale=None)[0]
    for weights, taken, scale in ranks2("train_scaled", placement=placement, bad=bad, scale=2.0**8):
        assert taken == {3}
        assert scale == 2.0**7
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


LATER = {
    "lr": "updates of rank 1 differ from those of rank 0",
    "group": "parameter 0 of group 1: rank 0 has 1 (4, 6)",
}
UNSUPPORTED = {
    "partial": "ValueError: w is placed as P",
    "strided": "ValueError: w is placed as _S",
}


@pytest.mark.parametrize(
    ("name", "argument", "words"),
    [("later", {"what": what}, words) for what, words in LATER.items()]
    + [("unsupported", {"case": case}, words) for case, words in UNSUPPORTED.items()],
)
def test_ranks_that_differ_later_and_unsupported_placements_are_refused(
    ranks2, name, argument, words
):
    for ok, message in ranks2.try_all(name, **argument):
        assert not ok and words in message, message


def test_a_rank_that_owns_nothing_of_a_group_does_not_differ(ranks2):
    first, second = ranks2("later", what="nothing")
    assert first == second


def test_a_divergence_is_noticed_on_every_rank(ranks2):
    for ok, message in ranks2.try_all("diverge"):
        assert not ok and "differ" in message
        assert "after 2 steps: updates of rank" in message


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "hsdp"])
def test_evaluating_the_average_leaves_no_trace_in_the_training(ranks2, ranks4, kind):
    """FSDP2 keeps the whole weights of the root after a forward pass: of W̄, then of W."""
    ranks = ranks4 if kind == "hsdp" else ranks2
    options = {"method": "leon", "kind": kind, "average": 0.3}
    expected, found = (ranks("train", evaluates=flag, **options) for flag in (False, True))
    for (weights, losses), (untouched, _) in zip(found, expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in untouched.items())
        assert losses[-2] == pytest.approx(losses[-1], rel=1e-12)  # inside, and as it was saved
        assert len({*losses[:-1]}) == 3
