"""A server whose processes are forks of one that has imported everything, as importing is slow."""

import os
from functools import lru_cache
from pathlib import Path

import torch.multiprocessing as mp

import nucleon

TESTS = Path(__file__).parent


@lru_cache
def server():
    """Return what starts the processes; they find the tests' own modules."""
    # Before all others the folder of the package at hand, which may be a copy of the installed one.
    source = Path(nucleon.__file__).parents[1]
    folders = (TESTS, TESTS / "distributed", TESTS / "optim", TESTS.parent / "benchmarks")
    places = [*map(str, (source, *folders)), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["checkpointing", "agreement", "stages", "torch._dynamo"])
    return context
