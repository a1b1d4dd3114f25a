import json
import re
import subprocess
import sys

import pytest

import nucleon
from nucleon import cli
from nucleon.cli import bench as bench_verb
from nucleon.cli.app import app
from nucleon.experiments import CLAIMS
from nucleon.learners import LEARNERS
from nucleon.streams import STREAMS


def test_version(command):
    assert command("--version").stdout == f"nucleon {nucleon.__version__}\n"


@pytest.mark.parametrize("verb", [c.name for c in app.registered_commands])
def test_every_verb_explains_itself_with_examples_on_lines_of_their_own(command, verb):
    done = command(verb, "--help")
    assert done.exit_code == 0
    examples = done.stdout.partition("For example:")[2].partition("╭")[0].splitlines()
    shown = [line for line in map(str.strip, examples) if f"nucleon {verb}" in line]
    assert shown
    assert all(line.startswith("nucleon") and line.count("nucleon ") == 1 for line in shown)


def test_completion_scripts_are_offered(command):
    assert "--install-completion" in command("--help").stdout


# ------------------------------------------------------------------ list


def test_list_names_everything_with_its_equation(command):
    done = command("list")
    names = (*LEARNERS, *STREAMS, *CLAIMS, "Muon", "Pion", "Leon", "Hyperbolic")
    assert all(name in done.stdout for name in names)
    assert "P = polar(Ĝ)" in done.stdout
    assert "polar(Ĝ)" not in command("list", "claims").stdout
    assert "fig-ripples" not in command("list", "optimizers").stdout
    assert command("list", "nonsense").exit_code == 2


def test_list_as_json(command):
    listed = json.loads(command("list", "learners", "--json").stdout)
    assert list(listed) == ["learners"]
    assert list(listed["learners"]) == list(LEARNERS)


# ------------------------------------------------------------------ bench


def test_bench_lists_and_runs_scripts_with_their_own_options(command, tmp_path, monkeypatch):
    (tmp_path / "quick.py").write_text('"""Times nothing.\n\nAt all."""\nimport sys\nsys.exit(7)\n')
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(bench_verb, "PLACES", (tmp_path / "absent", tmp_path))
    done = command("bench")
    assert "quick  Times nothing." in done.stdout
    assert "shared" not in done.stdout
    seen = []
    monkeypatch.setattr(
        bench_verb.subprocess,
        "run",
        lambda words, **_: seen.append(words) or subprocess.CompletedProcess(words, 7),
    )
    assert command("bench", "quick", "--set", "2x8", "--help").exit_code == 7
    assert seen == [[sys.executable, str(tmp_path / "quick.py"), "--set", "2x8", "--help"]]
    assert "the benchmarks are quick" in command("bench", "slow").stderr


def test_bench_without_a_checkout_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_verb, "PLACES", (tmp_path,))
    done = command("bench")
    assert done.exit_code == 2
    assert "not installed with the package\n  hint: clone" in done.stderr


def test_the_checkout_has_benchmarks(command):
    assert "torch's Muon" in command("bench").stdout


# ------------------------------------------------------------------ --config


PLAN = ("optimizer", "leon"), ("rho", 1), ("epsilon", 0.5), ("delta", 2), ("shape", "8x16")


def test_a_file_gives_options_and_flags_go_before_it(command, tmp_path):
    path = tmp_path / "run.toml"
    lines = [f"{name} = {value!r}" for name, value in PLAN]
    path.write_text("\n".join([*lines, "q-nuclear = 3.0", "gradient-bound = 1", "json = true"]))
    flags = [w for name, value in PLAN for w in (f"--{name}", value)]
    flags += ["--q-nuclear", 3, "--gradient-bound", 1, "--json"]
    said = command("plan", *flags)
    assert said.exit_code == 0
    assert command("plan", "--config", path).stdout == said.stdout
    other = command("plan", "--config", path, "--epsilon", 0.4).stdout
    assert other == command("plan", *flags, "--epsilon", 0.4).stdout
    assert other != said.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rho = ", ["cannot be read"]),
        ("roh = 1", ["sets 'roh'", "rho"]),
        (
            'rho = "much"\noptimizer = "leon"\nepsilon = 1\nshape = "2x2"',
            ["Invalid value for '--rho'"],
        ),
        (None, ["cannot be read"]),
    ],
)
def test_a_bad_file_is_a_usage_error(command, tmp_path, text, words):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    done = command("plan", "--config", path)
    assert done.exit_code == 2
    said = re.sub(r"[│\s]+", " ", done.stderr)
    assert all(word in said for word in words)


def test_a_file_is_read_as_strictly_as_the_command_line(command, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seeds = 1.5\nids = ['fig-ripples']\n")
    done = command("reproduce", "--config", path, "--output", tmp_path)
    assert done.exit_code == 2
    assert "Invalid value for '--seeds'" in done.stderr


# ------------------------------------------------------------------ packaging


def test_a_missing_extra_is_named_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "nucleon: the command line needs rich, which the extra [cli] brings: "
        "pip install 'nucleon-optim[cli]'\n"
    )


def test_the_library_does_not_import_the_command_lines_packages():
    code = (
        "import sys, nucleon, nucleon.experiments, nucleon.problems;"
        "print([m for m in ('typer', 'rich', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
