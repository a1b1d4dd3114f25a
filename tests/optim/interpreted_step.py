"""Run by `test_fused.py` in a process with TRITON_INTERPRET=1: the fused step on the CPU.

Each step is done twice from the same state, by the kernels and by the torch path, with the
float16 recursion in both. No bfloat16: the interpreter knows its bit patterns only.
"""

import math

import torch

import nucleon
from nucleon.linalg import triton_symmetric
from nucleon.optim import fused, replay, triton_step

assert triton_symmetric.INTERPRETED

HERE = fused.runs_on


def steps(cls, shapes, *, fast, spoil=None, dtype=torch.float32, grad_dtype=None, **options):
    """Weights and states after three steps; gradient number `spoil` of the second is not finite."""
    fused.runs_on = (lambda device: True) if fast else HERE
    fused.table = lambda places, device: torch.tensor(places)
    torch.cuda.is_current_stream_capturing = lambda: False
    replay._capture = lambda *_: None  # launched one by one every time
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    optimizer = cls(params, method="half", **options)
    calls = 0
    begin = triton_step.begin

    def counted(*args):
        nonlocal calls
        calls += 1
        return begin(*args)

    triton_step.begin = counted
    for step in range(3):
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (i - step)
            if (step, i) == (1, spoil):
                gradient.view(-1)[5] = math.nan
            p.grad = gradient.to(dtype)
        optimizer.step()
    triton_step.begin = begin
    fused.runs_on = HERE
    assert bool(calls) == fast
    return params, [optimizer.state[p] for p in params]


def compare(cls, shapes, spoil=None, **options):
    fast = steps(cls, shapes, fast=True, spoil=spoil, **options)
    slow = steps(cls, shapes, fast=False, spoil=spoil, **options)
    eps = torch.finfo(options.get("dtype", torch.float32)).eps
    for a, b in zip(fast[0], slow[0], strict=True):
        # The recursion rounds to float16 in either; G in float16 moves Λ by 2⁻¹¹ at most.
        change = 3 * float(options.get("lr", 0.02)) * math.sqrt(max(1, a.shape[-2] / a.shape[-1]))
        near = (a - b).abs() <= 0.01 * change + eps * 4
        # An entry of P near zero may fall on either side of it, and is decayed or not.
        least = 0.99 if options.get("cautious") else 1.0
        assert near.float().mean() >= least, (cls, shapes, options, (a - b).abs().max())
    for a, b in zip(fast[1], slow[1], strict=True):
        assert torch.equal(a["skipped"], b["skipped"])
        torch.testing.assert_close(a["total"], b["total"], rtol=1e-6, atol=1e-6)
        for name in (name for name in a if name.startswith("gram")):
            assert torch.equal(a[name], a[name].mT)
            difference = torch.linalg.matrix_norm(a[name] - b[name])
            assert (difference <= 2**-10 * torch.linalg.matrix_norm(b[name])).all()
    if spoil is not None:
        assert fast[1][spoil]["skipped"].sum() == 1


def main() -> None:
    wide, tall, stack = (64, 100), (130, 70), (3, 64, 64)
    for cls in (nucleon.Muon, nucleon.Leon):
        compare(cls, [wide, wide], spoil=1)
        compare(cls, [tall], lr=torch.tensor(0.1), weight_decay=0.1, cautious=True)
        compare(cls, [stack, stack], spoil=0, maximize=True, nesterov=True, weight_decay=0.1)
    compare(nucleon.Leon, [(3 * 64, 80)], axes="(b=3 r) c", beta2=0.9, gradient_bound=2.0)
    compare(nucleon.Leon, [(64, 2 * 72)], axes="r (b=2 c)", smoothing_scale=0.5)
    compare(nucleon.Leon, [(64 + 80, 96)], axes="r{64,80} c", steps="exponential")
    compare(nucleon.Leon, [wide], dtype=torch.float16)
    print("all agree")


main()
