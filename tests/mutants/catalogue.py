"""Named mutants: one wrong edit each, and the test that must notice it.

To add one, append an entry to its file: a name, the exact text that occurs in the file once, what
to put there instead, and the quickest test that fails for it (of another test file with its path).
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str


def mutants(file: str, test_file: str, *entries: tuple[str, str, str, str]) -> list[Mutant]:
    def located(test: str) -> str:
        return test if "::" in test.partition("[")[0] else f"{test_file}::{test}"

    area = file.removesuffix(".py").rpartition("/")[2].strip("_")
    return [Mutant(f"{area}: {n}", file, old, new, located(t)) for n, old, new, t in entries]


MUTANTS = [
    *mutants(
        "_checks.py",
        "tests/test_checks.py",
        (
            "a large neighbour hides an asymmetry",
            "= a.abs().amax(dim=(-2, -1), keepdim=True)",
            "= a.abs().amax()",
            "test_one_asymmetric_matrix_of_a_stack_is_enough",
        ),
        (
            "an indefinite matrix is let in",
            "ROUNDING * info.eps * norm",
            "1e15 * info.eps * norm",
            "tests/linalg/test_roots.py::test_rounding_is_forgiven_and_a_negative_eigenvalue_is_not",
        ),
        (
            "subnormals round no more than others",
            "norm.clamp_min(wide.shape[-1] * least / largest)",
            "norm",
            "test_a_subnormal_gram_matrix_is_semidefinite",
        ),
        (
            "broadcasting goes both ways",
            "if joint != other:",
            "if joint is None:",
            "test_broadcasting_goes_one_way",
        ),
    ),
    *mutants(
        "linalg/_scaling.py",
        "tests/linalg/test_scaling.py",
        (
            "a zero matrix pins the exponent",
            "torch.where(is_zero(s), e_smoothing, exponent(s))",
            "exponent(s)",
            "test_a_zero_partner_does_not_pin_the_scale",
        ),
        (
            "2^e in one factor overflows",
            'torch.div(e, 2, rounding_mode="floor")',
            "torch.zeros_like(e)",
            "test_the_ends_of_the_range_come_to_unit_scale",
        ),
        (
            "Λ scaled like S",
            "-2 * torch.where(zero, 0, e)",
            "-torch.where(zero, 0, e)",
            "test_joint_scale_forgets_a_common_power_of_two",
        ),
        (
            "subnormal numbers have one exponent",
            "torch.where(subnormal, bits.to(x.dtype), x).view(word)",
            "bits",
            "test_exponents_from_bits_at_every_power_of_two",
        ),
    ),
    *mutants(
        "optim/lists.py",
        "tests/optim/test_contract.py",
        (
            "a compiler is given lists",
            "if not torch.compiler.is_compiling():",
            "if tensors is not None:",
            "test_a_compiler_is_given_no_operations_on_lists[leon]",
        ),
        (
            "a compiler sees where moments come from",
            "return _settled(x) if torch.compiler.is_compiling() else x",
            "return x",
            "test_a_compiler_is_given_no_operations_on_lists[muon]",
        ),
    ),
    *mutants(
        "optim/base.py",
        "tests/optim/test_contract.py",
        (
            "a compiler is asked which stacks are fused",
            "        if torch.compiler.is_compiling():  # no step that is compiled is fused",
            "        if not stepping:",
            "test_a_compiler_is_not_asked_which_stacks_are_fused",
        ),
    ),
    *mutants(
        "linalg/kernels.py",
        "tests/optim/test_contract.py",
        (
            "a compiler sees into the float16 products",
            """    if torch.compiler.is_compiling():
        return _symmetric_op""",
            """    if a is None:
        return _symmetric_op""",
            "test_a_compiled_step_in_float16_equals_the_eager_one[Leon]",
        ),
    ),
    *mutants(
        "linalg/_precision.py",
        "tests/optim/test_other_devices.py",
        (
            "float64 on every device",
            "return torch.float64 if _checks.complete(device) else torch.float32",
            "return torch.float64",
            "test_a_step_needs_nothing_that_mps_lacks[defaults-dtype0-leon]",
        ),
    ),
    *mutants(
        "linalg/norms.py",
        "tests/linalg/test_norms.py",
        ("missing rescale", "shift(largest, e)", "largest", "test_closed_cases"),
        (
            "Frobenius instead of nuclear",
            "values.sum(dim=-1), e)",
            "values.square().sum(dim=-1).sqrt(), e)",
            "test_closed_cases",
        ),
    ),
    *mutants(
        "linalg/roots.py",
        "tests/linalg/test_roots.py",
        (
            "coefficient typo",
            "beta=1.5, alpha=-0.5)",
            "beta=1.5, alpha=-0.55)",
            "test_against_scipy",
        ),
        (
            "missing square root of the norm",
            "wide.rsqrt()",
            "wide.reciprocal()",
            "test_against_scipy",
        ),
        (
            "dropped floor",
            "add_to_diagonal(a / norm, floor(a.dtype))",
            "a / norm",
            "tests/linalg/test_augmented.py::test_feasible_at_any_rank_condition_and_scale[coupled]",
        ),
        (
            "wrong rank cut",
            "torch.where(values > torch.maximum(cut, least), values, torch.inf)",
            "torch.where(values > least, values, torch.inf)",
            "test_rank_tolerance_cuts_relative_to_the_largest_eigenvalue",
        ),
        (
            "a root beyond the range",
            "torch.where(values > torch.maximum(cut, least), values, torch.inf)",
            "torch.where(values > cut, values, torch.inf)",
            "tests/linalg/test_range.py::test_a_root_that_half_precision_cannot_hold",
        ),
        (
            "half precision rounds as float32 does",
            "else _lifted_half(a)",
            "else a.to(wide)",
            "tests/linalg/test_range.py::test_inverse_roots_are_finite",
        ),
        (
            "a norm whose square vanishes",
            "dtype=widest(a.device)",
            "dtype=a.dtype",
            "tests/linalg/test_range.py::test_the_coupled_root_at_any_scale",
        ),
    ),
    *mutants(
        "linalg/_rounding.py",
        "tests/linalg/test_range_augmented.py",
        (
            "subnormals round no more than others",
            "missing.clamp(0.0, most)",
            "0 * missing",
            "test_gradients_that_fade_into_the_subnormal_range[30-coupled]",
        ),
        (
            "everything is lifted",
            "missing.clamp(0.0, most)",
            "0 * missing + most",
            "test_a_subnormal_smoothing_still_smooths",
        ),
    ),
    *mutants(
        "linalg/augmented.py",
        "tests/linalg/test_augmented.py",
        (
            "Λ counted twice",
            "torch.linalg.eigh(s @ s.mT + smoothing)",
            "torch.linalg.eigh(s @ s.mT + 2 * smoothing)",
            "test_it_is_the_inverse_root_times_s",
        ),
        (
            "one eigendecomposition at any condition",
            "most = 0.25 * _PROMISE[s.dtype] / eps * smallest",
            "most = 1e300 * smallest",
            "tests/learners/test_gbpa.py::test_faml_keeps_its_promise_at_any_condition",
        ),
        (
            "squares that overflow without float64",
            "        s, smoothing = joint_unit_scale(s, smoothing)\n    norm",
            "        pass\n    norm",
            "tests/optim/test_other_devices.py::test_a_norm_whose_square_overflows",
        ),
        (
            "Λ on the wrong side of the Gram",
            "b, q = add_product(rest, x, x.mT), None\n    last",
            "b, q = x @ x.mT @ rest, None\n    last",
            "test_it_is_the_inverse_root_times_s",
        ),
        (
            "Λ for its root",
            "factor = vectors * values.sqrt().unsqueeze(-2)",
            "factor = vectors * values.unsqueeze(-2)",
            "test_the_reference_against_sixty_digits",
        ),
        (
            "wrong rank cut",
            "kept = (sigma > cut * sigma[..., :1])",
            "kept = (sigma > 0.1 * cut * sigma[..., :1])",
            "test_rank_tolerance_cuts_the_reference",
        ),
        (
            "no rank cut on the Gram route",
            "smallest > cut**2 * largest",
            "smallest > 0",
            "test_the_rank_cut_does_not_depend_on_the_route",
        ),
        (
            "the Gram route at any condition",
            "0.25 * _PROMISE[dtype] * smallest",
            "smallest.abs() + 1",
            "test_feasible_at_any_rank_condition_and_scale[eigh]",
        ),
        (
            "missing restart",
            "if i in restarts and q is not None:",
            "if i < 0 and q is not None:",
            "test_restarts_keep_float32_in_the_ball",
        ),
        (
            "a restart forgets Λ",
            "x, rest = q @ x, q @ rest @ q.mT",
            "x, rest = q @ x, rest",
            "test_cubic_recursion_is_the_scalar_one_on_each_singular_value",
        ),
        (
            "dropped floor",
            "add_to_diagonal(rest, floor(s.dtype) *",
            "add_to_diagonal(rest, 0 * floor(s.dtype) *",
            "test_feasible_where_rounding_made_the_smoothing_indefinite",
        ),
        (
            "missing rescale",
            "rest = smoothing / length / length",
            "rest = smoothing / length",
            "test_it_is_the_inverse_root_times_s",
        ),
        (
            "the inverse of a norm overflows",
            ".clamp(tiny, 1 / tiny)",
            ".clamp(1.0, 1.0)",
            "tests/linalg/test_range_augmented.py::test_a_polar_factor_at_the_ends_of_the_range",
        ),
        (
            "a zero total leaves rounding",
            "p.masked_fill(is_zero(s), 0.0)",
            "p",
            "tests/linalg/test_range_augmented.py::test_as_exact_as_the_condition_allows",
        ),
        (
            "steps that ran out count as converged",
            "difference = p.double() - augmented_svd(s, smoothing, cut)",
            "difference = 0 * p.double()",
            "test_report_is_the_distance_to_the_exact_factor",
        ),
    ),
    *mutants(
        "linalg/polar.py",
        "tests/linalg/test_polar.py",
        (
            "wrong rank cut",
            "_compose((u * keep.unsqueeze(-2)) @ vh",
            "_compose(u @ vh",
            "test_rank_tolerance_cuts_the_svd",
        ),
        (
            "sign of the odd terms",
            "x = add_product(x, factor, x, beta=a)",
            "x = add_product(x, factor, -x, beta=a)",
            "test_zero_gives_zero_within_a_stack",
        ),
        (
            "transposition in the inverse",
            "torch.linalg.inv_ex(x).inverse.mT / factor",
            "torch.linalg.inv_ex(x).inverse / factor",
            "test_orthogonal_equivariance_and_transposition[scaled-newton]",
        ),
        (
            "sign in the Halley step",
            "(a - b / c) * inverse_x",
            "(a + b / c) * inverse_x",
            "test_report_ignores_rank_noise",
        ),
    ),
    *mutants(
        "linalg/coefficients.py",
        "tests/linalg/test_coefficients.py",
        (
            "typo in Newton–Schulz",
            "(1.5, -0.5, 0.0)",
            "(1.5, -0.05, 0.0)",
            "test_newton_schulz_is_tangent_at_one",
        ),
        ("typo in Muon", "2.0315", "2.0351", "test_muon_is_torchs_default"),
        (
            "contraction forgotten",
            "_scaled(last, 1 / image([*first, last], 0.0, 1.0)[1])",
            "last",
            "test_contracted_stays_in_the_unit_interval",
        ),
    ),
    *mutants(
        "linalg/quadratic.py",
        "tests/linalg/test_projections.py",
        (
            "gap sign",
            "_inner(gradient, x) + torch.linalg.svdvals(gradient).sum(-1)",
            "_inner(gradient, x) - torch.linalg.svdvals(gradient).sum(-1)",
            "test_the_gap_is_honest_whatever_the_iteration_reached",
        ),
        (
            "missing half of the quadratic term",
            "self.linear + 0.5 * self.weight * x",
            "self.linear + self.weight * x",
            "test_the_gap_is_honest_whatever_the_iteration_reached",
        ),
        (
            "ascent instead of descent",
            "clip(ahead - self.problem.gradient(ahead)",
            "clip(ahead + self.problem.gradient(ahead)",
            "test_a_batch_equals_its_loop",
        ),
    ),
    *mutants(
        "linalg/projections.py",
        "tests/linalg/test_projections.py",
        (
            "radius forgotten",
            "(1 - radius * squares",
            "(1 - squares",
            "test_every_dtype_lands_in_the_ball",
        ),
    ),
    *mutants(
        "moments.py",
        "tests/test_moments.py",
        (
            "dropped discount square",
            "beta=rate**2",
            "beta=rate",
            "test_moments_are_discounted_sums",
        ),
        (
            "transposed Gram",
            "add_product(gram, g, g.mT,",
            "add_product(gram, g.mT, g,",
            "test_moments_are_discounted_sums",
        ),
        ("missing η", "gram / root**2", "gram", "test_smoothing_is_the_stated_matrix"),
        ("η not squared", "gram / root**2", "gram / root", "test_smoothing_is_the_stated_matrix"),
        (
            "the bound does not grow with 1/γ",
            "(bound / rate / root) ** 2",
            "(bound / root) ** 2",
            "test_smoothing_is_the_stated_matrix",
        ),
    ),
    *mutants(
        "noise.py",
        "tests/test_noise.py",
        ("wrong variance", ".mul_(-2)", ".mul_(-1)", "test_distribution"),
        ("half a circle", "math.pi * 2.0**-31", "math.pi * 2.0**-32", "test_distribution"),
        (
            "every sample the same",
            '("sample", sample)',
            '("sample", 0)',
            "test_neighbours_are_uncorrelated",
        ),
        (
            "distributions share their bits",
            "_NORMAL, _EXPONENTIAL, _UNIFORM, _SIGN = 1, 2, 3, 4",
            "_NORMAL, _EXPONENTIAL, _UNIFORM, _SIGN = 1, 1, 1, 1",
            "test_distributions_do_not_share_bits",
        ),
    ),
    *mutants(
        "potentials.py",
        "tests/test_potentials.py",
        (
            "η without its root",
            "math.sqrt(self.alpha / self.beta)",
            "self.alpha / self.beta",
            "test_stated_constants",
        ),
        (
            "β one column off",
            "1 / math.sqrt(width - m - 1)",
            "1 / math.sqrt(width - m)",
            "test_stated_constants",
        ),
        (
            "Λ for its symmetric root",
            "return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT",
            "return (vectors * values.unsqueeze(-2)) @ vectors.mT",
            "test_value_and_gradient_match_the_definition_by_autograd",
        ),
        (
            "sign of the total in FTRL",
            "            -s,\n            root,",
            "            s,\n            root,",
            "test_without_smoothing_it_is_the_nuclear_norm",
        ),
        (
            "missing half of the trace",
            "+ _trace(root) / 2",
            "+ _trace(root)",
            "test_regularized_reports_its_gap_and_starts_warm",
        ),
        (
            "antithetic sign",
            "torch.cat([perturbation, -perturbation])",
            "torch.cat([perturbation, perturbation])",
            "test_a_zero_total_has_a_zero_gradient",
        ),
        (
            "padding columns kept",
            "directions[..., : s.shape[-1]]",
            "directions[..., -s.shape[-1] :]",
            "test_value_and_gradient_match_the_definition_by_autograd",
        ),
        (
            "transposed factor of the noise",
            "perturbation = root @ z",
            "perturbation = root.mT @ z",
            "test_value_and_gradient_match_the_definition_by_autograd",
        ),
        (
            "no jitter for a singular Λ",
            ".fill_(1 + 8 * m * torch.finfo(smoothing.dtype).eps)",
            ".fill_(1.0)",
            "test_cholesky_root_of_singular_matrices",
        ),
    ),
    *mutants(
        "admissibility.py",
        "tests/test_admissibility.py",
        (
            "nothing is ever refuted",
            "return self.interval[0] <= self.stated",
            "return self.interval[0] >= 0",
            "test_an_estimate_reads_its_interval",
        ),
    ),
    *mutants(
        "linalg/_precision.py",
        "tests/linalg/test_precision.py",
        (
            "the user's setting is lost",
            "backend.fp32_precision = setting",
            'backend.fp32_precision = "ieee"',
            "test_inside_it_is_full_and_after_it_is_as_before",
        ),
        (
            "TF32 stays on",
            'backend.fp32_precision = "ieee"',
            "pass",
            "test_inside_it_is_full_and_after_it_is_as_before",
        ),
    ),
    *mutants(
        "learners/gbpa.py",
        "tests/learners/test_gbpa.py",
        (
            "ascent",
            "action = -self.radius * self._direction",
            "action = self.radius * self._direction",
            "test_alternating_gradients_make_ftl_linear_and_no_other",
        ),
        (
            "FTRL's bound with the wrong gap",
            "solution.x, solution.frank_wolfe_gap",
            "solution.x, solution.gap",
            "test_ftrl_takes_the_frank_wolfe_gap_for_its_bound",
        ),
    ),
    *mutants(
        "regret.py",
        "tests/test_regret.py",
        (
            "regret without its radius",
            "self.loss + self.radius * nuclear_norm(self.total)",
            "self.loss + nuclear_norm(self.total)",
            "test_the_ledger_is_the_definition",
        ),
    ),
    *mutants(
        "optim/base.py",
        "tests/optim/test_twins.py",
        (
            "averages for sums",
            "moments.accumulate_total(old, gradient,",
            "moments.accumulate_total(old, (1 - momentum) * gradient,",
            "test_leon_follows_algorithm_3",
        ),
        (
            "beta2 for its root",
            'math.sqrt(group["beta2"])',
            'group["beta2"]',
            "test_leon_follows_algorithm_3",
        ),
        (
            "nesterov forgets the gradient",
            "ahead = momentum * total + gradient if",
            "ahead = momentum * total if",
            "test_leon_follows_algorithm_3",
        ),
    ),
    *mutants(
        "optim/pion.py",
        "tests/optim/test_twins.py",
        (
            "padding columns kept in the wrong place",
            "direction[..., :n] / samples",
            "direction[..., -n:] / samples",
            "test_pion_follows_algorithm_2",
        ),
        (
            "antithetic pairs of one sign",
            "(-1) ** sample",
            "1",
            "test_pion_follows_algorithm_2",
        ),
    ),
    *mutants(
        "optim/adamw.py",
        "tests/optim/test_adamw.py",
        (
            "a skipped step is counted as one",
            '[s["step"] for s in states], list(finite.long().unbind())',
            '[s["step"] for s in states], list(torch.ones_like(finite).long().unbind())',
            "test_a_bad_gradient_leaves_its_parameter_alone",
        ),
        (
            "a square that overflows is let in",
            "ord=torch.inf)).square().isfinite()",
            "ord=torch.inf)).isfinite()",
            "test_a_bad_gradient_leaves_its_parameter_alone",
        ),
        (
            "a difference that loses its digits",
            "if step.dtype == torch.float64:",
            "if beta:",
            "tests/optim/test_other_devices.py::test_adamw_keeps_its_digits",
        ),
    ),
    *mutants(
        "optim/roles.py",
        "tests/optim/test_routing.py",
        (
            "a transposed convolution has its inputs as rows",
            'return Role("matrix", place.kind, f"c r{taps}")',
            'return Role("matrix", place.kind, f"r c{taps}")',
            "test_a_routed_parameter_equals_its_matrices_given_one_by_one",
        ),
        (
            "experts that do not say so are never transposed",
            "return both.shape[1] == down.shape[2] and both.shape[2] == 2 * down.shape[1]",
            "return False",
            "test_a_routed_parameter_equals_its_matrices_given_one_by_one",
        ),
        (
            "queries of heads are taken as one block",
            'return f"(r={_number(place, _HEADS)} b=3 r)"',
            'return f"(b=3 r={_number(place, _HEADS)} r)"',
            "test_a_routed_parameter_equals_its_matrices_given_one_by_one",
        ),
    ),
    *mutants(
        "optim/switching.py",
        "tests/optim/test_switching.py",
        (
            "an average is taken for a sum",
            'state["total"].copy_(moments.average / (1 - beta1))',
            'state["total"].copy_(moments.average)',
            "test_the_total_is_the_sum_of_the_gradients",
        ),
        (
            "the Gram is not corrected for its start",
            "moments.squares.to(wide) / (1 - moments.beta2**moments.steps)",
            "moments.squares.to(wide)",
            "test_the_gram_has_the_diagonal_of_the_mean_square_from_adamw",
        ),
        (
            "a Muon of unknown averaging is guessed",
            'if "ns_steps" in group:',
            'if "no such option" in group:',
            "test_a_momentum_that_the_options_do_not_tell_is_asked_for",
        ),
    ),
    *mutants(
        "optim/qk_clip.py",
        "tests/optim/test_qk_clip.py",
        (
            "both sides take the whole factor",
            "seen.key.shrink(factor.sqrt())",
            "seen.key.shrink(factor)",
            "test_recorded_logits_end_at_the_cap_and_others_stay",
        ),
        (
            "each rank shrinks by its own batch",
            "dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group)",
            "pass",
            "test_ranks_with_other_batches_shrink_alike",
        ),
    ),
    *mutants(
        "optim/weights.py",
        "tests/optim/test_contract.py",
        (
            "a skipped step still moves",
            "direction * (taken.to(direction.dtype) * rate)",
            "direction * rate",
            "test_a_nonfinite_gradient_is_skipped_and_counted",
        ),
    ),
    *mutants(
        "optim/triton_step.py",
        "tests/optim/test_fused.py",
        (
            "the smoothing scale is forgotten",
            "m * job.smoothing",
            "m * 1.0",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "a gradient that is not finite is entered",
            "tl.store(where, total.to(TOTAL), mask=inside & ok)",
            "tl.store(where, total.to(TOTAL), mask=inside)",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "a gradient that is not there is entered",
            "ok = finite & there",
            "ok = finite",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "the first floor sees a column",
            "at.to(tl.int64) * (m + 1), mask=at < m",
            "at.to(tl.int64) * m, mask=at < m",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "the scale forgets the bound of the gradients",
            "smoothing * (whole + m * bound)",
            "smoothing * whole",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "a Gram matrix that overflows is entered",
            "finite = finite & (whole < limit)",
            "finite = finite & (whole < float('inf'))",
            "test_the_fused_step_in_the_interpreter",
        ),
    ),
    *mutants(
        "optim/lanes.py",
        "tests/optim/test_lanes.py",
        (
            "a lane begins before the caller is there",
            "stream.wait_stream(used[stream])",
            "pass",
            "test_lanes_begin_after_the_caller_and_the_caller_goes_on_after_all_of_them",
        ),
        (
            "a failure leaves the lanes apart",
            "    try:\n        yield lane\n    finally:\n",
            "    yield lane\n    if used:\n",
            "test_lanes_are_joined_though_a_stack_fails",
        ),
        (
            "turns go on from step to step",
            "turns = count()",
            'turns = opened.__dict__.setdefault("turns", count())',
            "test_a_list_of_stacks_has_the_same_lanes_at_every_step",
        ),
    ),
    *mutants(
        "optim/addresses.py",
        "tests/optim/test_fused.py",
        (
            "addresses are taken on any device",
            "(t.dtype, t.device, t.is_contiguous())",
            "(t.dtype, device, t.is_contiguous())",
            "test_an_address_is_only_taken_of_what_lies_as_it_should",
        ),
        (
            "all matrices of a piece are counted as its first",
            "tensor.data_ptr() + size * start",
            "tensor.data_ptr()",
            "test_the_fused_step_in_the_interpreter",
        ),
    ),
    *mutants(
        "optim/replay.py",
        "tests/optim/test_fused.py",
        (
            "tensors that have moved are written where they were",
            "looks = Tensor.data_ptr, ",
            "looks = ",
            "test_the_fused_step_in_the_interpreter",
        ),
        (
            "a weight that was transposed is written as it lay",
            'attrgetter("dtype"), Tensor.is_contiguous',
            'attrgetter("dtype"),',
            "test_the_fused_step_in_the_interpreter",
        ),
    ),
    *mutants(
        "optim/stacks.py",
        "tests/optim/test_fused.py",
        (
            "pieces of a stack all begin at its first matrix",
            "tuple(o + k * i for",
            "tuple(o + (k - p.start) * i for",
            "test_the_layout_says_where_the_matrices_are",
        ),
    ),
    *mutants(
        "optim/stacks.py",
        "tests/optim/test_stacks.py",
        (
            "the last stack is what the others have left",
            "limit = min(most, ",
            "limit = max(most, ",
            "test_stacks_are_few_and_within_their_limit",
        ),
        (
            "a batch is cut where the first piece is full",
            "step = math.ceil(first / parts) * inner",
            "step = (max(1, most // inner) if cut else first) * inner",
            "test_matrices_are_split_evenly",
        ),
    ),
    *mutants(
        "optim/base.py",
        "tests/optim/test_stacks.py",
        (
            "a step does not ask whether it is fused",
            "partial(fused.expected, self, group) if stepping else None",
            "None",
            "test_a_step_asks_whether_it_is_fused_and_diagnostics_do_not",
        ),
    ),
    *mutants(
        "optim/fused.py",
        "tests/optim/test_stacks.py",
        (
            "moments that the kernels cannot read count as fused",
            'group["momentum_dtype"] != torch.float64',
            "True",
            "test_which_steps_are_expected_to_be_fused",
        ),
    ),
    *mutants(
        "optim/schema.py",
        "tests/optim/test_contract.py",
        (
            "state cast to the parameter's dtype",
            "value.to(param.device, dtype, copy=True)",
            "value.to(param.device, param.dtype, copy=True)",
            "test_half_precision_weights_keep_wide_moments",
        ),
    ),
    *mutants(
        "optim/axes.py",
        "tests/optim/test_axes.py",
        (
            "columns before rows",
            '"brc".index(letters[i])',
            '"bcr".index(letters[i])',
            "test_the_matrices_are_those_written_by_hand",
        ),
        (
            "every section from the start",
            "tensor.narrow(self.axis, self.start, self.length)",
            "tensor.narrow(self.axis, 0, self.length)",
            "test_a_layout_equals_its_matrices_one_by_one",
        ),
        (
            "a section counts as the whole parameter",
            "self.section is None and len",
            "len",
            "test_a_layout_equals_its_matrices_one_by_one",
        ),
        (
            "columns before rows count as rows before columns",
            "len(self.factors) == 2 and self.order == (0, 1)",
            "len(self.factors) == 2",
            "test_a_layout_equals_its_matrices_one_by_one",
        ),
    ),
    *mutants(
        "optim/certify.py",
        "tests/optim/test_certify.py",
        (
            "undiscounted loss",
            "new = discount * old + new",
            "new = old + new",
            "test_the_regret_is_that_of_the_directions_played",
        ),
        (
            "Gram matrix judged by the rounding of another dtype",
            "        state[gram_key(block)],  #",
            "        exact(state[gram_key(block)]),  #",
            "test_gradients_of_low_rank_are_certified",
        ),
    ),
    *mutants(
        "experiments/games.py",
        "tests/experiments/test_theory_claims.py",
        (
            "the exponent is that of all rounds",
            "late = t >= t[-1] / 10",
            "late = t >= 0",
            "test_an_exponent_is_that_of_the_last_decade",
        ),
    ),
    *mutants(
        "experiments/cost_model.py",
        "tests/experiments/test_theory_claims.py",
        (
            "negative times per flop",
            "if (x >= 0).all() and",
            "if",
            "test_nonnegative_least_squares_against_scipy",
        ),
    ),
    *mutants(
        "experiments/thm_faml.py",
        "tests/experiments/test_theory_claims.py",
        (
            "the row by hand forgets G²",
            "torch.zeros_like(gradients[0]), GRADIENT_BOUND**2",
            "torch.zeros_like(gradients[0]), 0.0",
            "test_the_quick_claim_holds_and_is_complete[thm-faml]",
        ),
    ),
    *mutants(
        "problems/rotations.py",
        "tests/problems/test_rotations.py",
        (
            "the signs are fair whatever the singular values",
            "uniform >= (1 + self.sigma) / 2",
            "uniform >= 0.5",
            "test_the_signs_have_their_probabilities",
        ),
        (
            "the reflection of U and V is forgotten",
            "self._determinant * others.prod(-1, keepdim=True)",
            "others.prod(-1, keepdim=True)",
            "test_the_heuristic_for_rotations_has_the_stated_bias",
        ),
        (
            "the pairs are transposed",
            "-(v.mT @ u) / len(u)",
            "-(u.mT @ v) / len(u)",
            "test_losses_and_regret_are_those_of_the_pairs",
        ),
    ),
    *mutants(
        "problems/quasi_newton.py",
        "tests/problems/test_quasi_newton.py",
        (
            "the gradient is not symmetrized",
            "gradient = (gradient + gradient.mT) / 2",
            "gradient = gradient.clone()",
            "test_the_game_is_the_one_of_the_losses",
        ),
        (
            "the factor of the affine map is dropped",
            "return 2 * self.half**2",
            "return 2 * self.half",
            "test_the_regret_is_the_worst_over_the_set",
        ),
        (
            "every trial is taken",
            "if not size <= norm * (self.L - self.mu) / (self.L + self.mu):",
            "if not math.isfinite(size):",
            "test_a_failed_trial_falls_back",
        ),
    ),
    *mutants(
        "learners/projected.py",
        "tests/learners/test_shampoo.py",
        (
            "the bound takes a gap that the proof cannot use",
            "self.radius * solution.frank_wolfe_gap",
            "self.radius * solution.gap",
            "test_the_gap_is_the_frank_wolfe_gap_of_the_proof",
        ),
        (
            "rounding counts as a direction",
            "torch.where(values > cut, values, 0.0) + epsilon",
            "values + epsilon",
            "test_rounding_is_no_direction_of_the_pseudo_inverse",
        ),
    ),
    *mutants(
        "learners/kronecker.py",
        "tests/learners/test_shampoo.py",
        (
            "the Kronecker regularizer forgets G²",
            "Root(g, epsilon=square, power=0.25)",
            "Root(g, epsilon=0.0, power=0.25)",
            "test_a_step_is_the_program_on_vec_x_with_the_kronecker_metric",
        ),
    ),
    *mutants(
        "learners/adagrad.py",
        "tests/learners/test_adagrad.py",
        (
            "the proximal regularizer counts the old metric twice",
            "pull + metric.apply(self.center) - before.apply(self.center)",
            "pull + metric.apply(self.center)",
            "test_a_step_is_the_program_that_defines_it",
        ),
    ),
    *mutants(
        "experiments/tab_shampoo.py",
        "tests/experiments/test_classical_claims.py",
        (
            "the turning stream never turns",
            "torch.where(t <= ends // 2, 1.0, -1.0)",
            "torch.where(t <= ends, 1.0, -1.0)",
            "test_without_the_projection_the_regret_is_the_sum_by_hand",
        ),
    ),
    *mutants(
        "experiments/tab_adagrad.py",
        "tests/experiments/test_classical_claims.py",
        (
            "the diagonal takes the offset of the others",
            'order = math.inf if preconditioner == "diagonal" else 2',
            "order = 2",
            "test_table_2_by_numpy",
        ),
    ),
    *mutants(
        "experiments/projection_cost.py",
        "tests/experiments/test_classical_claims.py",
        (
            "FTRL starts opposite to its last action",
            "_root(learner.smoothing()), -learner.start",
            "_root(learner.smoothing()), learner.start",
            "test_a_captured_problem_is_the_learners_own",
        ),
    ),
    *mutants(
        "training/checkpoint.py",
        "tests/training/test_checkpoint.py",
        (
            "a damaged checkpoint displaces a good one",
            "[s for s in self.steps() if s <= step][: -self.keep]",
            "self.steps()[: -self.keep]",
            "test_a_damaged_one_never_displaces_a_good_one",
        ),
        (
            "a changed byte goes unnoticed",
            "if _sha256(folder / name) != digest:",
            "if not (folder / name).stat().st_size:",
            "test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken",
        ),
    ),
    *mutants(
        "training/loop.py",
        "tests/training/test_loop.py",
        (
            "dropout goes on from a fresh generator",
            'torch.set_rng_state(state["generator"].cpu())',
            "torch.manual_seed(0)",
            "test_going_on_from_any_step_is_as_if_never_stopped[adamw]",
        ),
        (
            "accumulation sums instead of averaging",
            "targets.to(device)) / recipe.accumulate",
            "targets.to(device))",
            "test_the_loop_is_the_loop_everyone_writes",
        ),
    ),
    *mutants(
        "training/data.py",
        "tests/training/test_data.py",
        (
            "every time around in the same order",
            "step=visit,",
            "step=0,",
            "test_each_time_around_every_example_comes_once_in_a_new_order",
        ),
    ),
    *mutants(
        "optim/placement.py",
        "tests/distributed/test_parts.py",
        (
            "shares are of equal number, not of equal cost",
            "before += costs[i]",
            "before += total // len(sizes)",
            "test_shares_are_runs_of_about_equal_cost",
        ),
    ),
    *mutants(
        "optim/shards.py",
        "tests/distributed/test_parts.py",
        (
            "FSDP2 cuts before tensor parallelism",
            'key=lambda x: hasattr(x[0], "split_factor")',
            "key=lambda x: 0",
            "test_boxes_are_chunks_of_chunks",
        ),
    ),
    *mutants(
        "optim/grams.py",
        "tests/distributed/test_parts.py",
        (
            "only the last polynomial counts",
            "q = t if q is None else t @ q",
            "q = t",
            "test_the_factor_is_an_inverse_root[polar-express-0.99]",
        ),
        (
            "the lower triangle is not mirrored",
            "whole[:, b:, a:b] = whole[:, a:b, b:].mT",
            "whole[:, b:, a:b] = 0.0",
            "test_a_symmetric_matrix_survives_its_strips",
        ),
    ),
    *mutants(
        "optim/checkpoints.py",
        "tests/distributed/test_checkpoints.py",
        (
            "what one rank owns is loaded as the whole",
            'if not rest and group.get("placement") == "owner":',
            "if False:",
            "test_full_state_dict_of_owners_is_refused[ddp-owner-True-True]",
        ),
    ),
    *mutants(
        "optim/wire.py",
        "tests/distributed/test_parts.py",
        (
            "a permutation goes unnoticed",
            "(bits * places).sum()",
            "bits.sum()",
            "test_a_fingerprint_sees_a_bit_and_a_place",
        ),
    ),
    *mutants(
        "optim/choices.py",
        "tests/distributed/test_agreement.py",
        (
            "an optimizer of another model stands in for the one that is missing",
            "{tuple(param.shape)} ",
            "",
            "test_one_more_optimizer_on_one_rank[True]",
        ),
        (
            "which parameters have which options is not compared",
            '| {"of": digest([g])}',
            '| {"of": ""}',
            "test_local_optimizers_of_the_same_parameters_have_the_same_options[2-0-exchanged]",
        ),
    ),
    *mutants(
        "optim/bulletin.py",
        "tests/distributed/test_agreement.py",
        (
            "a silent rank is never missed",
            "talking[TALKING] > other.built[TALKING] and",
            "False and",
            "test_a_rank_may_try_something_before_the_run",
        ),
        (
            "ranks that part are not missed",
            "return bool(mine - theirs and theirs - mine)",
            "return False",
            "test_local_optimizers_of_the_same_parameters_have_the_same_options[2-0-built]",
        ),
        (
            "what was refused once is refused for ever",
            "max(self.pages[notice.digest], notice.page + 1)",
            "0",
            "test_what_was_refused_does_not_stand_against_what_follows",
        ),
    ),
    *mutants(
        "training/run.py",
        "tests/training/test_run.py",
        (
            "a resumed log keeps what will be written again",
            'if line["step"] <= run.start]',
            "if line]",
            "test_a_log_that_ran_ahead_of_the_checkpoint_is_cut_back",
        ),
    ),
    *mutants(
        "training/folder.py",
        "tests/training/test_folder.py",
        (
            "two processes hold a folder",
            "        _lock(opened)\n    except",
            "        pass\n    except",
            "test_a_second_process_is_told_who_holds_the_folder",
        ),
    ),
    *mutants(
        "report/untrusted.py",
        "tests/report/test_forged.py",
        (
            "a path leads out of the folder",
            'any(sign in name for sign in "/\\\\\\0")',
            "False",
            "test_no_file_outside_the_folder_is_read[../outside.json]",
        ),
        (
            "a field of another kind is taken as it is",
            "if type(value) not in kinds:",
            "if False:",
            "test_whatever_is_in_a_run_it_is_shown_or_named[manifest.json]",
        ),
        (
            "a large whole number stops the page",
            "except OverflowError:",
            "except FormError:",
            "test_a_result_that_is_none",
        ),
    ),
    *mutants(
        "report/saved.py",
        "tests/cli/test_faults.py",
        (
            "an altered file is taken as it is",
            "if digest(contents[name]) != expected:",
            "if not contents[name]:",
            "test_a_damaged_run_is_named_and_the_others_are_reported[result.json-altered]",
        ),
        (
            "other options count as the same run",
            '"options": json.loads(to_json(dict(options)))}',
            "}",
            "tests/report/test_page.py::test_completed_wants_the_same_options",
        ),
    ),
    *mutants(
        "report/runs.py",
        "tests/cli/test_train.py",
        (
            "a run that goes on still vouches for its files",
            "_write_manifest(run, folder, ())",
            "None",
            "test_a_run_is_in_the_report_whether_it_runs_stopped_or_ended",
        ),
    ),
    *mutants(
        "cli/trained.py",
        "tests/cli/test_train.py",
        (
            "a resumed run forgets how long it took before",
            "self.before + time.perf_counter() - self.clock",
            "time.perf_counter() - self.clock",
            "test_a_run_is_in_the_report_whether_it_runs_stopped_or_ended",
        ),
        (
            "a damaged run goes on in silence",
            "if (folder / MANIFEST).exists():",
            "if False:",
            "test_a_damaged_run_is_named_and_mended_by_going_on[trace.jsonl]",
        ),
    ),
    *mutants(
        "cli/report.py",
        "tests/cli/test_faults.py",
        (
            "training without a manifest is passed over",
            "[*find(path), *unmarked]",
            "find(path)",
            "test_training_without_a_manifest_is_told_how_to_get_one[train]",
        ),
    ),
    *mutants(
        "cli/jobs.py",
        "tests/cli/test_reproduce.py",
        (
            "claims wait in the pool's queue",
            "while left and len(pending) < jobs:",
            "while left:",
            "test_beside_each_other_too_the_expected_time_comes_before_a_claim_starts",
        ),
    ),
    *mutants(
        "experiments/app_training.py",
        "tests/experiments/test_app_training.py",
        (
            "means that agree are enough",
            "return ratio + float(t.ppf(CONFIDENCE, freedom)) * error",
            "return ratio + 0 * freedom",
            "test_leon_must_be_shown_not_to_be_worse",
        ),
    ),
    *mutants(
        "report/page.py",
        "tests/report/test_page.py",
        (
            "words of a run become markup",
            "autoescape=True,",
            "autoescape=False,",
            "test_every_word_is_escaped",
        ),
        (
            "runs of one id look alike",
            "name if ids.count(name) == 1 else",
            "name if ids else",
            "test_runs_of_one_id_are_told_apart_by_their_folders",
        ),
    ),
    *mutants(
        "linalg/half.py",
        "tests/linalg/test_kernels.py",
        (
            "the first Gram matrix has eleven bits",
            "(q @ begin.remainder).baddbmm_(q, begin.r, beta=1 / REMAINDER_SCALE)",
            "q @ begin.r",
            "test_half_precision_keeps_its_promises[condition 1e3-same]",
        ),
        (
            "a square step forgets its linear term",
            "beta=b, shift=a, scale=given",
            "beta=b, scale=given",
            "test_half_precision_polar_factors_keep_them_too",
        ),
        (
            "rounding leaves negative eigenvalues to the first steps",
            "FIRST_FLOOR = 0.1",
            "FIRST_FLOOR = 0.0",
            "test_half_precision_stays_in_the_ball_on_the_hardest_inputs[clusters in 6 rows]",
        ),
        (
            "the rounding of QR is taken for that of XXᵀ",
            "SMOOTHED_FLOOR = 6e-2",
            "SMOOTHED_FLOOR = 0.0",
            "test_half_precision_stays_in_the_ball_on_the_hardest_inputs[clusters in 16 rows]",
        ),
        (
            "a zero matrix divides by its norm",
            "norm.clamp_min(1.0).reciprocal()",
            "norm.reciprocal()",
            "test_zero_gives_zero_and_leaves_its_neighbour_alone",
        ),
    ),
    *mutants(
        "linalg/kernels.py",
        "tests/linalg/test_kernels.py",
        (
            "a symmetric product is not mirrored",
            "add_to_diagonal(total.tril() + total.tril(-1).mT, shift)",
            "add_to_diagonal(total, shift)",
            "test_a_product_that_is_not_quite_symmetric_is_mirrored",
        ),
        (
            "float64 is multiplied in float32 in silence",
            "if a.dtype not in OPERANDS:",
            "if not a.is_floating_point():",
            "test_what_a_kernel_would_misread_is_refused_by_name",
        ),
    ),
    *mutants(
        "linalg/triton_symmetric.py",
        "tests/linalg/test_kernels.py",
        (
            "the copy engine brings A in place of B",
            "b.load([batch, j * TILE, k])",
            "a.load([batch, j * TILE, k])",
            "test_the_triton_kernels_in_the_interpreter",
        ),
        (
            "A is read in place of B",
            "b_tile = b + far",
            "b_tile = a + far",
            "test_the_triton_kernels_in_the_interpreter",
        ),
        (
            "products with and without an addend share their tiles",
            "a.dtype, when, kind)",
            "a.dtype, kind)",
            "test_each_kind_of_product_has_tiles_of_its_own",
        ),
        (
            "the first tiles stay",
            "CONFIGS[times.index(min(times))]",
            "CONFIGS[0]",
            "test_the_fastest_tiles_are_taken_and_timed_once",
        ),
    ),
]
