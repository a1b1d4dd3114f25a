"""Rescaling by powers of two: exact, against Python's own frexp and rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nucleon.linalg._scaling import exponent, exponent_bits, joint_unit_scale, shift, unit_scale
from strategies import F64, FULL, HALF, exponents, normal, seeds, times_power_of_two

dtypes = st.sampled_from(FULL)


def limits(dtype):
    info = torch.finfo(dtype)
    return (info.max, info.tiny, info.tiny * info.eps)


@pytest.mark.parametrize("dtype", FULL)
def test_the_ends_of_the_range_come_to_unit_scale(dtype):
    """In a stack, beside a zero matrix, each by its own power of two."""
    x = torch.tensor([[[0.0, sign * v]] for v in limits(dtype) for sign in (1, -1)], dtype=dtype)
    x = torch.cat([x, torch.zeros_like(x[:1])])
    parts = [math.frexp(entry) for entry in x[..., 1].flatten().tolist()]
    assert exponent(x).flatten().tolist() == [e for _, e in parts]
    assert unit_scale(x)[..., 1].flatten().tolist() == [mantissa for mantissa, _ in parts]


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


@given(dtype=dtypes, data=st.data(), seed=seeds)
def test_joint_scale_brings_both_under_one_and_no_further(dtype, data, seed):
    s = normal(3, 4, seed=seed)
    s = torch.where(s.abs() < 0.1, 0.5, s).to(dtype)
    s = times_power_of_two(s, data.draw(exponents(dtype)))
    smoothing = torch.eye(3, dtype=dtype) + 0.25
    smoothing = times_power_of_two(smoothing, data.draw(exponents(dtype)))
    a, b = joint_unit_scale(s, smoothing)
    largest, spread = a.abs().max().item(), b.abs().max().item()
    assert largest < 1 and spread < 1
    assert largest >= 0.5 or spread >= 0.25  # half the scale would leave one of them at ≥ 1
    # The ratio S²/Λ, all that matters, is kept exactly while nothing underflows.
    if min(largest, spread) > 1e-12:
        ratio = Fraction(s[0, 0].item()) ** 2 / Fraction(smoothing[0, 0].item())
        assert Fraction(a[0, 0].item()) ** 2 / Fraction(b[0, 0].item()) == ratio


@pytest.mark.parametrize("dtype", FULL)
def test_a_zero_partner_does_not_pin_the_scale(dtype):
    zero = torch.zeros(1, 1, dtype=dtype)
    for value in (torch.tensor([[limit]], dtype=dtype) for limit in limits(dtype)):
        s, rest = joint_unit_scale(value, zero)
        assert 0.5 <= s.item() < 1 and rest.item() == 0
        rest, smoothing = joint_unit_scale(zero, value)
        assert rest.item() == 0 and 0.25 <= smoothing.item() < 1
    assert [x.item() for x in joint_unit_scale(zero, zero)] == [0, 0]


# ---------------------------------------------------------------- exponents from bits

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""


@pytest.mark.parametrize("dtype", FULL + HALF)
@given(data=st.data())
def test_exponents_from_bits_are_those_of_frexp(dtype, data):
    """Draw any bits: subnormal numbers, zero, infinity and NaN are among them."""
    word = WORDS[dtype.itemsize]
    bits = st.integers(0, torch.iinfo(word).max)  # no sign
    x = torch.tensor(data.draw(st.lists(bits, min_size=1, max_size=20)), dtype=word).view(dtype)
    assert torch.equal(exponent_bits(x), torch.frexp(x).exponent)


@pytest.mark.parametrize("dtype", FULL + HALF)
def test_exponents_from_bits_at_every_power_of_two(dtype):
    """And one unit below and above it, from the smallest subnormal number to infinity."""
    word, info = WORDS[dtype.itemsize], torch.finfo(dtype)
    low, high = math.frexp(info.tiny * info.eps)[1], math.frexp(info.max)[1]
    powers = torch.tensor([2.0 ** (e - 1) for e in range(low, high + 1)], dtype=F64)
    x = powers.to(dtype).view(word)
    x = torch.cat([x - 1, x, x + 1, torch.zeros(1, dtype=word)]).view(dtype)
    assert torch.equal(exponent_bits(x), torch.frexp(x).exponent)
