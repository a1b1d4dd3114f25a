import json
import math
import subprocess
import sys

import pytest

import nucleon
from nucleon import cli
from nucleon.claims import CLAIMS
from nucleon.cli.app import app
from nucleon.cli.console import CommandError
from nucleon.cli.play import setting
from nucleon.online.learners import LEARNERS
from nucleon.online.streams import STREAMS


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


# ------------------------------------------------------------------ packaging


def test_a_missing_extra_is_named_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "nucleon: the command line needs rich; install the extra [cli]: "
        "pip install 'nucleon-optim[cli]'\n"
    )


def test_the_library_does_not_import_the_command_lines_packages():
    code = (
        "import sys, nucleon, nucleon.claims, nucleon.online.problems;"
        "print([m for m in ('typer', 'rich', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("1e-3", 1e-3), ("-4", -4), ("0x1F", 31), ("True", True), ("true", True)),
        *(("null", None), ("inf", math.inf), ("-inf", -math.inf), ("eigh", "eigh"), ("'1'", "1")),
        *(("", ""), ("a.pt", "a.pt"), ("0.9,0.95", (0.9, 0.95)), ("[1", "[1"), ("a=b", "a=b")),
        *(("{[]: 1}", "{[]: 1}"), ("(" * 500, "(" * 500), ("open('x')", "open('x')")),
    ],
)
def test_a_value_is_a_python_literal_or_text(word, value):
    read = setting("faml", f"some-name={word}")
    assert repr(read) == repr(("some_name", value))


@pytest.mark.parametrize("text", ["lr", "=1", "1r=1", "a b=1", ""])
def test_what_sets_nothing_is_refused(text):
    with pytest.raises(CommandError, match=f"an option of faml is '{text}'") as refused:
        setting("faml", text)
    assert refused.value.hint == "write faml:option=value"
