"""Fused weights of timm, torchvision and torchtitan, and those nobody knows."""

import re
import warnings
from collections import OrderedDict

import pytest
from torch import nn

import nucleon
from nucleon.optim.routing import fused, roles
from nucleon.optim.routing.places import Role
from optim.modules import linear, named, parameter, rows_of, silent, written

HEADS, TIMM, TITAN = {"num_heads": 4}, "timm.models.", "torchtitan.models."
TINY = {**HEADS, "key_dim": 2, "val_dim": 2}
LATENT = {"kv_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 6}
FIRST, LAST = {"head_first": True}, {"head_first": False}
CASES = [  # file, class, name of the map, its rows, attributes of the class, the word of its rows
    ("timm.layers.attention", "Attention", "qkv", 24, {}, "(b=3 r)"),
    (f"{TIMM}maxxvit", "AttentionCl", "qkv", 24, HEADS | FIRST, "(r=4 b=3 r)"),
    (f"{TIMM}maxxvit", "AttentionCl", "qkv", 24, HEADS | LAST, "(b=3 r)"),
    (f"{TIMM}maxxvit", "Attention2d", "qkv", 24, HEADS | FIRST, "(r=4 b=3 r)"),
    ("timm.layers.attention2d", "Attention2d", "qkv", 24, HEADS | LAST, "(b=3 r)"),
    (f"{TIMM}tiny_vit", "Attention", "qkv", 24, TINY, "(r=4 b=3 r)"),
    (f"{TIMM}efficientformer", "Attention", "qkv", 20, TINY | {"key_dim": 1, "val_dim": 3},
     "(r=4 r{1,1,3})"),
    (f"{TIMM}levit", "AttentionDownsample", "kv", 16, TINY | {"key_dim": 1, "val_dim": 3},
     "(r=4 r{1,3})"),
    (f"{TIMM}shvit", "SHSA", "qkv", 16, {"qk_dim": 4, "pdim": 8}, "r{4,4,8}"),
    (f"{TIMM}gcvit", "WindowAttentionGlobal", "qkv", 24, {}, "(b=3 r)"),
    (f"{TIMM}gcvit", "WindowAttentionGlobal", "qkv", 16, {}, "(b=2 r)"),
    ("timm.layers.bottleneck_attn", "BottleneckAttn", "qkv", 16,
     {"dim_out_qk": 4, "dim_out_v": 8}, "r{4,4,8}"),
    ("timm.layers.attention_pool", "AttentionPoolLatent", "kv", 16, {}, "(b=2 r)"),
    ("timm.layers.mlp", "GluMlp", "fc1", 16, {}, "(b=2 r)"),
    (f"{TIMM}vision_transformer", "ParallelScalingBlock", "in_proj", 40,
     {"in_split": [16, 8, 8, 8]}, "r{16,8,8,8}"),
    ("torchvision.models.swin_transformer", "ShiftedWindowAttention", "qkv", 24, {}, "(b=3 r)"),
    (f"{TITAN}common.attention", "FusedQKVLinear", "wqkv", 16, {"heads_per_kv": 2, "head_dim": 2},
     "(r r{4,2,2})"),
    (f"{TITAN}flux.model.layers", "SelfAttention", "qkv", 24, {}, "(b=3 r)"),
    (f"{TITAN}flux.model.layers", "SingleStreamBlock", "linear1", 40, {}, "r{8,8,8,16}"),
    (f"{TITAN}deepseek_v3.model", "Attention", "wkv_a", 7, LATENT, "r{5,2}"),
    (f"{TITAN}deepseek_v3.model", "Attention", "wkv_b", 30, LATENT, "(r r{4,6})"),
]  # fmt: skip
"""Layouts as `forward` takes the maps apart; `make test-timm` tries timm's own classes."""


def known(file, kind, called, rows, attributes, wrap=lambda layer: layer):
    return named(kind, file, **{called: wrap(linear(rows)), **attributes})


WRAPS = {
    "linear": lambda layer: layer,
    "convolution": lambda layer: nn.Conv2d(8, layer.out_features, 1),
    "sequential": lambda x: nn.Sequential(OrderedDict(c=x, bn=nn.BatchNorm1d(x.out_features))),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}.{case[2]}-{case[3]}")
def test_maps_of_known_classes_are_cut_as_their_forward_does(case, wrap):
    *made, word = case
    if wrap == "sequential" and case[2] not in ("qkv", "kv"):
        return  # no other map stands beside its norm
    rows = rows_of(known(*made, WRAPS[wrap]), head=None).values()
    spec = f"{word} c" + " c c" * (wrap == "convolution")
    assert [r.axes for r in rows if r.route == "matrix"] == [spec]


# ---------------------------------------------------------------------------- unknown layouts

HALF, THIRD = "(b=2 r) c", "(b=3 r) c"


def holder(kind="Mine", **attributes):
    return named(kind, **attributes)


AMBIGUOUS = {
    **{
        name: (lambda name=name: holder(**{name: linear(24)}, n_head=4), [THIRD, "(r=4 b=3 r) c"])
        for name in ("queries_keys_values", "qkv", "to_qkv", "Wqkv", "query_key_value", "c_attn")
    },
    **{
        name: (lambda name=name: holder(**{name: linear(24)}, heads=3), [HALF, "(r=3 b=2 r) c"])
        for name in ("to_kv", "kv_b_proj", "qk_proj", "wkv", "linear_kv_points", "keys_values")
    },
    **{
        name: (lambda name=name: holder(**{name: linear(24)}), [HALF, "(r b=2) c"])
        for name in ("w12", "gate_up_proj")
    },
    "heads not told": (lambda: holder(W_pack=linear(24)), [THIRD]),
    "fewer keys, neither three equal parts nor four of three": (
        lambda: holder(qkv=linear(16), num_heads=4), ["r{8,4,4} c"]),
    "fewer heads": (lambda: holder(kv=linear(8), num_heads=8, num_key_value_heads=2),
                    [HALF, "(r=2 b=2 r) c"]),
    "latents": (lambda: holder(kv_b_proj=linear(20), qk_nope_head_dim=2, v_head_dim=3),
                [HALF, "(r r{2,3}) c"]),
    "latents and a key": (
        lambda: holder(kv_a_proj_with_mqa=linear(10), kv_lora_rank=6, qk_rope_head_dim=4),
        ["r{6,4} c"]),
    "unknown sizes": (lambda: holder(kv_a_proj_with_mqa=linear(10)), []),
    "Mamba": (lambda: holder(in_proj=linear(32), dt_proj=linear(16, 2)), [HALF]),
    "Mamba's x": (lambda: holder(x_proj=linear(38), dt_proj=linear(16, 6)), ["r{6,16,16} c"]),
    "Mamba-2": (lambda: holder(in_proj=linear(42), out_proj=linear(8, 16), A_log=parameter(4)),
                ["r{16,16,3,3,4} c"]),
    "adaLN by its class": (lambda: holder("MyAdaLayerNorm", linear=linear(48)), ["(b=6 r) c"]),
    "adaLN by its name": (
        lambda: holder(adaLN_modulation=nn.Sequential(nn.SiLU(), linear(16))), [HALF]),
    "a convolution": (lambda: holder(qkv=nn.Conv2d(8, 24, 1)), ["(b=3 r) c c c"]),
    "beside its norm": (
        lambda: holder(qkv=nn.Sequential(linear(24), nn.BatchNorm1d(24))), [THIRD]),
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_weight_of_several_maps_in_an_unknown_layout_is_one_matrix_with_one_warning(case):
    """Every override that the warning names can be pasted, is silent, and routes all layers so."""
    build, expected = AMBIGUOUS[case]
    model = nn.ModuleDict({"layers": nn.ModuleList([build() for _ in range(6)]), "head": linear(3)})
    with pytest.warns(UserWarning, match="in a layout not known here: layers.0") as caught:
        rows = nucleon.Leon.for_model(model).explain()
    assert len(caught) == 1 and caught[0].filename == __file__
    names = [row.name for row in rows if "one matrix" in row.reason]
    assert len(names) == 6 and {rows[name].axes for name in names} <= {"r c", "r c c c"}
    text = str(caught[0].message)
    assert names[0] in text and "and 2 more" in text and "r are outputs" in text
    assert re.search(r"overrides=.*  # (.*)", text)[1] == "one matrix, without this warning"
    specs = []
    for overrides in written(text):
        assert len(overrides) == 1
        with silent():
            after = rows_of(model, overrides=overrides)
        assert [row.name for row in after.values() if row.reason == "override"] == names
        specs += {after[name].axes for name in names}
    assert specs[1:] == expected


def test_weights_of_several_kinds_share_a_warning_whose_lines_serve_what_they_fit():
    both = holder(qkv=linear(24), x_proj=linear(38), dt_proj=linear(6, 6))
    model = holder(layer=both, wide=holder(qkv=linear(16)), head=linear(3))
    with pytest.warns(UserWarning, match="in a layout not known") as caught:
        nucleon.Leon.for_model(model)
    assert len(caught) == 1
    names = ["layer.qkv.weight", "layer.x_proj.weight", "wide.qkv.weight"]
    assigned = [dict.fromkeys(names, "r c")]
    assigned += [{n: x} for n, x in zip(names, (THIRD, "r{6,16,16} c", "r{8,4,4} c"), strict=True)]
    for overrides, expected in zip(written(caught[0].message), assigned, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the others
            rows = rows_of(model, overrides=overrides)
        assert {n: r.axes for n, r in rows.items() if r.reason == "override"} == expected


WHOLE = {
    "keys and values at once": lambda: holder(kv_proj=linear(8), head_dim=8),
    "told": lambda: holder(to_out=linear(24)),
    "a first map as wide as two": lambda: holder(fc1=linear(32), fc2=linear(8, 16)),
    "no state space": lambda: holder(in_proj=linear(24), out_proj=linear(8)),
    "an adaLN with maps of other widths": lambda: holder(
        "MyAdaLayerNorm", down=linear(4), same=linear(8), up=linear(80)
    ),
    "maps apart": lambda: holder(qkv=nn.ModuleDict({n: linear(8) for n in "qkv"})),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_weight_that_is_one_map_by_its_name_is_not_warned_of(case):
    with silent():
        rows = rows_of(holder(layer=WHOLE[case](), head=linear(3)))
    assert {r.axes for r in rows.values() if r.axes} == {"r c"}


OTHERS = {
    "of the name of a known class": ("mine.attention", "GPT2Attention", "c_attn", 24, {}),
    "rows that do not part": (f"{TIMM}tiny_vit", "Attention", "qkv", 23, TINY),
    "sizes that do not add up": (f"{TIMM}tiny_vit", "Attention", "qkv", 24, TINY | {"val_dim": 4}),
    "no heads": (f"{TIMM}tiny_vit", "Attention", "qkv", 24, {"key_dim": 2, "val_dim": 2}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_class_that_is_not_as_it_was_known_is_not_cut(case):
    with pytest.warns(UserWarning, match="in a layout not known"):
        rows = rows_of(known(*OTHERS[case]), head=None)
    assert {r.axes for r in rows.values() if r.route == "matrix"} == {"r c"}


def test_what_a_user_says_of_a_class_is_not_warned_of(monkeypatch):
    timm = known("timm.layers.attention", "Attention", "qkv", 24, {})
    timm.__class__ = type("Derived", (type(timm),), {"__module__": "mine"})
    mine = holder(qkv=linear(24))
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))
    with silent():
        assert rows_of(timm)["qkv.weight"].axes == THIRD
        row = rows_of(mine, overrides={"qkv.weight": "matrix"})["qkv.weight"]
        assert (row.route, row.axes) == ("matrix", "r c")
        registered = Role("matrix", "registered", "(r=4 b=3 r) c")
        roles.register_module(nn.Linear, lambda p: registered if p.parent is mine else None)
        assert rows_of(mine)["qkv.weight"].axes == "(r=4 b=3 r) c"


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"]
)
def test_a_wrapper_between_a_known_parent_and_its_weight_is_seen_through(wrapper):
    wrap = lambda layer: holder(**{wrapper: layer})  # noqa: E731
    rows = rows_of(known("timm.layers.attention", "Attention", "qkv", 24, {}, wrap))
    assert [r.axes for r in rows.values() if r.route == "matrix"] == [THIRD]


def test_every_layout_of_the_table_is_tried_here():
    tried = {f"{kind}.{called}" for _, kind, called, *_ in CASES}
    tried |= {"LinearSelfAttention.qkv_proj"}  # the layout of transformers' class, tried with it
    for package in {*fused.KNOWN} - {"transformers"}:
        table = fused.KNOWN[package]
        layouts = {layout for layout, _ in table.values()}
        assert layouts == {table[k][0] for k in table if ".".join(k.split(".")[-2:]) in tried}
