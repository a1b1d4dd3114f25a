"""Time and error of every matrix function of nucleon beside torch.linalg, in one run.

    python benchmarks/linalg.py            # CPU, and GPU where present; a few minutes
    python benchmarks/linalg.py --quick    # up to 512
    python benchmarks/linalg.py --limit 60 # also what takes up to a minute a call

Columns: the median time of a call; its ratio to the baseline, torch.linalg.svd or eigh of the same
matrix in the same dtype; the steps K; the flops of the paper's model (Section 4, Appendix F), where
it has one, over the time; and the error ‖P − P*‖_F/√m against float64 torch.linalg on the same
rounded input, relative for inverse roots, the relative duality gap for quadratic projections. An
error of order 1 at a condition number beyond 1/√eps is what a rank tolerance of √eps means.
A call predicted to exceed --limit is left out and marked.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from _timing import environment, medians, seconds
from nucleon import linalg, theory
from nucleon.linalg import augmented, coefficients, projections, roots
from nucleon.linalg.polar import METHODS as POLAR_METHODS

SHAPES = ((128, 128), (256, 1024), (512, 512), (1024, 1024), (2048, 2048))
QUICK = 512
SMALL = ((32, 64), (128, 128))
CONDITIONS = (1e1, 1e4, 1e8)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Case:
    """One line of the table: a call, what it should give, and its place in the flop model."""

    name: str
    call: Callable[[], Tensor]
    steps: int | None = None
    flops: float | None = None
    error: Callable[[], float] | None = None


@dataclass
class Group:
    """The methods for one problem, the first of them the baseline."""

    title: str
    work: float
    """Flops up to a constant: what a prediction of the time scales with."""
    cases: list[Case] = field(default_factory=list)


class Spectra:
    """Matrices with geometric singular values, and float64 oracles, each computed once."""

    def __init__(self, m: int, n: int, condition: float, dtype: torch.dtype, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype, self.device, self.condition = dtype, device, condition
        self.m, self.n = m, n
        u, v = self.orthogonal(m, min(m, n)), self.orthogonal(n, min(m, n))
        self.s = ((u * self.geometric(min(m, n))) @ v.mT).to(dtype)
        q = self.orthogonal(m, m)
        a = (q * self.geometric(m)) @ q.mT
        self.a = ((a + a.mT) / 2).to(dtype)
        self.smoothing = 1e-2 * self.a

    def orthogonal(self, rows: int, columns: int) -> Tensor:
        """Orthonormal columns."""
        options = {"dtype": torch.float64, "device": self.device, "generator": self.generator}
        return torch.linalg.qr(torch.randn(rows, columns, **options)).Q

    def geometric(self, size: int) -> Tensor:
        """1 down to 1/condition."""
        last = -math.log10(self.condition)
        return torch.logspace(0, last, size, dtype=torch.float64, device=self.device)

    def polar(self) -> Tensor:
        """The polar factor of S."""
        u, _, vh = torch.linalg.svd(self.s.double(), full_matrices=False)
        return u @ vh

    def inverse_root(self) -> Tensor:
        """A^(-1/2), with what is below the rounding of float64 lifted to it."""
        values, q = torch.linalg.eigh(self.a.double())
        least = torch.finfo(torch.float64).eps * values[-1]
        return (q * values.clamp_min(least).rsqrt()) @ q.mT

    def augmented(self) -> Tensor:
        """The leading block of polar([S L])."""
        values, q = torch.linalg.eigh(self.smoothing.double())
        root = q * values.clamp_min(0).sqrt()
        u, _, vh = torch.linalg.svd(torch.cat([self.s.double(), root], -1), full_matrices=False)
        return u @ vh[:, : self.n]


def polar_group(x: Spectra) -> Group:
    m, n, eps = x.m, x.n, torch.finfo(x.dtype).eps
    group = Group("polar", m * m * n, [Case("torch.linalg.svd", lambda: torch.linalg.svd(x.s)[0])])
    expected = Oracle(x.polar)
    for method in POLAR_METHODS:
        steps = flops = None
        if method == "newton-schulz":
            steps = coefficients.newton_schulz_steps((eps / m) ** 0.5, eps**0.75)
            flops = theory.polar_flops(m, n, steps=steps)
        call = _call(linalg.polar, x.s, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops, expected.distance(call)))
    return group


def root_group(x: Spectra) -> Group:
    m = x.m
    baseline = Case("torch.linalg.eigh", lambda: torch.linalg.eigh(x.a)[1])
    group = Group("inverse_sqrt", m**3, [baseline])
    expected = Oracle(x.inverse_root, relative=True)
    for method in roots.METHODS:
        steps = flops = None
        if method == "newton-schulz":
            steps = roots.coupled_steps(x.dtype)
            flops = 6.0 * steps * m**3
        call = _call(linalg.inverse_sqrt, x.a, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops, expected.distance(call)))
    return group


def augmented_group(x: Spectra) -> Group:
    m, n, eps = x.m, x.n, torch.finfo(x.dtype).eps
    baseline = Case("torch.linalg.eigh", lambda: torch.linalg.eigh(x.s @ x.s.mT + x.smoothing)[1])
    group = Group("augmented_polar", m * m * (m + n) / 2, [baseline])
    expected = Oracle(x.augmented)
    for method in augmented.METHODS:
        steps = flops = None
        if method == "newton-schulz":
            steps = coefficients.newton_schulz_steps((eps / m) ** 0.5, eps)
            flops = theory.augmented_flops(m, n, steps=steps)
        elif method == "coupled":
            steps = roots.coupled_steps(x.dtype)
            flops = theory.coupled_flops(m, n, steps=steps)
        call = _call(linalg.augmented_polar, x.s, x.smoothing, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops, expected.distance(call)))
    return group


def projection_group(x: Spectra) -> Group:
    """The ball, and the quadratic projection with half of the singular values outside."""
    m, n = x.m, x.n
    s = x.s * (3 / x.s.abs().max())
    ball = Case("project_operator_ball", lambda: linalg.project_operator_ball(s))
    baseline = Case("torch.linalg.svd", lambda: torch.linalg.svd(s)[0])
    group = Group("projections", m * m * n, [baseline, ball])
    for solver in get_args(projections.Solver):

        def solve(solver: projections.Solver = solver) -> linalg.QuadraticSolution:
            return linalg.quadratic_projection(
                s, x.a, solver=solver, tolerance=1e-6, max_iterations=300
            )

        gap = lambda solve=solve: float(solve().relative_gap)  # noqa: E731
        group.cases.append(Case(solver, lambda solve=solve: solve().x, None, None, gap))
    return group


@dataclass
class Oracle:
    """A float64 result, computed when first asked for."""

    compute: Callable[[], Tensor]
    relative: bool = False
    value: Tensor | None = None

    def distance(self, call: Callable[[], Tensor]) -> Callable[[], float]:
        """How far the result of a call is from it."""

        def error() -> float:
            if self.value is None:
                self.value = self.compute()
            norm = torch.linalg.matrix_norm
            size = norm(self.value) if self.relative else math.sqrt(self.value.shape[0])
            return float(norm(call().double() - self.value) / size)

        return error


def _call(
    function: Callable[..., Tensor], *arguments: object, steps: int | None
) -> Callable[[], Tensor]:
    options = {} if steps is None else {"steps": steps}
    return lambda: function(*arguments, **options)


class Table:
    """Prints the groups, and predicts from smaller sizes what would exceed the limit."""

    def __init__(self, device: torch.device, limit: float):
        self.device, self.limit = device, limit
        self.rates: dict[tuple[str, str], float] = {}

    def predicted(self, group: Group, case: str) -> float:
        """Seconds, from the last size that was measured; 0 for the first."""
        return self.rates.get((group.title, case), 0.0) * group.work

    def print(self, group: Group, shape: str, condition: float) -> None:
        """One line a method."""
        slow = {c.name: self.predicted(group, c.name) for c in group.cases}
        chosen = [c for c in group.cases if slow[c.name] <= self.limit]
        times = medians({c.name: c.call for c in chosen}, self.device)
        for name, time in times.items():
            self.rates[group.title, name] = time / group.work
        baseline = times.get(group.cases[0].name)
        for case in group.cases:
            start = f"{group.title:<16}{case.name:<23}{shape:>10}{condition:>8.0e}"
            if case.name not in times:
                print(f"{start}  left out: about {slow[case.name]:.0f} s, over --limit")
                continue
            time = times[case.name]
            ratio = f"{time / baseline:9.2f}" if baseline else f"{'—':>9}"
            steps = f"{case.steps:4d}" if case.steps else f"{'·':>4}"
            rate = f"{case.flops / time / 1e9:10.1f}" if case.flops else f"{'·':>10}"
            print(f"{start}{1e3 * time:11.2f}{ratio}{steps}{rate}{self.error(group, case):>10}")

    def error(self, group: Group, case: Case) -> str:
        """The error of a method, or — where its oracle would take too long."""
        if case.error is None:
            return "·"
        oracle = self.rates.get((group.title, "oracle"), 0.0) * group.work
        if oracle > 4 * self.limit:  # one oracle serves a whole group
            return "—"
        found = 0.0

        def compute() -> None:
            nonlocal found
            found = case.error()

        spent = seconds(compute, self.device)
        key = (group.title, "oracle")
        self.rates[key] = max(self.rates.get(key, 0.0), spent / group.work)
        return f"{found:.1e}"


HEADER = (
    f"{'function':<16}{'method':<23}{'shape':>10}{'cond':>8}{'ms':>11}{'ratio':>9}{'K':>4}"
    f"{'GFLOP/s':>10}{'error':>10}"
)


def groups(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Group, str, float]]:
    dtype = DTYPES[options.dtype]
    for m, n in options.shapes:
        for condition in options.conditions:
            x = Spectra(m, n, condition, dtype, device)
            for make in (polar_group, root_group, augmented_group):
                yield make(x), f"{m}×{n}", condition
    for m, n in options.small:
        for condition in options.conditions:
            x = Spectra(m, n, condition, dtype, device)
            yield projection_group(x), f"{m}×{n}", condition


def shape(text: str) -> tuple[int, int]:
    m, _, n = text.partition("x")
    return int(m), int(n or m)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only sides up to {QUICK}")
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, metavar="MxN")
    parser.add_argument("--small", type=shape, nargs="*", default=SMALL, metavar="MxN",
                        help="shapes for the projections")  # fmt: skip
    parser.add_argument("--conditions", type=float, nargs="+", default=CONDITIONS, metavar="C")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--limit", type=float, default=3.0, metavar="S",
                        help="leave out calls predicted to take longer, seconds")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: both where present")
    options = parser.parse_args(arguments)
    if options.quick:
        options.shapes = [s for s in options.shapes if max(s) <= QUICK]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for name in [options.device] if options.device else names:
        device = torch.device(name)
        print(f"{environment(device)}, {options.dtype}\n{HEADER}", flush=True)
        table = Table(device, options.limit)
        for group, title, condition in groups(options, device):
            table.print(group, title, condition)
        print(flush=True)


if __name__ == "__main__":
    main()
