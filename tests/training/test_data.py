import builtins
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.training import BytePairs, Characters, Examples, Text, digits, read, text
from nucleon.training.tokens import _WORD

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


# ------------------------------------------------------------------ tokens


@settings(max_examples=100)
@given(TEXTS, TEXTS, st.integers(256, 300))
def test_no_tokenizer_loses_anything(content, other, size):
    characters = Characters.of(content + other)
    assert characters.decode(characters.encode(content).tolist()) == content
    assert characters.size == len(set(content + other))
    pairs = BytePairs.learn(content, size)
    assert pairs.size <= size
    for each in (content, other):
        tokens = pairs.encode(each)
        assert pairs.decode(tokens.tolist()) == each
        assert tokens.dtype == torch.int64
        assert tokens.numel() == 0 or 0 <= tokens.min() <= tokens.max() < pairs.size


def slow_pairs(content, count):
    """Byte pairs by the definition: count all, replace all, again."""
    words = [list(word.encode()) for word in _WORD.findall(content)]
    merges = []
    for new in range(256, 256 + count):
        found = Counter(pair for word in words for pair in pairwise(word))
        if not found or max(found.values()) < 2:
            break
        best = min(pair for pair, times in found.items() if times == max(found.values()))
        merges.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [new]
                i += 1
    return tuple(merges), [token for word in words for token in word]


@settings(max_examples=60)
@given(st.text("aab é\n", max_size=80), st.integers(0, 12))
def test_byte_pairs_are_those_of_the_definition(content, count):
    pairs = BytePairs.learn(content, 256 + count)
    merges, tokens = slow_pairs(content, count)
    assert pairs.merges == merges
    assert pairs.encode(content).tolist() == tokens


def test_a_strange_character_is_named():
    with pytest.raises(ValueError, match="'z', which is not among the 3"):
        Characters.of("abc").encode("abz")


def test_pairs_shorten_the_text_they_were_learned_from():
    content = read(None, 50_000)
    pairs = BytePairs.learn(content, 512)
    assert pairs.size == 512
    assert len(pairs.encode(content)) < 0.6 * len(content.encode())


# ------------------------------------------------------------------ batches


@pytest.fixture(scope="module")
def examples():
    values = torch.arange(10)
    return Examples(values[:, None].float(), values, values[:4, None].float(), values[:4])


def test_each_time_around_every_example_comes_once_in_a_new_order(examples):
    seen = torch.cat([examples.batch(i, 4, seed=3)[1] for i in range(10)])  # four times around
    rounds = seen.view(4, 10).tolist()
    assert all(sorted(order) == list(range(10)) for order in rounds)
    assert len({tuple(order) for order in rounds}) == 4
    assert (
        seen[:10].tolist() != torch.cat([examples.batch(i, 5, seed=4)[1] for i in (0, 1)]).tolist()
    )


def test_inputs_stay_with_their_targets(examples):
    for i in range(5):
        inputs, targets = examples.batch(i, 7, seed=0)
        assert inputs[:, 0].tolist() == targets.tolist()


@pytest.fixture(scope="module")
def alphabet():
    return text("abcdefghij" * 30, context=8)


@pytest.mark.parametrize("name", ["examples", "alphabet"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_of_a_run_share_out_each_batch(name, world, request):
    data = request.getfixturevalue(name)
    whole = data.batch(5, 12, seed=1)
    for part, parts in zip(
        whole,
        zip(*(data.batch(5, 12, seed=1, rank=r, world=world) for r in range(world)), strict=True),
        strict=True,
    ):
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), part)


@pytest.mark.parametrize("name", ["examples", "alphabet"])
def test_a_batch_is_a_function_of_seed_and_index(name, request):
    data = request.getfixturevalue(name)
    before = data.batch(4, 6, seed=7)
    torch.rand(3)
    data.batch(2, 6, seed=7)
    assert all(map(torch.equal, before, data.batch(4, 6, seed=7)))
    assert not all(map(torch.equal, before, data.batch(4, 6, seed=8)))
    assert not all(map(torch.equal, before, data.batch(5, 6, seed=7)))


def test_windows_are_everywhere_in_the_text_and_targets_come_next(alphabet):
    assert len(alphabet.tokens) == 270
    assert len(alphabet.test_tokens) == 30
    counted = Text(torch.arange(20), torch.arange(20), alphabet.tokenizer, 8)
    starts = Counter()
    for i in range(50):
        inputs, targets = counted.batch(i, 16, seed=0)
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs[:, :1] + torch.arange(8), inputs)
        starts.update(inputs[:, 0].tolist())
    # 800 draws over the 12 places 0, …, 11: each is missed with probability (11/12)^800 < 1e-30.
    assert sorted(starts) == list(range(12))
    assert min(starts.values()) > 800 / 12 - 5 * (800 / 12) ** 0.5


def test_held_out_text_is_at_the_end_and_its_windows_do_not_overlap():
    data = text("a" * 900 + "b" * 100, context=8)
    windows = [w for inputs, _ in data.held_out(3) for w in inputs]
    assert set(data.tokens.tolist()) == {0}
    assert all(set(w.tolist()) == {1} for w in windows)
    assert len(windows) == (100 - 9) // 8 + 1
    places = Text(torch.arange(100), torch.arange(100), data.tokenizer, 8)
    firsts = torch.cat([inputs[:, 0] for inputs, _ in places.held_out(5)])
    assert firsts.diff().min() >= 8
    assert firsts[0] == 0
    assert firsts[-1] == 91


def test_a_fingerprint_tells_data_apart():
    a, b = text("abcdefgh" * 20, context=4), text("abcdefgh" * 19 + "abcdefhg", context=4)
    assert a.fingerprint == text("abcdefgh" * 20, context=4).fingerprint != b.fingerprint


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"too short.*a window has 9"):
        text("hello world", context=8)


# ------------------------------------------------------------------ sources


def test_digits_are_split_the_same_way_every_time():
    data = digits()
    assert data.inputs.shape == (1438, 64)
    assert data.test_inputs.shape == (359, 64)
    assert 0 <= data.inputs.min() < data.inputs.max() == 1
    assert data.fingerprint == digits().fingerprint
    # A random fifth of ten nearly equal classes: about 36 ± 5.4 of each.
    assert data.test_targets.bincount().min() > 36 - 4 * 5.4


def test_without_scikit_learn_the_error_says_so(monkeypatch):
    original = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        digits()


def test_the_standard_library_is_the_default_and_is_capped():
    content = read(None, 300_000)
    assert len(content.encode()) == pytest.approx(300_000, abs=3)  # a cut character is U+FFFD
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0].read_text("utf-8")
    assert content.startswith(first[:1000])


def test_a_folder_is_read_in_order_and_without_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("first ")
    (tmp_path / "c.md").write_text("second é")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x00")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert read(tmp_path, 1000) == "first second é"
    assert read(tmp_path, 8) == "first se"
    assert read(tmp_path / "c.md", 1000) == "second é"


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("missing.txt", None, FileNotFoundError, "there is no"),
        ("empty.txt", b"", ValueError, "no text in"),
        ("binary.gz", b"\x1f\x8b\x00", ValueError, "no text in"),
    ],
)
def test_a_place_without_text_is_refused(tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        read(tmp_path / name, 1000)
