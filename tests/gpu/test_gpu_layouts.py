"""Every layout that routing makes is stepped by the kernels, as torch steps it."""

import math

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import engine

LAYOUTS = {
    "transposed": ((200, 72), "c r"),
    "transposed, square": ((96, 96), "c r"),
    "fused, transposed": ((128, 3 * 80), "c (b=3 r)"),
    "fused": ((3 * 80, 128), "(b=3 r) c"),
    "grouped": ((128 + 64 + 64, 96), "r{128,64,64} c"),
    "grouped, transposed": ((96, 128 + 64 + 64), "c r{128,64,64}"),
    "head by head": ((4 * 3 * 20, 128), "(r=4 b=3 r) c"),
    "sections in each head": ((4 * (16 + 16 + 64), 128), "(r=4 r{16,16,64}) c"),
    "per head": ((128, 4 * 64), "r (b=4 c)"),
    "experts": ((3, 80, 128), "b r c"),
    "experts, transposed": ((3, 128, 160), "b c (b=2 r)"),
    "experts, alternating": ((3, 160, 128), "b (r b=2) c"),
    "convolution": ((96, 16, 3, 3), "r c c c"),
    "tall convolution": ((256, 16, 3, 3), "r c c c"),
    "grouped convolution": ((4 * 64, 16, 3, 3), "(b=4 r) c c c"),
    "transposed convolution": ((80, 64, 3, 3), "c r c c"),
    "gates": ((4 * 64, 80), "(b=4 r) c"),
    "LoRA": ((8, 300), "r c"),
    "LoRA, tall": ((300, 16), "r c"),
    "small stack": ((5, 33, 40), "b r c"),
    "small convolution": ((16, 3, 3, 3), "r c c c"),
    "a row": ((1, 100), "r c"),
    "a column, transposed": ((1, 100), "c r"),
}
CONVOLUTIONS = [name for name in LAYOUTS if "convolution" in name]


def trained(cls, param, spec, *, steps=4, **options):
    optimizer = cls([param], lr=0.05, scale="none", axes=spec, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(param.shape, generator=generator).to(param)
        param.grad = torch.empty_like(param).copy_(gradient)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon])
@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{name}, last" for name in CONVOLUTIONS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layout_is_served_and_right(cls, name, dtype, monkeypatch):
    shape, spec = LAYOUTS[name.removesuffix(", last")]
    memory = torch.channels_last if name.endswith(", last") else torch.contiguous_format
    value = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to("cuda", dtype)
    first, second = (value.to(memory_format=memory, copy=True).requires_grad_() for _ in range(2))
    fast = trained(cls, first, spec, weight_decay=0.1)
    assert {work.engine for work in fast._worklist.works} == {engine}
    assert all(work.cache.recording.replay.graph for work in fast._worklist.works)
    assert "torch" not in next(iter(fast.explain())).optimizer
    monkeypatch.setattr(engine, "runs_on", lambda device: False)
    slow = trained(cls, second, spec, weight_decay=0.1)
    assert {work.engine for work in slow._worklist.works} == {reference}
    a, b = fast.state[first], slow.state[second]
    torch.testing.assert_close(a["total"], b["total"], rtol=1e-5, atol=1e-5)
    short = min(
        min(block.shape[-2:]) for block in [a[k] for k in a if k.startswith("gram")] or [first]
    )
    for key in (key for key in a if key.startswith("gram")):
        difference = torch.linalg.matrix_norm(a[key] - b[key])
        assert (difference <= 2**-10 * torch.linalg.matrix_norm(b[key])).all()
    # Float16 recursions are within a percent of each other, float64 sums of float32 ones better.
    share = 1e-3 if short < 64 and cls is nucleon.Leon else 0.01
    eps = torch.finfo(dtype).eps
    near = (first - second).abs() <= share * 4 * 0.05 + 4 * eps * second.abs()
    assert near.all(), (first - second).abs().max()


def test_stochastic_rounding_takes_the_direction_of_the_kernels(monkeypatch):
    params = [torch.ones(64, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    fast = trained(nucleon.Leon, params[0].requires_grad_(), "r c", stochastic_rounding=True)
    assert {work.engine for work in fast._worklist.works} == {engine}
    monkeypatch.setattr(engine, "runs_on", lambda device: False)
    trained(nucleon.Leon, params[1].requires_grad_(), "r c", stochastic_rounding=True)
    assert ((params[0] - params[1]).abs() <= 2**-7).all()  # the same draws: a digit apart at most


def test_a_memory_format_that_changes_is_followed():
    param = torch.randn(96, 16, 3, 3, device="cuda", requires_grad=True)
    optimizer = trained(nucleon.Leon, param, "r c c c")
    kept = optimizer.state[param]["total"].clone()
    param.data = param.detach().to(memory_format=torch.channels_last)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    (work,) = optimizer._worklist.works
    assert work.engine is engine and work.cache.recording is not None
    torch.testing.assert_close(optimizer.state[param]["total"], 0.95 * kept)


def test_what_is_not_served_says_why():
    """The list of what remains."""
    leon, weight = nucleon.Leon, {"dtype": torch.float32}
    shape = (64, 80)
    remaining = [
        (leon, shape, weight, {"certify": True}, "certify"),
        (leon, shape, {"dtype": torch.float64}, {}, "float64 weights"),
        (leon, shape, weight, {"momentum_dtype": torch.float64}, "momentum_dtype"),
        (leon, shape, weight, {"beta2": 0.99}, "beta2 above 0.984"),
        (leon, shape, weight, {"method": "eigh"}, "method='eigh'"),
        (leon, shape, weight, {"method": "polar-express"}, "method='polar-express'"),
        (leon, (2, 3, 2, 5, 2, 7), weight, {"axes": "r b r b r c"}, "its entries are not apart"),
        (nucleon.Pion, (40, 80), weight, {}, "pion by 'polar-express'"),
    ]
    for cls, size, made, options, expected in remaining:
        param = torch.zeros(size, device="cuda", **made, requires_grad=True)
        optimizer = cls([param], **options)
        (row,) = optimizer.explain()
        assert f"(torch: {expected}" in row.optimizer, row.method
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(work.engine is reference for work in optimizer._worklist.works)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.memory = nn.LSTM(128, 128, batch_first=True)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.memory(x)[0]
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon])
def test_a_whole_model_has_no_matrix_on_the_slow_path(cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 128), Block(), nn.Linear(128, 100)).cuda()
    optimizer = cls.for_model(model, head="2")
    losses = []
    tokens = torch.randint(100, (8, 32), device="cuda")
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    engines = [w.engine for w in optimizer._worklist.works if hasattr(w, "stack")]
    assert engines and set(engines) == {engine}
    assert math.isfinite(losses[-1]) and losses[-1] < 0.5 * losses[0]
