"""Axis specs: a parameter of any layout equals its matrices given one by one."""

import ast
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nucleon
from nucleon.optim.matrices import axes

METHODS = {
    "muon": lambda p, **k: nucleon.Muon(p, **k),
    "leon": lambda p, **k: nucleon.Leon(p, **k),
    "pion": lambda p, **k: nucleon.Pion(p, smoothing_scale=0.0, **k),  # its noise is by position
}


def rows_of_conv(x):
    return [x.flatten(1)]


# name: spec, shape, and by hand the matrices of a tensor, in the order of their numbers.
CASES = {
    "linear": ("r c", (6, 4), lambda x: [x]),
    "transposed linear": ("c r", (4, 6), lambda x: [x.T]),
    "stack": ("b r c", (3, 4, 5), lambda x: list(x)),
    "stacked experts, matrices last": ("r c b", (4, 5, 3), lambda x: list(x.movedim(2, 0))),
    "conv1d": ("r c c", (6, 2, 3), rows_of_conv),
    "conv2d": ("r c c c", (6, 2, 3, 3), rows_of_conv),
    "conv3d": ("r c c c c", (5, 2, 2, 3, 2), rows_of_conv),
    "grouped conv": (
        "(b=2 r) c c c",
        (6, 2, 3, 3),
        lambda x: [x[:3].flatten(1), x[3:].flatten(1)],
    ),
    "depthwise conv": ("(b=4 r) c c c", (4, 1, 3, 3), lambda x: [r.flatten(1) for r in x.split(1)]),
    "transposed conv": ("c r c c", (4, 5, 3, 3), lambda x: [x.movedim(1, 0).flatten(1)]),
    "grouped transposed conv": (
        "(b=2 c) r c c",
        (4, 5, 2, 2),
        lambda x: [g.movedim(1, 0).flatten(1) for g in x.split(2)],
    ),
    "fused qkv": ("(b=3 r) c", (12, 5), lambda x: list(x.split(4))),
    "fused qkv, per head": ("(b=3 b=2 r) c", (12, 5), lambda x: list(x.split(2))),
    "heads of the output projection": ("r (b=3 c)", (5, 12), lambda x: list(x.split(4, dim=1))),
    "grouped-query": ("r{8,2,2} c", (12, 5), lambda x: list(x.split([8, 2, 2]))),
    "grouped-query, columns": ("r c{6,3}", (4, 9), lambda x: list(x.split([6, 3], dim=1))),
    "sections in each head": (
        "(r=2 r{1,1,3}) c",
        (10, 4),
        lambda x: [y.flatten(0, 1) for y in x.unflatten(0, (2, 5)).split([1, 1, 3], dim=1)],
    ),
    "sections in each group of columns": (
        "r (b=2 c{2, 1})",
        (4, 6),
        lambda x: [
            y for cut in (slice(2), slice(2, 3)) for y in x.unflatten(1, (2, 3))[..., cut].unbind(1)
        ],
    ),
    "experts with fused gate and up": (
        "b (b=2 r) c",
        (3, 8, 5),
        lambda x: [half for expert in x for half in expert.split(4)],
    ),
    "batch axes apart": (
        "b r b c",
        (2, 3, 4, 5),
        lambda x: [x[i, :, j] for i, j in itertools.product(range(2), range(4))],
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def steps(optimizer, params, gradients):
    for gradient in gradients:
        for param, g in zip(params, gradient, strict=True):
            param.grad = g.clone()
        optimizer.step()


def column_major(x):
    """Return the tensor in another memory format."""
    order = list(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


@every_case
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("scale", ["spectral", "match-adamw"])
@pytest.mark.parametrize("form", ["as it is", "column-major", "in small stacks"])
def test_a_layout_equals_its_matrices_one_by_one(case, make, scale, form):
    spec, shape, by_hand = CASES[case]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    placed = column_major if form == "column-major" else torch.clone
    largest = 1 if form == "in small stacks" else None
    whole = placed(start).requires_grad_()
    singles = [m.clone().contiguous().requires_grad_() for m in by_hand(start)]
    options = {"lr": 0.1, "weight_decay": 0.1, "scale": scale}
    optimizer = make([whole], axes=spec, largest_stack=largest, **options)
    steps(optimizer, [whole], [[placed(g)] for g in gradients])
    steps(make(singles, **options), singles, [by_hand(g) for g in gradients])
    for ours, alone in zip(by_hand(whole.detach()), singles, strict=True):
        torch.testing.assert_close(ours, alone.detach(), rtol=1e-11, atol=1e-12)


@every_case
def test_state_certificates_and_diagnostics_know_every_matrix(case):
    spec, shape, by_hand = CASES[case]
    param = torch.randn(shape).requires_grad_()
    make = {"axes": spec, "gradient_bound": 50.0, "certify": True}
    optimizer = nucleon.Leon([("weight", param)], **make)
    gradients = [torch.randn(shape) for _ in range(3)]
    steps(optimizer, [param], [[g] for g in gradients])
    count = len(by_hand(param))
    assert optimizer.certificates()["weight"].regret.shape == (count,)
    assert optimizer.certificates()["weight"].holds
    names = {key.rsplit("/", 1)[0] for key in optimizer.diagnostics()}
    expected = {"leon/weight"} if count == 1 else {f"leon/weight.{i}" for i in range(count)}
    assert names == expected
    copy = nucleon.Leon([("weight", torch.randn(shape).requires_grad_())], **make)
    copy.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(copy.state.values(), optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_several_specs_in_one_group():
    conv, linear = torch.randn(4, 2, 3, 3).requires_grad_(), torch.randn(4, 18).requires_grad_()
    gradient = torch.randn(4, 18)
    with torch.no_grad():
        conv.copy_(linear.reshape(conv.shape))
    optimizer = nucleon.Leon([conv, linear], axes=["r c c c", None])
    steps(optimizer, [conv, linear], [[gradient.reshape(conv.shape), gradient]])
    assert torch.equal(conv.flatten(1), linear)
    (work,) = optimizer._worklist.works
    assert work.stack.count == 2


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_blocks_are_a_partition_of_the_parameter(data):
    """Numbering the entries: each comes once, and a region and its matrices agree."""
    letters = data.draw(st.permutations(["r", "c", *data.draw(st.lists(st.sampled_from("brc")))]))
    letters = letters[:5] if {"r", "c"} <= set(letters[:5]) else ["r", "c"]
    sizes = [data.draw(st.integers(1, 4)) for _ in letters]
    words, shape = [], []
    for letter, size in zip(letters, sizes, strict=True):
        factor = data.draw(st.integers(1, 3))
        if data.draw(st.booleans()):
            words.append(f"({data.draw(st.sampled_from('brc'))}={factor} {letter})")
            shape.append(size * factor)
        else:
            words.append(letter)
            shape.append(size)
    numbered = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    seen = []
    for block in axes.parse(" ".join(words), tuple(shape)):
        matrices = block.matrices(numbered)
        assert matrices.shape == (block.count, block.rows, block.columns)
        assert torch.equal(block.region(numbered).flatten(), matrices.flatten())
        seen += matrices.flatten().tolist()
    assert sorted(seen) == list(range(numbered.numel()))


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("r c", (2, 3, 4), "words for 2 axes"),
        ("r r", (2, 3), "needs rows and columns"),
        ("x c", (2, 3), "is invalid at 'x c'"),
        ("(b=3 r) c", (8, 4), "does not multiply out"),
        ("(b=2 r=3) c", (8, 4), "does not multiply out"),
        ("(b r) c", (8, 4), "only one size"),
        ("(b=0 r) c", (8, 4), "does not multiply out"),
        ("r{4,5} c", (8, 4), "make 9 entries"),
        ("r{4,4} c{2,2}", (8, 4), "sections twice"),
        ("r{0,8} c", (8, 4), "sizes above 0"),
        ("r{8,0} c", (8, 4), "sizes above 0"),
        ("r{ } c", (8, 4), "is invalid at"),
        ("r{,} c", (8, 4), "is invalid at"),
        ("r{4 4} c", (8, 4), "is invalid at"),
        ("(q r) c", (8, 4), "is invalid at"),
        ("", (8, 4), "needs rows and columns"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec, shape, message):
    param = torch.zeros(shape, requires_grad=True)
    with pytest.raises(ValueError, match=r"conv1\.weight") as caught:
        nucleon.Leon([("conv1.weight", param)], axes=spec or " ")
    assert message in str(caught.value)


def test_axes_that_are_not_specs_are_refused():
    params = [torch.zeros(3, 3, requires_grad=True)]
    with pytest.raises(ValueError, match="axes has 2 specs for 1 parameters"):
        nucleon.Leon(params, axes=["r c", "r c"])
    with pytest.raises(ValueError, match=r"shape \(3, 3, 3, 3\)"):
        nucleon.Leon([torch.zeros(3, 3, 3, 3, requires_grad=True)])


def test_a_state_of_other_axes_is_refused():
    wide = nucleon.Leon([torch.zeros(6, 4, requires_grad=True)])
    split = nucleon.Leon([torch.zeros(6, 4, requires_grad=True)], axes="(b=2 r) c")
    with pytest.raises(ValueError, match=r"other axes of 0; .*'r c'"):
        split.load_state_dict(wide.state_dict())
    across = nucleon.Leon([torch.zeros(4, 4, requires_grad=True)], axes="c r")  # of equal shapes
    with pytest.raises(ValueError, match="other axes of 0"):
        across.load_state_dict(nucleon.Leon([torch.zeros(4, 4, requires_grad=True)]).state_dict())


def test_one_override_takes_a_state_of_other_axes_in_many_layers():
    def layer():
        return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("up", "gate", "out")})

    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(4)))
    former = {"*.up.weight": {"axes": "(b=2 r) c"}, "1.gate.weight": {"axes": "c r"}}
    saved = nucleon.Leon.for_model(model, head=None, overrides=former)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    saved.step()
    with pytest.raises(ValueError, match=r"other axes of 0\.up\.weight, ") as refused:
        nucleon.Leon.for_model(model, head=None).load_state_dict(saved.state_dict())
    told = ast.literal_eval(str(refused.value).partition("overrides=")[2])
    assert told == {"*up.weight": {"axes": "(b=2 r) c"}, "1.gate.weight": {"axes": "c r"}}
    loaded = nucleon.Leon.for_model(model, head=None, overrides=told)
    loaded.load_state_dict(saved.state_dict())
    axes_of = {row.name: row.axes for row in saved.explain()}
    assert {row.name: row.axes for row in loaded.explain()} == axes_of
