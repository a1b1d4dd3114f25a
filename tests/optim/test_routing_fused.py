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
from nucleon.optim.routing.roles import Role

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
    found = x.view(*x.shape[:-1], HEADS, -1).split([self.key_dim, self.key_dim, self.val_dim], 3)
    return [y.transpose(1, 2) for y in found]


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
    "older timm": lambda: Attention(f"{TIMM}vision_transformer", "Attention", take=maps_first),
    "swin": lambda: Attention(f"{TIMM}swin_transformer", "WindowAttention", take=maps_first),
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
    found = [block.matrices(weight) for block in axes.parse(row.axes, row.shape)]
    taken = weight.T.view(WIDTH, HEADS, -1).split([key, value], dim=-1)  # as forward takes them
    for (ours,), theirs in zip(found, taken, strict=True):
        assert torch.equal(ours.T, theirs.flatten(1))


def test_maps_apart_in_a_module_with_the_name_of_a_fused_one_are_matrices():
    apart = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = nucleon.Leon.for_model(nn.ModuleDict({"qkv": apart})).explain()
    assert {r.axes for r in rows if r.route == "matrix"} == {"r c"}


def test_a_fused_map_beside_its_norm_that_nobody_knows_is_warned_of():
    model = nn.ModuleDict({"qkv": nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24))})
    with pytest.warns(UserWarning, match=r"not known: qkv\.0\.weight"):
        assert nucleon.Leon.for_model(model).explain()["qkv.0.weight"].axes == "r c"


# ------------------------------------------------------------------------ what nobody knows

LOOKS_FUSED = (
    "queries_keys_values",
    "qkv",
    "to_qkv",
    "Wqkv",
    "query_key_value",
    "c_attn",
    "W_pack",
    "to_kv",
)
LOOKS_DOUBLE = (
    "kv_proj",
    "kv_b_proj",
    "to_qk",
    "qk_proj",
    "wkv",
    "kv_linear",
    "linear_kv_points",
    "w12",
    "gate_up_proj",
    "keys_values",
)


def blocks(*names, count=6):
    layers = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(WIDTH, 24) for name in names}) for _ in range(count)
    )
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(WIDTH, 3)})


@pytest.mark.parametrize("name", [*LOOKS_FUSED, *LOOKS_DOUBLE])
def test_a_fused_weight_of_unknown_order_is_one_matrix_with_one_warning(name):
    with pytest.warns(UserWarning, match="the order of the maps in it is not known") as caught:
        rows = nucleon.Leon.for_model(blocks(name)).explain()
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert f"layers.0.{name}.weight" in text and "and 2 more" in text
    parts = 2 if name in ("to_kv", *LOOKS_DOUBLE) else 3
    assert f"overrides={{'*{name}.weight': {{'axes': '(b={parts} r) c'}}}}" in text
    for layer in range(6):
        row = rows[f"layers.{layer}.{name}.weight"]
        assert (row.route, row.axes) == ("matrix", "r c") and "one matrix" in row.reason


PAIRS = [("in_proj", "out_proj"), ("fc1", "fc2"), ("linear1", "linear2"), ("Wi", "Wo")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_map_that_gives_more_than_the_next_takes_is_warned_of(first, second):
    def model(taken):
        maps = {first: nn.Linear(8, 24), second: nn.Linear(taken, 8)}
        return nn.ModuleDict({"layer": nn.ModuleDict(maps), "head": nn.Linear(8, 3)})

    with pytest.warns(UserWarning, match=rf"not known: layer\.{first}\.weight") as caught:
        rows = nucleon.Leon.for_model(model(12)).explain()
    assert rows[f"layer.{first}.weight"].axes == "r c"
    assert f"overrides={{'*{first}.weight': {{'axes': '(b=2 r) c'}}}}" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nucleon.Leon.for_model(model(24))


class GEGLU(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.proj = nn.Linear(8, rows)


def pointwise(taken):
    return {"pointwise_conv1": nn.Conv1d(8, 2 * taken, 1), "pointwise_conv2": nn.Conv1d(8, 8, 1)}


HALVED = {
    "names": lambda: nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(16, 8)}),
    "as wide": lambda: nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(8, 8)}),
    "a conformer": lambda: nn.ModuleDict(pointwise(8)),
    "other names": lambda: nn.ModuleDict({"into": nn.Linear(8, 32), "out": nn.Linear(16, 8)}),
    "in a row": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 8)),
    "a class": lambda: nn.ModuleList([GEGLU(32), nn.Dropout(), nn.Linear(16, 8)]),
}
WHOLE = {
    "a perceptron": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    "channels": lambda: nn.ModuleDict(pointwise(4)),
    "queries and fewer keys": lambda: nn.ModuleDict(
        {"q_proj": nn.Linear(8, 16), "k_proj": nn.Linear(8, 4), "o_proj": nn.Linear(16, 8)}
    ),
    "keys of another width": lambda: nn.ModuleDict(
        {"q_proj": nn.Linear(6, 16), "k_proj": nn.Linear(8, 4), "o_proj": nn.Linear(16, 8)}
    ),
    "a list": lambda: nn.ModuleList([nn.Linear(6, 16), nn.Linear(8, 16)]),
    "blocks between": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 8)), nn.Linear(8, 8)
    ),
}


@pytest.mark.parametrize("case", HALVED)
def test_a_map_with_a_gate_in_it_is_warned_of(case):
    model = nn.ModuleDict({"layer": HALVED[case](), "head": nn.Linear(8, 3)})
    name = next(name for name, _ in model.named_parameters())
    with pytest.warns(UserWarning, match=f"not known: {re.escape(name)}; pass") as caught:
        nucleon.Leon.for_model(model)
    (said,) = (str(each.message) for each in caught)
    told = ast.literal_eval(re.findall(r"overrides=({.*})", said)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = nucleon.Leon.for_model(model, overrides=told).explain()[name].axes
    assert axes.startswith("(b=2 r) c")


@pytest.mark.parametrize("case", WHOLE)
def test_a_map_of_which_the_next_takes_all_is_whole(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.ModuleDict({"layer": WHOLE[case](), "head": nn.Linear(8, 3)})
        assert {r.axes for r in nucleon.Leon.for_model(model).explain() if r.axes} <= {
            "r c",
            "r c c",
        }


class Merging(nn.Module):
    """Named in another order than used: `reduction` is the last."""

    def __init__(self):
        super().__init__()
        self.reduction, self.proj = nn.Linear(32, 16), nn.Linear(8, 8)

    def forward(self, x):
        return self.reduction(self.proj(x).unflatten(1, (-1, 4)).flatten(2))


def test_what_a_module_gives_as_it_is_is_not_halved_for_a_map_before_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.ModuleDict({"layer": Merging(), "head": nn.Linear(8, 3)})
        nucleon.Leon.for_model(model, head="head")


def test_each_weight_of_several_kinds_is_told_its_own_cut():
    """x_proj of Mamba holds dt of the size that dt_proj takes, and B and C of one size."""
    maps = {"qkv": nn.Linear(8, 24), "x_proj": nn.Linear(8, 38), "dt_proj": nn.Linear(6, 8)}
    model = nn.ModuleDict({"layer": nn.ModuleDict(maps), "head": nn.Linear(8, 3)})
    with pytest.warns(UserWarning, match="order of the maps") as caught:
        nucleon.Leon.for_model(model)
    (said,) = (str(each.message) for each in caught)
    in_turn, by_head, whole = (ast.literal_eval(x) for x in re.findall(r"overrides=({.*})", said))
    assert in_turn["*qkv.weight"] == {"axes": "(b=3 r) c"}
    assert in_turn["*x_proj.weight"] == by_head["*x_proj.weight"] == {"axes": "r{6,16,16} c"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for told in (in_turn, whole):
            rows = nucleon.Leon.for_model(model, overrides=told).explain()
            assert rows["layer.x_proj.weight"].axes == told["*x_proj.weight"]["axes"]


def test_one_head_that_is_keys_and_values_at_once_is_not_warned_of():
    model = Attention("mine", "Attention", called="kv_proj", rows=8, take=None, head_dim=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nucleon.Leon.for_model(model, head=None).explain()["kv_proj.weight"].axes == "r c"


def test_a_fused_weight_that_is_told_to_be_a_matrix_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = nucleon.Leon.for_model(blocks("qkv"), overrides={"*qkv.weight": "matrix"})
    assert {r.route for r in told.explain() if "qkv.weight" in r.name} == {"matrix"}


@pytest.mark.parametrize("spec", ["(b=3 r) c", "(r=4 b=3 r) c", "r c"])
def test_the_override_it_names_serves_all_of_them(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = {"*qkv.weight": {"axes": spec}}
        rows = nucleon.Leon.for_model(blocks("qkv"), overrides=told).explain()
    assert {r.axes for r in rows if "qkv.weight" in r.name} == {spec}


def test_a_class_of_the_same_name_from_elsewhere_is_not_known():
    model = Attention("mine.attention", "GPT2Attention", called="c_attn", take=maps_first)
    with pytest.warns(UserWarning, match="not known"):
        assert nucleon.Leon.for_model(model).explain()["c_attn.weight"].axes == "r c"


@pytest.mark.parametrize(
    "attributes",
    [
        {"rows": 23, "num_heads": HEADS, "key_dim": SIZE, "val_dim": SIZE},
        {"num_heads": HEADS, "key_dim": SIZE, "val_dim": 2 * SIZE},
        {"key_dim": SIZE, "val_dim": SIZE},
    ],
    ids=["rows that do not part", "sizes that do not add up", "no number of heads"],
)
def test_a_known_class_that_is_not_as_it_was_known_is_not_cut(attributes):
    model = Attention(f"{TIMM}tiny_vit", "Attention", take=of_tiny_vit, **attributes)
    with pytest.warns(UserWarning, match=r"qkv\.weight"):
        assert nucleon.Leon.for_model(model).explain()["qkv.weight"].axes == "r c"


def test_a_class_derived_from_a_known_one_is_known():
    model = Attention("timm.layers.attention", "Attention", take=maps_first)
    model.__class__ = type("Mine", (type(model),), {"__module__": "mine"})
    assert nucleon.Leon.for_model(model).explain()["qkv.weight"].axes == "(b=3 r) c"


def test_a_module_that_was_registered_is_cut_as_told(monkeypatch):
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))

    def role_of(place):
        told = type(place.parent).__name__ == "Mine" and place.called == "qkv"
        return Role("matrix", "told", "(r=4 b=3 r) c") if told else None

    roles.register_module(nn.Linear, role_of)
    model = Attention("mine", "Mine", take=heads_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nucleon.Leon.for_model(model).explain()["qkv.weight"].axes == "(r=4 b=3 r) c"


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
    for package, wanted in layouts.items():
        table = fused.KNOWN[package]
        assert wanted == {table[k][0] for k in table if ".".join(k.split(".")[-2:]) in tried}


def test_as_many_maps_are_advised_as_the_one_behind_takes_its_input_from():
    gated = nn.Module()  # B, C and x of a short convolution
    gated.in_proj, gated.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)
    with pytest.warns(UserWarning, match=r"\{'axes': '\(b=3 r\) c'\}\}  # the maps one after"):
        nucleon.Leon.for_model(gated, head=None)
