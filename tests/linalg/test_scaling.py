"""Rescaling by powers of two: exact, against Python's own frexp and rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nucleon.linalg._scaling import exponent, exponent_bits, joint_unit_scale, shift, unit_scale
from strategies import EMPTY, F64, FULL, HALF, exponents, normal, seeds, times_power_of_two

dtypes = st.sampled_from(FULL)


@given(dtype=dtypes, data=st.data(), seed=seeds)
def test_exponent_is_that_of_the_largest_entry(dtype, data, seed):
    powers = [data.draw(exponents(dtype)) for _ in range(3)]
    x = torch.stack([times_power_of_two(normal(2, 3, seed=seed, dtype=dtype), p) for p in powers])
    e = exponent(x)
    assert e.shape == (3, 1, 1)
    for matrix, found in zip(x, e.flatten().tolist(), strict=True):
        assert found == math.frexp(matrix.abs().max().item())[1]


def limits(dtype):
    info = torch.finfo(dtype)
    return {"max": info.max, "tiny": info.tiny, "subnormal": info.tiny * info.eps}


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("name", ["max", "tiny", "subnormal"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_ends_of_the_range_come_to_unit_scale(dtype, name, sign):
    value = limits(dtype)[name]
    x = torch.tensor([[sign * value, 0.0]], dtype=dtype)
    assert exponent(x).item() == math.frexp(value)[1]
    assert unit_scale(x).tolist() == [[sign * math.frexp(value)[0], 0.0]]


@pytest.mark.parametrize("dtype", FULL + HALF)
def test_zero_and_empty_matrices_keep_their_scale(dtype):
    assert exponent(torch.zeros(2, 3, 4, dtype=dtype)).tolist() == [[[0]], [[0]]]
    for shape in EMPTY:
        x = torch.zeros(shape, dtype=dtype)
        assert exponent(x).shape == (*shape[:-2], 1, 1)
        assert not exponent(x).any()
        assert unit_scale(x).shape == shape


@given(dtype=dtypes, start=st.data(), seed=seeds)
def test_shift_is_exact(dtype, start, seed):
    """From any normal scale to any other, though 2^e alone may overflow or vanish."""
    spare = 8  # entries below 2^-8 of the largest are removed
    before, after = start.draw(exponents(dtype, spare=spare)), start.draw(exponents(dtype))
    after = max(after, math.ceil(math.log2(torch.finfo(dtype).tiny)) + spare)
    x = normal(3, 4, seed=seed, dtype=dtype)
    x = times_power_of_two(torch.where(x.abs() < 2.0**-7, 0.5, x), before)
    e = after - before
    shifted = shift(x, torch.full((1, 1), e, dtype=torch.int32))
    assert shifted.dtype == dtype
    for a, b in zip(x.flatten().tolist(), shifted.flatten().tolist(), strict=True):
        assert Fraction(b) == Fraction(a) * Fraction(2) ** e


def test_every_matrix_of_a_stack_has_its_own_shift():
    x = normal(2, 3, 4, 5) * torch.logspace(-300, 300, 6, dtype=F64).reshape(2, 3, 1, 1)
    unit = unit_scale(x)
    largest = unit.abs().amax(dim=(-2, -1))
    assert (largest >= 0.5).all()
    assert (largest < 1).all()
    for i in range(2):
        for j in range(3):
            assert torch.equal(unit[i, j], unit_scale(x[i, j]))


def pair(dtype, s_power, smoothing_power, seed=0):
    s = torch.where(normal(3, 4, seed=seed).abs() < 0.1, 0.5, normal(3, 4, seed=seed)).to(dtype)
    smoothing = torch.eye(3, dtype=dtype) + 0.25
    return times_power_of_two(s, s_power), times_power_of_two(smoothing, smoothing_power)


@given(dtype=dtypes, data=st.data(), seed=seeds)
def test_joint_scale_brings_both_under_one_and_no_further(dtype, data, seed):
    s, smoothing = pair(dtype, data.draw(exponents(dtype)), data.draw(exponents(dtype)), seed)
    a, b = joint_unit_scale(s, smoothing)
    largest, spread = a.abs().max().item(), b.abs().max().item()
    assert largest < 1
    assert spread < 1
    assert largest >= 0.5 or spread >= 0.25  # half the scale would leave one of them at ≥ 1
    # The ratio S²/Λ, all that matters, is kept exactly while nothing underflows.
    if min(largest, spread) > 1e-12:
        ratio = Fraction(s[0, 0].item()) ** 2 / Fraction(smoothing[0, 0].item())
        assert Fraction(a[0, 0].item()) ** 2 / Fraction(b[0, 0].item()) == ratio


@given(dtype=dtypes, data=st.data(), k=st.integers(-10, 10), seed=seeds)
def test_joint_scale_forgets_a_common_power_of_two(dtype, data, k, seed):
    power = st.integers(-20, 20)
    powers = data.draw(power), data.draw(power)
    one = joint_unit_scale(*pair(dtype, *powers, seed))
    other = joint_unit_scale(*pair(dtype, powers[0] + k, powers[1] + 2 * k, seed))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("name", ["max", "tiny", "subnormal"])
def test_a_zero_partner_does_not_pin_the_scale(dtype, name):
    value = torch.tensor([[limits(dtype)[name]]], dtype=dtype)
    zero = torch.zeros(1, 1, dtype=dtype)
    s, rest = joint_unit_scale(value, zero)
    assert 0.5 <= s.item() < 1
    assert rest.item() == 0
    rest, smoothing = joint_unit_scale(zero, value)
    assert rest.item() == 0
    assert 0.25 <= smoothing.item() < 1
    assert [x.item() for x in joint_unit_scale(zero, zero)] == [0, 0]


def test_joint_scale_broadcasts_the_smoothing_and_keeps_matrices_apart():
    s = normal(5, 2, 3) * torch.logspace(-200, 200, 5, dtype=F64).reshape(5, 1, 1)
    s[2] = 0
    smoothing = torch.eye(2, dtype=F64)
    a, b = joint_unit_scale(s, smoothing)
    for i in range(5):
        one, rest = joint_unit_scale(s[i], smoothing)
        assert torch.equal(a[i], one)
        assert torch.equal(b[i], rest)


# ---------------------------------------------------------------- exponents from bits

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""


@pytest.mark.parametrize("dtype", FULL + HALF)
@given(data=st.data())
def test_exponents_from_bits_are_those_of_frexp(dtype, data):
    """Of any bits at all: subnormal numbers, zero, infinity and NaN are among them."""
    word = WORDS[dtype.itemsize]
    bits = st.integers(0, torch.iinfo(word).max)  # no sign
    x = torch.tensor(data.draw(st.lists(bits, min_size=1, max_size=20)), dtype=word).view(dtype)
    found = exponent_bits(x)
    assert found.dtype == torch.int32
    assert torch.equal(found, torch.frexp(x).exponent)


@pytest.mark.parametrize("dtype", FULL + HALF)
def test_exponents_from_bits_at_every_power_of_two(dtype):
    """And one unit below and above it, from the smallest subnormal number to infinity."""
    word, info = WORDS[dtype.itemsize], torch.finfo(dtype)
    low, high = math.frexp(info.tiny * info.eps)[1], math.frexp(info.max)[1]
    powers = torch.tensor([2.0 ** (e - 1) for e in range(low, high + 1)], dtype=F64)
    x = powers.to(dtype).view(word)
    x = torch.cat([x - 1, x, x + 1, torch.zeros(1, dtype=word)]).view(dtype)
    finite = x[x.isfinite()]
    assert torch.equal(exponent_bits(x), torch.frexp(x).exponent)
    assert exponent_bits(finite).tolist() == [math.frexp(v)[1] for v in finite.tolist()]
