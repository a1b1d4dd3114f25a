import json

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


def test_what_cannot_be_searched_is_named(search):
    done = search("ftl")
    assert done.exit_code == 2 and "faml, ftrl, ftpl" in done.stderr
