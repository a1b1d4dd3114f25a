"""The runs behind tests/data/states: what an earlier version saved, and where it went from there.

    PYTHONPATH=<a checkout of the earlier version>/src python tests/optim/older_states.py

writes them. `model`, `optimizer` and `go` are written so that every version can run them.
"""

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import nucleon
from nucleon import learners

FOLDER = Path(__file__).parents[1] / "data" / "states"
BEFORE, AFTER = 3, 3  # steps

CASES = {
    "muon": ("Muon", {"nesterov": True, "weight_decay": 0.1}),
    "leon": ("Leon", {"weight_decay": 0.1, "consistency_every": None}),
    "leon_certified": ("Leon", {"certify": True, "gradient_bound": 20.0}),
    "leon_bf16": ("Leon", {"momentum_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "muon_certified": ("Muon", {"certify": True}),
    "pion": ("Pion", {"steps": "exponential", "seed": 3}),
    "pion_certified": ("Pion", {"certify": True, "gradient_bound": 20.0}),
}
RANKS = 2

BOUND = {"gradient_bound": 20.0}
PROCESSES = {
    "FTL": BOUND,
    "FTRL": BOUND,
    "FTPL": BOUND,
    "FAML": BOUND,
    "GaussianFTPL": BOUND,
    "KroneckerFTRL": BOUND,
    "Shampoo": {},
    "OneSidedShampoo": {},
    "AdaGradOGD": {"ball": "l2"},
    "AdaGradFTRL": {"ball": "l2", "delta": 20.0},
}
"""What O2NC plays, by the name of the learner, and its options."""


class Tiny(nn.Module):
    """Matrices wide and tall, fused projections, a convolution, a frozen matrix, the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.convolution = nn.Conv2d(2, 3, 2)
        for i, param in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(i)
            nn.init.normal_(param, std=0.3, generator=generator)


def model(case):
    return Tiny().to(torch.bfloat16 if case == "leon_bf16" else torch.float32)


def optimizer(case, of, **changes):
    method, options = CASES[case]
    return getattr(nucleon, method).for_model(of, lr=0.05, **{**options, **changes})


def of_a_list(case, of, **changes):
    """Matrices that are named and have no axes of their own."""
    method, options = CASES[case]
    named = [(n, p) for n, p in of.named_parameters() if p.ndim == 2 and p.requires_grad]
    return getattr(nucleon, method)(named, lr=0.05, **{**options, **changes})


def go(of, by, start, stop):
    """Steps on prescribed gradients; one matrix has none at the first of them."""
    for step in range(start, stop):
        for i, param in enumerate(of.parameters()):
            generator = torch.Generator().manual_seed(1000 + 100 * step + i)
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = gradient if param.requires_grad else None
        if step == 0:
            of.up.weight.grad = None
        by.step()
    return {name: param.detach().clone() for name, param in of.named_parameters()}


def process(name):
    """A parameter, and O2NC on it; the learners of vectors have a row."""
    rows = 1 if name.startswith(("AdaGrad", "Gaussian")) else 2
    param = nn.Parameter(torch.full((rows, 3), 0.5, dtype=torch.float64))
    known = {"rho": 1.0, "discount": 0.9, "rounds": 20, "seed": 3, **PROCESSES[name]}
    return param, nucleon.O2NC([param], getattr(learners, name), **known)


def walk(param, by, start, stop):
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        by.step()
    return param.detach().clone()


def recorded(goes, state):
    """What is saved, and the weights before and after; it must not follow the run."""
    found = {"start": goes(0, BEFORE), "optimizer": copy.deepcopy(state())}
    return {**found, "end": goes(BEFORE, BEFORE + AFTER)}


def write(name, found):
    file = FOLDER / f"{name}.pt"
    torch.save(found, file, _use_new_zipfile_serialization=False)  # a third of the size
    print(f"{file.name}: {file.stat().st_size} bytes")


def run(case, make=optimizer, **changes):
    net = model(case)
    method = make(case, net, **changes)
    return recorded(lambda *steps: go(net, method, *steps), method.state_dict)


def run_process(name):
    param, by = process(name)
    return recorded(lambda *steps: walk(param, by, *steps), by.state_dict)


def run_rank(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    write(f"leon_certified_of_rank_{rank}", run("leon_certified", placement="owner"))
    write(f"muon_of_rank_{rank}", run("muon", of_a_list, placement="owner"))
    dist.destroy_process_group()


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        write(case, run(case))
    write("o2nc", {name: run_process(name) for name in PROCESSES})
    mp.spawn(run_rank, nprocs=RANKS)


if __name__ == "__main__":
    main()
