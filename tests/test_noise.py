"""The noise is standard, independent across its counters, and a function of them alone.

Statistical limits are five standard deviations of the statistic under the null hypothesis: about
6e-7 for each comparison, and the seeds are fixed.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from nucleon import noise

DISTRIBUTIONS = {
    "normal": (noise.normal, stats.norm),
    "exponential": (noise.exponential, stats.expon),
    "uniform": (noise.uniform, stats.uniform),
    "signs": (noise.signs, stats.rv_discrete(values=([-1, 1], [0.5, 0.5]))),
}
ALL = [draw for draw, _ in DISTRIBUTIONS.values()]
N = 400_000
SIGMAS = 5.0


def words(shape, **key):
    names = ("seed", "stream", "step", "sample")
    return noise._words(1, shape, *(key.get(name, 0) for name in names), None)


def correlation(x, y):
    return float(np.corrcoef(x.double().flatten(), y.double().flatten())[0, 1])


# Published outputs of splitmix64 from the state 1234567.
SPLITMIX = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_finalizer_is_splitmix64_on_host_and_in_tensors():
    states = [1234567 + i * 0x9E3779B97F4A7C15 for i in range(1, 6)]
    assert [noise._mix_int(z) % 2**64 for z in states] == list(SPLITMIX)
    signed = torch.tensor([noise._signed(z) for z in states])
    assert [z % 2**64 for z in noise._mix(signed).tolist()] == list(SPLITMIX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name, dtype):
    draw, law = DISTRIBUTIONS[name]
    x = draw((N,), seed=7, dtype=dtype).double().numpy()
    if name == "signs":
        assert {*x} == {-1.0, 1.0}
    else:
        assert stats.kstest(x, law.cdf).pvalue > 1e-6
    for order in (1, 2, 3, 4):
        mean, second = law.moment(order), law.moment(2 * order)
        assert abs((x**order).mean() - mean) <= SIGMAS * math.sqrt((second - mean**2) / N)


def test_extreme_normals_are_where_they_belong():
    """The tail counts beyond 4σ are Poisson; the last values come from 32 bits."""
    x = noise.normal((4 * N,), seed=3, dtype=torch.float32).abs()
    expected = 4 * N * 2 * stats.norm.sf(4)
    assert abs(int((x > 4).sum()) - expected) < SIGMAS * math.sqrt(expected)
    assert float(x.max()) <= math.sqrt(64 * math.log(2)) * (1 + 1e-6)
    least = noise._unit(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32).float())
    assert least.tolist() == [2.0**-32, 2.0**-32, 1.0, 1.0]


@pytest.mark.parametrize("word", ["seed", "stream", "step", "sample"])
def test_neighbours_are_uncorrelated(word):
    """Neighbouring and far counters, at every small shift of the sequence, and the squares.

    So are the entries of one sequence; at the lag N/2 they are the other half of each pair.
    """
    base = noise.normal((N,), seed=1, dtype=torch.float64)
    for lag in (1, 2, 3, 64, N // 2):
        assert abs(correlation(base[lag:], base[:-lag])) < SIGMAS / math.sqrt(N / 2)
        assert abs(correlation(base[lag:] ** 2, base[:-lag] ** 2)) < SIGMAS / math.sqrt(N / 2)
    for offset in (1, 2, 2**31, 2**62):
        key = {"seed": 1} | {word: offset + (1 if word == "seed" else 0)}
        other = noise.normal((N,), **key, dtype=torch.float64)
        limit = SIGMAS / math.sqrt(N)
        assert abs(correlation(base, other)) < limit
        assert abs(correlation(base**2, other**2)) < limit
        assert max(abs(correlation(base[s:], other[:-s])) for s in (1, 2, 3)) < 1.01 * limit


def test_distributions_do_not_share_bits():
    key = {"seed": 1, "stream": 2, "step": 3, "dtype": torch.float64}
    draws = [d((N,), **key) for d in ALL]
    for i, x in enumerate(draws):
        for y in draws[:i]:
            assert abs(correlation(x, y)) < SIGMAS / math.sqrt(N)
            assert abs(correlation(x, y**2 + y**3)) < SIGMAS / math.sqrt(N)


def test_every_bit_of_the_key_changes_half_the_output():
    """Avalanche: flipping any bit of any word flips each output bit with probability ½."""
    pairs = 2048
    base = words((2 * pairs,), seed=11)
    for name in ("seed", "stream", "step", "sample"):
        for bit in range(0, 64, 7):
            key = {"seed": 11} | {name: (11 if name == "seed" else 0) ^ (1 << bit)}
            flipped = (words((2 * pairs,), **key) ^ base).numpy().view(np.uint8)
            rate = np.unpackbits(flipped).mean()
            assert abs(rate - 0.5) < SIGMAS * 0.5 / math.sqrt(64 * pairs)


def test_close_keys_share_no_word():
    """Keys one apart, or one increment apart, would otherwise permute or shift one sequence."""
    start = 987654321
    keys = [start + i for i in range(8)] + [noise._signed(start + noise.GOLDEN)]
    drawn = torch.stack([noise._sequence(key, 64, None) for key in keys])
    assert drawn.unique().numel() == len(keys) * 64
    assert torch.equal(drawn, noise._sequence(torch.tensor(keys), 64, None))
    drawn = torch.stack([words((128,), step=t) for t in range(64)])
    assert drawn.view(torch.int64).unique().numel() == 64 * 64


def test_words_count_modulo_two_to_the_64():
    ids = torch.arange(3)
    for word in (2**63, 2**64 + 5, -1):
        got = words((3, 4), seed=word, step=torch.tensor(1), sample=word, stream=ids)
        small = (word + 2**63) % 2**64 - 2**63
        assert torch.equal(got, words((3, 4), seed=small, step=1, sample=small, stream=ids))


@example(1, 1, [], 1, 0, torch.float32, noise.normal)
@example(9, 1, [], 1, 9, torch.float32, noise.normal)
@example(0, 3, [4], 1, 0, torch.float32, noise.normal)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 9),
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    samples=st.integers(1, 3),
    step=st.integers(0, 2**40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    draw=st.sampled_from(ALL),
)
def test_a_stack_is_its_matrices(rows, columns, ids, samples, step, dtype, draw):
    """Bit for bit: over streams, over samples (of any number), an int or a tensor for the step."""
    stack = draw(
        (samples, len(ids), rows, columns),
        seed=3,
        stream=torch.tensor(ids, dtype=torch.int64),
        step=torch.tensor(step),
        sample=torch.arange(samples)[:, None],
        dtype=dtype,
    )
    assert stack.shape == (samples, len(ids), rows, columns)
    assert stack.dtype == dtype
    for k in range(samples):
        for i, stream in enumerate(ids):
            key = {"seed": 3, "stream": stream, "step": step, "sample": k}
            assert torch.equal(draw((rows, columns), **key, dtype=dtype), stack[k, i])
    # And past the sizes at which kernels switch to threads and vectors.
    if rows == 9:
        large = draw((2, 101, 333), seed=0, stream=torch.arange(2), step=step)
        assert torch.equal(large[1], draw((101, 333), seed=0, stream=1, step=step))


def test_float32_is_float64_rounded():
    """u carries a relative error eps, so r = √(−2 ln u) one of eps/r, and the angle eps·π/2."""
    eps = torch.finfo(torch.float32).eps
    x = noise.normal((N,), seed=2, dtype=torch.float64)
    y = noise.normal((N,), seed=2, dtype=torch.float32).double()
    radius = torch.hypot(*x.view(2, -1)).repeat(2)
    assert bool(((x - y).abs() <= eps * (2 / radius + 4 * radius)).all())
    half = noise.normal((N,), seed=2, dtype=torch.bfloat16)
    assert torch.equal(half, y.to(torch.bfloat16))


class NoReadback(TorchDispatchMode):
    """Fails where a kernel would read a tensor back to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        assert "nonzero" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("draw", ALL)
def test_tensor_counters_are_never_read_back(draw):
    ids, step = torch.arange(3), torch.tensor(5)
    with NoReadback():
        draw((3, 4, 5), seed=0, stream=ids, step=step)
    with pytest.raises(AssertionError), NoReadback():
        step.item()


def test_noise_compiles_into_one_graph():
    ids = torch.arange(3)

    def draw(step):
        return noise.normal((3, 5, 7), seed=0, stream=ids, step=step)

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for t in (1, 2):
        assert torch.equal(compiled(torch.tensor(t)), draw(t))


@pytest.mark.slow
def test_generated_code_wraps_its_products(tmp_path):
    """Signed overflow is undefined in the C++ that torch.compile writes: the words must survive it.

    36 values leave a remainder after every vector width, the loop where it went wrong. The folder
    of torch goes to the compiler unquoted: one with a space is reached by a link. With the setting
    ATEN_CPU_CAPABILITY=default torch writes C++ for vectors without its header: the compiler is
    given the machine as it is.
    """
    code = """
import torch
from nucleon import noise
def draw(step):
    return noise._words(1, (36,), 0, 0, step, 0, None)
assert torch.equal(torch.compile(draw, fullgraph=True)(torch.tensor(4)), draw(4))
"""
    packages = Path(torch.__file__).parents[1]
    if " " in str(packages):
        (tmp_path / "packages").symlink_to(packages)
        packages = tmp_path / "packages"
    paths = os.pathsep.join([str(packages), str(Path(noise.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def test_bad_input():
    with pytest.raises(ValueError, match=r"shape must begin with \(3,\).*got \(4, 5\)"):
        noise.normal((4, 5), seed=0, stream=torch.arange(3))
    with pytest.raises(ValueError, match="shape must begin with"):  # never a silent repetition
        noise.normal((4, 5), seed=0, stream=torch.tensor([1]))
    with pytest.raises(TypeError, match=r"step must hold integers.*torch.int64"):
        noise.normal((4, 5), seed=0, step=torch.tensor(1.0))
    with pytest.raises(TypeError, match="seed must be an integer"):
        noise.normal((4, 5), seed=0.5)  # pyright: ignore[reportArgumentType]


def test_a_derived_seed_is_a_hash_of_both_its_words():
    words = [-(2**63), -1, 0, 1, 2, 2**40, 2**64 - 1]
    seeds = {noise.derived_seed(a, b) for a in range(200) for b in range(-100, 100)}
    assert len(seeds) == 200 * 200 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert noise.derived_seed(-1, 5) == noise.derived_seed(2**64 - 1, 5)  # modulo 2⁶⁴
    assert noise.derived_seed(5, -1) == noise.derived_seed(5, 2**64 - 1)
    # Half of the 64 bits differ between neighbours of either word, give or take 4·√64/2.
    for a in words:
        for other in (noise.derived_seed(a + 1, 7), noise.derived_seed(7, a + 1)):
            for here in (noise.derived_seed(a, 7), noise.derived_seed(7, a)):
                assert 16 <= ((here ^ other) % 2**64).bit_count() <= 48
