"""Modules that are loaded, each in a process of its own, since this one has everything."""

import graphlib
import subprocess
import sys
import time

import grimp
import pytest

import nucleon
from nucleon import claims, cli
from nucleon.cli.app import VERBS, command

OPTIONAL = (
    *("transformers", "matplotlib", "triton", "typer", "rich", "jinja2", "scipy", "sklearn"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "lightning", "sympy"),
)
BEYOND_TORCH = 0.3
"""Seconds of processor time: what else the machine does counts for nothing."""


def after(code, *watched):
    """Return those of the watched modules that some code loads, and its processor time."""
    program = (
        "import sys, time\n"
        "begun = time.process_time()\n"
        f"{code}\n"
        "print('\\n', time.process_time() - begun, *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    seconds, *loaded = done.stdout.splitlines()[-1].split()
    return [name for name in watched if name in loaded], float(seconds)


def test_the_package_loads_its_names_on_first_use():
    assert after("import nucleon", "torch", "numpy", "nucleon.optim") == (
        [],
        pytest.approx(0, abs=0.3),
    )
    code = "import torch\nbegun = time.process_time()\nimport nucleon"
    loaded, seconds = after(code, *OPTIONAL)
    assert loaded == []
    assert seconds < BEYOND_TORCH


def test_the_optimizers_need_no_learner():
    watched = ("nucleon.optim", "nucleon.online")
    loaded, _ = after("import nucleon\nnucleon.Leon, nucleon.Muon, nucleon.Pion", *watched)
    assert loaded == ["nucleon.optim"]


def test_no_module_imports_itself_through_others():
    """Imports inside functions and those for type checkers count: they are read from the source."""
    graph = grimp.build_graph("nucleon", cache_dir=None)
    result = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    kernels = "nucleon.optim.engines.cuda.adamw_kernels"  # imported in both of these ways alone
    assert kernels in result["nucleon.optim.engines.cuda.adamw"]
    assert {*graphlib.TopologicalSorter(result).static_order()} == {*result}  # or CycleError


def test_what_is_used_brings_no_package_it_does_not_need():
    code = """import nucleon
nucleon.Leon, nucleon.Muon, nucleon.Pion, nucleon.online.O2NC
nucleon.online.play, nucleon.online.FAML, nucleon.online.streams, nucleon.online.theory
nucleon.online.game.play, nucleon.moments, nucleon.online.problems  # modules are attributes
nucleon.claims.CLAIMS"""
    assert after(code, *OPTIONAL)[0] == []
    assert cli is nucleon.cli


def test_the_optimizers_cost_little_beyond_torch():
    """Once in three: a first import may still have to compile the files."""
    code = "import torch\nbegun = time.process_time()\nimport nucleon; nucleon.Leon"
    assert any(after(code)[1] < BEYOND_TORCH for _ in range(3))


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_line_answers_without_torch(option):
    code = (
        f"from nucleon.cli import main\nsys.argv = ['nucleon', '{option}']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    clock = time.perf_counter()
    loaded, seconds = after(code, "torch", "numpy", "nucleon.optim", "nucleon.cli.play")
    assert loaded == []
    assert seconds < 0.5, time.perf_counter() - clock


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_verbs_says_what_they_say_themselves(name):
    assert command(name).help.partition("\n\n")[0].replace("\n", " ") == VERBS[name]


@pytest.mark.parametrize("package", [nucleon, nucleon.online, claims])
def test_every_name_is_there_and_listed(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        package.x  # noqa: B018
    assert not hasattr(package, "_private")


def test_what_a_module_needs_is_missed_by_its_own_name():
    code = (
        "sys.modules['jinja2'] = None\n"
        "try:\n    import nucleon.report.page\n"
        "except ModuleNotFoundError as error:\n    assert error.name == 'jinja2'\n"
        "else:\n    raise SystemExit(1)"
    )
    after(code)
