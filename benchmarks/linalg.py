"""Time and error of every matrix function of nucleon beside torch.linalg, in one run.

    python benchmarks/linalg.py            # CPU, and GPU where present; a quarter of an hour
    python benchmarks/linalg.py --quick    # up to 512: a minute or two
    python benchmarks/linalg.py --limit 2  # leave out what takes longer than two seconds a call

Columns: the median time of a call; its ratio to the baseline, torch.linalg.svd or eigh of the same
matrix in the same dtype; the steps K; the flops of the paper's model (Section 4, Appendix F), where
it has one, over the time (our augmented recursion does other products than the model's, see
`augmented_polynomial`); and the error ‖P − P*‖_F/√m against float64 torch.linalg on the same
rounded input, relative for inverse roots, the relative duality gap for quadratic projections. An
error of order 1 means that directions were cut: below √eps by the iterations, below √m·eps by the
references. A call predicted to exceed --limit is left out and marked, and — marks an error whose
float64 side would take four times as long.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from _timing import environment, medians, seconds
from nucleon import linalg
from nucleon.linalg import augmented, coefficients, quadratic, roots
from nucleon.linalg.polar import METHODS as POLAR_METHODS
from nucleon.linalg.polar import _steps as polar_steps
from nucleon.online import theory

SHAPES = ((128, 128), (256, 1024), (512, 512), (1024, 1024), (2048, 2048))
QUICK = 512
SMALL = ((32, 64), (128, 128))
CONDITIONS = (1e1, 1e4, 1e8)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Case:
    """One line of the table: a call and its place in the flop model."""

    name: str
    call: Callable[[], Tensor]
    steps: int | None = None
    flops: float | None = None
    gap: Callable[[], float] | None = None
    """Its error, where that is not the distance to the group's exact result."""


@dataclass
class Group:
    """The methods for one problem, the first of them the baseline."""

    title: str
    work: float
    """Flops up to a constant: what a prediction of the time scales with."""
    cases: list[Case]
    exact: Callable[[], Tensor] | None = None
    relative: bool = False


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
    baseline = Case("torch.linalg.svd", lambda: torch.linalg.svd(x.s, full_matrices=False)[0])
    group = Group("polar", m * m * n, [baseline], x.polar)
    for method in POLAR_METHODS:
        steps = None if method == "svd" else polar_steps(x.s, method, eps**0.75, eps**0.5)
        flops = theory.polar_flops(m, n, steps=steps) if method == "newton-schulz" else None
        call = _call(linalg.polar, x.s, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops))
    return group


def root_group(x: Spectra) -> Group:
    m = x.m
    baseline = Case("torch.linalg.eigh", lambda: torch.linalg.eigh(x.a)[1])
    group = Group("inverse_sqrt", m**3, [baseline], x.inverse_root, relative=True)
    for method in roots.METHODS:
        steps = flops = None
        if method == "newton-schulz":
            steps = roots.coupled_steps(x.dtype)
            flops = 6.0 * steps * m**3
        call = _call(linalg.inverse_sqrt, x.a, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops))
    return group


def augmented_group(x: Spectra) -> Group:
    m, n, eps = x.m, x.n, torch.finfo(x.dtype).eps
    baseline = Case("torch.linalg.eigh", lambda: torch.linalg.eigh(x.s @ x.s.mT + x.smoothing)[1])
    group = Group("augmented_polar", m * m * (m + n) / 2, [baseline], x.augmented)
    for method in augmented.METHODS:
        steps = flops = None
        if method == "newton-schulz":
            steps = coefficients.newton_schulz_steps((eps / m) ** 0.5, eps)
            flops = theory.augmented_flops(m, n, steps=steps)
        elif method == "polar-express":
            steps = coefficients.polar_express_steps((eps / m) ** 0.5, eps)
        elif method == "coupled":
            steps = roots.coupled_steps(x.dtype)
            flops = theory.coupled_flops(m, n, steps=steps)
        call = _call(linalg.augmented_polar, x.s, x.smoothing, method, steps=steps)
        group.cases.append(Case(method, call, steps, flops))
    return group


def projection_group(x: Spectra) -> Group:
    """The ball, and the quadratic projection of a matrix whose largest entry is three."""
    m, n = x.m, x.n
    s = x.s * (3 / x.s.abs().max())
    ball = Case("project_operator_ball", lambda: linalg.project_operator_ball(s))
    baseline = Case("torch.linalg.svd", lambda: torch.linalg.svd(s, full_matrices=False)[0])
    group = Group("projections", m * m * n, [baseline, ball])
    for solver in get_args(quadratic.Solver):

        def solve(solver: quadratic.Solver = solver) -> linalg.QuadraticSolution:
            return linalg.quadratic_projection(
                s, x.a, solver=solver, tolerance=1e-6, max_iterations=300
            )

        gap = lambda solve=solve: float(solve().relative_gap)  # noqa: E731
        group.cases.append(Case(solver, lambda solve=solve: solve().x, None, None, gap))
    return group


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

    def predicted(self, group: Group, name: str) -> float:
        """Seconds, from the smaller sizes; 0 where there were none."""
        return self.rates.get((group.title, name), 0.0) * group.work

    def remember(self, group: Group, name: str, time: float) -> None:
        """The best rate so far: the first call of a library also pays for loading it."""
        key = (group.title, name)
        self.rates[key] = min(self.rates.get(key, math.inf), time / group.work)

    def print(self, group: Group, shape: str, condition: float) -> None:
        """One line a method."""
        slow = {c.name: self.predicted(group, c.name) for c in group.cases}
        chosen = {c.name: c.call for c in group.cases if slow[c.name] <= self.limit}
        times = medians(chosen, self.device)
        for name, time in times.items():
            self.remember(group, name, time)
        baseline, exact = times.get(group.cases[0].name), self.exact(group)
        for case in group.cases:
            start = f"{group.title:<16}{case.name:<23}{shape:>10}{condition:>8.0e}"
            if case.name not in times:
                print(f"{start}  left out: about {slow[case.name]:.0f} s, over --limit", flush=True)
                continue
            time = times[case.name]
            ratio = f"{time / baseline:9.2f}" if baseline else f"{'—':>9}"
            steps = f"{case.steps:4d}" if case.steps else f"{'·':>4}"
            rate = f"{case.flops / time / 1e9:10.1f}" if case.flops else f"{'·':>10}"
            error = "·" if case is group.cases[0] else self.error(group, case, exact)
            print(f"{start}{1e3 * time:11.2f}{ratio}{steps}{rate}{error:>10}", flush=True)

    def exact(self, group: Group) -> Tensor | None:
        """The float64 result, None where there is none or it would take too long."""
        if group.exact is None or self.predicted(group, "exact") > 4 * self.limit:
            return None
        result: list[Tensor] = []
        compute = group.exact
        self.remember(group, "exact", seconds(lambda: result.append(compute()), self.device))
        return result[0]

    def error(self, group: Group, case: Case, exact: Tensor | None) -> str:
        """How far the result of a method is from the exact one, or its gap."""
        if case.gap is not None:
            return f"{case.gap():.1e}"
        if exact is None:
            return "—" if group.exact else "·"
        norm = torch.linalg.matrix_norm
        size = norm(exact) if group.relative else math.sqrt(exact.shape[0])
        return f"{float(norm(case.call().double() - exact) / size):.1e}"


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
    parser.add_argument("--limit", type=float, default=60.0, metavar="S",
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
