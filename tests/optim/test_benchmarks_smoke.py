"""The benchmark scripts run on tiny shapes and print what they promise."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = ("Muon", "Leon", "Pion k=1", "Pion k=4", "torch Muon", "torch AdamW")


def run(script, *arguments):
    """What the script prints, run in this process, which has most of its imports."""
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


def test_half_variants():
    names = ("--only", "as it is", "remainder", "two quintics")
    lines = run("half_variants.py", "--rows", 64, "--clusters", 1, *names).splitlines()
    usual, fewer_bits, without, quintics = lines
    assert "as it is" in usual and "above 1.01   0" in usual and "above 1.01   0" in fewer_bits
    assert float(without.split("‖P‖_op")[1].split(",")[0]) > 1.01
    error = [float(line.split("mean error ")[1].split(",")[0]) for line in (usual, quintics)]
    assert "above 1.01   0" in quintics and error[0] <= error[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_symmetric():
    """Every configuration that is timed on a GPU computes the product."""
    # A process of its own: Triton decides at import whether it compiles or interprets.
    command = [sys.executable, str(BENCHMARKS / "symmetric.py")]
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    said = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
    assert said.count("configurations are right") == 3


def test_memory():
    table = run("memory.py", "--set", "1x32", "--stack", 1, "--stack", 100_000)
    rows = {line[:20].strip(): line[20:].split() for line in table.splitlines() if line.strip()}
    weights = 12 * 32 * 32 * 4 / 2**20
    for name in ("Muon", "Leon"):
        state, small, large = map(float, rows[name])
        # The Grams of four matrices of short side 32; the state's counters are a few bytes.
        assert abs(state - weights - (4 * 32 * 32 * 4 / 2**20 if name == "Leon" else 0)) <= 0.051
        assert 0 < small <= large
    assert set(METHODS) <= set(rows)


def test_step_profile():
    lines = run("step_profile.py", "2x16x24", "--device", "cpu", "--method", "Muon").splitlines()
    at = lines.index("Muon, 2x16x24") + 1
    *kernels, last = (line.split("µs")[0].split() for line in lines[at:])
    assert any("mm" in name for name, _ in kernels)  # polynomials are products
    assert last[:2] == [str(len(kernels)), "kernels"]
    assert abs(float(last[2]) - sum(float(t) for _, t in kernels)) <= 0.1 * len(kernels)


def test_adamw():
    sizes = ("--entries", 1000, "--rounds", 2, "--queue", 2)
    table = run("adamw.py", "--device", "cpu", "--set", "one tensor, bf16", *sizes)
    assert "1 tensors, 1,000 entries, bfloat16" in table
    rows = {
        line[:14].strip(): line[14:].split() for line in table.splitlines() if line[:14].strip()
    }
    ours, theirs = (list(map(float, rows[name])) for name in ("nucleon", "torch fused"))
    ratio, queued = map(float, rows["/ torch fused"])
    assert abs(ratio - ours[0] / theirs[0]) <= 0.01 * ratio + 0.001
    assert abs(queued - ours[1] / theirs[1]) <= 0.01 * queued + 0.001
