"""How much the noise of Pion's direction falls when its draws come in pairs Z, −Z.

    python benchmarks/antithetic.py
    python benchmarks/antithetic.py --shape 32x32 --samples 4

The variance of P at one state, Σ_ij Var P_ij over many seeds, of k independent draws and of k/2
pairs: after one step on a Gaussian gradient, and after several, each of a gradient of its own.
Polar factors by the SVD in float64; mean and standard deviation over problems.
"""

import argparse
import statistics

import torch
from torch import Tensor

import nucleon

ROUNDS = (1, 20)


def variance(
    gradients: list[Tensor], draws: int, *, samples: int, antithetic: bool, seed: int
) -> float:
    """Σ_ij Var P_ij of the last of the directions along these gradients.

    The draws are the matrices of one stack: each has a stream of noise of its own.
    """
    m, n = gradients[0].shape
    weights = torch.zeros(draws, m, n, dtype=torch.float64, requires_grad=True)
    pion = nucleon.Pion(
        [weights], lr=1.0, scale="none", method="svd", samples=samples, antithetic=antithetic,
        seed=seed,
    )  # fmt: skip
    for gradient in gradients:
        weights.grad = gradient.expand_as(weights).contiguous()
        weights.detach().zero_()  # so that it ends as minus the last direction
        pion.step()
    return weights.detach().var(dim=0).sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="16x32", metavar="MxN")
    parser.add_argument("--samples", type=int, default=2, help="k, an even number")
    parser.add_argument("--draws", type=int, default=400, help="seeds that a variance is of")
    parser.add_argument("--problems", type=int, default=5, help="sequences of gradients")
    options = parser.parse_args()
    m, n = map(int, options.shape.split("x"))
    print(f"torch {torch.__version__}; {m}×{n}, k = {options.samples}, ", end="")
    print(f"{options.draws} draws, {options.problems} problems")
    print(f"{'after':>8} {'independent':>18} {'pairs':>18} {'ratio':>14}")
    for rounds in ROUNDS:
        found: dict[bool, list[float]] = {False: [], True: []}
        for problem in range(options.problems):
            generator = torch.Generator().manual_seed(problem)
            gradients = [
                torch.randn(m, n, generator=generator, dtype=torch.float64) for _ in range(rounds)
            ]
            for pairs, values in found.items():
                values.append(
                    variance(
                        gradients, options.draws, samples=options.samples, antithetic=pairs,
                        seed=problem,
                    )
                )  # fmt: skip
        ratios = [b / a for a, b in zip(found[False], found[True], strict=True)]
        cells = (_cell(values) for values in (found[False], found[True], ratios))
        print(f"{rounds:>2} steps " + "".join(f"{cell:>18}" for cell in cells), flush=True)


def _cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
