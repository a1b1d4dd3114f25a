"""The scalar sequences behind the polar iterations, computed on the host in float64.

An odd polynomial acts on a matrix through its singular values, p(X) = U p(Σ) Vᵀ, so an iteration
for the polar factor is designed on the interval of the singular values alone. Every odd polynomial
here is a triple (a, b, c), p(x) = ax + bx³ + cx⁵, and every interval starts as [lower_bound, 1].

Sources: Newton–Schulz as in the paper; Polar Express: Amsel, Persson, Musco, Gower, "The Polar
Express" (arXiv 2505.16932); Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural
networks" (2024); scaled Newton: Byers, Xu, "A new scaling for Newton's iteration for the polar
decomposition" (SIAM J. Matrix Anal. Appl. 30, 2008); QDWH: Nakatsukasa, Bai, Gygi, "Optimizing
Halley's iteration for computing the matrix polar decomposition" (ibid. 31, 2010).
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

from nucleon import _checks

Quintic = tuple[float, float, float]
"""(a, b, c), the odd polynomial ax + bx³ + cx⁵."""

Iteration = Literal["newton-schulz", "polar-express", "scaled-newton", "qdwh"]

REACH = 0.99
"""Value to which so many steps raise the lower bound of `bound_for`."""

SAFETY = 0.01
"""Polar Express leaves this relative room above each interval for rounding errors."""

CUSHION = 0.02407327424182761
"""Polar Express designs for [CUSHION·u, u] where l/u is smaller. The least value of that minimax
quintic is a tenth of its largest; a smaller l would let it push middle singular values to 0."""


def newton_schulz() -> Quintic:
    """Return the cubic 3x/2 − x³/2: increasing on [0, 1], with 1 − p = (1−x)²(2+x)/2."""
    return (1.5, -0.5, 0.0)


def muon() -> Quintic:
    """Return Jordan's quintic, the default of `torch.optim.Muon`, which does not converge to 1."""
    return (3.4445, -4.7750, 2.0315)


@lru_cache
def polar_express(
    lower_bound: float,
    steps: int,
    margins: tuple[float, ...] | None = None,
    cushion: float = CUSHION,
) -> tuple[Quintic, ...]:
    """Return the quintics p₁, …, p_K whose composition is closest to 1 on [lower_bound, 1].

    Each p_k is the minimax approximation of 1 on the image [l, u] of the ones before, and u = 2 − l
    after every step. With margins and `cushion` 0 the composition is optimal among all of its
    kind. The margin s of a step, `SAFETY` but for the last, designs it for [l, (1+s)u], so that
    rounding errors stay inside; `cushion` designs for [cushion·u, u] while l is smaller, then
    recentres the image on 1. `lower_bound` or `cushion` is 1e-12 at least, since p(l) = 1 − E.
    """
    lower, upper = lower_bound, 1.0
    sequence: list[Quintic] = []
    for margin in (SAFETY,) * (steps - 1) + (0.0,) if margins is None else margins:
        upper *= 1 + margin
        p = _minimax_quintic(max(lower, cushion * upper), upper)
        p = _scaled(p, 2 / sum(image([p], lower, upper)))
        lower, upper = image([p], lower, upper)
        sequence.append(p)
    return tuple(sequence)


def contracted(coefficients: Iterable[Quintic]) -> tuple[Quintic, ...]:
    """Return the sequence, its last polynomial divided by its largest value: [0, 1] → [0, 1].

    Polar Express approaches 1 from both sides; contracted, it does so from below, and no singular
    value leaves the unit ball however few the steps.
    """
    *first, last = coefficients
    return (*first, _scaled(last, 1 / image([*first, last], 0.0, 1.0)[1]))


@lru_cache
def quintics(method: str, lower_bound: float, steps: int) -> tuple[Quintic, ...]:
    """Return the polynomials of "newton-schulz" or "polar-express": [0, 1] → [0, 1]."""
    if method == "newton-schulz":
        return (newton_schulz(),) * steps
    return contracted(polar_express(lower_bound, steps))


def custom(coefficients: Sequence[Quintic], steps: int | None = None) -> tuple[Quintic, ...]:
    """Return a user's triples, checked; with `steps` the last is repeated, as Polar Express does.

    Raises:
        ValueError: if they are no finite triples, or more than `steps`.
    """
    try:
        triples = [tuple(map(float, triple)) for triple in coefficients]
    except (TypeError, ValueError):
        triples = []
    if not triples or not all(len(t) == 3 and all(map(math.isfinite, t)) for t in triples):
        raise ValueError(
            f"coefficients must be triples of finite numbers such as [(1.5, -0.5, 0.0)], "
            f"got {coefficients!r}"
        )
    count = len(triples)
    more = 0 if steps is None else _checks.count("steps", steps, minimum=count) - count
    return tuple((a, b, c) for a, b, c in triples + triples[-1:] * more)


def image(coefficients: Iterable[Quintic], lower: float, upper: float) -> tuple[float, float]:
    """Return the least and the largest value of the composition on [lower, upper], lower ≥ 0."""
    for p in coefficients:
        points = [lower, upper, *(x for x in _turning_points(p) if lower < x < upper)]
        a, b, c = p
        values = [x * (a + x**2 * (b + x**2 * c)) for x in points]
        lower, upper = min(values), max(values)
    return lower, upper


def largest(coefficients: Iterable[Quintic]) -> float:
    """Return a bound of |p_K(…p_1(x))| on [0, 1], the least where no value is below 0.

    It is that of ‖P‖_op for the P that these triples make of a matrix.
    """
    most = 1.0
    for p in coefficients:
        most = max(map(abs, image([p], 0.0, most)))
    return most


HALF_LOWER_BOUND = 3e-3
HALF_RESTART = 3
HALF_SQUARES = (
    (-0.332578, 1.613875, -2.142627),
    (0.49, 0.072356, -0.610772),
    (-0.66, -0.434423, 0.037013),
    (0.987225, -1.013983, 1.822618),
)
"""(α, β, δ) of q ← αq² + βx² + δ from q = x², for x·q ≈ 1 where the quintics of
`half_polar_express` end at the restart, with 15 % room: [0.332, 1.918]. The minimax among
these polynomials, scaled to at most 0.995: float16 leaves the ball by less than with 1,
and the error is still below that of two quintics."""


@lru_cache
def half_polar_express(steps: int) -> tuple[Quintic, ...]:
    """Design Polar Express for the float16 Gram recursion, with room for its rounding.

    Up to the restart after three steps the recursion follows the Gram matrix without looking at X
    again and may be off by several percent; the step after it leaves room for that.
    """
    margins = tuple(
        {HALF_RESTART - 1: 0.03, HALF_RESTART: 0.15}.get(i, SAFETY) for i in range(steps)
    )
    *first, last = polar_express(HALF_LOWER_BOUND, steps, margins)
    lower, upper = 0.0, 1.0
    for p, margin in zip([*first, last], margins, strict=True):
        lower, upper = image([p], lower, upper * (1 + margin))
    return (*first, _scaled(last, 1 / upper))


@lru_cache
def scaled_newton(lower_bound: float, steps: int) -> tuple[tuple[float, ...], float]:
    """Return Byers and Xu's factors γ_k of x ← (γx + 1/(γx))/2, and the final bound.

    γ₀ centres the interval on 1 geometrically, its image is [1, b], and γ = 1/√b does the same
    again. The second result is the last b: all singular values end in [1, b].
    """
    bound = 1 / lower_bound
    factors: list[float] = []
    for step in range(steps):
        root = math.sqrt(bound)
        factors.append(1 / root if step else root)
        bound = (root + 1 / root) / 2
    return tuple(factors), bound


@lru_cache
def qdwh(lower_bound: float, steps: int) -> tuple[tuple[Quintic, ...], float]:
    """Return the weights (a, b, c) of x ← x(a + bx²)/(1 + cx²), and the lower bound reached.

    Each step maps [l, 1] into [l', 1] with the largest l' that such a map can have; l = 1 gives
    Halley's (3, 1, 3).
    """
    lower = lower_bound
    weights: list[Quintic] = []
    for _ in range(steps):
        d = math.cbrt(4 * (1 - lower**2) / lower**4)
        root = math.sqrt(1 + d)
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - lower**2) / (lower**2 * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        weights.append((a, b, c))
        lower = min(1.0, lower * (a + b * lower**2) / (1 + c * lower**2))
    return tuple(weights), lower


def reached(method: Iteration, lower_bound: float, steps: int) -> float:
    """Return the least value in (0, 1] to which `steps` of a method take [lower_bound, 1]."""
    if method == "scaled-newton":
        return 1 / scaled_newton(lower_bound, steps)[1]
    if method == "qdwh":
        return qdwh(lower_bound, steps)[1]
    return image(quintics(method, lower_bound, steps), lower_bound, 1.0)[0]


@lru_cache
def steps_for(method: Iteration, lower_bound: float, tolerance: float) -> int:
    """Return the fewest steps ≥ 1 that take [lower_bound, 1] into [1 − tolerance, 1].

    Fewer where rounding ends the progress.
    """
    steps, previous, value = 1, 0.0, reached(method, lower_bound, 1)
    while 1 - value > tolerance and value > previous:
        steps, previous, value = steps + 1, value, reached(method, lower_bound, steps + 1)
    return steps


@lru_cache
def bound_for(method: Iteration, steps: int) -> float:
    """Return the least lower bound that so many steps take to `REACH`.

    Five quintics reach down to 3.2e-3, six to 7.8e-4; designed for less, they would leave the
    largest singular values short of 1.
    """
    low, high = 1e-12, 1.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(method, middle, steps) >= REACH else (middle, high)
    return high


def _minimax_quintic(lower: float, upper: float) -> Quintic:
    """Return the odd quintic nearest to 1: 1 − p takes ±E in turn at four points.

    With t = x² and q(t) = p(x)/x a quadratic, q(t_i) = (1 − s_iE)/x_i, s = (1, −1, 1, −1), at the
    ends and two inner points; the third divided difference of q vanishes, which gives E. Remez
    exchange moves the inner points to the turning points of p until E no longer grows.
    """
    l = lower / upper
    if l > 1 - 1e-5:  # the limit, centred: its error 5(1−l)³/16 is below rounding
        return _scaled((1.875, -1.25, 0.375), 1.0, 2 / (lower + upper))
    points, level = (l, (3 * l + 1) / 4, (l + 3) / 4, 1.0), 0.0
    while True:
        p, new_level = _level(points)
        if new_level <= level:
            break
        level = new_level
        if l > 1 - 1e-3:  # the first points are right to O((1−l)²), rounding moves them more
            break
        points = (l, *_turning_points(p), 1.0)
    return _scaled(p, 1.0, 1 / upper)


def _level(points: tuple[float, ...]) -> tuple[Quintic, float]:
    """Return the odd quintic with 1 − p = (E, −E, E, −E) at four points, and E."""
    t = [x * x for x in points]
    signs = (1, -1, 1, -1)
    weights = [
        1 / (x * math.prod(t_i - t_j for j, t_j in enumerate(t) if j != i))
        for i, (x, t_i) in enumerate(zip(points, t, strict=True))
    ]
    level = sum(weights) / sum(s * w for s, w in zip(signs, weights, strict=True))
    # Newton's form of q through the last three points: the first may be tiny, and (1−E)/l cancels.
    (t1, q1), (t2, q2), (t3, q3) = (
        (t[i], (1 - signs[i] * level) / points[i]) for i in range(1, len(points))
    )
    slope = (q2 - q1) / (t2 - t1)
    c = ((q3 - q2) / (t3 - t2) - slope) / (t3 - t1)
    b = slope - c * (t1 + t2)
    a = q1 - slope * t1 + c * t1 * t2
    return (a, b, c), level


def _turning_points(p: Quintic) -> tuple[float, ...]:
    """Return the positive zeros of p' = a + 3bt + 5ct², t = x², in increasing order."""
    a, b, c = p
    root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
    pivot = -(3 * b + math.copysign(root, b)) / 2  # no cancellation: the zeros' product is a/5c
    zeros = sorted(top / bottom for top, bottom in ((pivot, 5 * c), (a, pivot)) if bottom)
    return tuple(math.sqrt(t) for t in zeros if t > 0)


def _scaled(p: Quintic, factor: float, argument: float = 1.0) -> Quintic:
    """Return the coefficients of factor·p(argument·x)."""
    a, b, c = p
    return (factor * a * argument, factor * b * argument**3, factor * c * argument**5)
