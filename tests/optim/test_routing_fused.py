"""Fused weights of timm, torchvision and torchtitan, and those nobody knows.

Each library's own way of taking q, k and v apart stands in a tiny attention under its class and
file: queries twice as large with keys half as large change nothing, without values nothing is left.
"""

import ast
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim.matrices import axes
from nucleon.optim.routing import fused, roles
from nucleon.optim.routing.places import Role

WIDTH, HEADS, SIZE, TOKENS = 8, 4, 2, 5


class Attention(nn.Module):
    """softmax(q kᵀ) v for q, k, v (…, heads, tokens, size) that `take` finds in a fused output."""

    def __new__(cls, file, kind, **_):
        return super().__new__(type(kind, (Attention,), {"__module__": file}))

    def __init__(self, file, kind, *, called="qkv", rows=3 * WIDTH, take, conv=False, **attributes):
        super().__init__()
        make = (lambda c, r: nn.Conv2d(c, r, 1)) if conv else nn.Linear
        self.take, self.called, self.conv = take, called, conv
        setattr(self, called, make(WIDTH, rows))
        for name, value in attributes.items():
            setattr(self, name, value)
        with torch.no_grad():
            getattr(self, called).bias.zero_()

    def forward(self, x):
        if self.conv:
            x = x.mT[..., None]
        q, k, v = self.take(self, getattr(self, self.called)(x))
        return torch.softmax(q @ k.mT, -1) @ v


def maps_first(self, x):
    return x.reshape(*x.shape[:-1], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)


def heads_first(self, x):
    return x.view(*x.shape[:-1], HEADS, 3 * SIZE).transpose(1, 2).chunk(3, dim=3)


def channels(self, x):
    x = x.flatten(2)
    if self.head_first:
        return [y.mT for y in x.view(len(x), HEADS, 3 * SIZE, -1).chunk(3, dim=2)]
    return [y.mT for y in x.reshape(len(x), 3, HEADS, SIZE, -1).unbind(1)]


def tokens_last(self, x):
    return heads_first(self, x) if self.head_first else maps_first(self, x)


def of_tiny_vit(self, x):
    maps = x.view(*x.shape[:-1], HEADS, -1).split([self.key_dim, self.key_dim, self.val_dim], 3)
    return [y.transpose(1, 2) for y in maps]


def of_bottleneck(self, x):
    sizes = [self.dim_out_qk, self.dim_out_qk, self.dim_out_v]
    return [y.mT for y in x.flatten(2).split(sizes, dim=1)]


def of_shvit(self, x):
    return [y.mT for y in x.flatten(2).split([self.qk_dim, self.qk_dim, self.pdim], dim=1)]


def of_torchtitan(self, x):
    x = x.view(*x.shape[:-1], -1, self.heads_per_kv + 2, self.head_dim)
    q, k, v = x.split([self.heads_per_kv, 1, 1], dim=-2)
    q, k, v = (y.flatten(2, 3).transpose(1, 2) for y in (q, k, v))
    return q, *(y.repeat_interleave(self.heads_per_kv, dim=1) for y in (k, v))


def of_a_parallel_block(self, x):
    _, q, k, v = x.split(self.in_split, dim=-1)
    return q, k, v


TIMM = "timm.models."
CASES = {
    "vision transformer": lambda: Attention("timm.layers.attention", "Attention", take=maps_first),
    "maxvit": lambda: Attention(
        f"{TIMM}maxxvit", "AttentionCl", take=tokens_last, head_first=True, num_heads=HEADS
    ),
    "maxvit, maps first": lambda: Attention(
        f"{TIMM}maxxvit", "AttentionCl", take=tokens_last, head_first=False, num_heads=HEADS
    ),
    "coatnet": lambda: Attention(
        f"{TIMM}maxxvit", "Attention2d", take=channels, conv=True, head_first=True, num_heads=HEADS
    ),
    "2-d, maps first": lambda: Attention(
        "timm.layers.attention2d",
        "Attention2d",
        take=channels,
        conv=True,
        head_first=False,
        num_heads=HEADS,
    ),
    "tiny vit": lambda: Attention(
        f"{TIMM}tiny_vit",
        "Attention",
        take=of_tiny_vit,
        num_heads=HEADS,
        key_dim=SIZE,
        val_dim=SIZE,
    ),
    "unequal maps in each head": lambda: Attention(
        f"{TIMM}efficientformer",
        "Attention",
        rows=HEADS * 5,
        take=of_tiny_vit,
        num_heads=HEADS,
        key_dim=1,
        val_dim=3,
    ),
    "shvit": lambda: Attention(
        f"{TIMM}shvit", "SHSA", rows=16, take=of_shvit, conv=True, qk_dim=4, pdim=8
    ),
    "gcvit": lambda: Attention(f"{TIMM}gcvit", "WindowAttentionGlobal", take=maps_first),
    "bottleneck": lambda: Attention(
        "timm.layers.bottleneck_attn",
        "BottleneckAttn",
        take=of_bottleneck,
        conv=True,
        rows=16,
        dim_out_qk=4,
        dim_out_v=8,
    ),
    "torchvision": lambda: Attention(
        "torchvision.models.swin_transformer", "ShiftedWindowAttention", take=maps_first
    ),
    "torchtitan": lambda: Attention(
        "torchtitan.models.common.attention",
        "FusedQKVLinear",
        called="wqkv",
        rows=2 * (2 + 2) * SIZE,
        take=of_torchtitan,
        heads_per_kv=2,
        head_dim=SIZE,
    ),
    "torchtitan, of images": lambda: Attention(
        "torchtitan.models.flux.model.layers", "SelfAttention", take=maps_first
    ),
    "torchtitan, one stream": lambda: Attention(
        "torchtitan.models.flux.model.layers",
        "SingleStreamBlock",
        called="linear1",
        rows=40,
        take=lambda self, x: x.split([8, 8, 8, 16], dim=-1)[:3],
    ),
    "parallel block": lambda: Attention(
        f"{TIMM}vision_transformer",
        "ParallelScalingBlock",
        called="in_proj",
        rows=40,
        take=of_a_parallel_block,
        in_split=[16, 8, 8, 8],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cut_is_the_one_forward_makes(case):
    torch.manual_seed(0)
    model = CASES[case]().double()
    (row,) = (r for r in nucleon.Leon.for_model(model).explain() if r.route == "matrix")
    weight = getattr(model, model.called).weight
    start, tokens = weight.detach().clone(), torch.randn(2, TOKENS, WIDTH).double()

    @torch.no_grad()
    def out(scales):
        weight.copy_(start)
        regions = [(b, b.region(weight)) for b in axes.parse(row.axes, row.shape)]
        maps = [m for b, r in regions for m in (r.unbind(0) if b.batch else [r])]
        for place, scale in scales.items():
            maps[place].mul_(scale)
        return model(tokens)

    q, k, v = (1, 2, 3) if case == "parallel block" else (0, 1, 2)
    base = out({})
    assert torch.equal(out({q: 2.0, k: 0.5}), base)
    assert not torch.allclose(out({q: 2.0}), base)
    assert not out({v: 0.0}).any()


@pytest.mark.parametrize(
    ("file", "kind", "called", "rows"),
    [
        ("timm.layers.attention_pool", "AttentionPoolLatent", "kv", 16),
        ("timm.models.gcvit", "WindowAttentionGlobal", "qkv", 16),
        ("timm.layers.mlp", "GluMlp", "fc1", 16),
    ],
)
def test_pairs_are_two_halves(file, kind, called, rows):
    model = Attention(file, kind, called=called, rows=rows, take=None)
    assert nucleon.Leon.for_model(model).explain()[f"{called}.weight"].axes == "(b=2 r) c"


def test_keys_and_values_of_each_head_of_a_map_beside_its_norm():
    """As LeViT has them: `kv.linear` and `kv.bn`, and in each head a key and a longer value."""
    key, value = 1, 3
    model = Attention(
        f"{TIMM}levit",
        "AttentionDownsample",
        called="kv",
        rows=HEADS * (key + value),
        take=None,
        num_heads=HEADS,
        key_dim=key,
        val_dim=value,
    )
    model.kv = nn.Sequential(OrderedDict(linear=model.kv, bn=nn.BatchNorm1d(16)))
    row = nucleon.Leon.for_model(model).explain()["kv.linear.weight"]
    weight = torch.arange(16.0 * WIDTH).view(16, WIDTH)
    maps = [block.matrices(weight) for block in axes.parse(row.axes, row.shape)]
    taken = weight.T.view(WIDTH, HEADS, -1).split([key, value], dim=-1)  # as forward takes them
    for (ours,), theirs in zip(maps, taken, strict=True):
        assert torch.equal(ours.T, theirs.flatten(1))


# ---------------------------------------------------------------------------- unknown layouts


class Holder(nn.Module):
    """A module of one's own with maps and attributes of these names."""

    def __init__(self, maps, **attributes):
        super().__init__()
        for name, value in {**maps, **attributes}.items():
            setattr(self, name, value)


class MyAdaLayerNorm(Holder):
    """A norm whose shift and scale a condition makes."""


ONE = "one matrix, without this warning"
HALF, THIRD = "(b=2 r) c", "(b=3 r) c"


def linear(rows, columns=8):
    return nn.Linear(columns, rows)


AMBIGUOUS = {
    **{
        name: (lambda name=name: Holder({name: linear(24)}, n_head=4), [THIRD, "(r=4 b=3 r) c"])
        for name in ("queries_keys_values", "qkv", "to_qkv", "Wqkv", "query_key_value", "c_attn")
    },
    **{
        name: (lambda name=name: Holder({name: linear(24)}, heads=3), [HALF, "(r=3 b=2 r) c"])
        for name in ("to_kv", "kv_b_proj", "qk_proj", "wkv", "linear_kv_points", "keys_values")
    },
    **{
        name: (lambda name=name: Holder({name: linear(24)}), [HALF, "(r b=2) c"])
        for name in ("w12", "gate_up_proj")
    },
    "W_pack, heads not told": (lambda: Holder({"W_pack": linear(24)}), [THIRD]),
    "qkv with fewer keys": (
        lambda: Holder({"qkv": linear(16)}, num_heads=4),
        ["r{8,4,4} c"],  # neither three equal parts nor four of three
    ),
    "kv of fewer heads": (
        lambda: Holder({"kv": linear(8)}, num_heads=8, num_key_value_heads=2),
        [HALF, "(r=2 b=2 r) c"],
    ),
    "kv_b_proj of latents": (
        lambda: Holder({"kv_b_proj": linear(20)}, qk_nope_head_dim=2, v_head_dim=3),
        [HALF, "(r r{2,3}) c"],
    ),
    "kv_a_proj_with_mqa": (
        lambda: Holder({"kv_a_proj_with_mqa": linear(10)}, kv_lora_rank=6, qk_rope_head_dim=4),
        ["r{6,4} c"],
    ),
    "kv_a_proj_with_mqa of unknown sizes": (
        lambda: Holder({"kv_a_proj_with_mqa": linear(10)}),
        [],
    ),
    "in_proj of Mamba": (
        lambda: Holder({"in_proj": linear(32), "dt_proj": linear(16, 2)}),
        [HALF],
    ),
    "x_proj of Mamba": (
        lambda: Holder({"x_proj": linear(38), "dt_proj": linear(16, 6)}),
        ["r{6,16,16} c"],
    ),
    "in_proj of Mamba-2": (
        lambda: Holder(
            {"in_proj": linear(32 + 6 + 4), "out_proj": linear(8, 16)},
            A_log=nn.Parameter(torch.zeros(4)),
        ),
        ["r{16,16,3,3,4} c"],
    ),
    "adaLN by its class": (lambda: MyAdaLayerNorm({"linear": linear(48)}), ["(b=6 r) c"]),
    "adaLN by its name": (
        lambda: Holder({"adaLN_modulation": nn.Sequential(nn.SiLU(), linear(16))}),
        [HALF],
    ),
    "a convolution": (lambda: Holder({"qkv": nn.Conv2d(8, 24, 1)}), ["(b=3 r) c c c"]),
    "beside its norm": (
        lambda: Holder({"qkv": nn.Sequential(linear(24), nn.BatchNorm1d(24))}),
        [THIRD],
    ),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_weight_of_several_maps_in_an_unknown_layout_is_one_matrix_with_one_warning(case):
    """Every override that the warning names can be pasted, is silent, and routes all layers so."""
    build, expected = AMBIGUOUS[case]
    model = nn.ModuleDict({"layers": nn.ModuleList([build() for _ in range(6)]), "head": linear(3)})
    with pytest.warns(UserWarning, match="in a layout not known here: layers.0") as caught:
        rows = nucleon.Leon.for_model(model).explain()
    assert len(caught) == 1 and caught[0].filename == __file__
    named = [row.name for row in rows if "one matrix" in row.reason]
    assert len(named) == 6 and {rows[name].axes for name in named} <= {"r c", "r c c c"}
    text = str(caught[0].message)
    assert named[0] in text and "and 2 more" in text and "r are outputs" in text
    choices = re.findall(r"overrides=({.*})  # (.*)", text)
    assert choices[0][1] == ONE
    specs = []
    for written, _ in choices:
        overrides = ast.literal_eval(written)
        assert len(overrides) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows_then = nucleon.Leon.for_model(model, overrides=overrides).explain()
        (spec,) = {rows_then[name].axes for name in named}
        assert sum(row.reason == "override" for row in rows_then) == 6
        specs.append(spec)
    assert specs[1:] == expected


def test_weights_of_several_kinds_share_a_warning_whose_lines_serve_what_they_fit():
    maps = {"qkv": linear(24), "x_proj": linear(38), "dt_proj": linear(6, 6)}
    model = nn.ModuleDict({"layer": Holder(maps), "wide": Holder({"qkv": linear(16)})})
    model["head"] = linear(3)
    with pytest.warns(UserWarning, match="in a layout not known") as caught:
        nucleon.Leon.for_model(model)
    (text,) = (str(each.message) for each in caught)
    lines = [ast.literal_eval(x) for x in re.findall(r"overrides=({.*})  #", text)]
    names = ["layer.qkv.weight", "layer.x_proj.weight", "wide.qkv.weight"]
    assigned = [
        dict.fromkeys(names, "r c"),
        {names[0]: THIRD},
        {names[1]: "r{6,16,16} c"},
        {names[2]: "r{8,4,4} c"},
    ]
    for overrides, expected in zip(lines, assigned, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the others
            rows = nucleon.Leon.for_model(model, overrides=overrides).explain()
        assert {r.name: r.axes for r in rows if r.reason == "override"} == expected


WHOLE = {
    "one head that is keys and values at once": lambda: Holder({"kv_proj": linear(8)}, head_dim=8),
    "told": lambda: Holder({"to_out": linear(24)}),
    "a first map as wide as two": lambda: Holder({"fc1": linear(32), "fc2": linear(8, 16)}),
    "an in_proj of no state space": lambda: Holder({"in_proj": linear(24), "out_proj": linear(8)}),
    "an adaLN with maps of other widths": lambda: MyAdaLayerNorm(
        {"down": linear(4), "same": linear(8), "up": linear(80)}
    ),
    "names of maps apart": lambda: Holder({"qkv": nn.ModuleDict({n: linear(8) for n in "qkv"})}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_weight_that_is_one_map_by_its_name_is_not_warned_of(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.ModuleDict({"layer": WHOLE[case](), "head": linear(3)})
        assert {r.axes for r in nucleon.Leon.for_model(model).explain() if r.axes} == {"r c"}


TINY = {"num_heads": HEADS, "key_dim": SIZE, "val_dim": SIZE}
OTHERS = {
    "of the name of a known class": ("mine.attention", "GPT2Attention", {"called": "c_attn"}),
    "rows that do not part": (f"{TIMM}tiny_vit", "Attention", {**TINY, "rows": 23}),
    "sizes that do not add up": (f"{TIMM}tiny_vit", "Attention", {**TINY, "val_dim": 2 * SIZE}),
    "no number of heads": (f"{TIMM}tiny_vit", "Attention", {"key_dim": SIZE, "val_dim": SIZE}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_class_that_is_not_as_it_was_known_is_not_cut(case):
    file, kind, attributes = OTHERS[case]
    model = Attention(file, kind, take=None, **attributes)
    with pytest.warns(UserWarning, match="in a layout not known"):
        assert nucleon.Leon.for_model(model).explain()[f"{model.called}.weight"].axes == "r c"


def test_what_a_user_says_of_a_class_is_not_warned_of(monkeypatch):
    model = Attention("timm.layers.attention", "Attention", take=None)
    model.__class__ = type("Derived", (type(model),), {"__module__": "mine"})
    mine = Attention("mine", "Mine", take=None)
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nucleon.Leon.for_model(model).explain()["qkv.weight"].axes == "(b=3 r) c"
        rows = nucleon.Leon.for_model(mine, overrides={"qkv.weight": "matrix"}).explain()
        assert (rows["qkv.weight"].route, rows["qkv.weight"].axes) == ("matrix", "r c")
        registered = Role("matrix", "registered", "(r=4 b=3 r) c")
        roles.register_module(nn.Linear, lambda p: registered if p.parent is mine else None)
        assert nucleon.Leon.for_model(mine).explain()["qkv.weight"].axes == "(r=4 b=3 r) c"


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"]
)
def test_a_wrapper_between_a_known_parent_and_its_weight_is_seen_through(wrapper):
    model = Attention("timm.layers.attention", "Attention", take=maps_first)
    inner, model.qkv = model.qkv, nn.Module()
    setattr(model.qkv, wrapper, inner)
    (row,) = (r for r in nucleon.Leon.for_model(model).explain() if r.route == "matrix")
    assert row.axes == "(b=3 r) c"


def test_every_layout_of_the_table_is_tried_here():
    tried = {f"{type(m).__name__}.{m.called}" for m in (make() for make in CASES.values())}
    tried |= {"AttentionPoolLatent.kv", "GluMlp.fc1", "AttentionDownsample.kv"}
    tried |= {"Attention.wkv_b", "Attention.wkv_a"}  # in test_torchtitan_modules
    tried |= {"LinearSelfAttention.qkv_proj"}  # the layout of transformers' class, tried with it
    layouts = {
        package: {layout for layout, _ in table.values()}
        for package, table in fused.KNOWN.items()
        if package != "transformers"
    }
    for package, known_layouts in layouts.items():
        table = fused.KNOWN[package]
        assert known_layouts == {table[k][0] for k in table if ".".join(k.split(".")[-2:]) in tried}
