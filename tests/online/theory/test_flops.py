"""The flop models, recomputed by counting products."""

import pytest

from nucleon.online import theory


def product(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n


@pytest.mark.parametrize(("m", "n", "steps"), [(1, 1, 0), (3, 5, 4), (7, 7, 1), (64, 256, 10)])
def test_models_count_the_products(m, n, steps):
    gram, apply, square = product(m, n, m), product(m, m, n), product(m, m, m)
    assert theory.polar_flops(m, n, steps=steps) == steps * (gram + apply)
    assert theory.coupled_flops(m, n, steps=steps) == 2 * gram + apply + steps * 3 * square
    assert theory.augmented_flops(m, n, steps=steps) == 2 * gram + steps * (apply + 2 * square)
    polars = 3 * steps * (gram + apply) / 2
    shared = {"steps": steps, "samples": 3, "speedup": 2.0}
    assert theory.ftpl_flops(m, n, perturbation=False, **shared) == pytest.approx(
        gram + m**3 / 3 + polars
    )
    assert theory.ftpl_flops(m, n, **shared) == pytest.approx(gram + m**3 / 3 + polars + 3 * apply)
    assert theory.coupled_flops(n, m, steps=steps) == theory.coupled_flops(m, n, steps=steps)
