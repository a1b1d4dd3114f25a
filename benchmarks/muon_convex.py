"""Muon and Leon on a convex loss of diag(x, y), without and with momentum; a figure for docs.

    python benchmarks/muon_convex.py                  # prints the losses after 3,000 steps
    python benchmarks/muon_convex.py --figure docs/figures/muon-convex.png

The loss ε|x + y| + |x − y| has the slopes diag(εa + b, εa − b) with signs a and b. For ε < 1 their
polar factor is diag(b, −b), so that Muon without momentum never moves x + y.
"""

import argparse
import math

import torch

from nucleon import Leon, Muon

EPSILON, START, RATE, STEPS = 0.3, (1.0, 0.2), 0.2, 3000
METHODS = {
    "Muon": lambda w, momentum: Muon([w], lr=RATE, momentum=momentum, scale="none", method="svd"),
    "Leon": lambda w, momentum: Leon(
        [w], lr=RATE, momentum=momentum, beta2=0.95, scale="none", method="eigh"
    ),
}


def losses(method: str, momentum: float, steps: int = STEPS) -> list[float]:
    """Return the loss before each step of rate RATE/√t."""
    w = torch.nn.Parameter(torch.diag(torch.tensor(START, dtype=torch.float64)))
    optimizer = METHODS[method](w, momentum)
    path: list[float] = []
    for t in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = RATE / math.sqrt(t)
        terms = torch.stack([EPSILON * (w[0, 0] + w[1, 1]), w[0, 0] - w[1, 1]])
        loss = torch.where(terms >= 0, terms, -terms).sum()  # at a kink the slope of one side
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        path.append(loss.item())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figure", help="where to draw the losses, as a PNG (default: nowhere)")
    arguments = parser.parse_args()
    paths = {(m, name): losses(name, m) for m in (0.0, 0.9) for name in METHODS}
    print(f"{'momentum':>8}  {'method':6} {'first':>8} {'largest of the last 100':>24}")
    for (momentum, name), path in paths.items():
        print(f"{momentum:8g}  {name:6} {path[0]:8.4f} {max(path[-100:]):24.2g}")
    if arguments.figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        for axes, momentum in zip(figure.subplots(1, 2, sharey=True), (0.0, 0.9), strict=True):
            for name in METHODS:
                axes.loglog(range(1, STEPS + 1), paths[momentum, name], label=name)
            axes.set(title=f"momentum {momentum:g}", xlabel="step", ylim=(1e-4, 2))
        figure.axes[0].set_ylabel(f"{EPSILON:g}|x+y| + |x−y|")
        figure.axes[0].legend()
        figure.savefig(arguments.figure, dpi=120)


if __name__ == "__main__":
    main()
