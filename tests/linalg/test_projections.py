"""The quadratic projection onto the operator-norm ball against cvxpy and duality.

The oracles share nothing with the code: a conic solver at small sizes and, at any size, the
Lagrangian dual, whose value lies below the minimum whatever the multiplier.
"""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import quadratic_projection
from nucleon.linalg.projections import _Problem
from strategies import (
    EMPTY,
    FULL,
    HALF,
    REFERENCE,
    geometric,
    normal,
    ranged,
    whole_range,
    with_eigenvalues,
    with_singular_values,
    work_dtype,
)
from strategies import semidefinite as any_semidefinite

SOLVERS = ["projected-gradient", "frank-wolfe", "douglas-rachford"]
FAST = ["projected-gradient", "douglas-rachford"]  # those that reach small gaps
SHAPES = [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3)]
gaussian = normal


def spectral(shape, condition):
    """A matrix with geometric singular values from 1 down to 1/condition."""
    return with_singular_values(shape, geometric(min(shape), math.log10(condition)))


def semidefinite(size, condition=10.0, rank=None, seed=0):
    """A symmetric matrix with geometric eigenvalues from 1 down to 1/condition, then zeros."""
    return with_eigenvalues(geometric(size, math.log10(condition), rank), seed)


def operator_norm(x):
    return np.linalg.norm(x.double().numpy(), 2, axis=(-2, -1))


def objective(s, left, right, x):
    """f(x) in NumPy, from the problem as it was given."""
    s, left, x = (t.double().numpy() for t in (s, left, x))
    quadratic = left @ x if right is None else left @ x @ right.double().numpy()
    return np.sum(s * x) + 0.5 * np.sum(x * quadratic)


def duality_gap(s, left, right, x):
    s, left, x = (t.double().numpy() for t in (s, left, x))
    gradient = s + (left @ x if right is None else left @ x @ right.double().numpy())
    return np.sum(gradient * x) + np.linalg.norm(gradient, "nuc")


def rounding(s, left, x):
    """Return the largest distance of a computed value or gap at x from the exact one.

    About 30 rounding errors in sums of the size of ‖S‖_* + ‖L‖_*, and the gradient's nuclear norm
    times what x exceeds the ball by, for such an excess lowers f and the gap alike.
    """
    size = sum(float(torch.linalg.matrix_norm(a.double(), "nuc")) for a in (s, left))
    return size * (30 * 2.3e-16 + 2 * max(0.0, float(operator_norm(x)) - 1))


def root(a):
    eigenvalues, vectors = np.linalg.eigh(a.numpy())
    return (vectors * np.sqrt(np.clip(eigenvalues, 0, None))) @ vectors.T


def solved_by_cvxpy(s, left, right):
    right = torch.eye(s.shape[1]).double() if right is None else right
    x = cp.Variable(s.shape)
    quadratic = cp.sum_squares(root(left) @ x @ root(right))
    problem = cp.Problem(
        cp.Minimize(cp.sum(cp.multiply(s.numpy(), x)) + 0.5 * quadratic), [cp.sigma_max(x) <= 1]
    )
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    return problem.value, torch.from_numpy(x.value)


CONES = [
    # shape, size of S, condition of L and of R (None: identity)
    ((3, 4), 1.0, 5.0, None),
    ((3, 4), 0.7, 50.0, 20.0),
    ((4, 3), 0.4, 30.0, 3.0),
    ((4, 3), 1.5, 1e3, None),
    ((1, 4), 1.0, 1.0, 40.0),
]


@pytest.mark.parametrize(("shape", "size", "left_condition", "right_condition"), CONES)
def test_values_and_minimizers_of_a_conic_solver(shape, size, left_condition, right_condition):
    s = size * gaussian(*shape, seed=3)
    left = semidefinite(shape[0], left_condition, seed=4)
    right = None if right_condition is None else semidefinite(shape[1], right_condition, seed=5)
    value, minimizer = solved_by_cvxpy(s, left, right)
    convexity = 1 / left_condition / (right_condition or 1.0)
    for solver in SOLVERS:
        tolerance = 1e-3 if solver == "frank-wolfe" else 1e-9
        solution = quadratic_projection(s, left, right, solver=solver, tolerance=tolerance)
        assert solution.converged
        # The oracle meets the constraint and its own gap to 1e-9; the multiplier, at most ‖S‖_*,
        # turns the former into an error of the value.
        slack = 1e-9 * (1 + float(torch.linalg.matrix_norm(s, "nuc")))
        assert -slack <= float(solution.value) - value <= float(solution.gap) + slack
        # ½·convexity·‖X − X*‖² ≤ f(X) − min f, for our point and for the oracle's.
        distance = float(torch.linalg.matrix_norm(solution.x - minimizer))
        radii = [(2 * excess / convexity) ** 0.5 for excess in (float(solution.gap), slack)]
        assert distance <= sum(radii)


problems = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(SHAPES),
        "size": st.floats(-2, 2),
        "condition": st.sampled_from([1.0, 10.0, 1e3]),
        "rank": st.sampled_from([None, 1, 2]),
        "weighted": st.booleans(),
        "seed": st.integers(0, 100),
    }
)


def build(shape, size, condition, rank, weighted, seed):
    s = 10.0**size * gaussian(*shape, seed=seed)
    left = semidefinite(shape[0], condition, rank, seed=seed + 1)
    right = semidefinite(shape[1], condition, seed=seed + 2) if weighted else None
    return s, left, right


@settings(deadline=None, max_examples=40)
@given(problem=problems, solver=st.sampled_from(SOLVERS), steps=st.integers(1, 30))
def test_the_gap_is_honest_whatever_the_iteration_reached(problem, solver, steps):
    s, left, right = build(**problem)
    solution = quadratic_projection(
        s, left, right, solver=solver, tolerance=1e-6, max_iterations=steps
    )
    accurate = quadratic_projection(s, left, right, solver="douglas-rachford", tolerance=1e-10)
    assert operator_norm(solution.x) <= 1 + 1e-9
    slack = rounding(s, left, solution.x) + rounding(s, left, accurate.x)
    assert float(solution.value) == pytest.approx(
        objective(s, left, right, solution.x), rel=1e-10, abs=slack
    )
    # Never more than the Frank–Wolfe gap; and that itself, unless f is bounded below by its
    # unconstrained minimum, which is the sharper bound where the constraint does not bind.
    frank_wolfe = duality_gap(s, left, right, solution.x)
    assert float(solution.frank_wolfe_gap) == pytest.approx(frank_wolfe, rel=1e-6, abs=slack)
    assert solution.gap <= solution.frank_wolfe_gap
    if problem["rank"] is not None and problem["rank"] < problem["shape"][0]:
        assert float(solution.gap) == pytest.approx(frank_wolfe, rel=1e-6, abs=slack)
    assert solution.value - accurate.value <= solution.gap + slack
    assert solution.relative_gap * -solution.value == pytest.approx(
        float(solution.gap), rel=1e-12, abs=slack
    )
    assert bool(solution.converged) == bool(solution.relative_gap <= 1e-6)
    assert solution.iterations <= steps


@settings(deadline=None, max_examples=25)
@given(size=st.floats(-9, -1), away=st.floats(-9, -1), seed=st.integers(0, 50))
def test_the_gap_around_a_minimizer_inside_the_ball(size, away, seed):
    # f(x) − min f = ½⟨d, weight∘d⟩ for the distance d to the minimizer, known in closed form.
    weight = 1 + gaussian(1, 3, 5, seed=seed) ** 2
    minimizer, d = 0.1 * 10.0**size * gaussian(2, 3, 5, seed=seed + 1)[:, None]
    x = minimizer + (d := 10.0**away * d)
    excess = float(0.5 * (weight * d**2).sum())
    gap = float(_Problem(-weight * minimizer, weight).gaps(x)[1])
    # The gradient is rounded relative to weight·minimizer, hence d is known to eps·‖minimizer‖.
    slack = 1e-15 * float((weight * (d.abs() + minimizer.abs()) * minimizer.abs()).sum())
    assert excess - slack <= gap <= excess * (1 + 1e-6) + slack


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", SHAPES)
class TestClosedCases:
    def test_without_a_quadratic_term_it_is_minus_the_polar_factor(self, solver, shape):
        s = spectral(shape, 1e6)
        solution = quadratic_projection(s, torch.zeros(shape[0], shape[0]).double(), solver=solver)
        u, _, vt = np.linalg.svd(s.numpy(), full_matrices=False)
        # Polar factors move by eps·‖s‖/σ_min: 1e-10 at this condition number.
        assert np.allclose(solution.x.numpy(), -u @ vt, rtol=0, atol=1e-8)
        assert solution.iterations == 0
        assert solution.value == pytest.approx(-np.linalg.norm(s.numpy(), "nuc"), rel=1e-13)

    def test_a_multiple_of_the_identity_clips(self, solver, shape):
        s = 2 * gaussian(*shape)
        solution = quadratic_projection(s, 0.7 * torch.eye(shape[0]).double(), solver=solver)
        assert solution.converged
        assert solution.iterations == 0
        u, sigma, vt = np.linalg.svd(-s.numpy() / 0.7, full_matrices=False)
        expected = torch.from_numpy((u * np.minimum(sigma, 1.0)) @ vt)
        torch.testing.assert_close(solution.x, expected, rtol=0, atol=1e-12)

    def test_a_feasible_unconstrained_minimizer_is_returned(self, solver, shape):
        left, right = semidefinite(shape[0], 100.0), semidefinite(shape[1], 10.0, seed=3)
        inside = 0.9 * spectral(shape, 4.0)
        s = -left @ inside @ right
        solution = quadratic_projection(s, left, right, solver=solver)
        assert solution.converged
        assert solution.iterations == 0
        torch.testing.assert_close(solution.x, inside, rtol=0, atol=1e-11)

    def test_zero_gives_zero(self, solver, shape):
        solution = quadratic_projection(
            torch.zeros(shape).double(), semidefinite(shape[0], rank=1), solver=solver
        )
        assert not solution.x.any()
        assert solution.gap == solution.value == solution.relative_gap == 0
        assert solution.converged


@pytest.mark.parametrize("solver", FAST)
def test_one_row_with_a_metric_on_the_columns(solver):
    # min ⟨s,x⟩ + ½xRxᵀ over ‖x‖₂ ≤ 1: x = −(R + μI)⁻¹s with the μ ≥ 0 at which ‖x‖ = 1.
    s, right = 2 * gaussian(1, 6), semidefinite(6, 100.0)
    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        x = -np.linalg.solve(right.numpy() + middle * np.eye(6), s.numpy()[0])
        low, high = (middle, high) if np.linalg.norm(x) > 1 else (low, middle)
    solution = quadratic_projection(
        s, torch.ones(1, 1).double(), right, solver=solver, tolerance=1e-13
    )
    assert np.allclose(solution.x.numpy()[0], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", FULL + HALF)
@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_every_input(solver, dtype, data):
    """Finite and feasible whatever the rank and the scales; the gap is no less than 0."""
    s, work = data.draw(ranged(dtype)), work_dtype(dtype)
    left = data.draw(any_semidefinite(s.shape[0], work, data.draw(whole_range(work))))
    result = quadratic_projection(s, left, solver=solver, max_iterations=20)
    assert torch.isfinite(result.x).all()
    assert operator_norm(result.x) <= 1 + REFERENCE[dtype]
    assert result.gap >= 0


@pytest.mark.parametrize("shape", EMPTY)
def test_empty_matrices(shape):
    left = torch.eye(shape[-2]).expand(*shape[:-2], shape[-2], shape[-2])
    solution = quadratic_projection(torch.zeros(shape), left)
    assert solution.x.shape == shape
    assert solution.gap.shape == shape[:-2]
    assert solution.converged.all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_batch_equals_its_loop(solver):
    s = gaussian(2, 3, 4, 6) * torch.tensor([0.0, 0.01, 1.0]).double()[:, None, None]
    left = torch.stack([semidefinite(4, c, seed=7) for c in (1.0, 10.0, 100.0)])
    right = semidefinite(6, 5.0)
    tolerance = 1e-2 if solver == "frank-wolfe" else 1e-8
    together = quadratic_projection(s, left, right, solver=solver, tolerance=tolerance)
    assert together.converged.all()
    for i in range(2):
        for j in range(3):
            alone = quadratic_projection(
                s[i, j], left[j], right, solver=solver, tolerance=tolerance
            )
            torch.testing.assert_close(together.x[i, j], alone.x, rtol=0, atol=1e-9)
            assert together.iterations[i, j] == alone.iterations
            assert together.value[i, j] == pytest.approx(float(alone.value), rel=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("power", [-700, -300, 300, 700])
def test_any_common_scale_gives_the_same_point_bit_for_bit(solver, power):
    s, left, right = gaussian(4, 6), semidefinite(4, 50.0), semidefinite(6, 3.0)
    scale = 2.0**power
    base = quadratic_projection(s, left, right, solver=solver, tolerance=1e-2)
    for arguments in [
        (scale * s, scale * left, right),
        (scale * s, left, scale * right),
        (scale * s, scale**2 * left, right / scale) if abs(power) < 500 else (s, left, right),
    ]:
        scaled = quadratic_projection(*arguments, solver=solver, tolerance=1e-2)
        assert torch.equal(scaled.x, base.x)
        assert torch.equal(scaled.relative_gap, base.relative_gap)
    scaled = quadratic_projection(scale * s, scale * left, right, solver=solver, tolerance=1e-2)
    assert float(scaled.value) == scale * float(base.value)
    assert float(scaled.gap) == scale * float(base.gap)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("linear", "quadratic"), [(1e-250, 1e-3), (1e-3, 1e250), (1e250, 1e-3)])
def test_terms_of_very_different_scale(solver, linear, quadratic):
    s, left = linear * gaussian(3, 5), quadratic * semidefinite(3, 10.0)
    solution = quadratic_projection(s, left, solver=solver)
    assert solution.converged
    if linear < quadratic:
        expected = -torch.linalg.solve(left / quadratic, s / linear)
        torch.testing.assert_close(
            solution.x * (quadratic / linear), expected, rtol=1e-12, atol=1e-12
        )
    else:
        assert operator_norm(solution.x) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_warm_start_helps_and_a_bad_one_does_no_harm(solver):
    s, left = gaussian(8, 12), semidefinite(8, 1e3)
    tolerance = 1e-2 if solver == "frank-wolfe" else 1e-8
    cold = quadratic_projection(s, left, solver=solver, tolerance=tolerance)
    warm = quadratic_projection(s, left, solver=solver, tolerance=tolerance, start=cold.x)
    assert cold.iterations > 0
    assert warm.iterations == 0
    assert warm.converged
    bad = quadratic_projection(s, left, solver=solver, tolerance=tolerance, start=-100 * cold.x)
    assert bad.converged
    assert bad.iterations <= cold.iterations + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_is_the_double_solution_rounded(dtype):
    s, left = gaussian(4, 7).to(dtype), semidefinite(4, 20.0).float()  # half takes a float32 L
    left = (left + left.mT) / 2
    solution = quadratic_projection(s, left)
    double = quadratic_projection(s.double(), left.double())
    assert solution.x.dtype == dtype
    assert solution.value.dtype == solution.gap.dtype == torch.float64
    assert torch.equal(solution.x, double.x.to(dtype))
    assert operator_norm(solution.x) <= 1 + REFERENCE[dtype]


EYE = torch.eye(2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"s": torch.full((2, 3), torch.nan)}, ValueError, "s must be finite"),
        ({"left": torch.eye(3)}, ValueError, "left must be 2×2 to act on the rows"),
        ({"left": EYE.double()}, TypeError, "left has dtype"),
        ({"left": torch.eye(2).expand(3, 2, 2)}, ValueError, "batch shape .* of left"),
        ({"left": torch.diag(torch.tensor([1.0, -0.1]))}, ValueError, "left must be positive"),
        ({"right": EYE}, ValueError, r"right must be 3×3 .* columns.* s\.mT @ s, or"),
        ({"right": -torch.eye(3)}, ValueError, "right must be positive semidefinite"),
        ({"solver": "newton"}, ValueError, "solver must be one of"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be a finite number > 0"),
        ({"max_iterations": 0}, ValueError, "max_iterations must be an integer ≥ 1"),
        ({"start": torch.ones(3, 2)}, ValueError, "start must have the shape"),
        ({"start": torch.ones(2, 3).double()}, TypeError, "start has dtype"),
        ({"start": torch.full((2, 3), torch.nan)}, ValueError, "start must be finite"),
    ],
)
def test_bad_input_of_the_quadratic_projection(change, error, words):
    arguments = {"s": torch.ones(2, 3), "left": EYE} | change
    with pytest.raises(error, match=words):
        quadratic_projection(**arguments)
