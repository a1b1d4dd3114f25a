"""Cases of the fused step, for the interpreter and for a GPU: the kernels beside the torch path.

A case is a function of a device with its options. Both paths have the float16 recursion.
"""

import copy
import math
from itertools import pairwise
from unittest import mock

import torch

from nucleon import Leon, Muon, Pion
from nucleon.optim import worklist
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import engine
from soundness import cases, skips

LAST = torch.channels_last


def by_kernels(fast):
    """The kernels step whatever they can, or nothing."""
    return mock.patch.object(engine, "runs_on", lambda device: fast)


def stepped(
    device, fast, cls, shapes, *, steps, dtype=torch.float32, spoil=None, moves="", at=None,
    memory_format=torch.contiguous_format, method="half", **options,
):  # fmt: skip
    """Weights and states after steps by one path; gradient `spoil` of the last but one is NaN.

    Before the last step `moves` are elsewhere, or lie otherwise. Gradients lie as their parameters,
    or begin at entry `at` of a buffer; they are kept, so that each has an address of its own.
    """
    generator = torch.Generator().manual_seed(0)
    params = [2 * torch.rand(shape, generator=generator) - 1 for shape in shapes]
    params = [p.to(device, dtype).to(memory_format=memory_format).requires_grad_() for p in params]
    optimizer, kept = cls(params, method=method, scale="none", **options), []
    for step in range(steps):
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (i - step % 3)
            if (step, i) == (steps - 2, spoil):
                gradient.view(-1)[-5] = math.nan  # of the last matrix
            p.grad = torch.empty_like(p)
            if at is not None:
                buffer = torch.empty(at + p.numel(), device=device, dtype=dtype)
                p.grad = buffer[at:].view(p.shape)
            kept.append(p.grad.copy_(gradient))
            if step == steps - 1 and moves in MOVES:
                p.data = MOVES[moves](p.detach())
                p.grad = torch.empty_like(p).copy_(gradient)
        if step == steps - 1 and moves == "states":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    works = optimizer._worklist.works
    assert {work.engine for work in works} == {engine if fast else reference}
    if fast and device.type == "cuda" and not moves:
        assert all(work.cache.recording.replay.graph for work in works)
    return params, [optimizer.state[p] for p in params]


MOVES = {
    "weights": torch.clone,
    "transposed": lambda weight: weight.mT,
    "channels last": lambda weight: weight.to(memory_format=LAST),
}


def agree(device, cls, shapes, spoil=None, **options):
    """The kernels take the steps of the torch path: on a GPU one, a capture, and its replays."""
    steps, on_cpu = (3, True) if device.type == "cpu" else (5, False)
    given = {"steps": steps, "spoil": spoil, **options}
    with by_kernels(True), mock.patch.object(reference, "advance", side_effect=AssertionError):
        ours, states = stepped(device, True, cls, shapes, **given)
    with by_kernels(False):
        theirs, expected = stepped(device, False, cls, shapes, **given)
    eps = torch.finfo(options.get("dtype", torch.float32)).eps
    # The recursion rounds to float16 in either; G in float16 moves Λ by 2⁻¹¹ at most. Below 64 rows
    # the sums are float64 inside.
    share = 0.01
    if options.get("method", "half") != "half" and (on_cpu or cls is Leon):
        share = 1e-4 if on_cpu else 1e-3
    length = 1.0 if on_cpu or "step_length" not in options else 4.0
    moved = steps * float(options.get("lr", 0.02))
    for a, b in zip(ours, theirs, strict=True):
        near = (a - b).abs() <= share * moved * length + eps * (4 * b.abs() + moved)
        assert near.all(), (a - b).abs().max()
    for a, b in zip(states, expected, strict=True):
        assert torch.equal(a["skipped"], b["skipped"])
        half = b["total"].dtype == torch.bfloat16
        rtol = 3 * 2.0**-8 if half else 1e-6 if on_cpu else 1e-5
        atol = 1e-6 * (1.0 if on_cpu else b["total"].abs().max().item())
        torch.testing.assert_close(a["total"], b["total"], rtol=rtol, atol=atol)
        for name in (name for name in a if name.startswith("gram")):
            assert torch.equal(a[name], a[name].mT)
            difference = torch.linalg.matrix_norm(a[name] - b[name])
            assert (difference <= 2**-10 * torch.linalg.matrix_norm(b[name])).all()
    if spoil is not None:
        assert states[spoil]["skipped"].sum() == 1


def missing(device, cls):
    """One of two parameters has no gradient, then one that is not finite, then again none."""
    found = []
    for fast in (True, False):
        with by_kernels(fast):
            params = [torch.zeros(64, 70, device=device, requires_grad=True) for _ in range(2)]
            optimizer = cls(params, method="half", lr=1.0, scale="none")
            generator = torch.Generator().manual_seed(3)
            gradients = [torch.randn(64, 70, generator=generator).to(device) for _ in params]
            (work,), (settings,) = worklist.present(optimizer), optimizer._current_settings()
            assert work.engine is (engine if fast else reference)
            for there in (False, True, False):
                mask = torch.tensor([True, there], device=device)
                with torch.no_grad():
                    p, taken = work.engine.advance(work, settings, gradients, mask)
                gradients[1][5, 6] = math.nan
            params[0].grad = gradients[0].clone()  # the same through the public step
            optimizer.step()
            programs = set()
            for lacking in (0, 1, None, 0, 1):
                before = [p.detach().clone() for p in params]
                states = copy.deepcopy([optimizer.state[p] for p in params])
                for i, param in enumerate(params):
                    param.grad = None if i == lacking else torch.ones_like(param)
                optimizer.step()
                for i, (param, old, state) in enumerate(zip(params, before, states, strict=True)):
                    assert torch.equal(param, old) == (i == lacking)
                    names = [name for name in state if i == lacking and name != "step"]
                    assert all(torch.equal(optimizer.state[param][n], state[n]) for n in names)
                (own,) = optimizer._worklist.works
                programs.add(own.cache.recording.replay.arguments if fast else None)
            assert len(programs) == 1  # a mask is an input of the step, not another step
        found.append((p[0].float(), taken, work.states, params))
    (p, taken, states, weights), (q, others, expected, slow) = found
    assert taken.tolist() == others.tolist() == [True, False]
    assert ((p - q).abs() <= 0.01).all()  # as in `agree`
    for a, b in zip(states, expected, strict=True):
        assert torch.equal(a["skipped"], b["skipped"])
        torch.testing.assert_close(a["total"], b["total"], rtol=1e-6, atol=1e-6)
    for a, b in zip(weights, slow, strict=True):
        assert ((a - b).abs() <= 0.04).all()
    assert states[1]["skipped"].item() == 1


def for_others(device):
    """The direction that other ranks are sent has the order of the axes, not that of the memory."""
    found = []
    for fast in (True, False):
        with by_kernels(fast), torch.no_grad():
            weight = torch.zeros(64, 8, 3, 3, device=device).to(memory_format=LAST)
            group = {"params": [weight.requires_grad_()], "axes": ["r c c c"]}
            optimizer = Leon([group], method="half", lr=1.0, scale="none")
            (work,), (settings,) = worklist.present(optimizer), optimizer._current_settings()
            assert work.engine is (engine if fast else reference)
            gradient = torch.randn(64, 8, 3, 3, generator=torch.Generator().manual_seed(5))
            gradient = gradient.to(device)
            found.append(work.engine.advance(work, settings, [gradient], None)[0].float())
    assert ((found[0] - found[1]).abs() <= 0.01).all()  # as in `agree`


def one_step(device, gradient, **options):
    """The weight of Leon, from 0, after one step with a gradient, and its state, on the CPU."""
    weight = torch.zeros(gradient.shape, device=device, requires_grad=True)
    weight.grad = gradient.to(device)
    with by_kernels(True):
        optimizer = Leon([weight], scale="none", method="half", **options)
        optimizer.step()
    return weight.detach().cpu(), optimizer.state[weight]


def huge(device):
    """‖G‖² just fits float32, m times an entry of GGᵀ does not: P = polar(G)/√2 all the same."""
    size = torch.where(torch.arange(64) < 16, 3e17, 3e16)[:, None]
    gradient = torch.randn(64, 100, generator=torch.Generator().manual_seed(4)) * size
    exact = torch.linalg.svd(gradient.double(), full_matrices=False)
    assert 64 * gradient.double().square().sum(-1).max() > torch.finfo(torch.float32).max
    weight, state = one_step(device, gradient, lr=1.0)
    assert state["skipped"].item() == 0
    expected = exact.U @ exact.Vh / math.sqrt(2)
    assert torch.linalg.matrix_norm(weight + expected) <= 0.1 * math.sqrt(64)


def bounded(device):
    """Λ is nearly G²β₁⁻²I and 10⁶ times SSᵀ: the Gram matrix fits float16, P is small and right."""
    gradient = torch.randn(64, 100, generator=torch.Generator().manual_seed(5))
    weight, _ = one_step(device, gradient, lr=1e4, momentum=0.5, gradient_bound=1e4)
    wide = gradient.double()
    values, vectors = torch.linalg.eigh(2 * wide @ wide.mT + (1e4 / 0.5) ** 2 * torch.eye(64))
    expected = 1e4 * (vectors / values.sqrt()) @ vectors.mT @ wide
    # The recursion alone is off by a few percent; of a Gram matrix that overflows nothing is left.
    assert torch.dist(weight.double(), -expected) <= 0.1 * expected.norm()


def overflowing(device):
    """A finite gradient whose square leaves float32 is skipped, and changes nothing of its own."""
    params = [torch.ones(64, 100, device=device, requires_grad=True) for _ in range(2)]
    generator = torch.Generator().manual_seed(6)
    with by_kernels(True):
        optimizer = Leon(params, method="half", weight_decay=0.1)
        for size in (1.0, 1e20):
            before = [p.detach().clone() for p in params]
            state = copy.deepcopy(optimizer.state[params[0]])
            for p in params:
                p.grad = torch.randn(64, 100, generator=generator).to(device)
            params[0].grad[3, 4] = size
            optimizer.step()
    assert torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
    for name in ("total", "gram"):
        assert state[name].any() and torch.equal(optimizer.state[params[0]][name], state[name])
    assert [optimizer.state[p]["skipped"].item() for p in params] == [1, 0]


def broken_roots(device):
    """An indefinite M̂ has the root of an upper bound; one that is not finite keeps its weights."""
    found = []
    for fast in (True, False):
        with by_kernels(fast):
            params = [torch.zeros(70, 80, device=device, requires_grad=True) for _ in range(3)]
            optimizer = Pion(params, method="half", lr=1.0, scale="none", samples=2)
            generator = torch.Generator().manual_seed(8)
            for p, value in zip(params, (0.0, 1e4, math.nan), strict=True):
                p.grad = torch.randn(70, 80, generator=generator).to(device)
                gram = optimizer.state[p]["gram"]
                gram += 9 * torch.eye(70, device=device)
                gram[0, 65, 3] = gram[0, 3, 65] = value
            optimizer.step()
        found.append((params, [optimizer.state[p]["skipped"].item() for p in params]))
    (ours, skipped), (theirs, expected) = found
    assert skipped == expected == [0, 0, 1]
    assert not ours[2].any()
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).abs() <= 0.01).all(), (a - b).abs().max()


def hooks(device, cls, to):
    """A direction that is assigned after steps by the kernels is the one that runs."""
    param = torch.zeros(64, 70, device=device, requires_grad=True)
    param.grad = torch.eye(64, 70, device=device)

    def step():
        before = param.detach().clone()
        optimizer.step()
        (work,) = optimizer._worklist.works
        return not torch.equal(param, before), work.engine

    with by_kernels(True):
        optimizer = cls([param], method="half")
        assert [step() for _ in range(3)] == [(True, engine)] * 3
        target = optimizer if to == "instance" else cls
        with mock.patch.object(target, "direction", lambda *given: torch.zeros_like(given[-3])):
            assert step() == (False, reference)
        assert step() == (True, engine)


# ---- for the interpreter alone: `tests/soundness` has the same on a GPU


def rests(device, cls, shape=(64, 70), **options):
    """Full steps, rest, moments that fade, and gradients that return: each as the oracle has it."""
    with by_kernels(True):
        setting = cases.Setting(cls, options={"method": "half", "momentum": 0.5, **options})
        watched = setting.watched([shape])
        for scale in (1e-15, *[0.0] * 9, 1e-15, 1e-20, 1.0):  # 1e-20 alone would fade at once
            watched.step(*cases.drawn(watched, watched.steps, scale))
    lengths = [length for (length,) in watched.lengths]
    if "gradient_bound" in options:  # above ‖1e-15·Z‖_op: the steps fall with Ĝ
        assert all(a > b for a, b in pairwise(lengths[:7])) and not lengths[9]
    else:
        assert lengths[1] > 0.7 and not any(lengths[2:10])


def spoiled(device, cls, name, method="half"):
    """A step that is not finite keeps every bit, and is counted once."""
    with by_kernels(True):
        skips.check_skip(name, cases.Setting(cls, options={"method": method}))


def grown(device):
    """The kernels do not follow a parameter that has outgrown its state."""
    with by_kernels(True):
        param = torch.zeros(5, 8, requires_grad=True)
        optimizer = Leon([param])
        param.grad = torch.ones(5, 8)
        optimizer.step()
        param.data, param.grad = torch.zeros(9, 8), torch.ones(9, 8)
        try:
            optimizer.step()
        except RuntimeError:
            return
        raise AssertionError("the kernels wrote beyond the state")


def mixed(device):
    """Gradients of two dtypes, one beyond float16; a rate that the user's own dtype would round."""
    found = []
    for default in (torch.float32, torch.float16):
        with by_kernels(True):
            torch.set_default_dtype(default)
            try:
                size = {"dtype": torch.float32, "requires_grad": True}
                params = [torch.zeros(64, 70, **size) for _ in range(2)]
                for param in params:
                    param.grad_dtype = None
                params[0].grad = torch.eye(64, 70, dtype=torch.float16)
                params[1].grad = 1e6 * torch.eye(64, 70, dtype=torch.float32)
                optimizer = Muon(params, lr=0.0213, method="half", weight_decay=0.1)
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        assert [optimizer.state[p]["skipped"].item() for p in params] == [0, 0]
        found.append(params)
    assert all(map(torch.equal, *found))


WIDE, TALL, STACK, SMALL = (64, 100), (130, 70), (3, 64, 64), {"method": "auto"}
DECAY = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
CLIMBING = {"maximize": True, "nesterov": True}
SAMPLES = {"samples": 3, "nesterov": True, "gradient_bound": 2.0}
LITERAL = {"smoothing_scale": "literal", "maximize": True, "seed": 7}
STEPS = [
    # Shapes.
    *((cls, [WIDE, WIDE], {"spoil": 1}) for cls in (Muon, Leon)),
    *((cls, [TALL], DECAY) for cls in (Muon, Leon)),
    *((cls, [STACK] * 2, {"spoil": 0, "weight_decay": 0.1, **CLIMBING}) for cls in (Muon, Leon)),
    (Leon, [(2, 65, 70), (1, 65, 70)], {}),  # odd sides begin anywhere in a batch
    # Options, and where it all lies.
    (Leon, [(64, 2 * 72)], {"axes": "r (b=2 c)", "smoothing_scale": 0.5}),
    (Leon, [(64 + 80, 96)], {"axes": "r{64,80} c", "step_length": "exponential"}),
    (Leon, [(3 * 64, 80)], {"axes": "(b=3 r) c", "beta2": 0.9, "gradient_bound": 2.0}),
    (Leon, [WIDE], {"dtype": torch.float16}),
    (Leon, [WIDE], {"momentum": 0, "smoothing_scale": 0, "weight_decay": 1, "lr": 1}),
    *((Leon, [WIDE, WIDE], {"moves": moves}) for moves in ("weights", "states")),
    *((Leon, [WIDE, WIDE], {"at": 1, "dtype": t}) for t in (torch.float32, torch.float16)),
    # Layouts that routing makes of a weight.
    (Leon, [(3 * 64, 64), (64, 64)], {"axes": ["(b=3 r) c", None], "spoil": 0}),
    (Leon, [(100, 64)], {"axes": "c r"}),
    (Leon, [(64, 70)], {"axes": "c r", "spoil": 0}),
    (Leon, [(64, 64)], {"axes": "c r", "weight_decay": 0.1}),
    (Leon, [(80, 3 * 64)], {"axes": "c (b=3 r)", "spoil": 0}),
    (Leon, [(80, 64 + 70)], {"axes": "c r{64,70}"}),
    (Muon, [(2 * 64, 3 * 66)], {"axes": "(b=2 c) (b=3 r)"}),
    (Leon, [(2 * 3 * 32, 80)], {"axes": "(r=2 b=3 r) c", "spoil": 0}),
    (Leon, [(2 * 3 * 40, 70)], {"axes": "(r=2 b=3 r) c"}),
    (Leon, [(2 * (32 + 40), 80)], {"axes": "(r=2 r{32,40}) c"}),
    (Muon, [(2, 64, 2 * 66)], {"axes": "b c (b=2 r)"}),
    (Leon, [(2, 2 * 64, 70)], {"axes": "b (r b=2) c"}),
    (Leon, [(64, 8, 3, 3)], {"axes": "r c c c", "memory_format": LAST, "at": 0}),
    (Leon, [(96, 8, 3, 3)], {"axes": "r c c c", "memory_format": LAST, "weight_decay": 0.1}),
    (Muon, [(2 * 64, 8, 3, 3)], {"axes": "(b=2 r) c c c", "memory_format": LAST}),
    (Leon, [(8, 64, 3, 3)], {"axes": "c r c c"}),
    (Leon, [(8, 64, 3, 3)], {"axes": "c r c c", "memory_format": LAST}),
    (Leon, [(64, 64)], {"moves": "transposed"}),
    (Leon, [(64, 4, 4, 4)], {"axes": "r c c c", "moves": "channels last"}),
    # Short sides below 64, where the direction is that of float64 sums.
    *((cls, [(3, 20), (3, 20)], {"spoil": 1, **SMALL}) for cls in (Muon, Leon)),
    *(
        (c, [(70, 5)], {"lr": torch.tensor(0.1), "weight_decay": 0.1, **SMALL})
        for c in (Muon, Leon)
    ),
    *((cls, [(2, 33, 40)], {"spoil": 0, **CLIMBING, **SMALL}) for cls in (Muon, Leon)),
    (Leon, [(4, 3, 20), (3, 3, 20)], SMALL),
    (Leon, [(9, 40)], {"beta2": 0.9, "gradient_bound": 2.0, **SMALL}),
    (Leon, [(20, 3 * 8)], {"axes": "c (b=3 r)", **SMALL}),
    (Leon, [(12, 4, 3, 3)], {"axes": "(b=2 r) c c c", **SMALL}),
    (Muon, [(16, 3, 3, 3)], {"axes": "r c c c", "memory_format": LAST, **SMALL}),
    (Leon, [(1, 30), (40, 1)], SMALL),
    (Muon, [(1, 100)], {"axes": "c r", **SMALL}),
    # Noise: in blocks of L of odd size, wide and padded, and as routing lays weights out.
    (Pion, [(65, 71)], SAMPLES),
    (Pion, [(64, 140), (64, 140)], {"spoil": 1}),
    (Pion, [(130, 140)], {"weight_decay": 0.1}),
    (Pion, [(3, 64, 64)], {"samples": 2, "spoil": 0}),
    (Pion, [(100, 64)], LITERAL),
    (Pion, [(64, 70)], {"smoothing_scale": 0.0, "dtype": torch.float16}),
    (Pion, [(80, 3 * 64)], {"axes": "c (b=3 r)", "spoil": 0}),
    (Pion, [(2 * 2 * 32, 80)], {"axes": "(r=2 b=2 r) c", "samples": 2}),
    (Pion, [(64, 8, 3, 3)], {"axes": "r c c c", "memory_format": LAST}),
]


def label(cls, shapes, options):
    words = [f"{key}={getattr(value, '__name__', value)}" for key, value in options.items()]
    return " ".join([cls.__name__, *map(str, shapes), *words])


AGREE = {label(*given): (agree, dict(cls=given[0], shapes=given[1], **given[2])) for given in STEPS}
OTHERS = {
    **{f"missing {cls.__name__}": (missing, {"cls": cls}) for cls in (Muon, Leon, Pion)},
    **{
        f"hooks {cls.__name__} {to}": (hooks, {"cls": cls, "to": to})
        for cls in (Muon, Leon, Pion)
        for to in ("instance", "class")
    },
    **{f.__name__: (f, {}) for f in (for_others, huge, bounded, overflowing, broken_roots)},
}
BAD = ("first entry nan", "Ĝ overflows", "M̂ overflows", "nan in Ĝ", "nan on the diagonal of M̂")
BESIDE = "nan beside the diagonal of M̂"
ALONE = {
    "rests Leon": (rests, {"cls": Leon}),
    "rests Muon": (rests, {"cls": Muon, "nesterov": True}),
    "rests Pion": (rests, {"cls": Pion}),
    "rests bounded": (rests, {"cls": Leon, "gradient_bound": 2e-14}),
    "rests small Leon": (rests, {"cls": Leon, "shape": (9, 20), **SMALL}),
    "rests small Muon": (rests, {"cls": Muon, "shape": (9, 20), **SMALL}),
    **{f"spoiled {name}": (spoiled, {"cls": Leon, "name": name}) for name in BAD},
    **{f"spoiled small {n}": (spoiled, {"cls": Leon, "name": n, **SMALL}) for n in (*BAD, BESIDE)},
    **{f"spoiled Pion {n}": (spoiled, {"cls": Pion, "name": n}) for n in (BAD[0], *BAD[2::2])},
    "grown": (grown, {}),
    "mixed": (mixed, {}),
}
CASES = AGREE | OTHERS | ALONE
