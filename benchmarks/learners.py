"""Per-round time and regret of the learners, side by side in one run.

Times are of play() and observe() alone, without validation, each learner in turn within a round so
that all see the same machine: processor time on one thread (the default), wall-clock time on more.
Figures are medians over the rounds, of growth minima over repetitions. About four minutes on one
core.

What FTRL and Shampoo cost depends on whether the ball binds. On streams without a mean FTRL's
unconstrained minimizer lies inside, this library finds that in closed form, and what is left is an
eigendecomposition, as for FAML; the paper's way, projected gradient with an SVD a step, does not
look. `WithMean` makes the ball bind.
"""

import argparse
import math
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nucleon import moments
from nucleon.linalg import augmented_polar, nuclear_norm
from nucleon.linalg.augmented import augmented_definite, augmented_eigh
from nucleon.online import streams, theory
from nucleon.online.learners import FAML, FTL, FTPL, FTRL, Learner, OneSidedShampoo, Shampoo
from nucleon.online.regret import Ledger

GAP = 1e-6
EASY = 5
"""The first rounds are easy for a solver and warm the caches: they are left out."""
TEXTBOOK = "FTRL, textbook"
LIBRARY = ("FTRL, projected gradient", "FTRL, Douglas-Rachford")
ONE_SIDED = ("one-sided Shampoo, proj. grad.", "one-sided Shampoo, Douglas-R.")


@dataclass(frozen=True)
class WithMean:
    """½(G_t + Ḡ) of a stream, Ḡ one more of its gradients: the total grows linearly along Ḡ.

    Without a mean the unconstrained minimizer stays inside the ball and FTRL needs no solver.
    """

    stream: streams.Stream

    @property
    def name(self) -> str:
        """Of the stream, and that it has a mean."""
        return f"{self.stream.name} with a mean"

    def gradient(self, t: int) -> torch.Tensor:
        """½(G_t + Ḡ)."""
        return (self.stream.gradient(t) + self.stream.gradient(10**9)) / 2


class TextbookFTRL:
    """FTRL as Appendix F.1 costs it: projected gradient on m×n, a full SVD a step, a warm start.

    No closed form where the ball does not bind, no eigenbasis, no reduction to m×m: what `FTRL`
    owes to those shows beside it.
    """

    def __init__(self, shape: tuple[int, int], tolerance: float) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.gram = torch.zeros(shape[0], shape[0], dtype=torch.float64)
        self.action, self.tolerance = torch.zeros_like(self.total), tolerance
        zero = self.total.new_zeros(())
        self.first_nuclear, self.gap, self.gaps = zero, zero, zero

    def play(self) -> torch.Tensor:
        """The action that `observe` prepared."""
        return self.action

    def observe(self, gradient: torch.Tensor) -> None:
        """Λ = 2(I + M), η = 1/√2, then ⟨S,X⟩ + ½Tr XᵀΛ^½X to the relative gap."""
        if not self.total.any():
            self.first_nuclear = nuclear_norm(gradient)
        self.gaps = self.gaps + self.gap
        self.total = self.total + gradient
        self.gram = self.gram + gradient @ gradient.mT
        values, vectors = torch.linalg.eigh(moments.smoothing(self.gram, gradient_bound=1.0))
        values = math.sqrt(2) * values.sqrt()
        left, step = (vectors * values) @ vectors.mT, 1 / values[-1].item()
        x = y = self.action
        momentum = 1.0
        while True:
            u, sigma, vt = torch.linalg.svd(y - step * (self.total + left @ y), full_matrices=False)
            new = (u * sigma.clamp(max=1)) @ vt
            slope = self.total + left @ new
            gap = (slope * new).sum() + torch.linalg.svdvals(slope).sum()
            value = ((self.total + slope) * new).sum() / 2
            if gap <= self.tolerance * -value:
                break
            if ((y - new) * (new - x)).sum() > 0:
                momentum = 1.0  # the momentum points uphill: restart it
            grown = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            x, y, momentum = new, new + (momentum - 1) / grown * (new - x), grown
        self.action, self.gap = new, gap

    def bound(self) -> torch.Tensor:
        """FTRL's, with the gaps of the actions that were played."""
        return theory.ftrl_bound(
            self.gram,
            radius=1.0,
            gradient_bound=1.0,
            first_nuclear=self.first_nuclear,
            gaps=self.gaps.clamp(min=0),
        )


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="128x256", help="m x n (default 128x256)")
    parser.add_argument("--rounds", type=int, default=80, help="of each game (default 80)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    arguments = parser.parse_args()
    if arguments.rounds <= EASY:
        parser.error(f"--rounds must be above {EASY}, got {arguments.rounds}")
    torch.set_num_threads(arguments.threads)
    m, n = map(int, arguments.shape.split("x"))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} of {os.cpu_count()} threads, {m}×{n}, float64 unless said"
    )
    ill_conditioned = streams.ill_conditioned((m, n), dtype=torch.float64)
    gaussian = streams.gaussian((m, n), dtype=torch.float64)
    for stream in (ill_conditioned, WithMean(ill_conditioned), gaussian):
        side_by_side(stream, (m, n), arguments.rounds)
    overhead((m, n), torch.float64)
    overhead((m, n), torch.float32)
    growth()


def side_by_side(stream: streams.Stream | WithMean, shape: tuple[int, int], rounds: int) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "validate": False}
    learners: dict[str, Learner | TextbookFTRL] = {
        "FTL": FTL(shape, **options),
        TEXTBOOK: TextbookFTRL(shape, GAP),
        LIBRARY[0]: FTRL(shape, tolerance=GAP, **options),
        LIBRARY[1]: FTRL(shape, solver="douglas-rachford", tolerance=GAP, **options),
        ONE_SIDED[0]: OneSidedShampoo(shape, tolerance=GAP, **options),
        ONE_SIDED[1]: OneSidedShampoo(shape, solver="douglas-rachford", tolerance=GAP, **options),
        "Shampoo, Douglas-Rachford": Shampoo(
            shape, solver="douglas-rachford", tolerance=GAP, **options
        ),
        "FTPL, k = 1": FTPL(shape, samples=1, **options),
        "FAML": FAML(shape, **options),
        "FAML, polar-express": FAML(shape, method="polar-express", **options),
    }
    times: dict[str, list[float]] = {label: [] for label in learners}
    ledgers = {label: Ledger(shape) for label in learners}
    for t in range(1, rounds + 1):
        gradient = stream.gradient(t)
        for label, learner in learners.items():
            start = clock()
            action = learner.play()
            learner.observe(gradient)
            times[label].append(clock() - start)
            ledgers[label].record(gradient, action)
    print(f"\n{stream.name}, {rounds} rounds; FTRL and Shampoo to a relative gap of {GAP:g}")
    print(f"{'learner':30}{'ms a round':>12}{'/ FAML':>9}{'regret':>12}{'/ FAML':>9}{'bound':>12}")
    cost = {label: 1e3 * statistics.median(series[EASY:]) for label, series in times.items()}
    regret = {label: ledger.regret().item() for label, ledger in ledgers.items()}
    for label, learner in learners.items():
        print(
            f"{label:30}{cost[label]:12.2f}{cost[label] / cost['FAML']:9.1f}"
            f"{regret[label]:12.2f}{regret[label] / regret['FAML']:9.3f}"
            f"{learner.bound().item():12.2f}"
        )
    least = {TEXTBOOK: 1} | dict.fromkeys(ONE_SIDED, 20)  # the library's own FTRL is not judged
    for label, factor in least.items():
        verdict(f"time of {label} over FAML's", cost[label] / cost["FAML"], factor, ">=")
    if not isinstance(stream, WithMean):  # FTRL's smaller αβ shows where the comparator is strong
        ratio = regret["FAML"] / min(regret[label] for label in LIBRARY)
        verdict("regret of FAML over FTRL's", ratio, 1.1, "<=")


def overhead(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A FAML round beside the augmented polar factor of the same S and Λ, in three forms.

    `augmented_polar`; the same without the checks of its arguments; and the kernel of the learner,
    which knows that Λ is definite. A round is more than that: the Gram matrix of the gradient alone
    is a product of 2m²n operations, a tenth of the last.
    """
    stream = streams.ill_conditioned(shape, dtype=dtype)
    learner = FAML(shape, dtype=dtype, validate=False)
    cut = math.sqrt(shape[0]) * torch.finfo(torch.float64).eps
    least = torch.ones((), dtype=torch.float64)  # G² = η = 1
    forms: dict[str, Callable[..., object]] = {
        "augmented_polar": augmented_polar,
        "augmented_polar without its checks": lambda s, smoothing: augmented_eigh(
            s, smoothing, cut, dtype=torch.float64
        ),
        "its kernel, which trusts Λ": lambda s, smoothing: augmented_definite(s, smoothing, least),
    }
    rounds: list[float] = []
    times: dict[str, list[float]] = {label: [] for label in forms}
    for t in range(1, 151):
        gradient = stream.gradient(t)
        now = learner.total, learner.smoothing()  # float64 in every game
        for label, form in forms.items():
            times[label].append(timed(partial(form, *now)))
        rounds.append(timed(lambda g=gradient: (learner.play(), learner.observe(g))))
    whole = statistics.median(rounds[5:])
    print(f"\n{dtype}, a FAML round: {1e3 * whole:.3f} ms")
    for label, series in times.items():
        bare = statistics.median(series[5:])
        claim = f"overhead of the round over {label} ({1e3 * bare:.3f} ms)"
        verdict(claim, whole / bare - 1, 0.15, "<")


def growth() -> None:
    """Exponents of a FAML round in n at fixed m, and in m at fixed n/m: m²n and m³."""
    wide = [(64, n) for n in (2048, 4096, 8192, 16384)]
    square = [(m, 2 * m) for m in (256, 512, 1024)]
    print(f"\n{'m×n':>12}{'ms a round':>12}{'state KiB':>12}{'peak KiB':>12}{'bytes/(mn+m²)':>16}")
    measured = {shape: _round_cost(shape) for shape in (*wide, *square)}
    for (m, n), (seconds, state, peak) in measured.items():
        row = f"{f'{m}×{n}':>12}{1e3 * seconds:12.3f}{state / 1024:12.0f}{peak / 1024:12.0f}"
        print(f"{row}{peak / (m * n + m * m):16.1f}")
    for label, shapes, axis, expected in (
        ("n, m = 64", wide, 1, "time 1 (m²n), memory 1 (mn)"),
        ("m, n = 2m", square, 0, "time 3 (m²n + m³), memory 2 (mn + m²)"),
    ):
        sizes = [shape[axis] for shape in shapes]
        exponents = [slope(sizes, [measured[shape][i] for shape in shapes]) for i in range(3)]
        print(
            f"exponents in {label}: time {exponents[0]:.2f}, state {exponents[1]:.2f}, "
            f"peak {exponents[2]:.2f}; expected {expected}"
        )


def _round_cost(shape: tuple[int, int]) -> tuple[float, int, int]:
    """Seconds of a round, bytes of the state, and the most bytes of tensors alive in a round."""
    learner = FAML(shape, dtype=torch.float64, validate=False)
    stream = streams.gaussian(shape, dtype=torch.float64)
    gradient = stream.gradient(1)

    def one_round() -> None:
        learner.play()
        learner.observe(gradient)

    one_round()
    seconds = min(timed(one_round) for _ in range(3))
    tensors = [v for v in learner.state_dict().values() if isinstance(v, torch.Tensor)]
    state = sum(v.numel() * v.element_size() for v in tensors)
    with Peak() as peak:
        one_round()
    return seconds, state, state + peak.most


class Peak(TorchDispatchMode):
    """The most bytes of tensors created inside that were alive at once (no LAPACK workspace)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage(), inputs)
        return result

    def _enter(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in inputs or address in self.seen:
            return
        self.seen.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, address, size)

    def _leave(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size


def timed(call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def slope(sizes: list[int], values: list[float]) -> float:
    """The least-squares exponent p of value = c·size^p."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(value) for value in values]
    ).slope


def verdict(claim: str, measured: float, limit: float, relation: str) -> None:
    holds = {"<": measured < limit, "<=": measured <= limit, ">=": measured >= limit}[relation]
    print(f"{'PASS' if holds else 'FAIL'}  {claim}: {measured:.3f} {relation} {limit:g}")


if __name__ == "__main__":
    main()
