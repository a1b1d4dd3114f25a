"""Real processes that stay: each test hands them a function of `cases.py` to run together."""

import os
import socket
import traceback
from datetime import timedelta

import torch.multiprocessing as mp

TIMEOUT = 20  # seconds until a rank that does not answer is an error


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(rank, size, port, pipe):
    """Run what comes through the pipe until it closes; answer with the result or the traceback."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    import cases

    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(cases, name)(**arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """`size` ranks over gloo; a call runs on all of them and returns their results in order."""

    def __init__(self, size):
        context, port = mp.get_context("spawn"), free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, name, **arguments):
        answers = self.try_all(name, **arguments)
        failed = [f"rank {i}: {text}" for i, (ok, text) in enumerate(answers) if not ok]
        assert not failed, "\n".join(map(str, failed))
        return [value for _, value in answers]

    def try_all(self, name, **arguments):
        """(worked, result or message) of each rank."""
        for pipe in self.pipes:
            pipe.send((name, arguments))
        answers = []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if not pipe.poll(6 * TIMEOUT):
                answers.append((False, "did not answer"))
            else:
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    process.join(5)
                    answers.append((False, f"died with status {process.exitcode}"))
        return answers

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
