import json
import math
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nucleon
from nucleon import cli
from nucleon.cli import bench as bench_verb
from nucleon.cli.app import app
from nucleon.cli.console import CommandError, _rate, setting
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
    assert list(listed["learners"]) == [*LEARNERS, "gbpa"]


def test_list_takes_a_file_as_the_other_verbs_do(command, tmp_path):
    (tmp_path / "run.toml").write_text('kind = "learners"\njson = true\n')
    go = ("list", "--config", tmp_path / "run.toml")
    assert list(json.loads(command(*go).stdout)) == ["learners"]
    assert list(json.loads(command(*go, "claims").stdout)) == ["claims"]


# ------------------------------------------------------------------ progress


def test_rates_are_plain_numbers():
    shown = [_rate(value) for value in (0.03117, 4.5678, 99.96, 1234.5, 2e6)]
    assert shown == ["0.0312", "4.57", "100", "1,234", "2,000,000"]


# ------------------------------------------------------------------ bench


TIMES = '''"""Times nothing.

At all."""
import sys

if __name__ == "__main__":
    print(f"{'':10}{'ms':>9}\\n{'Muon, ours':10}{1234.5:>12,.2f}\\n\\nwith {sys.argv[1:]}")
    if "--warn" in sys.argv:
        print("a warning", file=sys.stderr)
    if "--crash" in sys.argv:
        raise ValueError("no such shape")
    sys.exit(7)
'''


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    (tmp_path / "times.py").write_text(TIMES)
    (tmp_path / "shared.py").write_text("")  # not a command: the others import it
    monkeypatch.setattr(bench_verb, "PLACES", (tmp_path / "absent", tmp_path))


@pytest.mark.usefixtures("benchmarks")
def test_bench_lists_and_passes_on_what_follows_the_name(command):
    listed = command("bench").stdout
    assert "times  Times nothing." in listed
    assert "shared" not in listed
    done = command("bench", "times", "--json", "file", "--help")
    assert done.exit_code == 7
    assert done.stdout.endswith("with ['--json', 'file', '--help']\n")
    assert "the benchmarks are times" in command("bench", "slow").stderr


@pytest.mark.usefixtures("benchmarks")
def test_bench_for_machines(command):
    listed = json.loads(command("bench", "--json").stdout)
    assert listed == {"benchmarks": {"times": "Times nothing."}}
    done = command("bench", "--json", "times", "--warn", "8x8")
    assert done.exit_code == 7
    assert done.stderr == "times  started\na warning\n"
    found = json.loads(done.stdout)
    assert found.pop("seconds") > 0
    assert found == {
        "benchmark": "times",
        "arguments": ["--warn", "8x8"],
        "exit_code": 7,
        "rows": [["ms"], ["Muon, ours", 1234.5], ["with ['--warn', '8x8']"]],
    }


@pytest.mark.usefixtures("benchmarks")
def test_bench_takes_a_file_and_what_is_given_goes_before_it(command, tmp_path):
    path = tmp_path / "bench.toml"
    path.write_text('name = "times"\narguments = ["--set", "2x8"]\njson = true\n')
    found = json.loads(command("bench", "--config", path).stdout)
    assert found["arguments"] == ["--set", "2x8"]
    found = json.loads(command("bench", "--config", path, "times", "--set", "4x4").stdout)
    assert found["arguments"] == ["--set", "4x4"]
    path.write_text("nam = 1")
    done = command("bench", "--config", path)
    assert done.exit_code == 2
    assert "sets 'nam'" in re.sub(r"[│\s]+", " ", done.stderr)


@pytest.mark.usefixtures("benchmarks")
def test_a_benchmark_that_breaks_is_a_sentence_and_a_traceback_with_debug(command, capfd):
    done = command("bench", "times", "--crash")
    assert done.exit_code == 2
    assert done.stderr == (
        "times  started\n"
        "nucleon: ValueError: no such shape\n  hint: add --debug to see where it happened\n"
    )
    assert "Traceback" not in capfd.readouterr().err
    assert command("bench", "--debug", "times", "--crash").exit_code == 1
    assert "Traceback (most recent call last):" in capfd.readouterr().err


SLOW = """
import sys, time
if __name__ == "__main__":
    print("a row")
    print("a word", file=sys.stderr)
    time.sleep(60)
"""


def test_bench_is_heard_of_from_the_start(tmp_path):
    """Lines come as the benchmark prints them, and an interrupt ends it too."""
    (tmp_path / "slow.py").write_text(SLOW)
    code = (
        "import signal, sys; from pathlib import Path; from nucleon.cli import app, bench\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "bench.PLACES = (Path(sys.argv[1]),); app.app(['bench', 'slow'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "slow  started\n"
    assert process.stdout.readline() == "a row\n"
    assert process.stderr.readline() == "a word\n"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130


def test_a_package_without_benchmarks_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_verb, "PLACES", (tmp_path,))
    done = command("bench")
    assert done.exit_code == 2
    assert "not installed with the package\n  hint: install it again" in done.stderr


def test_the_checkout_and_the_wheel_have_the_benchmarks(command):
    assert "torch's Muon" in command("bench").stdout
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"benchmarks": f"nucleon/{bench_verb.PLACES[0].name}"}


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


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("1e-3", 1e-3), ("-4", -4), ("1_000", 1000), ("0x1F", 31), (" 2 ", 2), ("1.", 1.0)),
        *(("True", True), ("true", True), ("None", None), ("null", None), ("-inf", -math.inf)),
        *(("eigh", "eigh"), ('"eigh"', "eigh"), ("'1'", "1"), ("", ""), ("a.pt", "a.pt")),
        *(("0.9,0.95", (0.9, 0.95)), ("[1, inf, true]", [1, math.inf, True]), ("[1", "[1")),
        ('{"*.w": {"route": "adamw", "axes": null}}', {"*.w": {"route": "adamw", "axes": None}}),
        *(("{[]: 1}", "{[]: 1}"), ("(" * 500, "(" * 500), ("-true", "-true"), ("a=b", "a=b")),
        *(("open('x')", "open('x')"), ("2**9", "2**9"), ("\0", "\0"), ("\udcff", "\udcff")),
        *((x, x) for x in ("...", "{1, 2}", "1+2j", "b'x'", "{1: 2}", "[{1: 2}]", r"a\d")),
    ],
)
def test_a_value_is_a_python_literal_or_text(word, value):
    assert repr(setting("--set", f"some-name={word}")) == repr(("some_name", value))


@pytest.mark.parametrize("text", ["lr", "=1", "1r=1", "a b=1", ""])
def test_what_sets_nothing_is_refused(text):
    with pytest.raises(CommandError, match=f"--set is '{text}'") as refused:
        setting("--set", text)
    assert "NAME=VALUE" in refused.value.hint
