"""A decoder with torchtitan's classes, names and layouts, tiny: where each parameter goes.

torchtitan itself is tried by `make test-torchtitan`.
"""

import re
import warnings

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim.engines.cuda.addresses import place_of
from nucleon.optim.matrices import axes

WIDTH, HEADS_PER_KV, SIZE, EXPERTS = 8, 2, 2, 4
COMMON = "torchtitan.models.common"


def module(file, kind, **attributes):
    """A module of a class that torchtitan has."""
    instance = type(kind, (nn.Module,), {"__module__": f"{COMMON}.{file}"})()
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


def linear(rows, columns):
    kind = type("Linear", (nn.Linear,), {"__module__": f"{COMMON}.nn_modules"})
    return kind(columns, rows, bias=False)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def attention():
    rows = 2 * (HEADS_PER_KV + 2) * SIZE
    sizes = {"heads_per_kv": HEADS_PER_KV, "head_dim": SIZE}
    fused = module("attention", "FusedQKVLinear", wqkv=linear(rows, WIDTH), **sizes)
    return module("attention", "GQAttention", qkv_linear=fused, wo=linear(WIDTH, WIDTH))


def experts():
    shapes = {"w1_EFD": (3, WIDTH), "w2_EDF": (WIDTH, 3), "w3_EFD": (3, WIDTH)}
    stacks = {name: parameter(EXPERTS, *shape) for name, shape in shapes.items()}
    inner = module("moe", "GroupedExperts", **stacks)
    router = module("moe", "TokenChoiceTopKRouter", gate=linear(EXPERTS, WIDTH))
    routed = module("moe", "RoutedExperts", inner_experts=inner)
    return module("moe", "MoE", routed_experts=routed, router=router)


def block():
    ffn = module("feed_forward", "FeedForward", w1=linear(6, WIDTH), w2=linear(WIDTH, 6))
    norms = {f"{name}_norm": nn.RMSNorm(WIDTH) for name in ("attention", "ffn")}
    parts = {"attention": attention(), "feed_forward": ffn, "moe": experts()}
    return module("decoder", "TransformerBlock", **parts, **norms)


def decoder(first=0, last=2, of=2):
    """A decoder, or a stage of a pipeline, whose modules in other stages are None."""
    layers = nn.ModuleDict({str(i): block() for i in range(first, last)})
    return module(
        "decoder",
        "Decoder",
        tok_embeddings=nn.Embedding(16, WIDTH) if first == 0 else None,
        layers=layers,
        norm=nn.RMSNorm(WIDTH) if last == of else None,
        lm_head=linear(16, WIDTH) if last == of else None,
    )


AXES = {
    "layers.*.attention.qkv_linear.wqkv.weight": "(r r{4,2,2}) c",
    "layers.*.attention.wo.weight": "r c",
    "layers.*.feed_forward.w1.weight": "r c",
    "layers.*.feed_forward.w2.weight": "r c",
    "layers.*.moe.routed_experts.inner_experts.w1_EFD": "b r c",
    "layers.*.moe.routed_experts.inner_experts.w2_EDF": "b r c",
    "layers.*.moe.routed_experts.inner_experts.w3_EFD": "b r c",
    "layers.*.moe.router.gate.weight": "r c",
}


def matrices(rows):
    return {re.sub(r"\.\d+\.", ".*.", r.name): r.axes for r in rows if r.route == "matrix"}


def test_each_module_is_cut_as_it_lies():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = nucleon.Leon.for_model(decoder()).explain()
    assert matrices(rows) == AXES
    rest = {r.name for r in rows if r.route == "adamw"}
    assert {"tok_embeddings.weight", "lm_head.weight", "norm.weight"} <= rest
    assert all("norm" in name for name in rest - {"tok_embeddings.weight", "lm_head.weight"})
    assert "a router" in rows["layers.0.moe.router.gate.weight"].reason


@pytest.mark.parametrize("cut", [(0, 1), (1, 2)])
def test_the_stages_of_a_pipeline_are_cut_like_the_whole(cut):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = "auto" if cut[1] == 2 else None
        rows = nucleon.Leon.for_model(decoder(*cut), head=head).explain()
    assert matrices(rows) == AXES
    assert ("lm_head.weight" in {r.name for r in rows}) == (cut == (1, 2))


def test_keys_and_values_of_latents_are_cut_as_forward_takes_them():
    """DeepSeek's: latents and a rotary key, then in each head a key and a value."""
    heads, sizes = 3, {"kv_lora_rank": 5, "qk_rope_head_dim": 2}
    sizes |= {"qk_nope_head_dim": 4, "v_head_dim": 6}
    latent = module("model", "Attention", wkv_a=linear(7, WIDTH), wkv_b=linear(30, 5), **sizes)
    type(latent).__module__ = "torchtitan.models.deepseek_v3.model"
    rows = nucleon.Leon.for_model(latent, head=None).explain()
    a, b = rows["wkv_a.weight"], rows["wkv_b.weight"]
    first, second = torch.randn(7, WIDTH), torch.randn(30, 5)
    by_head = second.view(heads, -1, 5).split([4, 6], dim=1)
    for row, weight, expected in ((a, first, first.split([5, 2])), (b, second, by_head)):
        maps = [block.matrices(weight)[0] for block in axes.parse(row.axes, row.shape)]
        assert all(map(torch.equal, maps, [x.flatten(0, -2) for x in expected]))


def test_the_kernels_of_cuda_take_its_maps():
    weight = attention().qkv_linear.wqkv.weight
    cut = axes.parse(AXES["layers.*.attention.qkv_linear.wqkv.weight"], tuple(weight.shape))
    assert [(block.rows, block.count) for block in cut] == [(8, 1), (4, 1), (4, 1)]
    assert None not in [place_of(weight, block) for block in cut]
