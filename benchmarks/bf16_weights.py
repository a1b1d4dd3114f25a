"""What bf16 weights cost a run of Leon, and what `stochastic_rounding` gives back.

    python benchmarks/bf16_weights.py                      # the standard library's sources
    python benchmarks/bf16_weights.py --text input.txt     # a text of one's own

A small GPT learns characters, its products in bfloat16; the matrices that Leon moves are kept in
float32, in bfloat16, and in bfloat16 with stochastic rounding, the rest and the batches are the
same. The rate falls linearly to zero. Printed are the held-out loss after the last step, its mean
and standard deviation over the seeds, and how many steps of an entry are large enough to move it:
those above half the distance to the next bfloat16, in the middle of the float32 run.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

import nucleon
from gpt import GPT, Text, characters, loss, read

KINDS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, stochastic": (torch.bfloat16, True),
}
BATCH = 8
PRODUCTS = torch.autocast("cpu", torch.bfloat16)


def run(
    data: Text, width: int, kind: str, rate: float, seed: int, steps: int
) -> tuple[float, float]:
    """(held-out loss, share of steps of an entry that round to a move) of one run."""
    torch.manual_seed(seed)
    model = GPT(data.vocabulary, context=data.context, layers=2, heads=2, width=width)
    dtype, stochastic = KINDS[kind]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            module.to(dtype)
    optimizer = nucleon.Leon.for_model(
        model, lr=rate, aux_lr=3e-3, stochastic_rounding=stochastic, seed=seed
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    matrices = [p for g in optimizer.param_groups if g["route"] == "matrix" for p in g["params"]]
    moved = float("nan")
    for step in range(steps):
        with PRODUCTS:
            value = loss(model, *data.batch(step, BATCH, seed=seed))
        value.backward()
        before = [p.detach().clone() for p in matrices] if step == steps // 2 else []
        optimizer.step()
        if before:
            moved = share_that_rounds(before, matrices)
        optimizer.zero_grad()
        rates.step()
    return held_out(model, data), moved


def share_that_rounds(before: list[Tensor], after: list[Tensor]) -> float:
    """The share of entries that would have moved too had they been rounded to bfloat16."""
    pairs = zip(before, after, strict=True)
    found = [(a.bfloat16().float() + (b - a).float()).bfloat16() != a.bfloat16() for a, b in pairs]
    return sum(f.sum().item() for f in found) / sum(f.numel() for f in found)


@torch.no_grad()
def held_out(model: nn.Module, data: Text) -> float:
    with PRODUCTS:
        values = [loss(model, *batch).item() for batch in data.judged(BATCH)]
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file, or a folder of them")
    parser.add_argument("--rate", type=float, action="append", help="of Leon; may be repeated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    data = characters(read(options.text), context=64)
    print(f"torch {torch.__version__}, {options.steps} steps, {options.seeds} seeds")
    print(f"{'rate':>8} {'moves':>7} " + "".join(f"{kind:>20}" for kind in KINDS))
    for rate in options.rate or (0.02, 2e-3):
        cells, moves = list[str](), list[float]()
        for kind in KINDS:
            runs = [
                run(data, options.width, kind, rate, seed, options.steps)
                for seed in range(options.seeds)
            ]
            values = [value for value, _ in runs]
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            cells.append(f"{statistics.fmean(values):13.3f} ± {spread:.3f} ")
            if kind == "float32":
                moves = [share for _, share in runs]
        print(f"{rate:8g} {statistics.fmean(moves):7.2f} " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
