"""Real processes that stay: tests hand them functions to run."""

import socket
import traceback
from datetime import timedelta

from helpers_forks import server

TIMEOUT = 20  # seconds until a rank that does not answer is an error


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(rank, size, meeting, timeout, pipe):
    """Run what comes through the pipe until it closes; answer with the result or the traceback."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=limit)
    import agreement
    import cases
    import checkpointing
    import stages

    modules = (cases, checkpointing, agreement, stages)

    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            module = next(m for m in modules if hasattr(m, name))
            pipe.send((True, getattr(module, name)(**arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """`size` ranks over gloo; a call runs on all of them and returns their results in order."""

    def __init__(self, size, timeout=TIMEOUT, meeting=None):
        context, meeting = server(), meeting or f"tcp://127.0.0.1:{free_port()}"
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, meeting, timeout, there)
            process = context.Process(target=serve, args=arguments, daemon=True)
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
        self.send(name, **arguments)
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def send(self, name, **arguments):
        for pipe in self.pipes:
            pipe.send((name, arguments))

    def answer(self, rank):
        """(worked, result or message) of one rank."""
        if not self.pipes[rank].poll(6 * TIMEOUT):
            return False, "did not answer"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(5)
            return False, f"died with status {self.processes[rank].exitcode}"

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
