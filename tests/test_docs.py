"""Names, files and links on the pages exist, and their programs run."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import nucleon
from nucleon.optim.routing import roles

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])


def resolve(dotted):
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"no module for {dotted}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_and_files_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    for dotted in set(re.findall(r"`(nucleon(?:\.\w+)+)(?:\(.*?\))?`", text)):
        assert resolve(dotted) is not None, dotted
    for file, test in set(
        re.findall(r"`((?:tests|benchmarks|examples)/[\w/]+\.py)(?:::(\w+))?`", text)
    ):
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), test
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target


def test_every_function_of_the_theory_is_on_its_page():
    from nucleon.online import theory

    text = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
    functions = [n for n in theory.__all__ if not isinstance(getattr(theory, n), type)]
    assert not [n for n in functions if f"`theory.{n}`" not in text]
    for dotted in re.findall(r"^\|.*\| `([\w.]+)` \|$", text, flags=re.M):
        full = dotted if dotted.startswith("nucleon.") else f"nucleon.online.{dotted}"
        assert resolve(full) is not None, dotted


def test_every_optimizer_and_integration_is_on_the_page_of_the_api():
    from nucleon import optim

    text = (ROOT / "docs/api/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- (\w+)$|::: nucleon\.optim\.(\w+)|options of (\w+)", text, re.M))
    listed = {name for names in listed for name in names}
    shown = set(optim.__all__)
    for file in (ROOT / "src/nucleon/integrations").glob("[!_]*.py"):
        if file.stem != "quantities":  # what the others write
            source = file.read_text(encoding="utf-8")
            shown |= set(re.findall(r"^(?:def|class) (?!_)(\w+)(?!.*Protocol)", source, re.M))
    assert not shown - listed


@pytest.mark.parametrize("page", ["docs/trainers.md", "examples/trainers/torchtitan_debug.py"])
def test_commands_of_torchtitan_choose_a_backend_that_starts(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"-m torchtitan\.train(?:.*\\\n)*.*", text)
    assert commands and all("spmd_backend partial_dtensor" in command for command in commands)


def test_the_tutorial_runs(capsys):
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 4
    assert sum(block.count("\n") for block in blocks) <= 60
    space = {}
    for block in blocks:
        exec(compile(block, "tutorial", "exec"), space)
    assert "FTL" in capsys.readouterr().out


def test_training_without_a_horizon_runs(monkeypatch, tmp_path):
    page = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(block, namespace)
    saved, raw = torch.load("average.pt"), namespace["run"]["model"]
    assert saved.keys() == raw.keys() == namespace["weights"].keys()
    for name, weight in saved.items():
        assert torch.equal(weight, namespace["weights"][name])
        assert not torch.equal(weight, raw[name])


def test_the_afternoon_runs_and_prints_what_is_on_it(capsys):
    """Word for word; numbers may round otherwise on another machine, so the page asserts those."""
    text = (ROOT / "docs/afternoon.md").read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n(?:\n```console\n(.*?)```)?", text, flags=re.S)
    assert len(pairs) == 6
    space = {}
    for block, shown in pairs:
        exec(compile(block, "afternoon", "exec"), space)
        printed, shown = (re.sub(r"\d+\.\d+", "0.0", s) for s in (capsys.readouterr().out, shown))
        assert printed == shown


def test_a_gpt_of_your_own_is_cut_as_the_page_says(monkeypatch):
    """The page's override, and its registered role, are without the warning."""
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    section = text[text.index("## A GPT of your own") :]
    overridden, registered = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))
    space = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(compile(overridden, "migration", "exec"), space)
        model = space["GPT"]()
        assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 64)
        with pytest.raises(
            UserWarning, match=r"overrides={'\*c_attn.weight': {'axes': '\(b=3 r\) c'}}"
        ):
            nucleon.Leon.for_model(model)
        exec(compile(registered, "migration", "exec"), space)


def test_figures_of_whole_models_are_those_of_their_files():
    """The page has the tables that the command prints; README has some of their rows."""
    command = [sys.executable, ROOT / "benchmarks/models_report.py"]
    files = sorted(ROOT.glob("docs/figures/models/*.json"))
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 4 * (2 + len(files))
    page, readme = (
        (ROOT / name).read_text(encoding="utf-8").splitlines()
        for name in ("docs/performance.md", "README.md")
    )
    assert not set(rows) - set(page)
    readme = readme[readme.index("## Speed") :]  # with shorter headings of the same columns
    heading, line, *table = readme[2 + readme[2:].index("") + 1 :][: len(files) + 2]
    table = [row for row in table if row.startswith("|")]
    assert heading.count("|") == rows[0].count("|") and line == rows[1]
    assert len(table) > 2 and not set(table) - set(rows)


def test_the_way_to_measure_runs(capsys):
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    param = torch.ones(4, 6, requires_grad=True)
    param.grad = torch.ones(4, 6)
    exec(compile(block, "performance", "exec"), {"optimizer": nucleon.Leon([param])})
    assert " us" in (printed := capsys.readouterr().out) or " ms" in printed
    assert printed.endswith("[]\n")  # a matrix on a CPU is not one that the kernels refuse


EXTENDING = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), flags=re.S
)


# Each file in a process of its own, which begins with the parts of torch that all of them import.
ALONE = """
import os, runpy, sys
import torch._dynamo
for path in sys.argv[1:]:
    if not (child := os.fork()):
        runpy.run_path(path, run_name="__main__")
        sys.exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{path} failed")
    print("-- ran", path, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_programs_that_extend_the_library_run(tmp_path):
    """Each alone, as a file of its own, and each prints something."""
    paths = []
    for program in EXTENDING:
        (name,) = re.findall(r"class (\w+)", program)[:1]
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(program, encoding="utf-8")
    command = [sys.executable, "-c", ALONE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *printed, after = re.split(r"-- ran .*\n", done.stdout)
    assert len(printed) == len(EXTENDING) and all(printed) and not after


def test_a_method_of_ones_own_is_a_program_of_20_lines():
    (program,) = (text for text in EXTENDING if "MatrixOptimizer" in text)
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 20
