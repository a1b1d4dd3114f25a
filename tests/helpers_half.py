"""Inputs and yardsticks of the half-precision recursions, for the CPU and the GPU tests."""

import math

import torch

from nucleon.linalg.coefficients import muon

CASES = (
    "gaussian",
    "falling rows",
    "condition 1e1",
    "condition 1e2",
    "condition 1e3",
    "condition 1e4",
    "condition 1e6",
    "one large 1e2",
    "one large 1e4",
    "half large 1e1",
    "half large 1e2",
    "half large 1e3",
    "rank one",
    "rank a quarter",
    "zero rows",
    "zero columns",
    "one entry",
)
LAMBDAS = ("none", "same", "small", "rotated", "gradients", "low rank", "ridge", "large ridge")
CLUSTERS = {"clusters": None, "clusters in 16 rows": 16, "clusters in 6 rows": 6}
"""Names of `clusters`, with their rows; Λ is "none" or "own"."""


def pair(name, kind, m, n, seed=0):
    """S and Λ of these names, Λ None where it is 0."""
    if name in CLUSTERS:
        s, smoothing = clusters(m, n, seed, CLUSTERS[name])
        return s, smoothing if kind == "own" else None
    s = case(name, m, n, seed)
    return s, smoothing_of(kind, s, seed)


def case(name, m, n, seed=0):
    """An m×n float32 matrix with the spectrum or the structure that its name says."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(m, n, generator=generator)
    if name == "falling rows":
        return s * torch.arange(1, m + 1).rsqrt()[:, None]
    if name == "zero rows":
        return torch.where(torch.arange(m)[:, None] < m // 2, s, 0.0)
    if name == "zero columns":
        return torch.where(torch.arange(n) < n // 3, s, 0.0)
    if name == "one entry":
        return torch.zeros(m, n).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.0))
    if name == "gaussian":
        return s
    u, _, vh = torch.linalg.svd(s.double(), full_matrices=False)
    values = torch.zeros(m, dtype=torch.float64)
    if name == "rank one":
        values[0] = 1
    elif name == "rank a quarter":
        values[: m // 4] = 1
    else:
        kind, _, number = name.rpartition(" ")
        small = 1 / float(number)
        values[:] = small
        if kind == "condition":
            values = torch.logspace(0, math.log10(small), m, dtype=torch.float64)
        else:
            values[: 1 if kind == "one large" else m // 2] = 1
    return ((u * values) @ vh).float()


def smoothing_of(kind, s, seed=0):
    """Λ of one of the kinds for S, float32; None is 0."""
    m, n = s.shape
    generator = torch.Generator().manual_seed(1000 + seed)
    size = s.norm() ** 2
    if kind == "none":
        return None
    if kind == "same":
        return s @ s.mT
    if kind == "small":
        return 0.01 * s @ s.mT
    if kind == "rotated":
        other = torch.randn(m, m, generator=generator) @ s / m**0.5
        return other @ other.mT
    if kind == "gradients":
        noise = torch.randn(3, m, n, generator=generator) * (0.1 * s.norm() / (m * n) ** 0.5)
        return sum(g @ g.mT for g in 0.3 * s + noise)
    if kind == "low rank":
        v = torch.randn(m, 2, generator=generator)
        return v @ v.mT * size / m
    return torch.eye(m) * size * (1e-6 if kind == "ridge" else 1e2)


def clusters(m, n, seed, rows=None):
    """S with two to five singular values over 3.5 decades, and a Λ of rank one or two.

    Λ has a hundredth to a hundred times ‖S‖_F²; only `rows` rows are not zero (all). The hardest
    inputs that are known: float16 has the fewest bits for the small values beside the large ones.
    """
    generator = torch.Generator().manual_seed(seed)
    k = m if rows is None else rows

    def uniform():
        return torch.rand((), generator=generator, dtype=torch.float64).item()

    def orthogonal(rows, columns):
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(drawn).Q

    few = torch.tensor([10 ** (-3.5 * uniform()) for _ in range(2 + int(4 * uniform()))])
    values = few.double()[torch.randint(0, len(few), (k,), generator=generator)]
    if uniform() < 0.5:
        s = torch.eye(k, n, dtype=torch.float64) * values[:, None]
    else:
        s = (orthogonal(k, k) * values) @ orthogonal(n, k).mT
    v = torch.randn(k, 1 + int(2 * uniform()), generator=generator, dtype=torch.float64)
    v *= (10 ** (4 * uniform() - 2) * values.square().sum() / v.square().sum()).sqrt()
    where = torch.eye(m, dtype=torch.float64)[:, torch.randperm(m, generator=generator)[:k]]
    return (where @ s).float(), (where @ v @ v.mT @ where.mT).float()


def svd(a):
    """The thin SVD, by LAPACK's slower `gesvd` where torch's `gesdd` does not converge."""
    try:
        return torch.linalg.svd(a, full_matrices=False)
    except torch.linalg.LinAlgError:
        import scipy.linalg  # which not every machine has

        found = scipy.linalg.svd(a.numpy(), full_matrices=False, lapack_driver="gesvd")
        return tuple(map(torch.from_numpy, found))


def augmented(s, smoothing):
    """[S L] in float64, LLᵀ = Λ."""
    if smoothing is None:
        return s.double()
    vectors, values, _ = svd(smoothing.double())  # eigh may fail with many zeros
    return torch.cat([s.double(), vectors * values.sqrt()], dim=-1)


def exact(s, smoothing):
    """The leading block of the polar factor of [S L], singular values of rounding cut."""
    u, sigma, vh = svd(augmented(s, smoothing))
    return ((u * (sigma > 1e-6 * sigma[0])) @ vh)[:, : s.shape[1]]


def distance(p, reference):
    """‖P − exact‖_F/‖exact‖_F."""
    return ((p.double() - reference).norm() / reference.norm()).item()


def jordan(s, smoothing):
    """Return the result of Muon's usual five steps in bfloat16, on [S L], for S."""
    a, b, c = muon()
    x = augmented(s, smoothing).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x[:, : s.shape[1]]
