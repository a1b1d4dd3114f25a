"""A run that anything may happen to: events of hypothesis, every step judged by the oracle."""

import copy
import math

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import nucleon
from soundness.cases import METHODS, OF_THE_GRAM, OPTIONS, Setting, exponents
from soundness.watch import same_bits, snapshot

SHAPES = [(2, 4, 6), (5, 3)]
KINDS = ("full", "rank one", "one entry", "zero", "nan", "inf", "equal")


def gradient(kind: str, scale: float, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """An m×n float64 matrix of a kind, its entries of about this size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-3, 3)
    if kind == "rank one":
        x = x[:, :1] * x[:1, :]
    if kind == "equal":
        x = torch.ones_like(x)
    if kind == "one entry":
        x = torch.zeros_like(x).index_put((torch.tensor(1), torch.tensor(2)), x[0, 0])
    if kind == "zero":
        return torch.zeros_like(x)
    x = x * scale
    if kind in ("nan", "inf"):
        x[seed % shape[0], seed % shape[1]] = math.nan if kind == "nan" else math.inf
    return x


@st.composite
def events(draw, setting: Setting):
    """A gradient for each parameter: a kind, an exponent and a seed for each matrix."""
    low, high = exponents(setting)
    found = []
    for shape in SHAPES:
        rows = [
            gradient(
                draw(st.sampled_from(KINDS)),
                10.0 ** draw(st.floats(low, high) | st.floats(-18, 2)),
                shape[-2:],
                draw(st.integers(0, 99)),
            )
            for _ in range(math.prod(shape[:-2]))
        ]
        found.append(torch.stack(rows).reshape(shape))
    return found


def machine(make: type, dtype: torch.dtype, counted: list[int]) -> type[RuleBasedStateMachine]:
    """The runs of one optimizer in one dtype; each that ends adds what it judged to `counted`."""
    choices = [
        {"method": method, **given}
        for method in METHODS[make]
        if method != "half"  # for matrices of 64 rows and more
        for given in OPTIONS
        if make is not nucleon.Muon or not OF_THE_GRAM & set(given)
    ]

    class Run(RuleBasedStateMachine):
        @initialize(options=st.sampled_from(choices))
        def start(self, options):
            self.setting = Setting(make, dtype, options=options)
            self.watched = self.setting.watched(SHAPES)

        @rule(data=st.data())
        def step(self, data):
            self.watched.step(*data.draw(events(self.setting)))

        @rule(data=st.data(), which=st.integers(0, 1))
        def step_of_one(self, data, which):
            given = data.draw(events(self.setting))
            given[which] = None
            self.watched.step(*given)

        @rule(steps=st.integers(1, 4))
        def quiet(self, steps):
            self.watched.quiet(steps)

        @rule(scale=st.sampled_from([1e-9, 1.0, 1e3]), steps=st.integers(1, 3))
        def ordinary(self, scale, steps):
            for seed in range(steps):
                drawn = [gradient("full", scale, s[-2:], seed) for s in SHAPES]
                both = zip(drawn, SHAPES, strict=True)
                self.watched.step(*(g.expand(s).clone() for g, s in both))

        @precondition(lambda self: "gradient_bound" not in self.setting.options)
        @rule(momentum=st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.999]))
        def momentum(self, momentum):
            self.watched.group["momentum"] = momentum

        @precondition(lambda self: make is not nucleon.Muon)
        @rule(scale=st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
        def smoothing(self, scale):
            self.watched.group["smoothing_scale"] = scale

        @precondition(lambda self: make is not nucleon.Muon)
        @precondition(lambda self: "gradient_bound" not in self.setting.options)
        @rule(beta2=st.sampled_from([None, 0.5, 0.97]))
        def beta2(self, beta2):
            self.watched.group["beta2"] = beta2

        @rule(flag=st.booleans())
        def nesterov(self, flag):
            self.watched.group["nesterov"] = flag

        @rule(method=st.sampled_from([m for m in METHODS[make] if m != "half"]))
        def method(self, method):
            self.watched.group["method"] = method

        @rule(flag=st.booleans())
        def direction(self, flag):
            self.watched.group["maximize"] = flag

        @rule()
        def resume(self):
            """A state that is saved and loaded is the same, bit for bit."""
            watched, saved = self.watched, copy.deepcopy(self.watched.optimizer.state_dict())
            before = snapshot(watched.optimizer, watched.params)
            watched.optimizer = make(watched.params, lr=1.0, scale="none")
            watched.optimizer.load_state_dict(saved)
            after = snapshot(watched.optimizer, watched.params)
            for a, b in zip(before, after, strict=True):
                assert a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)

        @rule()
        def look(self):
            found = self.watched.optimizer.diagnostics()
            assert all(math.isfinite(value) for value in found.values()), found

        def teardown(self):
            if hasattr(self, "watched"):
                counted[0] += 1
                counted[1] += self.watched.judged

    Run.__name__ = f"{make.__name__}_{str(dtype).removeprefix('torch.')}"
    return Run
