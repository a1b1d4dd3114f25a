import json
from pathlib import Path

import pytest

from nucleon.adversary import search as search_worst
from nucleon.streams import WorstCase


@pytest.fixture
def search(command, tmp_path):
    def call(*words):
        fixed = ("--rounds", 6, "--starts", 2, "--shape", "1x2", "--output", tmp_path)
        return command("search", *words, *fixed)

    return call


def test_it_writes_the_stream_that_the_function_finds(search, command, tmp_path):
    done = search("faml", "ftrl", "--steps", 5, "--seed", 3)
    assert done.exit_code == 0, done.output
    names = {"faml-1x2-6.json", "ftrl-1x2-6.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    file = tmp_path / "faml-1x2-6.json"
    expected = search_worst("faml", (1, 2), 6, starts=2, steps=5, seed=3)
    assert WorstCase.load(file).ratio == expected.ratio
    assert f"{expected.ratio:.4f}" in done.stdout
    words = ("--shape", "1x2", "--rounds", 6, "--stream", f"worst:file={file}")
    played = command("play", "faml", *words, "--json", "--output", tmp_path / "runs")
    (game,) = json.loads(played.stdout)["games"]
    assert game["regret"] / game["bound"] == pytest.approx(expected.ratio, abs=1e-9)


def test_a_file_gives_way_only_to_a_larger_ratio(search, tmp_path):
    (first,) = json.loads(search("faml", "--steps", 20, "--json").stdout)["streams"]
    assert first["written"]
    (worse,) = json.loads(search("faml", "--steps", 0, "--json").stdout)["streams"]
    assert worse["ratio"] < first["ratio"] and not worse["written"]
    assert WorstCase.load(tmp_path / "faml-1x2-6.json").ratio == first["ratio"]
    again = search("faml", "--steps", 0)
    assert "its ratio is larger" in again.stdout


MINE = """
from nucleon.potentials import Admissibility, Hyperbolic, Potential


class Plain(Potential):
    def value(self, s, smoothing):
        return Hyperbolic().value(s, smoothing)

    def value_at_root(self, s, root):
        return Hyperbolic().value_at_root(s, root)

    def gradient(self, s, smoothing):
        return Hyperbolic().gradient(s, smoothing)

    def admissibility(self, m, n):
        return Admissibility(1.0, 1.0)
"""


def test_learners_are_named_as_for_play(search, command, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    own = f"gbpa:potential={path}:Plain"
    done = search("faml", "nucleon.learners:FAML", own, "faml:eta=2", "--steps", 5, "--json")
    assert done.exit_code == 0, done.output
    faml, by_class, by_potential, other = json.loads(done.stdout)["streams"]
    assert faml["ratio"] == by_class["ratio"]
    assert faml["ratio"] == pytest.approx(by_potential["ratio"], abs=1e-9) != other["ratio"]
    names = [Path(one["file"]).name for one in (faml, by_class, other)]
    expected = ["faml-1x2-6.json", "nucleon.learners-FAML-1x2-6.json", "faml-eta=2-1x2-6.json"]
    assert names == expected and WorstCase.load(by_potential["file"]).learner == own
    words = ("--shape", "1x2", "--rounds", 6, "--stream", f"worst:file={other['file']}")
    played = command("play", "faml:eta=2", *words, "--json", "--output", tmp_path / "runs")
    (game,) = json.loads(played.stdout)["games"]
    assert game["tightness"] == pytest.approx(other["ratio"], abs=1e-9)


def test_one_that_draws_noise_is_measured_in_the_mean(search):
    words = ("ftpl:samples=2", "gbpa:potential=gaussian", "gaussian-ftpl:samples=4")
    done = search(*words, "--steps", 1, "--shape", "1x3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["streams"]
    assert len(found) == 6 and all(0 < one["margin"] < 0.2 for one in found)


def test_a_tall_shape_is_the_game_of_its_transpose(search):
    found = [
        json.loads(search("faml", "--steps", 3, "--json", "--shape", s).stdout)["streams"]
        for s in ("2x3", "3x2")
    ]
    assert [one["shape"] for one in found[1]] == [[2, 3], [1, 2]]
    assert found[0][0]["ratio"] == found[1][0]["ratio"]
    twice = json.loads(search("faml", "--shape", "2x1", "--json", "--steps", 0).stdout)["streams"]
    assert len(twice) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ftl", "no admissibility constants"),
        ("shampoo", "through a potential"),
        ("faml:radius=2", "radius, gradient_bound and discount 1"),
        ("faml:gradient_bound=None", "radius, gradient_bound and discount 1"),
        ("faml:discount=0.9", "radius, gradient_bound and discount 1"),
        ("fam", "did you mean faml?"),
        ("nucleon.learners:Missing", "cannot be imported"),
        ("faml:bogus=1", "bogus"),
    ],
)
def test_what_cannot_be_searched_is_named(search, words, said):
    done = search(words, "--steps", 1)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
    assert "debug" not in done.stderr
