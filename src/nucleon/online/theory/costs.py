"""Leading-order flops of a round with K Newton–Schulz steps (Section 4, Appendix F).

m is the short side and n the long one, whichever way the matrix is given.
"""


def polar_flops(rows: int, columns: int, *, steps: int) -> float:
    """Return 4Km²n: the polar factor by the cubic Newton–Schulz iteration (Appendix F.2)."""
    m, n = sorted((rows, columns))
    return 4.0 * steps * m**2 * n


def coupled_flops(rows: int, columns: int, *, steps: int) -> float:
    """Return 6m²n + 6Km³: FAML by the coupled inverse square root (Appendix F.3)."""
    m, n = sorted((rows, columns))
    return 6.0 * m**2 * n + 6.0 * steps * m**3


def augmented_flops(rows: int, columns: int, *, steps: int) -> float:
    """Return 4m²n + K(2m²n + 4m³): FAML by the augmented recursion on (X, B) (Appendix F.3)."""
    m, n = sorted((rows, columns))
    return 4.0 * m**2 * n + steps * (2.0 * m**2 * n + 4.0 * m**3)


def ftpl_flops(
    rows: int,
    columns: int,
    *,
    steps: int,
    samples: int,
    speedup: float = 1.0,
    perturbation: bool = True,
) -> float:
    """Return 2m²n + m³/3 + 4kKm²n/s_par + 2km²n: FTPL with k samples (Appendix F.2).

    The last term, the products LZ, is missing in the paper; `perturbation=False` leaves it out.
    `speedup` is s_par ≥ 1, the effective parallelism over the samples.
    """
    m, n = sorted((rows, columns))
    polars = samples * polar_flops(m, n, steps=steps) / speedup
    products = 2.0 * samples * m**2 * n if perturbation else 0.0
    return 2.0 * m**2 * n + m**3 / 3 + polars + products
