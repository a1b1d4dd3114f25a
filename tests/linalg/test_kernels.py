"""Symmetric products and what is built on them, against float64; Triton through its interpreter."""

import math
from collections import defaultdict
from functools import partial
from itertools import chain

import pytest
import torch

import half_contract
from helpers_half import CASES, CLUSTERS, LAMBDAS, clusters
from linalg import kernel_cases
from nucleon.linalg import coefficients, kernels
from nucleon.linalg.half import half_augmented, half_polar
from soaking import some


@pytest.mark.parametrize("case", kernel_cases.BY_TORCH.values(), ids=kernel_cases.BY_TORCH)
def test_a_product_by_torch(case):
    run, options = case
    run(torch.device("cpu"), **options)


@pytest.fixture
def launches(monkeypatch):
    """The Triton module with no tiles timed, timing as a fake launch says, and none captured."""
    module = pytest.importorskip("nucleon.linalg.triton_symmetric")
    monkeypatch.setattr(module, "_tuned", {})
    monkeypatch.setattr(module.triton.testing, "do_bench", lambda launch, **_: launch())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def timed(module, times):
    """A launch that takes the time of its configuration, None is too large, and a log of them."""
    log = []

    def run(config):
        log.append(config)
        time = times[module.CONFIGS.index(config)]
        if time is None:
            raise module.OutOfResources(2**18, 2**17, "shared memory")
        return time

    return run, log


def test_the_fastest_tiles_are_taken_and_timed_once(launches):
    slow, quick = timed(launches, [3.0, 2.0, 1.0, 4.0]), timed(launches, [1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        assert launches._tuned_for("this", slow[0]) is launches.CONFIGS[2]
        assert launches._tuned_for("that", quick[0]) is launches.CONFIGS[0]
    assert slow[1] == quick[1] == launches.CONFIGS


def test_tiles_that_do_not_fit_the_device_are_passed_over(launches):
    run, log = timed(launches, [None, 3.0, None, 2.0])
    assert launches._tuned_for("this", run) is launches.CONFIGS[3]
    assert log == launches.CONFIGS


def test_while_a_graph_is_captured_nothing_is_timed(launches, monkeypatch):
    run, log = timed(launches, [4.0, 3.0, 2.0, 1.0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launches._tuned_for("this", run) is launches.CONFIGS[0]
    assert log == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert launches._tuned_for("this", run) is launches.CONFIGS[3]  # the first was not remembered
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launches._tuned_for("this", run) is launches.CONFIGS[3]


def test_each_kind_of_product_has_tiles_of_its_own(launches, monkeypatch):
    """Square matrices: XXᵀ, αRR + βR, the same with a second result, and those of another shape."""
    keys = []

    def tuned(key, run):
        keys.append(key)
        return launches.SMALL

    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "_has_copy_engine", lambda device: True)
    monkeypatch.setattr(launches, "_tuned_for", tuned)
    monkeypatch.setattr(launches, "_symmetric", defaultdict(lambda: lambda *_, **__: None))
    for m in (128, 136):
        r = torch.zeros(1, m, m, dtype=torch.float16)
        for addend, kind in ((None, ""), (r, ""), (r, "shifted")):
            for factor in (1.0, 2.0):  # which are arguments: the kernel is the same
                factors = {"alpha": factor, "beta": factor, "second_shift": 1.0}
                launches.symmetric(r, r, r, r, addend=addend, kind=kind, **factors)
    assert len(keys) == 12 and len(set(keys)) == 6
    assert keys[::2] == keys[1::2]


@pytest.mark.slow
@pytest.mark.parametrize("case", some(kernel_cases.CASES))
def test_the_triton_kernels_in_the_interpreter(case, check_in_interpreter):
    check_in_interpreter("linalg.kernel_cases", case)


def test_the_half_precision_sequence_stays_in_the_unit_interval():
    sequence = coefficients.half_polar_express(5)
    x = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for a, b, c in sequence:
        x = a * x + b * x**3 + c * x**5
    assert x.min() >= 0 and x.max() <= 1 + 1e-12
    assert sequence[0][0] == pytest.approx(8.14, abs=0.01)  # the growth that five steps need


WAYS = {
    "float16": (half_contract.bare, (64, 100), 9),
    "float16, square": (half_contract.bare, (64, 64), 9),
    "a step": (half_contract.stepped, (64, 100), 9),
    "bfloat16 Muon": (partial(half_contract.by_bfloat16, "Muon"), (64, 100), 1),
    "bfloat16 Leon": (partial(half_contract.by_bfloat16, "Leon"), (64, 100), 8),
}
"""Directions, a shape, and how many directions there are for all kinds of Λ."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_half_precision_keeps_its_promises(way, name):
    how, shape, count = WAYS[way]
    judged = [half_contract.judged(name, kind, *shape, 0, "cpu", how) for kind in LAMBDAS]
    found = list(chain(*judged))
    assert len(found) == count
    assert all(half_contract.kept(*figures) for _, *figures in found), found


SEQUENCE = coefficients.half_polar_express(5)


@pytest.mark.parametrize("rows", CLUSTERS.values(), ids=CLUSTERS)
def test_half_precision_stays_in_the_ball_on_the_hardest_inputs(rows):
    drawn = [clusters(64, 128, seed, rows) for seed in range(200)]
    s, smoothing = map(torch.stack, zip(*drawn, strict=True))
    for p in (half_augmented(s, smoothing, SEQUENCE), half_polar(s, SEQUENCE)):
        assert torch.linalg.matrix_norm(p.double(), 2).max() <= half_contract.LARGEST_NORM
    for given in (smoothing, None):
        p = half_contract.by_bfloat16("Leon", s, given)["Leon"]
        assert torch.linalg.matrix_norm(p.double(), 2).max() <= half_contract.LARGEST_NORM


@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 64, 160)], ids=str)
def test_half_precision_does_not_see_the_scale(shape, exponent):
    s = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    assert torch.equal(half_polar(s * 2.0**exponent, SEQUENCE), half_polar(s, SEQUENCE))
    if abs(exponent) < 50:  # beyond that float32 holds no Gram matrix of it
        smoothing = s @ s.mT
        p = half_augmented(s * 2.0**exponent, smoothing * 4.0**exponent, SEQUENCE)
        assert torch.equal(p, half_augmented(s, smoothing, SEQUENCE))


def test_zero_gives_zero_and_leaves_its_neighbour_alone():
    s = torch.randn(2, 64, 70, generator=torch.Generator().manual_seed(7))
    s[0] = 0
    for p in (half_polar(s, SEQUENCE), half_augmented(s, s @ s.mT, SEQUENCE)):
        assert torch.equal(p[0], torch.zeros_like(p[0])) and p.isfinite().all()
    assert math.isclose(torch.linalg.matrix_norm(half_polar(s, SEQUENCE)[1], 2), 1, abs_tol=0.02)


def test_a_broken_promise_is_published_with_its_input(monkeypatch, capsys):
    monkeypatch.setattr(half_contract, "CASES", ("gaussian",))
    monkeypatch.setattr(half_contract, "LAMBDAS", ("none", "same"))
    monkeypatch.setattr("sys.argv", ["half_contract.py", "--rows", "64", "--clusters", "0"])
    with pytest.raises(SystemExit, match="False"):
        half_contract.main()
    kept = capsys.readouterr().out
    assert kept.count("3 directions") == 2 and "BROKEN" not in kept
    monkeypatch.setattr(half_contract, "LARGEST_NORM", 0.8)  # polar factors have 1, Λ = SSᵀ halves
    with pytest.raises(SystemExit, match="True"):
        half_contract.main()
    broken = [x for x in capsys.readouterr().out.splitlines() if "BROKEN" in x]
    assert len(broken) == 4
    assert all("S gaussian, Λ none" in line for line in broken)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 200), (2, 128), (2, 129), (3, 1000), (20, 1281)])
def test_a_gram_matrix_in_parts_is_that_of_the_whole(batch, m, n):
    x, c = torch.randn(*batch, m, n).double(), torch.randn(*batch, m, m).double()
    for layout in (x, x.mT.contiguous().mT):
        torch.testing.assert_close(kernels.add_gram(c, layout), c + x @ x.mT)
