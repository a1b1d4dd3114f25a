"""Processes that are forks of one that has imported everything, as importing takes seconds."""

import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch.multiprocessing as mp

import nucleon

TESTS = Path(__file__).parent
NUCLEON = "from nucleon.cli import main\nmain()"
"""The command `nucleon`."""


@lru_cache
def server():
    """What starts the processes; they find the tests' own modules."""
    # Before all others the folder of the package at hand, which may be a copy of the installed one.
    source = Path(nucleon.__file__).parents[1]
    folders = (TESTS, TESTS / "distributed", TESTS / "optim", TESTS.parent / "benchmarks")
    places = [*map(str, (source, *folders)), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    context = mp.get_context("forkserver")
    ranks = ("checkpointing", "agreement", "stages")
    commands = ("torch._dynamo", "nucleon.cli.reproduce", "nucleon.report.page")
    context.set_forkserver_preload([*ranks, *commands])
    return context


class Forked:
    """A process that runs some code with arguments, as `python -c` does; like subprocess.Popen."""

    def __init__(self, code, *arguments):
        self.folder = tempfile.TemporaryDirectory()
        words = (code, ["-c", *map(str, arguments)], self.folder.name)
        self.process = server().Process(target=_run, args=words, daemon=True)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.process.kill()

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"more than {timeout} s")
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for its end; what it wrote to the two streams."""
        self.wait(timeout)
        return tuple(self.said(stream) for stream in ("stdout", "stderr"))

    def said(self, stream):
        file = Path(self.folder.name, stream)
        return file.read_text(encoding="utf-8") if file.exists() else ""


def _run(code, argv, folder):
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY), number)
    sys.argv = argv
    exec(code, {"__name__": "__main__"})
