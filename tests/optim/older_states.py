"""The runs behind tests/data/states: what an earlier version saved, and where it went from there.

    PYTHONPATH=<a checkout of the earlier version>/src python tests/optim/older_states.py

writes them. `model`, `optimizer` and `go` are written so that every version can run them.
"""

import copy
from pathlib import Path

import torch
from torch import nn

import nucleon

FOLDER = Path(__file__).parents[1] / "data" / "states"
BEFORE, AFTER = 3, 3  # steps

CASES = {
    "muon": ("Muon", {"nesterov": True, "weight_decay": 0.1}),
    "leon": ("Leon", {"weight_decay": 0.1, "consistency_every": None}),
    "leon_certified": ("Leon", {"certify": True, "gradient_bound": 20.0}),
    "leon_bf16": ("Leon", {"momentum_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "pion": ("Pion", {"steps": "exponential", "seed": 3}),
    "pion_certified": ("Pion", {"certify": True, "gradient_bound": 20.0}),
}


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


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        net = model(case)
        method = optimizer(case, net)
        start = go(net, method, 0, BEFORE)
        state = copy.deepcopy(method.state_dict())  # what is saved must not follow the run
        found = {"start": start, "optimizer": state}
        found["end"] = go(net, method, BEFORE, BEFORE + AFTER)
        file = FOLDER / f"{case}.pt"
        torch.save(found, file, _use_new_zipfile_serialization=False)  # a third of the size
        print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
