"""The moments against sums written out term by term."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon import moments

F64 = torch.float64


def gradients(rounds: int, *shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(rounds, *shape, dtype=dtype, generator=torch.Generator().manual_seed(7))


def run(g: torch.Tensor, discount: moments.Scalar) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.zeros(g.shape[1:], dtype=g.dtype)
    gram = torch.zeros(*g.shape[1:-1], g.shape[-2], dtype=g.dtype)
    for gradient in g:
        total = moments.accumulate_total(total, gradient, discount)
        gram = moments.accumulate_gram(gram, gradient, discount)
    return total, gram


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2), (2, 3, 4), (0, 2, 3)]),
    rounds=st.integers(1, 8),
    discount=st.floats(0.3, 1.0),
)
def test_moments_are_discounted_sums(shape: tuple[int, ...], rounds: int, discount: float) -> None:
    g = gradients(rounds, *shape)
    total, gram = run(g, discount)
    age = torch.arange(rounds - 1, -1, -1, dtype=F64).reshape(-1, *(1 for _ in shape))
    # At most `rounds` terms of order 10 with one rounding each for product and sum.
    torch.testing.assert_close(total, (discount**age * g).sum(0), rtol=1e-13, atol=1e-13)
    products = torch.einsum("t...ij,t...kj->t...ik", g, g)
    torch.testing.assert_close(
        gram, (discount ** (2 * age) * products).sum(0), rtol=1e-13, atol=1e-12
    )


def test_discounted_moments_are_the_plain_game_on_growing_gradients() -> None:
    discount, bound, rounds = 0.8, 2.0, 6
    g = gradients(rounds, 3, 4)
    total, gram = run(g, discount)
    growth = discount ** -torch.arange(1, rounds + 1, dtype=F64)[:, None, None]
    plain_total, plain_gram = run(growth * g, 1.0)
    shrink = discount**rounds
    torch.testing.assert_close(total, shrink * plain_total)
    torch.testing.assert_close(gram, shrink**2 * plain_gram)
    discounted = moments.smoothing(gram, gradient_bound=bound, eta=1.5, discount=discount)
    plain = moments.smoothing(
        plain_gram, gradient_bound=bound * discount ** -(rounds + 1), eta=1.5, discount=1.0
    )
    torch.testing.assert_close(discounted, shrink**2 * plain)


def test_smoothing_is_the_stated_matrix() -> None:
    gram = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=F64)
    found = moments.smoothing(gram, gradient_bound=3.0, eta=2.0, discount=0.5)
    expected = torch.tensor([[38.0, 1.0], [1.0, 39.0]], dtype=F64) / 4  # (9/0.25·I + gram)/4
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(moments.smoothing(gram, gradient_bound=0.0), gram, rtol=0, atol=0)
    plain = torch.tensor([[11.0, 1.0], [1.0, 12.0]], dtype=F64)
    torch.testing.assert_close(moments.smoothing(gram, gradient_bound=3.0), plain, rtol=0, atol=0)


def test_scalars_may_be_tensors_one_for_each_matrix() -> None:
    g = gradients(4, 3, 2, 5)
    values = [0.5, 0.9, 1.0]
    per_matrix = torch.tensor(values, dtype=F64)
    total, gram = run(g, per_matrix)
    smoothing = moments.smoothing(
        gram, gradient_bound=per_matrix, eta=2 * per_matrix, discount=per_matrix
    )
    near = {"rtol": 1e-13, "atol": 1e-13}  # four rounds with a few roundings of terms below 100
    for i, value in enumerate(values):
        one_total, one_gram = run(g[:, i], value)
        expected = moments.smoothing(one_gram, gradient_bound=value, eta=2 * value, discount=value)
        torch.testing.assert_close(smoothing[i], expected, **near)
        for pair in (total[i], gram[i]), run(g[:, i], torch.tensor(value, dtype=F64)):
            torch.testing.assert_close(pair, (one_total, one_gram), **near)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_state_keeps_its_dtype_and_the_sum_is_wide(
    state: torch.dtype, dtype: torch.dtype
) -> None:
    total = torch.full((1, 1), 256.0, dtype=state)
    gradient = torch.full((1, 1), 1.5, dtype=dtype)
    found = moments.accumulate_total(total, gradient, 1.0)
    assert found.dtype == state
    expected = (total.double() + gradient.double()).to(state)
    assert torch.equal(found, expected)
    gram = torch.zeros(1, 1, dtype=torch.float32)
    for scalar in (0.5, torch.tensor(0.5, dtype=F64), torch.full((1,), 0.5, dtype=F64)):
        assert moments.accumulate_gram(gram, gradient, scalar).dtype == torch.float32
        assert moments.accumulate_total(total[None], gradient, scalar).dtype == state
        assert moments.smoothing(gram[None], gradient_bound=scalar).dtype == torch.float32
