"""The promises of the float16 directions over many kinds of matrices; violations with their input.

    python tests/half_contract.py                                        # 64, 128 and 256 rows
    python tests/half_contract.py --device cuda --rows 64 512            # judged on the CPU
    python tests/half_contract.py --device cuda --step                   # steps of the optimizers
    python tests/half_contract.py --bfloat16 Muon                        # products of bfloat16

For every kind of S and of Λ in `helpers_half`, and for many draws of its clusters, square and four
times as wide: ‖P‖_op at most 1.01, and an error no larger than that of Muon's usual five bfloat16
steps on the same [S L]. Where those are exact by accident, 0.04 will do. The errors of clusters,
made to have singular values that eleven bits do not resolve, are counted instead. Exit code 1 where
a promise is broken.
"""

import argparse
import math
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch

import nucleon

sys.path.insert(0, str(Path(__file__).parent))  # the helpers, also as a script

from helpers_half import CASES, CLUSTERS, LAMBDAS, distance, exact, jordan, pair
from nucleon.linalg.augmented import augmented_bfloat16
from nucleon.linalg.coefficients import half_polar_express
from nucleon.linalg.half import half_augmented, half_polar
from nucleon.linalg.polar import polar_bfloat16
from nucleon.optim.polar_methods import polynomials

SEQUENCE = half_polar_express(5)
LARGEST_NORM, LARGEST_ERROR = 1.01, 0.04


def bare(s, smoothing):
    """The directions themselves, by the names of their optimizers."""
    batch = None if smoothing is None else smoothing[None]
    found = {"Leon": half_augmented(s[None], batch, SEQUENCE)[0]}
    if smoothing is None:
        found["Muon"] = half_polar(s[None], SEQUENCE)[0]
    return found


def by_bfloat16(name, s, smoothing):
    """Return the direction by products of bfloat16, of the optimizer of that name."""
    sequence = polynomials("bfloat16", 5)
    if name == "Muon":
        return {} if smoothing is not None else {"Muon": polar_bfloat16(s, sequence)}
    smoothing = torch.zeros_like(s @ s.mT) if smoothing is None else smoothing
    return {"Leon": augmented_bfloat16(s, smoothing, sequence)}


def stepped(s, smoothing):
    """Return the moves of weights by steps of the optimizers whose moments become S and Λ."""
    found = {}
    for cls in (nucleon.Leon, nucleon.Muon) if smoothing is None else (nucleon.Leon,):
        weight = torch.zeros_like(s).requires_grad_()
        weight.grad = torch.zeros_like(s)
        optimizer = cls([weight], lr=1.0, momentum=0.5, scale="none", method="half")
        optimizer.state[weight]["total"].copy_(2 * s)
        if smoothing is not None:
            optimizer.state[weight]["gram"].copy_(4 * smoothing)
        optimizer.step()
        found[cls.__name__] = -weight.detach()
    return found


def judged(name, kind, m, n, seed, device, directions=bare):
    """(label, ‖P‖_op, error, Jordan's error) of the directions of one input."""
    s, smoothing = pair(name, kind, m, n, seed)
    found = directions(s.to(device), None if smoothing is None else smoothing.to(device))
    reference = exact(s, smoothing)
    theirs = distance(jordan(s, smoothing), reference)
    for method, direction in found.items():
        p = direction.cpu()
        finite = bool(p.isfinite().all())
        norm = torch.linalg.matrix_norm(p.double(), 2).item() if finite else math.inf
        label = f"{method}, S {name}, Λ {kind}, {m}×{n}, seed {seed}"
        yield label, norm, distance(p, reference), theirs


def kept(norm, error, theirs):
    """Return True if both promises hold."""
    return norm <= LARGEST_NORM and error <= max(theirs, LARGEST_ERROR)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seeds", type=int, default=1, help="of each kind of S and Λ")
    parser.add_argument("--clusters", type=int, default=50, help="draws of each kind of clusters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--step", action="store_true", help="of whole steps of Leon and Muon")
    parser.add_argument("--bfloat16", choices=("Muon", "Leon"), help="its products of bfloat16")
    options = parser.parse_args()
    broken, how = False, stepped if options.step else bare
    if options.bfloat16:
        how = partial(by_bfloat16, options.bfloat16)
    for m, wide in product(options.rows, (1, 4)):
        inputs = [*product(CASES, LAMBDAS, range(options.seeds))]
        inputs += product(CLUSTERS, ("own", "none"), range(options.clusters))
        every = (judged(c, k, m, wide * m, seed, options.device, how) for c, k, seed in inputs)
        found = [row for rows in every for row in rows]
        label, norm, *_ = max(found, key=lambda row: row[1])
        mean, theirs = (statistics.fmean(row[i] for row in found) for i in (2, 3))
        print(f"{m}×{wide * m}, {len(found)} directions: ‖P‖_op at most {norm:.4f} ({label});")
        print(f"    mean error {mean:.3f}, of Muon's five bfloat16 steps {theirs:.3f}", flush=True)
        hard = [figures for label, *figures in found if "clusters" in label]
        if above := [error - theirs for _, error, theirs in hard if error > theirs]:
            print(f"    clusters: {len(above)} of {len(hard)} errors above theirs, ", end="")
            print(f"by {statistics.median(above):.3f} in the median, {max(above):.3f} at most")
        for label, *figures in found:
            norm, error, theirs = figures
            if norm <= LARGEST_NORM and ("clusters" in label or error <= theirs):
                continue
            broken |= not kept(*figures)
            word = "above theirs" if kept(*figures) else "BROKEN"
            print(f"    {word}: {label}: ‖P‖_op {norm:.4f}, {error:.3f} against {theirs:.3f}")
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
