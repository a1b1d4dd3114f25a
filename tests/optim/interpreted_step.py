"""Asked by `test_fused.py`, in a process with TRITON_INTERPRET=1: the fused step on the CPU.

Each step is done twice from the same state, by the kernels and by the torch path, with the
float16 recursion in both. No bfloat16: the interpreter knows its bit patterns only.
"""

import copy
import math
import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path

import torch
import torch._dynamo  # at the first step

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases, also as a script

import interpreting  # noqa: F401  (patches the language once)
import nucleon
from nucleon.linalg import triton_symmetric
from nucleon.linalg.half import first_floor
from nucleon.optim import worklist
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import addresses, engine, kernels, perturbed
from nucleon.optim.engines.cuda import small as small_kernel
from soaking import every_third
from soundness import cases, skips

assert triton_symmetric.INTERPRETED

HERE = engine.runs_on
addresses.send = lambda places, table: table.copy_(torch.tensor(places))
torch.cuda.is_current_stream_capturing = lambda: False


def steps(
    cls, shapes, *, fast, spoil=None, dtype=torch.float32, moves="", at=0, method="half",
    memory_format=torch.contiguous_format, **options,
):  # fmt: skip
    """Weights and states after three steps; gradient number `spoil` of the second is not finite.

    What `moves` is elsewhere, or lies otherwise, from the third step on. Gradients begin at entry
    `at` of a buffer of their own.
    """
    engine.runs_on = (lambda device: True) if fast else HERE
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    params = [p.to(memory_format=memory_format).requires_grad_() for p in params]
    optimizer = cls(params, method=method, scale="none", **options)
    calls = 0
    begin, compute = kernels.begin, small_kernel.compute
    with_noise = perturbed.compute

    def counted(*args):
        nonlocal calls
        calls += 1
        found, taken = begin(*args)
        assert torch.allclose(found.floor, first_floor(found.r), rtol=1e-5)  # a sum of squares
        return found, taken

    def counted_small(*args):
        nonlocal calls
        calls += 1
        return compute(*args)

    def counted_perturbed(*args):
        nonlocal calls
        calls += 1
        return with_noise(*args)

    kernels.begin, small_kernel.compute = counted, counted_small
    perturbed.compute = counted_perturbed
    for step in range(3):
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (i - step)
            if (step, i) == (1, spoil):
                gradient.view(-1)[-5] = math.nan  # of the last matrix
            buffer = torch.empty(at + p.numel(), dtype=dtype)
            p.grad = buffer[at:].view(p.shape).copy_(gradient)
        if step == 2:
            for p in params:
                if moves == "weights":
                    p.data = p.detach().clone()
                if moves == "transposed":
                    p.data = p.detach().mT
                if moves == "channels last":
                    p.data = p.detach().to(memory_format=torch.channels_last)
            if moves == "states":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    kernels.begin, small_kernel.compute, perturbed.compute = begin, compute, with_noise
    engine.runs_on = HERE
    assert calls >= 3 * fast, calls
    return params, [optimizer.state[p] for p in params]


@every_third
def compare(cls, shapes, spoil=None, **options):
    fast = steps(cls, shapes, fast=True, spoil=spoil, **options)
    slow = steps(cls, shapes, fast=False, spoil=spoil, **options)
    eps = torch.finfo(options.get("dtype", torch.float32)).eps
    for a, b in zip(fast[0], slow[0], strict=True):
        # The recursion rounds to float16 in either; G in float16 moves Λ by 2⁻¹¹ at most.
        change = 3 * float(options.get("lr", 0.02))
        share = 0.01 if options.get("method", "half") == "half" else 1e-4  # float64 inside
        near = (a - b).abs() <= share * change + eps * 4
        assert near.all(), (cls, shapes, options, (a - b).abs().max())
    for a, b in zip(fast[1], slow[1], strict=True):
        assert torch.equal(a["skipped"], b["skipped"])
        torch.testing.assert_close(a["total"], b["total"], rtol=1e-6, atol=1e-6)
        for name in (name for name in a if name.startswith("gram")):
            assert torch.equal(a[name], a[name].mT)
            difference = torch.linalg.matrix_norm(a[name] - b[name])
            assert (difference <= 2**-10 * torch.linalg.matrix_norm(b[name])).all()
    if spoil is not None:
        assert fast[1][spoil]["skipped"].sum() == 1


def not_there():
    """One of two parameters has no gradient, then one that is not finite, then again none."""
    found = []
    for fast in (True, False):
        engine.runs_on = (lambda device: True) if fast else HERE
        params = [torch.zeros(64, 70, requires_grad=True) for _ in range(2)]
        optimizer = nucleon.Leon(params, method="half", lr=1.0, scale="none")
        generator = torch.Generator().manual_seed(3)
        gradients = [torch.randn(64, 70, generator=generator) for _ in params]
        (work,), (settings,) = worklist.present(optimizer), optimizer._current_settings()
        assert work.engine is (engine if fast else reference)
        for there in (False, True, False):
            with torch.no_grad():
                p, taken = work.engine.advance(
                    work, settings, gradients, torch.tensor([True, there])
                )
            gradients[1][5, 6] = math.nan
        for i, param in enumerate(params):  # the same through the public step
            param.grad = gradients[i].clone() if i == 0 else None
        optimizer.step()
        before = [param.detach().clone() for param in params]
        programs = set()
        for missing in (0, 1, None, 0):
            for i, param in enumerate(params):
                param.grad = None if i == missing else torch.ones(64, 70)
            optimizer.step()
            for i, (param, old) in enumerate(zip(params, before, strict=True)):
                assert torch.equal(param, old) == (i == missing)
            before = [param.detach().clone() for param in params]
            (own,) = optimizer._worklist.works
            programs.add(own.cache.recording.replay.arguments if fast else None)
        assert len(programs) == 1  # a mask is an input of the step, not another step
        found.append((p[0].float(), taken, work.states, before))
    engine.runs_on = HERE
    (p, taken, states, weights), (q, others, expected, slow) = found
    assert taken.tolist() == others.tolist() == [True, False]
    assert ((p - q).abs() <= 0.01).all()  # as in `compare`
    for a, b in zip(states, expected, strict=True):
        assert torch.equal(a["skipped"], b["skipped"])
        torch.testing.assert_close(a["total"], b["total"], rtol=1e-6, atol=1e-6)
    for a, b in zip(weights, slow, strict=True):
        assert ((a - b).abs() <= 0.04).all()
    assert states[1]["skipped"].item() == 1


def for_others():
    """The direction that other ranks are sent has the order of the axes, not that of the memory."""
    found = []
    for fast in (True, False):
        engine.runs_on = (lambda device: True) if fast else HERE
        weight = torch.zeros(64, 8, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        group = {"params": [weight], "axes": ["r c c c"]}
        optimizer = nucleon.Leon([group], method="half", lr=1.0, scale="none")
        (work,), (settings,) = worklist.present(optimizer), optimizer._current_settings()
        assert work.engine is (engine if fast else reference)
        generator = torch.Generator().manual_seed(5)
        gradient = torch.randn(64, 8, 3, 3, generator=generator)
        with torch.no_grad():
            found.append(work.engine.advance(work, settings, [gradient], None)[0].float())
    engine.runs_on = HERE
    assert ((found[0] - found[1]).abs() <= 0.01).all()  # as in `compare`


def huge():
    """‖G‖² just fits float32, m times an entry of GGᵀ does not: P = polar(G)/√2 all the same."""
    weight = torch.zeros(64, 100, requires_grad=True)
    size = torch.where(torch.arange(64) < 16, 3e17, 3e16)
    weight.grad = torch.randn(64, 100, generator=torch.Generator().manual_seed(4)) * size[:, None]
    exact = torch.linalg.svd(weight.grad.double(), full_matrices=False)
    assert 64 * weight.grad.double().square().sum(-1).max() > torch.finfo(torch.float32).max
    engine.runs_on = lambda device: True
    optimizer = nucleon.Leon([weight], lr=1.0, scale="none", method="half")
    optimizer.step()
    engine.runs_on = HERE
    assert optimizer.state[weight]["skipped"].item() == 0
    expected = exact.U @ exact.Vh / math.sqrt(2)
    assert torch.linalg.matrix_norm(weight.detach() + expected) <= 0.1 * math.sqrt(64)


def bounded():
    """Λ is nearly G²β₁⁻²I and 10⁶ times SSᵀ: the Gram matrix fits float16, P is small and right."""
    gradient = torch.randn(64, 100, generator=torch.Generator().manual_seed(5))
    weight = torch.zeros(64, 100, requires_grad=True)
    weight.grad = gradient.clone()
    options = {"scale": "none", "method": "half", "momentum": 0.5, "gradient_bound": 1e4}
    optimizer = nucleon.Leon([weight], lr=1e4, **options)
    engine.runs_on = lambda device: True
    optimizer.step()
    engine.runs_on = HERE
    wide = gradient.double()
    values, vectors = torch.linalg.eigh(2 * wide @ wide.mT + (1e4 / 0.5) ** 2 * torch.eye(64))
    expected = 1e4 * (vectors / values.sqrt()) @ vectors.mT @ wide
    # The recursion alone is off by a few percent; of a Gram matrix that overflows nothing is left.
    assert torch.dist(weight.detach().double(), -expected) <= 0.1 * expected.norm()


def overflowing():
    """A finite gradient whose square leaves float32 is skipped, and changes nothing of its own."""
    params = [torch.ones(64, 100, requires_grad=True) for _ in range(2)]
    generator = torch.Generator().manual_seed(6)
    optimizer = nucleon.Leon(params, method="half", weight_decay=0.1)
    engine.runs_on = lambda device: True
    for size in (1.0, 1e20):
        before = copy.deepcopy(([p.detach() for p in params], [optimizer.state[p] for p in params]))
        for p in params:
            p.grad = torch.randn(64, 100, generator=generator)
        params[0].grad[3, 4] = size
        optimizer.step()
    engine.runs_on = HERE
    (old, _), (state, _) = before
    assert torch.equal(params[0], old) and not torch.equal(params[1], before[0][1])
    for name in ("total", "gram"):
        assert state[name].any() and torch.equal(optimizer.state[params[0]][name], state[name])
    assert [optimizer.state[p]["skipped"].item() for p in params] == [1, 0]


def without_gradients(cls, shape=(64, 70), **options):
    """Full steps, rest, moments that fade, and gradients that return: each as the oracle has it."""
    engine.runs_on = lambda device: True
    setting = cases.Setting(cls, options={"method": "half", "momentum": 0.5, **options})
    watched = setting.watched([shape])
    for scale in (1e-15, *[0.0] * 9, 1e-15, 1e-20, 1.0):  # 1e-20 alone would fade at once
        watched.step(*cases.drawn(watched, watched.steps, scale))
    engine.runs_on = HERE
    return [length for (length,) in watched.lengths]


@every_third
def spoiled(name, cls=nucleon.Leon, **options):
    """A step that is not finite keeps every bit, and is counted once."""
    engine.runs_on = lambda device: True
    setting = cases.Setting(cls, options={"method": "half", **options})
    try:
        skips.skip_keeps_the_bits(name, setting)
    finally:
        engine.runs_on = HERE


def hostile():
    lengths = without_gradients(nucleon.Leon)
    assert lengths[1] > 0.7 and not any(lengths[2:10])
    without_gradients(nucleon.Muon, nesterov=True)
    lengths = without_gradients(nucleon.Leon, gradient_bound=2e-14)  # above ‖1e-15·Z‖_op
    assert all(a > b for a, b in pairwise(lengths[:7])) and not lengths[9]
    for name in ("first entry nan", "Ĝ overflows", "M̂ overflows", "nan in Ĝ"):
        spoiled(name)
    spoiled("nan on the diagonal of M̂")


def small():
    """Short sides below 64, where the direction is that of float64 sums; odd strides beside."""
    for cls in (nucleon.Muon, nucleon.Leon):
        compare(cls, [(3, 20), (3, 20)], method="auto", spoil=1)
        compare(cls, [(70, 5)], method="auto", lr=torch.tensor(0.1), weight_decay=0.1)
        compare(cls, [(2, 33, 40)], method="auto", maximize=True, nesterov=True, spoil=0)
    compare(nucleon.Leon, [(9, 40)], method="auto", beta2=0.9, gradient_bound=2.0)
    compare(nucleon.Leon, [(20, 3 * 8)], axes="c (b=3 r)", method="auto")
    compare(nucleon.Leon, [(12, 4, 3, 3)], axes="(b=2 r) c c c", method="auto")
    compare(nucleon.Leon, [(1, 30), (40, 1)], method="auto")
    for cls in (nucleon.Muon, nucleon.Leon):
        lengths = without_gradients(cls, shape=(9, 20), method="auto")
        assert lengths[1] > 0.7 and not any(lengths[2:10])
    for name in ("first entry nan", "Ĝ overflows", "M̂ overflows", "nan in Ĝ"):
        spoiled(name, method="auto")
    spoiled("nan on the diagonal of M̂", method="auto")
    spoiled("nan beside the diagonal of M̂", method="auto")


def layouts():
    """What routing makes of a weight: stored transposed, cut, head by head, channels last."""
    compare(nucleon.Leon, [(100, 64)], axes="c r")
    compare(nucleon.Leon, [(64, 70)], axes="c r", spoil=0)
    compare(nucleon.Leon, [(64, 64)], axes="c r", weight_decay=0.1)
    compare(nucleon.Leon, [(80, 3 * 64)], axes="c (b=3 r)", spoil=0)
    compare(nucleon.Muon, [(2 * 64, 3 * 66)], axes="(b=2 c) (b=3 r)")
    compare(nucleon.Leon, [(2 * 3 * 32, 80)], axes="(r=2 b=3 r) c", spoil=0)
    compare(nucleon.Leon, [(2 * 3 * 40, 70)], axes="(r=2 b=3 r) c")
    compare(nucleon.Leon, [(2 * (32 + 40), 80)], axes="(r=2 r{32,40}) c")
    last = torch.channels_last
    compare(nucleon.Leon, [(64, 8, 3, 3)], axes="r c c c", memory_format=last)
    compare(nucleon.Leon, [(96, 8, 3, 3)], axes="r c c c", memory_format=last, weight_decay=0.1)
    compare(nucleon.Leon, [(8, 64, 3, 3)], axes="c r c c")
    compare(nucleon.Leon, [(64, 64)], moves="transposed")
    compare(nucleon.Leon, [(64, 4, 4, 4)], axes="r c c c", moves="channels last")


def samples():
    """Pion: the samples as one batch, in two blocks of L of odd size."""
    compare(nucleon.Pion, [(65, 71)], samples=3, nesterov=True, gradient_bound=2.0)


def noisy():
    """Wide and padded, and several blocks of L."""
    compare(nucleon.Pion, [(64, 140), (64, 140)], spoil=1)
    compare(nucleon.Pion, [(130, 140)], weight_decay=0.1)
    compare(nucleon.Pion, [(3, 64, 64)], samples=2, spoil=0)
    compare(nucleon.Pion, [(100, 64)], smoothing_scale="literal", maximize=True, seed=-7)
    compare(nucleon.Pion, [(64, 70)], smoothing_scale=0.0, dtype=torch.float16)


def noisy_layouts():
    """The same of what is stored transposed, cut or in channels-last memory."""
    compare(nucleon.Pion, [(80, 3 * 64)], axes="c (b=3 r)", spoil=0)
    compare(nucleon.Pion, [(2 * 2 * 32, 80)], axes="(r=2 b=2 r) c", samples=2)
    compare(nucleon.Pion, [(64, 8, 3, 3)], axes="r c c c", memory_format=torch.channels_last)


def broken_roots():
    """An indefinite M̂ has the root of an upper bound; one that is not finite keeps its weights."""
    found = []
    for fast in (True, False):
        engine.runs_on = (lambda device: True) if fast else HERE
        params = [torch.zeros(70, 80, requires_grad=True) for _ in range(3)]
        optimizer = nucleon.Pion(params, method="half", lr=1.0, scale="none", samples=2)
        generator = torch.Generator().manual_seed(8)
        for i, p in enumerate(params):
            p.grad = torch.randn(70, 80, generator=generator)
            gram = optimizer.state[p]["gram"]
            gram += 9 * torch.eye(70)
            if i:
                gram[0, 65, 3] = gram[0, 3, 65] = math.nan if i == 2 else 1e4
        optimizer.step()
        found.append((params, [optimizer.state[p]["skipped"].item() for p in params]))
    engine.runs_on = HERE
    (fast, skipped), (slow, expected) = found
    assert skipped == expected == [0, 0, 1]
    assert not fast[2].any()
    for a, b in zip(fast, slow, strict=True):
        assert ((a - b).abs() <= 0.01).all(), ((a - b).abs().max(), b.norm(), a.norm())


def hostile_noise():
    lengths = without_gradients(nucleon.Pion)
    assert lengths[1] > 0.7 and not any(lengths[2:10])
    for name in ("first entry nan", "M̂ overflows", "nan on the diagonal of M̂"):
        spoiled(name, nucleon.Pion)


def shapes():
    wide, tall, stack = (64, 100), (130, 70), (3, 64, 64)
    for cls in (nucleon.Muon, nucleon.Leon):
        compare(cls, [wide, wide], spoil=1)
        compare(cls, [tall], lr=torch.tensor(0.1), weight_decay=0.1)
        compare(cls, [stack, stack], spoil=0, maximize=True, nesterov=True, weight_decay=0.1)


def options():
    wide = (64, 100)
    compare(nucleon.Leon, [(3 * 64, 80)], axes="(b=3 r) c", beta2=0.9, gradient_bound=2.0)
    compare(nucleon.Leon, [(64, 2 * 72)], axes="r (b=2 c)", smoothing_scale=0.5)
    compare(nucleon.Leon, [(64 + 80, 96)], axes="r{64,80} c", step_length="exponential")
    compare(nucleon.Leon, [wide], dtype=torch.float16)
    compare(nucleon.Leon, [wide, wide], moves="weights")
    compare(nucleon.Leon, [wide, wide], moves="states")
    compare(nucleon.Leon, [wide, wide], at=1)
    compare(nucleon.Leon, [(3 * 64, 64), (64, 64)], axes=["(b=3 r) c", None], spoil=0)
    compare(nucleon.Leon, [wide], momentum=0, smoothing_scale=0, weight_decay=1, lr=1)


def hooks():
    """A direction that is assigned after a step by the kernels is the one that runs."""
    engine.runs_on = lambda device: True
    served = []

    def counted(function):
        return lambda *given: served.append(function) or function(*given)

    kernels.begin, perturbed.compute = counted(kernels.begin), counted(perturbed.compute)
    for cls in (nucleon.Muon, nucleon.Leon, nucleon.Pion):
        for to in ("instance", "class"):
            param = torch.zeros(64, 70, requires_grad=True)
            param.grad = torch.eye(64, 70)
            optimizer = cls([param], method="half")

            def step(optimizer=optimizer, param=param):
                """Whether the weight has moved, and whether kernels were called."""
                before = param.detach().clone()
                served.clear()
                optimizer.step()
                return not torch.equal(param, before), bool(served)

            own, target = vars(cls)["direction"], optimizer if to == "instance" else cls
            assert step() == (True, True)
            target.direction = lambda *given: torch.zeros_like(given[-3])
            assert step() == (False, False)
            if to == "class":
                cls.direction = own
                assert step() == (True, True)


def irregular():
    """What does not fit is not followed, what is odd is."""
    # Gram matrices of an odd side begin anywhere in a batch.
    compare(nucleon.Leon, [(4, 3, 20), (3, 3, 20)], method="auto")
    compare(nucleon.Leon, [(2, 65, 70), (1, 65, 70)])
    # A parameter that has grown has a state that is too small.
    engine.runs_on = lambda device: True
    param = torch.zeros(5, 8, requires_grad=True)
    optimizer = nucleon.Leon([param])
    param.grad = torch.ones(5, 8)
    optimizer.step()
    param.data = torch.zeros(9, 8)
    param.grad = torch.ones(9, 8)
    try:
        optimizer.step()
    except RuntimeError:
        pass
    else:
        raise AssertionError("the kernels wrote beyond the state")
    engine.runs_on = HERE
    # Gradients of two dtypes; a rate that the user's own dtype would round.
    usual, other = (mixed(dtype) for dtype in (torch.float32, torch.float16))
    assert all(torch.equal(a, b) for a, b in zip(usual, other, strict=True))


def mixed(default):
    """Two weights after a step with a float16 and a float32 gradient, the latter beyond float16."""
    engine.runs_on = lambda device: True
    torch.set_default_dtype(default)
    try:
        params = [torch.zeros(64, 70, dtype=torch.float32, requires_grad=True) for _ in range(2)]
        for param in params:
            param.grad_dtype = None
        params[0].grad = torch.eye(64, 70, dtype=torch.float16)
        params[1].grad = 1e6 * torch.eye(64, 70, dtype=torch.float32)
        optimizer = nucleon.Muon(params, lr=0.0213, method="half", weight_decay=0.1)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
        engine.runs_on = HERE
    assert [optimizer.state[p]["skipped"].item() for p in params] == [0, 0]
    return params


def status(name):
    """The exit code of a fork that runs the case: it has everything imported, and may crash."""
    child = os.fork()
    if child == 0:
        try:
            globals()[name]()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            status = 1
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print("exit", status(line.strip()), flush=True)
