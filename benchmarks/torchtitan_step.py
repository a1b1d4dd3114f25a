"""A step of torchtitan with its AdamW and with ours: milliseconds and memory, on one device.

    python benchmarks/torchtitan_step.py                       # Llama of 10⁹ weights, on CUDA
    python benchmarks/torchtitan_step.py --model debugmodel --sequence 32 --steps 2   # on a CPU

torchtitan runs as on many devices, FSDP2 over a mesh of one rank and NCCL, with attention of torch,
without CUDA graphs, and with the loss in one piece, not in chunks. A step is forward, backward,
clipping and the optimizer's, the median of several; memory is the largest that was allocated within
them. Packages that torchtitan imports and that are not used here need not be there: a stand-in
takes their place.
"""

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "trainers"))
OPTIMIZERS = ("adamw", "muon", "leon")


class Unused(ModuleType):
    """A module of a package that is not installed; all it has are names."""

    __path__: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in() -> None:
    """Let torchtitan be imported without data sets and TensorBoard, and with torch 2.11."""
    for name, parts in {"datasets": ("distributed",), "tensorboard": ()}.items():
        if importlib.util.find_spec(name) is None:
            names = [name, *(f"{name}.{part}" for part in parts)]
            names += ["torch.utils.tensorboard"] if name == "tensorboard" else []
            sys.modules.update({each: Unused(each) for each in names})
    if not hasattr(fsdp, "DataParallelMeshDims"):  # of a backend that is not chosen here
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})


def single() -> None:
    """The environment of a run of one process."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29500}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


def prepare() -> None:
    """Make torchtitan ready in this process: what it lacks on this machine comes before it."""
    stand_in()
    single()
    logging.disable(logging.WARNING)
    try:
        import torchtitan_debug  # noqa: F401
    except ImportError as error:
        sys.exit(f"needs a checkout, and pip install 'nucleon-optim[torchtitan]': {error}")


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, the device included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def build(optimizer: str, chosen: argparse.Namespace, folder: str) -> Any:
    """The trainer of a Llama, with one of the optimizers."""
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan_debug import on_numbers, plain

    config = llama3_debugmodel()
    config.model_spec = model_registry(chosen.model)
    config.loss = config.loss.loss_fn  # in chunks, FSDP2 of torch 2.11 frees a weight too early
    config.loss.global_vocab_size = config.model_spec.model.vocab_size
    config = plain(on_numbers(config, folder, steps=1000))
    config.training.seq_len, config.training.local_batch_size = chosen.sequence, chosen.batch
    config.activation_checkpoint, config.metrics.log_freq = None, 10**6
    if optimizer == "adamw" and not torch.cuda.is_available():
        config.optimizer.implementation = "foreach"
    if optimizer != "adamw":
        target = f"nucleon.integrations.torchtitan.{optimizer}"
        config.override.imports = [(target, {"lr": 0.02})]
    return config.build()


def measure(optimizer: str, chosen: argparse.Namespace) -> None:
    """Print a line: all of a step, the optimizer's part, memory at most, and the state's."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(optimizer, chosen, folder)
        data, parts = trainer.batch_generator(trainer.dataloader), list[float]()
        step = trainer.optimizers.step
        trainer.optimizers.step = lambda: parts.append(timed(step))
        for _ in range(3):  # first steps allocate, and record graphs
            trainer.step += 1
            trainer.train_step(data)
        parts.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        whole: list[float] = []
        for _ in range(chosen.steps):
            trainer.step += 1
            whole.append(timed(lambda: trainer.train_step(data)))
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        states = [s for o in trainer.optimizers for s in o.state.values()]
        kept = sum(
            getattr(x, "_local_tensor", x).nbytes
            for state in states
            for x in state.values()
            if isinstance(x, torch.Tensor)
        )
        figures = f"{statistics.median(whole):10.1f}{statistics.median(parts):14.2f}"
        print(f"{optimizer:10}{figures}{most / 2**30:12.2f}{kept / 2**30:15.2f}", flush=True)
        trainer.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure the optimizers one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="1B", help="a Llama of torchtitan's")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    chosen = parser.parse_args()
    prepare()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"Llama {chosen.model}, {chosen.batch} × {chosen.sequence} tokens, {where}, ", end="")
    print(f"torch {torch.__version__}\n\n{'':10}{'ms per step':>12}{'of optimizer':>14}", end="")
    print(f"{'GiB at most':>12}{'GiB of state':>15}", flush=True)
    for optimizer in chosen.optimizers:  # each in a process of its own, with memory of its own
        process = get_context("spawn").Process(target=measure, args=(optimizer, chosen))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
