"""Named mutants: one wrong edit each, and the tests that must notice it.

To add one, append a line: a name, the file under src/nucleon, the exact text that occurs in it
once, what to put there instead, and the quickest node ids that fail for it.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, file, old, new, tests)


CHECKS = "tests/test_checks.py::"
SCALING = "tests/linalg/test_scaling.py::"
NORMS = "tests/linalg/test_norms.py::"
ROOTS = "tests/linalg/test_roots.py::"
AUGMENTED = "tests/linalg/test_augmented.py::"
POLAR = "tests/linalg/test_polar.py::"
COEFFICIENTS = "tests/linalg/test_coefficients.py::"
PROJECTIONS = "tests/linalg/test_projections.py::"
MOMENTS = "tests/test_moments.py::"
NOISE = "tests/test_noise.py::"
POTENTIALS = "tests/test_potentials.py::"

# fmt: off
MUTANTS = (
    mutant("checks: a large neighbour hides an asymmetry", "_checks.py", "a.abs().amax(dim=(-2, -1), keepdim=True)", "a.abs().amax()", CHECKS + "test_one_asymmetric_matrix_of_a_stack_is_enough"),
    mutant("checks: broadcasting goes both ways", "_checks.py", "if joint != other:", "if joint is None:", CHECKS + "test_broadcasting_goes_one_way"),

    mutant("scaling: a zero matrix pins the exponent", "linalg/_scaling.py", "torch.where(_is_zero(s), e_smoothing, exponent(s))", "exponent(s)", SCALING + "test_a_zero_partner_does_not_pin_the_scale"),
    mutant("scaling: 2^e in one factor overflows", "linalg/_scaling.py", 'torch.div(e, 2, rounding_mode="floor")', "torch.zeros_like(e)", SCALING + "test_the_ends_of_the_range_come_to_unit_scale"),
    mutant("scaling: Λ scaled like S", "linalg/_scaling.py", "shift(smoothing, -2 * e)", "shift(smoothing, -e)", SCALING + "test_joint_scale_forgets_a_common_power_of_two"),

    mutant("norms: missing rescale", "linalg/norms.py", "shift(largest, e)", "largest", NORMS + "test_closed_cases"),
    mutant("norms: Frobenius instead of nuclear", "linalg/norms.py", "values.sum(dim=-1), e)", "values.square().sum(dim=-1).sqrt(), e)", NORMS + "test_closed_cases"),

    mutant("roots: coefficient typo", "linalg/roots.py", "1.5 * eye - 0.5 * (z @ y)", "1.5 * eye - 0.55 * (z @ y)", ROOTS + "test_against_scipy"),
    mutant("roots: missing square root of the norm", "linalg/roots.py", "norm.rsqrt()", "norm.reciprocal()", ROOTS + "test_against_scipy"),
    mutant("roots: dropped floor", "linalg/roots.py", "y = a / norm + floor(a.dtype) * eye", "y = a / norm", AUGMENTED + "test_feasible_at_any_rank_condition_and_scale[coupled]"),
    mutant("roots: wrong rank cut", "linalg/roots.py", "torch.where(values > cut, values, torch.inf)", "torch.where(values > 0, values, torch.inf)", ROOTS + "test_rank_tolerance_cuts_relative_to_the_largest_eigenvalue"),
    mutant("roots: an indefinite matrix is let in", "linalg/roots.py", "(values[..., 0] < -rounding).any()", "(values[..., 0] < -1e15 * rounding).any()", ROOTS + "test_rounding_is_forgiven_and_a_negative_eigenvalue_is_not"),

    mutant("augmented: sign of Λ", "linalg/augmented.py", "torch.linalg.eigh(s @ s.mT + smoothing)", "torch.linalg.eigh(s @ s.mT - smoothing)", AUGMENTED + "test_it_is_the_inverse_root_times_s"),
    mutant("augmented: Λ on the wrong side of the Gram", "linalg/augmented.py", "b, q = x @ x.mT + rest, eye\n    last", "b, q = x @ x.mT @ rest, eye\n    last", AUGMENTED + "test_it_is_the_inverse_root_times_s"),
    mutant("augmented: Λ for its root", "linalg/augmented.py", "factor = vectors * values.sqrt().unsqueeze(-2)", "factor = vectors * values.unsqueeze(-2)", AUGMENTED + "test_the_reference_against_sixty_digits"),
    mutant("augmented: wrong rank cut", "linalg/augmented.py", "sigma > cut * sigma[..., :1]", "sigma > 0.1 * cut * sigma[..., :1]", AUGMENTED + "test_rank_tolerance_cuts_the_reference"),
    mutant("augmented: the Gram route at any condition", "linalg/augmented.py", "0.25 * _PROMISE[dtype] * values[..., 0]", "values[..., 0].abs() + 1", AUGMENTED + "test_an_ill_conditioned_matrix_without_smoothing_keeps_half_its_digits"),
    mutant("augmented: missing restart", "linalg/augmented.py", "if i in restarts:", "if i < 0:", AUGMENTED + "test_restarts_keep_float32_in_the_ball"),
    mutant("augmented: a restart forgets Λ", "linalg/augmented.py", "x, rest = q @ x, q @ rest @ q.mT", "x, rest = q @ x, rest", AUGMENTED + "test_cubic_recursion_is_the_scalar_one_on_each_singular_value"),
    mutant("augmented: dropped floor", "linalg/augmented.py", "FLOOR = 8\n", "FLOOR = 0\n", AUGMENTED + "test_feasible_where_rounding_made_the_smoothing_indefinite"),
    mutant("augmented: missing rescale", "linalg/augmented.py", "x, rest = s / norm, smoothing / norm**2", "x, rest = s / norm, smoothing / norm", AUGMENTED + "test_it_is_the_inverse_root_times_s"),
    mutant("augmented: steps that ran out count as converged", "linalg/augmented.py", "return torch.linalg.matrix_norm(p.double() - exact, ord=2)", "return 0 * torch.linalg.matrix_norm(p.double() - exact, ord=2)", AUGMENTED + "test_report_is_the_distance_to_the_exact_factor"),

    mutant("polar: wrong rank cut", "linalg/polar.py", "return (u * keep.unsqueeze(-2)) @ vh", "return u @ vh", POLAR + "test_rank_tolerance_cuts_the_svd"),
    mutant("polar: sign of the odd terms", "linalg/polar.py", "x = a * x + factor @ x", "x = a * x - factor @ x", POLAR + "test_zero_gives_zero_within_a_stack"),
    mutant("polar: transposition in the inverse", "linalg/polar.py", "torch.linalg.inv_ex(x).inverse.mT / factor", "torch.linalg.inv_ex(x).inverse / factor", POLAR + "test_orthogonal_equivariance_and_transposition[scaled-newton]"),
    mutant("polar: sign in the Halley step", "linalg/polar.py", "(a - b / c) * inverse_x", "(a + b / c) * inverse_x", POLAR + "test_orthogonal_equivariance_and_transposition[qdwh]"),
    mutant("coefficients: typo in Newton–Schulz", "linalg/coefficients.py", "(1.5, -0.5, 0.0)", "(1.5, -0.05, 0.0)", COEFFICIENTS + "test_newton_schulz_is_tangent_at_one"),
    mutant("coefficients: typo in Muon", "linalg/coefficients.py", "2.0315", "2.0351", COEFFICIENTS + "test_muon_is_torchs_default"),
    mutant("coefficients: contraction forgotten", "linalg/coefficients.py", "_scaled(last, 1 / image([*first, last], 0.0, 1.0)[1])", "last", COEFFICIENTS + "test_contracted_stays_in_the_unit_interval"),

    mutant("projections: gap sign", "linalg/projections.py", "_inner(gradient, x) + torch.linalg.svdvals(gradient).sum(-1)", "_inner(gradient, x) - torch.linalg.svdvals(gradient).sum(-1)", PROJECTIONS + "test_the_gap_is_honest_whatever_the_iteration_reached"),
    mutant("projections: missing half of the quadratic term", "linalg/projections.py", "self.linear + 0.5 * self.weight * x", "self.linear + self.weight * x", PROJECTIONS + "test_diagonal_problems_are_coordinatewise"),
    mutant("projections: ascent instead of descent", "linalg/projections.py", "_clip(ahead - self.problem.gradient(ahead)", "_clip(ahead + self.problem.gradient(ahead)", PROJECTIONS + "test_a_batch_equals_its_loop"),
    mutant("projections: radius forgotten", "linalg/projections.py", "(1 - radius * squares", "(1 - squares", PROJECTIONS + "test_every_dtype_lands_in_the_ball"),

    mutant("moments: dropped discount square", "moments.py", "_per_matrix(discount) ** 2 * gram", "_per_matrix(discount) * gram", MOMENTS + "test_moments_are_discounted_sums"),
    mutant("moments: transposed Gram", "moments.py", "g @ g.mT", "g.mT @ g", MOMENTS + "test_moments_are_discounted_sums"),
    mutant("moments: missing η", "moments.py", "gram / root**2", "gram", MOMENTS + "test_smoothing_is_the_stated_matrix"),
    mutant("moments: η not squared", "moments.py", "gram / root**2", "gram / root", MOMENTS + "test_smoothing_is_the_stated_matrix"),
    mutant("moments: the bound does not grow with 1/γ", "moments.py", "(bound / rate / root) ** 2", "(bound / root) ** 2", MOMENTS + "test_smoothing_is_the_stated_matrix"),

    mutant("noise: wrong variance", "noise.py", ".mul_(-2)", ".mul_(-1)", NOISE + "test_distribution"),
    mutant("noise: half a circle", "noise.py", "math.pi * 2.0**-31", "math.pi * 2.0**-32", NOISE + "test_distribution"),
    mutant("noise: every sample the same", "noise.py", '("sample", sample)', '("sample", 0)', NOISE + "test_neighbours_are_uncorrelated"),
    mutant("noise: distributions share their bits", "noise.py", "_NORMAL, _EXPONENTIAL, _UNIFORM, _SIGN = 1, 2, 3, 4", "_NORMAL, _EXPONENTIAL, _UNIFORM, _SIGN = 1, 1, 1, 1", NOISE + "test_distributions_do_not_share_bits"),

    mutant("potentials: η without its root", "potentials.py", "math.sqrt(self.alpha / self.beta)", "self.alpha / self.beta", POTENTIALS + "test_stated_constants"),
    mutant("potentials: β one column off", "potentials.py", "1 / math.sqrt(width - m - 1)", "1 / math.sqrt(width - m)", POTENTIALS + "test_stated_constants"),
    mutant("potentials: Λ for its symmetric root", "potentials.py", "return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT", "return (vectors * values.unsqueeze(-2)) @ vectors.mT", POTENTIALS + "test_value_and_gradient_match_the_definition_by_autograd"),
    mutant("potentials: sign of the total in FTRL", "potentials.py", "            -s,\n            root,", "            s,\n            root,", POTENTIALS + "test_without_smoothing_it_is_the_nuclear_norm"),
    mutant("potentials: missing half of the trace", "potentials.py", "+ _trace(root) / 2", "+ _trace(root)", POTENTIALS + "test_regularized_reports_its_gap_and_starts_warm"),
    mutant("potentials: antithetic sign", "potentials.py", "torch.cat([perturbation, -perturbation])", "torch.cat([perturbation, perturbation])", POTENTIALS + "test_a_zero_total_has_a_zero_gradient"),
    mutant("potentials: padding columns kept", "potentials.py", "directions[..., : s.shape[-1]]", "directions[..., -s.shape[-1] :]", POTENTIALS + "test_value_and_gradient_match_the_definition_by_autograd"),
    mutant("potentials: transposed factor of the noise", "potentials.py", "perturbation = root @ z", "perturbation = root.mT @ z", POTENTIALS + "test_value_and_gradient_match_the_definition_by_autograd"),
    mutant("potentials: no jitter for a singular Λ", "potentials.py", ".fill_(1 + 8 * m * torch.finfo(smoothing.dtype).eps)", ".fill_(1.0)", POTENTIALS + "test_cholesky_root_of_singular_matrices"),
)
# fmt: on
