import json

import pytest
import torch

from nucleon.online import streams
from nucleon.online.game import play as play_game
from nucleon.online.learners import FAML
from nucleon.report.runs import load


@pytest.fixture
def play(command, tmp_path):
    return lambda *words: command("play", *words, "--output", tmp_path)


def test_learners_side_by_side(play, runs, tmp_path):
    words = ("faml", "ftl", "--stream=alternating", "--rounds=50", "--shape=3x5")
    done = play(*words)
    assert done.exit_code == 0, done.output
    (folder,) = runs(tmp_path, "play")
    assert done.stdout.splitlines()[-1] == f"run  {folder}"
    saved = load(folder)
    assert saved.manifest["command"].startswith(f"nucleon play {' '.join(words)}")
    (check,) = saved.result.checks  # FTL has no theorem
    learner = FAML((3, 5), dtype=torch.float64)
    stream = streams.alternating((3, 5), dtype=torch.float64)
    end = play_game(learner, stream, 50).certificate
    assert check.measured == pytest.approx(float(end.regret), rel=1e-12)
    assert check.threshold == pytest.approx(float(end.bound), rel=1e-12)
    first, second = (folder / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["learner"] for line in (first, second)] == ["faml", "ftl"]
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert rows["against"] == ["against", "alternating"]
    assert rows["faml"][1] == "50"
    assert float(rows["faml"][2]) == pytest.approx(check.measured, rel=1e-3)
    assert rows["ftl"][3] == "none"
    (panel,) = json.loads((folder / "result.json").read_text())["figures"][0]["panels"]
    assert [s["name"] for s in panel["series"]] == ["faml", "faml, bound", "ftl"]


def test_a_narrow_terminal_cuts_no_name(play, monkeypatch):
    monkeypatch.setattr("nucleon.cli.console.PIPE_WIDTH", 72)
    learners = ("one-sided-shampoo", "ftpl:samples=16,seed=3")
    lines = play(*learners, "--stream", "ill-conditioned", "--rounds", 3).stdout.splitlines()
    assert max(map(len, lines[:7])) <= 72
    rows = [line.split() for line in lines]
    assert all([len(row) for row in rows if row[:1] == [name]] == [6] for name in learners)


def test_options_seeds_and_a_refused_bound(play):
    words = ("ftpl:samples=1", "ftpl:samples=1,seed=7", "--seed", 3, "--rounds", 20)
    done = play(*words, "--stream", "adversary", "--stream", "gaussian", "--json")
    assert done.exit_code == 0, done.output
    games = json.loads(done.stdout)["games"]
    assert [g["bound"] is None for g in games] == [True, True, False, False]
    assert "noise" in games[0]["refusal"]
    assert games[2]["regret"] != games[3]["regret"]
    again = json.loads(play(*words, "--stream", "gaussian", "--json").stdout)["games"]
    assert again == games[2:]


@pytest.mark.parametrize(
    "learner", ["shampoo", "one-sided-shampoo", "kronecker-ftrl", "scalar-gbpa", "ftrl"]
)
def test_every_matrix_learner_can_play(play, learner):
    assert play(learner, "--rounds", 3, "--shape", "2x3").exit_code == 0


def test_vector_learners_and_a_recording(play, tmp_path):
    vectors = ("adagrad-ogd", "adagrad-ftrl", "gaussian-ftpl")
    assert play(*vectors, "--rounds", 3, "--shape", "1x4").exit_code == 0
    path = tmp_path / "recorded.pt"
    torch.save(3 * torch.randn(6, 2, 4), path)
    done = play("faml", "--stream", f"replay:gradients={path}", "--rounds", 6, "--json")
    assert done.exit_code == 0, done.output
    done = play("faml", "--stream", f"replay:gradients={path}", "--rounds", 7)
    assert done.exit_code == 2
    assert "past the end of the stream" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fmal"], ["no learner 'fmal'", "did you mean faml?", "module:Class"]),
        (["faml", "--stream", "altern"], ["no stream 'altern'", "hint:"]),
        (["faml:bogus=1"], ["no option bogus", "gradient_bound"]),
        (["faml:bogus"], ["an option of faml is 'bogus'", "faml:option=value"]),
        (["faml", "--stream", "low-rank:rank=99"], ["rank", "nucleon list streams"]),
        (["faml", "--shape", "8"], ["--shape is '8'", "as 8x16"]),
        (["faml", "--rounds", "0"], ["rounds"]),
        (["faml", "--device", "abacus"], ["abacus", "hint: pass cpu"]),
        (["adagrad-ogd"], ["shape must be a row"]),
    ],
)
def test_usage_errors(play, tmp_path, words, said):
    done = play(*words)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in said)
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


MINE = """
import torch
from nucleon.online.learners import GBPA
from nucleon.online.potentials import Admissibility, Hyperbolic, Potential


class Plain(Potential):
    def value(self, s, smoothing):
        return Hyperbolic().value(s, smoothing)

    def gradient(self, s, smoothing):
        return Hyperbolic().gradient(s, smoothing)

    def admissibility(self, m, n):
        return Admissibility(1.0, 1.0)


class Mine(GBPA):
    name = "mine"

    def __init__(self, shape, *, eta=1.0, **options):
        super().__init__(shape, Plain(), eta=eta, **options)


class Constant:
    name, gradient_bound, oblivious, rounds = "constant", 1.0, True, None

    def __init__(self, shape, size=1.0, dtype=None):
        self.shape, self.size, self.dtype = shape, size, dtype

    def gradient(self, t, action=None):
        return self.size * torch.eye(*self.shape, dtype=self.dtype)
"""


def test_learners_potentials_and_streams_of_ones_own(play, tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    own = ("faml", f"{path}:Mine", f"gbpa:potential={path}:Plain", f"{path}:Mine:eta=2")
    words = ("--stream", f"{path}:Constant:size=0.5", "--rounds", 9, "--shape", "2x3", "--json")
    done = play(*own, *words)
    assert done.exit_code == 0, done.output
    faml, mine, gbpa, other = json.loads(done.stdout)["games"]
    assert faml["regret"] == pytest.approx(mine["regret"], rel=1e-9)
    assert (
        faml["bound"] == pytest.approx(gbpa["bound"], rel=1e-9) and other["bound"] != gbpa["bound"]
    )
    assert faml["share"] == pytest.approx(faml["regret"] / faml["bound"])
    monkeypatch.chdir(tmp_path)
    done = play("mine:Mine", "gbpa:potential=hyperbolic", "--stream", "mine:Constant", *words[2:])
    assert done.exit_code == 0, done.output
    for bad, said in (
        (["mine.py:Missing"], "cannot be imported: the file has no Missing"),
        (["nowhere.py:Mine"], "cannot be imported"),
        (["no.such.module:Mine"], "cannot be imported"),
        (["mine.py:Constant"], "is no learner"),
        (["gbpa:potential=mine.py:Constant"], "shape"),
        (["gbpa:potential=hyperbol"], "did you mean hyperbolic?"),
        (["gbpa"], "potential"),
        (["mine.py:Mine:bogus=1"], "bogus"),
    ):
        done = play(*bad, "--rounds", 2)
        assert done.exit_code == 2 and said in done.stderr, (bad, done.output)
        assert "Traceback" not in done.output


def test_a_bound_with_a_probability(play):
    words = ("ftpl:samples=2", "--stream", "gaussian", "--rounds", 20, "--shape", "2x3", "--json")
    (mean,) = json.loads(play(*words).stdout)["games"]
    (drawn,) = json.loads(play(*words, "--delta", 0.01).stdout)["games"]
    assert drawn["regret"] == mean["regret"] and drawn["bound"] > mean["bound"]
    assert "probability at least 0.99" in drawn["theorem"]
    done = play(*words, "--delta", 2)
    assert done.exit_code == 2 and "delta" in done.stderr
