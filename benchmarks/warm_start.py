"""Can the root of the last step serve the next one? R_t = SSᵀ + Λ changes between two steps; this
prints by how much, and what one correcting step from Q = R_{t−1}^(-1/2) leaves.

    python benchmarks/warm_start.py                # a small network, minibatches of 32
    python benchmarks/warm_start.py --batch 1024   # little noise in the gradients

E = QRQ would be I if nothing had changed. One Newton step Q ← (3I − E)Q/2 makes it better where its
eigenvalues are below 3. Even exact, E^(-1/2)Q is a root of R⁻¹ but not the symmetric one, as Q does
not commute with the new R; "exactly corrected" has the error that this alone leaves. Float64.
"""

import argparse

import torch

import nucleon
from nucleon.linalg import inverse_sqrt
from nucleon.optim import worklist
from nucleon.optim.engines.reference import present_direction


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(";")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    d = options.width
    teacher = torch.nn.Sequential(torch.nn.Linear(d, d), torch.nn.ReLU(), torch.nn.Linear(d, d))
    hidden = torch.nn.Linear(d, 2 * d, bias=False)
    student = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(2 * d, d))
    leon = nucleon.Leon([hidden.weight], lr=0.02, method="eigh")
    rest = torch.optim.AdamW(student[2].parameters(), lr=1e-3)
    before = None
    rows: list[tuple[float, ...]] = []
    for step in range(options.steps):
        x = torch.randn(options.batch, d)
        loss = (student(x) - teacher(x).detach()).square().mean()
        student.zero_grad()
        loss.backward()
        leon.step()
        rest.step()
        (work,), (settings,) = worklist.present(leon), leon._current_settings()
        with torch.no_grad():
            total, smoothing, exact = (t[0] for t in present_direction(work, settings))
        gram = total @ total.mT + smoothing
        if before is not None and step >= options.steps // 3:
            e = before @ gram @ before
            values = torch.linalg.eigvalsh(e)
            once = (3 * torch.eye(len(e)) - e) @ before @ total / 2
            fully = inverse_sqrt(e) @ before @ total
            errors = [((p - exact).norm() / exact.norm()).item() for p in (once, fully)]
            norm = torch.linalg.matrix_norm(once, 2).item()
            rows.append((values[0].item(), values[-1].item(), *errors, norm))
        before = inverse_sqrt(gram)
    print(f"{d}×{2 * d}, minibatches of {options.batch}, steps {options.steps // 3} and later")
    found = torch.tensor(rows)
    for name, column in zip(
        (
            "smallest eigenvalue of E",
            "largest",
            "error after one step",
            "exactly corrected",
            "‖P‖_op",
        ),
        found.unbind(1),
        strict=True,
    ):
        low, middle, high = column.quantile(torch.tensor([0.0, 0.5, 1.0])).tolist()
        print(f"{name:26} least {low:8.3f}   median {middle:8.3f}   largest {high:8.3f}")


if __name__ == "__main__":
    main()
