"""The optimizers against exact decompositions and torch's Muon."""

import math

import pytest
import torch

import nucleon
from helpers_half import clusters
from strategies import normal as draw
from strategies import with_singular_values

PLAIN = {"lr": 1.0, "momentum": 0.0, "scale": "none"}


def with_spectrum(m, n, spectrum, seed=0):
    """A float64 m×n matrix with the given singular values, m ≤ n."""
    return with_singular_values((m, n), torch.as_tensor(spectrum, dtype=torch.float64), seed)


def direction(make, *gradients, **options):
    """P of the last of some steps: from W = 0 with lr 1 and no scale, W = −P."""
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([weight], **{**PLAIN, **options})
    for gradient in gradients:
        weight.detach().zero_()
        weight.grad = gradient.clone()
        optimizer.step()
    return -weight.detach()


def distance(a, b):
    return torch.linalg.matrix_norm(a.double() - b.double(), 2).max().item()


# ---------------------------------------------------------------- Muon and torch's Muon

TORCH_OPTIONS = [
    {"nesterov": True, "weight_decay": 0.1},
    {"nesterov": False, "weight_decay": 0.0},
]


def run_beside_torch(options, ours, dtype, steps=4):
    shapes = [(8, 8), (6, 20), (20, 6)]
    results = []
    for make, given in ((torch.optim.Muon, options), (nucleon.Muon, ours)):
        params = [torch.nn.Parameter(draw(*s, seed=9, dtype=dtype)) for s in shapes]
        optimizer = make(params, lr=0.1, momentum=0.9, **given)
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = draw(*p.shape, seed=10 * step + i, dtype=dtype)
            optimizer.step()
        results.append([p.detach() - draw(*p.shape, seed=9, dtype=dtype) for p in params])
    pairs = zip(*results, strict=True)
    return max(((a - b).norm() / a.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("options", TORCH_OPTIONS, ids=str)
def test_muon_equals_torchs_muon_in_float64(options, monkeypatch):
    """Jordan's quintic five times, or a triple of one's own, given once or as often.

    torch's moving average is our sum times 1−β₁, which cancels. torch's Muon works in bfloat16
    whatever it is given; without that cast both agree to rounding, amplified by the slope of the
    composition, 3.4445⁵ ≈ 500 at most, and four steps.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
    assert run_beside_torch(options, {**options, "method": "muon"}, torch.float64) < 1e-11
    triple, other = (3.0, -3.2, 1.2), (1.5, -0.5, 0.0)
    theirs = {**options, "ns_coefficients": triple}
    for given, same in (
        ([triple], True),
        ([triple] * 5, True),
        ([triple, other], False),
        ([other, triple], False),
    ):
        apart = run_beside_torch(theirs, {**options, "coefficients": given}, torch.float64)
        assert apart < 1e-11 if same else apart > 1e-2


@pytest.mark.parametrize(
    ("coefficients", "norm"),
    [([(3.4445, -4.7750, 2.0315)], "1.203"), ([(1.5, -0.5, 0.0)] * 3, "1")],
)
def test_coefficients_that_leave_the_ball_say_by_how_much(coefficients, norm):
    optimizer = nucleon.Muon([torch.nn.Parameter(draw(8, 12))], coefficients=coefficients)
    assert optimizer.explain().rows[0].optimizer == f"muon/coefficients (‖P‖_op ≤ {norm})"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coefficients": [(1.0, 2.0)]}, "coefficients must be triples of finite numbers"),
        ({"coefficients": "quintic"}, "coefficients must be triples"),
        ({"coefficients": 3}, "coefficients must be triples"),
        ({"coefficients": []}, "coefficients must be triples"),
        ({"coefficients": [(1.5, -0.5, float("inf"))]}, "coefficients must be triples"),
        ({"coefficients": [(1.5, -0.5, 0.0)], "method": "svd"}, "need method='auto'"),
        ({"coefficients": [(1.5, -0.5, 0.0)] * 6}, "6 triples need .* iterations=5"),
    ],
)
def test_bad_coefficients_are_refused_by_name(options, words):
    params = [torch.nn.Parameter(draw(3, 4, seed=1))]
    with pytest.raises(ValueError, match=words):
        nucleon.Muon(params, **options)
    optimizer = nucleon.Muon(params)
    before = params[0].detach().clone()
    params[0].grad = draw(3, 4, seed=2)
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        ("spectral", {(6, 20): 1.0, (20, 6): (20 / 6) ** 0.5}),
        ("unit-rms", {(6, 20): (6 / 20) ** 0.5, (20, 6): (20 / 6) ** 0.5}),
        ("match-adamw", {(6, 20): 0.2 * 20**0.5, (20, 6): 0.2 * 20**0.5}),
        ("none", {(6, 20): 1.0, (20, 6): 1.0}),
        (0.25, {(6, 20): 0.25, (20, 6): 0.25}),
        (("unit-rms", 0.5), {(6, 20): 0.5 * (6 / 20) ** 0.5, (20, 6): 0.5 * (20 / 6) ** 0.5}),
        (["spectral", 3], {(6, 20): 3.0, (20, 6): 3 * (20 / 6) ** 0.5}),
    ],
    ids=str,
)
def test_a_step_has_the_length_of_its_scale(scale, factor):
    """‖ΔW‖_op of a first step by "svd"; rows are outputs, also where a weight lies transposed."""
    for shape, expected in factor.items():
        for axes, size in (("r c", shape), ("c r", shape[::-1])):
            param = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
            group = {"params": [param], "axes": axes}
            optimizer = nucleon.Muon([group], lr=0.5, method="svd", scale=scale)
            param.grad = draw(*size, seed=3)
            optimizer.step()
            length = torch.linalg.matrix_norm(param.detach(), 2).item()
            assert length == pytest.approx(0.5 * expected, rel=1e-12)


# ---------------------------------------------------------------- feasibility


def contract(m, n):
    """(cases, m, n) float64: every condition number, rank, pattern and scale of the contract."""
    short = min(m, n)
    cases = [with_spectrum(short, max(m, n), torch.logspace(0, -d, short)) for d in range(0, 13, 2)]
    cases += [
        with_spectrum(short, max(m, n), [1.0] + [0.0] * (short - 1)),
        with_spectrum(short, max(m, n), [1.0] * (short // 2) + [0.0] * (short - short // 2)),
        with_spectrum(short, max(m, n), [1.0] * (short - 1) + [1e-6]),
        torch.zeros(short, max(m, n), dtype=torch.float64),
        torch.ones(short, max(m, n), dtype=torch.float64),
        torch.eye(short, max(m, n), dtype=torch.float64),
    ]
    block = draw(short, max(m, n), seed=3)
    block[: short // 2] = 0
    block[:, ::3] = 0
    cases += [block, block * torch.logspace(0, -8, short, dtype=torch.float64)[:, None]]
    stack = torch.stack(cases)
    stack = torch.cat([stack * scale for scale in (1.0, 1e-15, 1e-7, 1e7, 1e15)])
    return stack if m <= n else stack.mT.contiguous()


FEASIBLE = {  # an optimizer, its options, and by how much ‖P‖_op may exceed 1
    "muon": (nucleon.Muon, {}, 1e-3),
    "muon-newton-schulz": (nucleon.Muon, {"method": "newton-schulz"}, 1e-3),
    "muon-bfloat16": (nucleon.Muon, {"method": "bfloat16"}, 1e-2),
    "muon-svd": (nucleon.Muon, {"method": "svd"}, 1e-5),
    **{
        f"leon-{method}-{scale}": (
            nucleon.Leon,
            {"method": method, "smoothing_scale": scale},
            tolerance,
        )
        for method, tolerance in {
            **dict.fromkeys(("auto", "newton-schulz", "coupled"), 1e-3),
            "bfloat16": 1e-2,
            "eigh": 1e-5,
        }.items()
        for scale in (1.0, 0.0)
    },
    "pion": (nucleon.Pion, {}, 1e-3),
    "pion-literal": (nucleon.Pion, {"smoothing_scale": "literal"}, 1e-3),
}


@pytest.mark.parametrize(
    "name,iterations,shape",
    [
        (name, iterations, shape)
        for name, (_, _, tolerance) in FEASIBLE.items()
        for iterations in ((5,) if tolerance < 1e-3 else (3, 5, 8))
        for shape in [(12, 30), (12, 12), (30, 12), (48, 64)]
        if shape[0] < 48 or iterations in (5, 8)
    ],
)
def test_no_direction_leaves_the_ball(name, iterations, shape):
    """‖P‖_op ≤ 1 + 1e-3 in float32, 1e-5 for the exact methods, 1e-2 for bfloat16; 0 gives 0.

    All cases in one stack: first alone, then with the Gram and a tenth of the total of a step
    before, whose gradient was another case.
    """
    make, options, tolerance = FEASIBLE[name]
    cases = contract(*shape).float()
    for before in ((), (cases.roll(1, 0),), (cases.flip(0),)):
        momentum = 0.1 if before else 0.0
        p = direction(
            make, *before, cases, momentum=momentum, iterations=iterations, nesterov=True, **options
        )
        norms = torch.linalg.matrix_norm(p.double(), 2)
        assert p.isfinite().all()
        assert norms.max() <= 1 + tolerance, f"case {norms.argmax().item()}: {norms.max().item()}"
        if not before:
            zero = (cases == 0).all(dim=(-2, -1))
            assert zero.sum() == 5 and (norms[zero] == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-6, 1e-3])
@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (128, 128), (128, 64)])
def test_with_little_smoothing_the_rounding_of_a_gram_matrix_stays_in_the_ball(shape, scale):
    """Singular values whose squares are 1e-5 of the largest, in six rows (`helpers_half`)."""
    gradient = clusters(min(shape), max(shape), 19, rows=6)[0]
    gradient = gradient if shape[0] <= shape[1] else gradient.mT
    p = direction(nucleon.Leon, gradient, smoothing_scale=scale)
    assert torch.linalg.matrix_norm(p.double(), 2) <= 1 + 1e-3


@pytest.mark.parametrize("name", FEASIBLE)
@pytest.mark.parametrize("k", [-30, 40])
def test_a_power_of_two_on_the_gradients_changes_no_bit(name, k):
    make, options, _ = FEASIBLE[name]
    cases = contract(6, 10)[:15].float()
    gradients = (cases.roll(1, 0), cases)
    plain = direction(make, *gradients, momentum=0.5, **options)
    scaled = direction(make, *(g * 2.0**k for g in gradients), momentum=0.5, **options)
    assert torch.equal(plain, scaled)


# ---------------------------------------------------------------- Pion's noise


@pytest.mark.parametrize("width", [40, 160])
def test_pion_tends_to_leon_for_wide_matrices(width):
    """E polar(S + LZ) ≈ (SSᵀ + nLLᵀ)^(-1/2)S: ZZᵀ is n·I up to √(m/n), which averages to O(m/n).

    Monte Carlo over `copies` independent streams; the interval is four standard errors, and the
    systematic part is at most 3m/n of the projection on Leon's direction.
    """
    m, copies = 2, 3000
    g = draw(m, width, seed=4)
    g = g + 2 * with_spectrum(m, width, [6.0, 3.0], seed=8)
    leon = direction(nucleon.Leon, g, method="eigh")
    stack = g.expand(copies, m, width).contiguous()
    draws = direction(nucleon.Pion, stack, method="svd", smoothing_scale=1 / width)
    projections = (draws * leon).sum(dim=(-2, -1)) / leon.square().sum()
    error = (projections.mean() - 1).abs().item()
    interval = 4 * projections.std().item() / math.sqrt(copies)
    assert interval < 0.05  # else the test could not fail
    assert error <= 3 * m / width + interval


def train_pion(groups, resume=False, **options):
    """Weights after three steps, by name; `groups` lists the names of each group's parameters."""
    shapes = {"a": (4, 6), "b": (6, 4), "c": (2, 4, 6), "d": (5, 5)}
    params = {n: torch.nn.Parameter(draw(*s, seed=ord(n))) for n, s in shapes.items()}

    def make():
        given = [{"params": [params[n] for n in names]} for names in groups]
        return nucleon.Pion(given, lr=0.1, momentum=0.9, method="svd", seed=5, **options)

    optimizer = make()
    for step in range(3):
        if resume and step == 1:
            saved, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(saved)
        for n, p in params.items():
            p.grad = draw(*p.shape, seed=100 * step + ord(n))
        optimizer.step()
    return params


@pytest.mark.parametrize(
    "groups,options",
    [
        (["ab", "cd"], {}),
        (["a", "b", "c", "d"], {}),
        (["abcd"], {"largest_stack": 1}),
        (["abcd"], {"largest_stack": 48}),
        (["abcd"], {"resume": True}),
    ],
    ids=["two groups", "four groups", "one by one", "small stacks", "resumed"],
)
def test_noise_depends_on_the_parameter_alone(groups, options):
    reference, other = train_pion(["abcd"]), train_pion(groups, **options)
    for name, weight in reference.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=1e-12)


def test_parameters_slices_steps_and_seeds_have_their_own_noise():
    g = draw(1, 3, 5, seed=1).expand(2, 3, 5).contiguous()
    params = [torch.nn.Parameter(torch.zeros_like(g)) for _ in range(2)]
    optimizer = nucleon.Pion(params, **PLAIN)
    seen = []
    for _ in range(2):
        for p in params:
            p.detach().zero_()
            p.grad = g.clone()
        optimizer.step()
        seen += [m.clone() for p in params for m in p.detach()]
    seen.append(-direction(nucleon.Pion, g, seed=1)[0])
    for i, a in enumerate(seen):
        assert all(distance(a, b) > 1e-3 for b in seen[:i])


# ---------------------------------------------------------------- exponential lengths


def lengths(make, steps, seed=0):
    """s_t of each matrix, (steps, matrices): its update over the one with constant steps."""
    shapes = [(3, 5), (5, 3), (2, 3, 5), (4, 4)]
    moves = []
    for kind in ("exponential", "constant"):
        params = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in shapes]
        optimizer = make(params, **PLAIN, step_length=kind, seed=seed, method="newton-schulz")
        rows = []
        for step in range(steps):
            for i, p in enumerate(params):
                p.detach().zero_()
                p.grad = draw(*p.shape, seed=7 * step + i)
            optimizer.step()
            rows.append(torch.stack([p.detach().flatten()[:2].clone() for p in params]))
        moves.append(torch.stack(rows))
    return (moves[0] / moves[1]).flatten(1)


@pytest.mark.slow
def test_exponential_lengths_are_shared_by_all_matrices():
    s = lengths(nucleon.Leon, 200)
    torch.testing.assert_close(s, s[:, :1].expand_as(s), rtol=1e-9, atol=0)
    s = s[:, 0]
    assert (s > 0).all() and s.unique().numel() == 200
    # Mean 1 and median ln 2, each within four standard errors of 200 draws of Exp(1).
    assert abs(s.mean() - 1) < 4 / math.sqrt(200)
    assert abs((s < math.log(2)).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(200)
    again, other = lengths(nucleon.Muon, 20), lengths(nucleon.Leon, 20, seed=1)
    torch.testing.assert_close(again[:, 0], s[:20], rtol=1e-9, atol=0)
    assert (other[:, 0] - s[:20]).abs().min() > 0
