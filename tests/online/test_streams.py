"""Streams: exact bounds, random access, independent games, and the law that each one names."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nucleon.online import streams

SHAPES = [(1, 1), (1, 7), (6, 1), (5, 5), (4, 9), (8, 3), (3, 4, 6), (2, 6, 4)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
VARIANTS = {
    "alternating": streams.alternating,
    "alternating-turned": lambda shape, seed=3, **kw: streams.alternating(shape, seed=seed, **kw),
    "gaussian": streams.gaussian,
    "low-rank": streams.low_rank,
    "ill-conditioned": streams.ill_conditioned,
    "drifting": lambda shape, **kw: streams.drifting(shape, period=7, **kw),
    "drifting-quiet": lambda shape, **kw: streams.drifting(shape, period=7, noise_level=0, **kw),
    "sparse": streams.sparse,
    "heavy-tailed": streams.heavy_tailed,
    "heavier-tailed": lambda shape, **kw: streams.heavy_tailed(shape, degrees=1e-3, **kw),
    "greedy": streams.adversary,
    "orthogonal": lambda shape, **kw: streams.adversary(shape, kind="orthogonal", **kw),
}
SEEDED = [v for v in VARIANTS if v not in ("alternating", "greedy", "orthogonal")]


def action(shape, t, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + t)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def norms(x):
    return torch.linalg.svdvals(x.double())[..., 0]


def polar(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def test_every_constructor_is_registered():
    assert set(streams.STREAMS) == {
        *("alternating", "gaussian", "low-rank", "ill-conditioned", "drifting"),
        *("sparse", "heavy-tailed", "adversary", "worst", "replay"),
    }
    for name, make in streams.STREAMS.items():
        if name not in ("worst", "replay"):
            stream = make((2, 3))
            assert stream.name == name
            assert stream.oblivious == (name != "adversary")
            assert stream.rounds is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bound_is_exact(variant, shape, dtype):
    """‖G_t‖_op ≤ bound in float64, where the float64 SVD itself may err by 8·eps."""
    for bound in (1.0, 0.1, 300.7):  # 0.1 rounds upwards in float32
        stream = VARIANTS[variant](shape, bound=bound, dtype=dtype)
        assert stream.gradient_bound == bound
        for t in (1, 2, 3, 10**6):
            g = stream.gradient(t, action(shape, t))
            assert (tuple(g.shape), g.dtype) == (shape, dtype)
            assert float(norms(g).max()) <= bound * (1 + 8 * 2.0**-52)


@settings(max_examples=25, deadline=None)
@given(
    variant=st.sampled_from(list(VARIANTS)),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    bound=st.floats(1e-30, 1e30),
    t=st.integers(1, 10**9),
)
def test_bound_holds_for_any_shape_scale_and_round(variant, shape, bound, t):
    g = VARIANTS[variant](shape, bound=bound, dtype=torch.float32).gradient(t, action(shape, 1))
    assert float(norms(g)) <= bound * (1 + 8 * 2.0**-52)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 4, 6)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_access(variant, shape):
    """A round does not depend on the rounds asked for before it, nor does mutation reach it."""
    make = VARIANTS[variant]
    first = [make(shape).gradient(t, action(shape, t)).clone() for t in (5, 1, 3)]
    stream = make(shape)
    for t in (1, 2, 3, 4, 5):
        stream.gradient(t, action(shape, t)).fill_(7)
    again = [stream.gradient(t, action(shape, t)) for t in (5, 1, 3)]
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (1, 1), (5, 5), (32, 64)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stack_plays_its_games(variant, shape):
    """Game i is the one with seed + i, up to the rounding of stacked products."""
    make, seeded = VARIANTS[variant], variant in SEEDED
    options = {"dtype": torch.float64} | ({"seed": 11} if seeded else {})
    stack = make((3, *shape), **options)
    for t in (1, 4):
        x = action((3, *shape), t)
        g = stack.gradient(t, x)
        for i in range(3):
            one = make(shape, **options | ({"seed": 11 + i} if seeded else {}))
            torch.testing.assert_close(g[i], one.gradient(t, x[i]), rtol=1e-12, atol=1e-12)
    if seeded and variant != "sparse" and math.prod(shape) > 1:
        assert not torch.allclose(g[0].abs(), g[1].abs(), atol=1e-3)


@pytest.mark.parametrize("variant", SEEDED)
def test_seeds_and_rounds_differ(variant):
    shape = (8, 12)
    gradients = [VARIANTS[variant](shape, seed=seed).gradient(3) for seed in (0, 1, 2)]
    assert not torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[1], gradients[2])
    stream = VARIANTS[variant](shape)
    assert not torch.equal(stream.gradient(2), stream.gradient(3))


@pytest.mark.parametrize("variant", SEEDED)
def test_dtypes_play_the_same_game(variant):
    """The float32 gradient is the float64 one up to the slack and the rounding of an entry."""
    shape = (6, 9)
    wide = VARIANTS[variant](shape, dtype=torch.float64).gradient(4)
    narrow = VARIANTS[variant](shape, dtype=torch.float32).gradient(4)
    tolerance = torch.finfo(torch.float32).eps * (math.sqrt(6) + 1)
    torch.testing.assert_close(narrow.double(), wide, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("variant", SEEDED)
def test_tall_is_wide_transposed(variant):
    make = VARIANTS[variant]
    assert torch.equal(make((9, 4)).gradient(3), make((4, 9)).gradient(3).mT)


def test_alternating():
    stream = streams.alternating((3, 5), bound=2.0)
    e = 2.0 * torch.eye(3, 5)
    for t, expected in enumerate((e / 2, -e, e, -e, e), start=1):
        assert torch.equal(stream.gradient(t), expected)
    total = sum(stream.gradient(t) for t in range(1, 8))
    assert torch.equal(total, e / 2)
    for seed in (None, 4):
        options = {} if seed is None else {"seed": seed}
        s = torch.linalg.svdvals(
            streams.alternating((4, 6), rank=2, dtype=torch.float64, **options).gradient(2)
        )
        expected = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
        torch.testing.assert_close(s, expected, rtol=0, atol=1e-12)


def test_gaussian_entries_and_clipping():
    """Mean and variance within five deviations; norms beyond the bound are rare."""
    m, n, rounds = 8, 16, 400
    stream = streams.gaussian((m, n), dtype=torch.float64)
    g = torch.stack([stream.gradient(t) for t in range(1, rounds + 1)])
    z = (g * (math.sqrt(m) + math.sqrt(n) + 3)).flatten().numpy()
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / z.size)
    clipped = int((norms(g) > 1 - 1e-9).sum())
    p = math.exp(-4.5)
    assert clipped <= rounds * p + 5 * math.sqrt(rounds * p)
    assert stats.kstest(z, stats.norm.cdf).pvalue > 1e-6


def test_low_rank_shares_its_spaces():
    stream = streams.low_rank((7, 9), rank=3, dtype=torch.float64)
    g = [stream.gradient(t) for t in range(1, 6)]
    for x in (g[0], torch.cat(g, dim=0), torch.cat(g, dim=1)):
        s = torch.linalg.svdvals(x)
        assert float(s[3]) < 1e-13 < 1e-4 < float(s[2])
    u, _, vh = torch.linalg.svd(streams.low_rank((6, 6), dtype=torch.float64).gradient(1))
    assert abs(float(u[:, 0] @ vh[0])) < 0.99  # two spaces, not one


def test_ill_conditioned_spectrum():
    """Mean Gram of T rounds in its own basis: χ² with Tn degrees, relative deviation √(2/Tn)."""
    m, n, rounds, condition = 4, 16, 500, 1e4
    stream = streams.ill_conditioned((m, n), condition=condition, dtype=torch.float64)
    g = torch.stack([stream.gradient(t) for t in range(1, rounds + 1)])
    spectrum = torch.linalg.eigvalsh((g @ g.mT).sum(dim=0)).flip(0).sqrt()
    expected = condition ** -(torch.arange(m, dtype=torch.float64) / (m - 1))
    scale = math.sqrt(rounds * n) / (math.sqrt(n) + float(expected.norm()) + 3)
    deviation = 5 * math.sqrt(2 / (rounds * n))  # generous for a root, whose deviation is half
    np.testing.assert_allclose(spectrum / (scale * expected), 1, rtol=deviation)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 4), (3, 7), (5, 4)])
def test_drifting_target_turns(shape):
    quiet = streams.drifting(shape, period=40, noise_level=0, dtype=torch.float64)
    start, later, quarter, half = (quiet.gradient(t) for t in (40, 41, 50, 60))
    torch.testing.assert_close(half, -start, rtol=0, atol=1e-12)
    torch.testing.assert_close(quiet.gradient(80), start, rtol=0, atol=1e-12)
    assert float(norms(later - start)) <= 2 * math.sin(math.pi / 40) + 1e-12  # a chord
    s = torch.linalg.svdvals(start)
    torch.testing.assert_close(s, torch.ones_like(s), rtol=0, atol=1e-11)
    assert abs(float((quarter * start).sum())) < 1e-12
    if max(shape) % 2 == 0:
        torch.testing.assert_close(torch.linalg.svdvals(quarter), s, rtol=0, atol=1e-11)


def test_drifting_noise_has_the_target_for_mean():
    m, n, rounds = 4, 6, 600
    shape = (m, n)
    noisy = streams.drifting(shape, period=1e12, noise_level=0.5, dtype=torch.float64)
    quiet = streams.drifting(shape, period=1e12, noise_level=0.0, dtype=torch.float64)
    mean = torch.stack([noisy.gradient(t) for t in range(1, rounds + 1)]).mean(dim=0)
    deviation = 0.5 / (math.sqrt(m) + math.sqrt(n) + 3) / math.sqrt(rounds)
    assert float((mean - 0.5 * quiet.gradient(1)).abs().max()) < 5 * deviation


@pytest.mark.parametrize("density", [0.03, 0.4, 1.0])
def test_sparse_density(density):
    stream = streams.sparse((20, 30), density=density)
    kept = torch.stack([stream.gradient(t) != 0 for t in range(1, 101)]).double()
    deviation = math.sqrt(density * (1 - density) / kept.numel())
    assert abs(float(kept.mean()) - density) <= 5 * deviation


@pytest.mark.parametrize("degrees", [1.0, 2.0, 7.5])
def test_heavy_tails_are_students(degrees):
    """1×1 matrices, below the clipping level 5 = √1 + √1 + 3, follow the truncated t law."""
    stream = streams.heavy_tailed((4000, 1, 1), degrees=degrees, dtype=torch.float64)
    x = 5 * stream.gradient(1).flatten().numpy()
    law = stats.t(degrees)
    inside = np.abs(x) < 5 * (1 - 1e-9)
    p = 2 * law.sf(5)
    assert abs((~inside).sum() - p * x.size) < 5 * math.sqrt(p * x.size)

    def truncated(v):
        return (law.cdf(v) - law.cdf(-5)) / (1 - p)

    assert stats.kstest(x[inside], truncated).pvalue > 1e-6


def test_heavy_tailed_entries_are_independent():
    stream = streams.heavy_tailed((2000, 1, 2), degrees=30, dtype=torch.float64)
    x = stream.gradient(1)[:, 0].numpy()
    for power in (1, 2):
        assert abs(np.corrcoef((x**power).T)[0, 1]) < 5 / math.sqrt(2000)


@pytest.mark.parametrize("shape", [(1, 1), (4, 9), (9, 4), (5, 5), (2, 4, 6)])
def test_greedy_adversary_is_the_maximizer(shape):
    """⟨G, X⟩ = bound·‖X‖_*, which no G of norm ≤ bound exceeds; at full rank it is the polar."""
    stream = streams.adversary(shape, bound=3.0, dtype=torch.float64)
    x = action(shape, 1)
    g = stream.gradient(1, x)
    torch.testing.assert_close(g, 3 * polar(x), rtol=0, atol=1e-11)
    best = 3 * torch.linalg.svdvals(x).sum(dim=-1)
    torch.testing.assert_close((g * x).sum(dim=(-2, -1)), best, rtol=1e-11, atol=0)
    low = x[..., :1] @ x[..., :1, :]  # rank one
    best = 3 * torch.linalg.svdvals(low).sum(dim=-1)
    torch.testing.assert_close(
        (stream.gradient(1, low) * low).sum(dim=(-2, -1)), best, rtol=1e-11, atol=0
    )


def test_adversary_opens_on_zero_game_by_game():
    x = action((2, 3, 5), 1)
    x[0] = 0
    for kind in ("greedy", "orthogonal"):
        stream = streams.adversary((2, 3, 5), kind=kind, dtype=torch.float64)
        g = stream.gradient(1, x)
        torch.testing.assert_close(g[0], torch.eye(3, 5, dtype=torch.float64))
        assert not torch.allclose(g[1], g[0])
    turned = streams.adversary((3, 5), seed=1, dtype=torch.float64).gradient(1, x[0])
    torch.testing.assert_close(torch.linalg.svdvals(turned), torch.ones(3, dtype=torch.float64))


def test_orthogonal_adversary_forces_the_order_of_the_bounds():
    """Zero loss, and the learner along the total has regret m√T exactly when n ≥ 2m."""
    m, n, rounds = 3, 7, 100
    stream = streams.adversary((m, n), kind="orthogonal", dtype=torch.float64)
    total, loss = torch.zeros(m, n, dtype=torch.float64), 0.0
    for t in range(1, rounds + 1):
        x = -total / (1 + norms(total))
        g = stream.gradient(t, x)
        loss += float((g * x).sum())
        total += g
    assert abs(loss) < 1e-10
    regret = loss + float(torch.linalg.svdvals(total).sum())
    assert regret == pytest.approx(m * math.sqrt(rounds), rel=1e-10)


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 4, 3), (5, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_replay_round_trip(tmp_path, shape, dtype):
    recording = action(shape, 1).to(dtype)
    torch.save(recording, tmp_path / "gradients.pt")
    for source in (recording, tmp_path / "gradients.pt", str(tmp_path / "gradients.pt")):
        stream = streams.replay(source)
        assert (stream.rounds, stream.shape, stream.dtype) == (5, shape[1:], dtype)
        for t in (3, 1, 5):
            assert torch.equal(stream.gradient(t), recording[t - 1])
        largest = float(norms(recording).max())
        assert largest <= stream.gradient_bound <= largest * (1 + 1e-12)
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            stream.gradient(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_replay_rescales_by_one_constant(dtype):
    recording = action((6, 4, 5), 2) * 1e5
    stream = streams.replay(recording, bound=0.7, dtype=dtype)
    g = torch.stack([stream.gradient(t) for t in range(1, 7)]).double()
    slack = 3 * torch.finfo(dtype).eps * math.sqrt(4) + 1e-12
    assert 0.7 * (1 - slack) <= float(norms(g).max()) <= 0.7
    ratio = g / recording
    torch.testing.assert_close(ratio, ratio[0, 0, 0].expand_as(ratio), rtol=slack, atol=0)


def test_replay_keeps_the_bound_in_a_narrower_dtype():
    recording = action((20, 4, 5), 3)
    stream = streams.replay(recording, dtype=torch.bfloat16)
    for t in range(1, 21):
        assert torch.equal(stream.gradient(t), recording[t - 1].bfloat16())
        assert float(norms(stream.gradient(t))) <= stream.gradient_bound


def test_a_recording_made_against_the_noise_is_not_oblivious():
    recording = action((5, 3, 4), 1)
    assert streams.replay(recording).oblivious
    assert not streams.replay(recording, oblivious=False).oblivious
    assert not streams.replay(recording, bound=1.0, oblivious=False).oblivious


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: streams.gaussian((3,)), r"shape must be \(m, n\) or \(b, m, n\), got \(3,\)"),
        (lambda: streams.gaussian((0, 3)), "every side of shape.*got 0"),
        (lambda: streams.gaussian((2, 3), bound=0.0), "bound must be a finite number > 0, got 0"),
        (lambda: streams.gaussian((2, 3), seed=-1), "seed must be an integer ≥ 0, got -1"),
        (lambda: streams.low_rank((2, 3), rank=3), r"rank must be at most min\(m, n\) = 2, got 3"),
        (lambda: streams.alternating((2, 3), rank=3), "rank must be at most"),
        (lambda: streams.sparse((2, 3), density=0.0), r"density must lie in \(0, 1\], got 0"),
        (lambda: streams.heavy_tailed((2, 3), degrees=0), "degrees must be a finite number > 0"),
        (lambda: streams.drifting((2, 3), period=0), "period must be a finite number > 0"),
        (lambda: streams.drifting((2, 3), noise_level=1.5), "noise_level must lie"),
        (lambda: streams.ill_conditioned((2, 3), condition=0), "condition must be"),
        (lambda: streams.adversary((2, 3), kind="kind"), "kind must be one of"),
        (lambda: streams.replay(torch.zeros(3, 4)), "gradients must be a nonempty tensor"),
        (lambda: streams.replay(torch.zeros(2, 3, 4)), "not all be zero"),
        (lambda: streams.replay(torch.full((2, 3, 4), math.nan)), "gradients must be finite"),
        (lambda: streams.gaussian((2, 3)).gradient(0), "t must be an integer ≥ 1, got 0"),
        (
            lambda: streams.adversary((2, 3)).gradient(1, torch.ones(3, 2)),
            r"action must have the shape \(2, 3\).*got \(3, 2\)",
        ),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: streams.gaussian((2, 3.0)),
        lambda: streams.gaussian((2, 3), bound="1"),
        lambda: streams.gaussian((2, 3), size=4),
        lambda: streams.gaussian((2, 3), dtype=torch.int64),
        lambda: streams.gaussian((2, 3)).gradient(1.0),
        lambda: streams.adversary((2, 3)).gradient(1),
    ],
)
def test_bad_types(make):
    with pytest.raises(TypeError):
        make()
