"""A decoder with torchtitan's classes, names and layouts, tiny: where each parameter goes.

torchtitan itself is tried by `make test-torchtitan`.
"""

import re

import pytest
from torch import nn

from nucleon.optim.engines.cuda.addresses import block_layout
from nucleon.optim.matrices import axes
from optim import modules
from optim.modules import parameter, rows_of, silent

WIDTH, EXPERTS = 8, 4


def module(file, kind, **attributes):
    return modules.named(kind, f"torchtitan.models.common.{file}", **attributes)


def linear(rows, columns):
    kind = {"__module__": "torchtitan.models.common.nn_modules"}
    return type("Linear", (nn.Linear,), kind)(columns, rows, bias=False)


def block():
    fused = module("attention", "FusedQKVLinear", wqkv=linear(16, 8), heads_per_kv=2, head_dim=2)
    stacks = {"w1_EFD": (3, WIDTH), "w2_EDF": (WIDTH, 3), "w3_EFD": (3, WIDTH)}
    stacks = {name: parameter(EXPERTS, *shape) for name, shape in stacks.items()}
    experts = module(
        "moe", "RoutedExperts", inner_experts=module("moe", "GroupedExperts", **stacks)
    )
    router = module("moe", "TokenChoiceTopKRouter", gate=linear(EXPERTS, WIDTH))
    return module(
        *("decoder", "TransformerBlock"),
        attention=module("attention", "GQAttention", qkv_linear=fused, wo=linear(WIDTH, WIDTH)),
        feed_forward=module(
            "feed_forward", "FeedForward", w1=linear(6, WIDTH), w2=linear(WIDTH, 6)
        ),
        moe=module("moe", "MoE", routed_experts=experts, router=router),
        ffn_norm=nn.RMSNorm(WIDTH),
    )


FUSED = "(r r{4,2,2}) c"
AXES = {
    "layers.*.attention.qkv_linear.wqkv.weight": FUSED,
    "layers.*.attention.wo.weight": "r c",
    "layers.*.feed_forward.w1.weight": "r c",
    "layers.*.feed_forward.w2.weight": "r c",
    "layers.*.moe.routed_experts.inner_experts.w1_EFD": "b r c",
    "layers.*.moe.routed_experts.inner_experts.w2_EDF": "b r c",
    "layers.*.moe.routed_experts.inner_experts.w3_EFD": "b r c",
    "layers.*.moe.router.gate.weight": "r c",
    "layers.*.ffn_norm.weight": None,
}


@pytest.mark.parametrize("cut", [(0, 2), (0, 1), (1, 2)])
def test_each_module_is_cut_as_it_lies(cut):
    """Whole, and in stages of a pipeline, whose modules in other stages are None."""
    first, last = cut[0] == 0, cut[1] == 2
    decoder = module(
        *("decoder", "Decoder"),
        tok_embeddings=nn.Embedding(16, WIDTH) if first else None,
        layers=nn.ModuleDict({str(i): block() for i in range(*cut)}),
        norm=nn.RMSNorm(WIDTH) if last else None,
        lm_head=linear(16, WIDTH) if last else None,
    )
    with silent():
        rows = rows_of(decoder, head="auto" if last else None)
    ends = {"tok_embeddings.weight": first, "norm.weight": last, "lm_head.weight": last}
    expected = AXES | {name: None for name, here in ends.items() if here}
    assert {re.sub(r"\.\d+\.", ".*.", name): row.axes for name, row in rows.items()} == expected
    assert all((row.axes is None) == (row.route == "adamw") for row in rows.values())
    assert "a router" in rows[f"layers.{cut[0]}.moe.router.gate.weight"].reason


def test_the_kernels_of_cuda_take_its_maps():
    weight = block().attention.qkv_linear.wqkv.weight
    cut = axes.parse(FUSED, tuple(weight.shape))
    assert [(block.rows, block.count) for block in cut] == [(8, 1), (4, 1), (4, 1)]
    assert None not in [block_layout(weight, block) for block in cut]
