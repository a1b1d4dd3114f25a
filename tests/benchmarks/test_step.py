"""The benchmark scripts run on tiny shapes and print what they promise."""

import argparse
import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path
from unittest import mock

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = ("Muon", "Leon", "Pion k=1", "Pion k=4", "torch Muon", "torch AdamW")


def run(script, *arguments):
    """Return the output of the script, run in this process, which has most of its imports."""
    command = [str(BENCHMARKS / script), *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        runpy.run_path(command[0], run_name="__main__")
    return said.getvalue()


def test_step(tmp_path):
    figures = tmp_path / "step.json"
    table = run("step.py", "--set", "1x8", "--rounds", 3, "--warmup", 1, "--json", figures)
    assert "1 of 24×8" in table and "threads" in table and "/ torch Muon" in table
    (result,) = json.loads(figures.read_text())["results"]
    assert set(METHODS) <= set(result["milliseconds"])
    assert all(value > 0 for value in result["milliseconds"].values())
    # Five quintics are within a few percent, Jordan's in bfloat16 is not a polar factor at all.
    errors = result["error"]
    assert all(errors[name] < 0.1 for name in METHODS if name != "torch Muon")
    assert 0.05 < errors["torch Muon"] < 0.6


def test_bare_directions(monkeypatch, capsys):
    """`--directions` has shapes of its own, which a processor does not finish soon."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    step = importlib.import_module("step")
    numbers = {"rounds": 3, "warmup": 1, "error": True, "error_rows": 64}
    chosen = argparse.Namespace(device="cpu", cpu_time=False, fall=0.0, **numbers)
    found = step.directions((2, 8, 12), {}, chosen)
    assert all(found["error"][name] < 0.1 for name in ("Muon", "Leon")), found
    assert found["orthogonality"]["Muon"] < found["orthogonality"]["torch Muon"]
    assert "Leon" in capsys.readouterr().out
