"""Every class of timm whose fused weights are cut: the cut is the one its own `forward` makes.

    python tests/trainers/check_timm.py        # needs timm

Queries twice as large with keys half as large leave an attention as it is, and without values
nothing comes out of it; of a gated map nothing is left without either factor.
"""

import importlib
import sys

import torch

from nucleon.optim.matrices import axes
from nucleon.optim.routing import fused

WIDTH, HEADS, SIDE = 32, 4, 4
TOKENS = SIDE * SIDE
SIZES = {"dim": WIDTH, "num_heads": HEADS}
BY_KEY = {"dim": WIDTH, "key_dim": 8, "num_heads": HEADS, "resolution": (SIDE, SIDE)}
DOWN = {"in_dim": WIDTH, "out_dim": WIDTH, "key_dim": 8, "num_heads": HEADS}
DOWN |= {"attn_ratio": 2.0, "resolution": (SIDE, SIDE)}
BOTTLENECK = SIZES | {"feat_size": (SIDE, SIDE), "qk_ratio": 0.5}
GLU = {"in_features": WIDTH, "hidden_features": 2 * WIDTH, "act_layer": torch.nn.SiLU}
OUT = {"dim_out": WIDTH}
POOL = {"in_features": WIDTH, "num_heads": HEADS}
TOKENS_IN, MAP, GRID = (2, TOKENS, WIDTH), (2, WIDTH, SIDE, SIDE), (2, SIDE, SIDE, WIDTH)
WINDOW = {**SIZES, "window_size": (SIDE, SIDE)}


def no_position(q, v, size):
    return 0.0


MADE = {
    "attention.Attention.qkv": ("layers.attention", SIZES, TOKENS_IN),
    "beit.Attention.qkv": ("models.beit", SIZES, TOKENS_IN),
    "fastvit.Attention.qkv": ("models.fastvit", {"dim": WIDTH, "head_dim": 8}, MAP),
    "metaformer.Attention.qkv": ("models.metaformer", {"dim": WIDTH, "head_dim": 8}, TOKENS_IN),
    "nest.Attention.qkv": ("models.nest", SIZES, (2, 1, TOKENS, WIDTH)),
    "visformer.Attention.qkv": ("models.visformer", SIZES, MAP),
    "volo.Attention.qkv": ("models.volo", SIZES, GRID),
    "vision_transformer_sam.Attention.qkv": ("models.vision_transformer_sam", SIZES, GRID),
    "AttentionRope.qkv": ("layers.attention", SIZES, TOKENS_IN),
    "DiffAttention.qkv": ("layers.diff_attention", SIZES, TOKENS_IN),
    "RotAttentionPool2d.qkv": ("layers.attention_pool2d", {**POOL, "ref_feat_size": SIDE}, MAP),
    "AttentionPool2d.qkv": ("layers.attention_pool2d", {**POOL, "feat_size": SIDE}, MAP),
    "TalkingHeadAttn.qkv": ("models.cait", SIZES, TOKENS_IN),
    "MHSA.qkv": ("models.convit", SIZES, TOKENS_IN),
    "ChannelAttention.qkv": ("models.davit", SIZES, TOKENS_IN),
    "ChannelAttentionV2.qkv": ("models.davit", SIZES, TOKENS_IN),
    "WindowAttention.qkv": ("models.swin_transformer", WINDOW, TOKENS_IN),
    "WindowMultiHeadAttention.qkv": ("models.swin_transformer_v2_cr", WINDOW, TOKENS_IN),
    "CrossCovarianceAttn.qkv": ("models.edgenext", SIZES, TOKENS_IN),
    "EvaAttention.qkv": ("models.eva", {**SIZES, "scale_norm": False}, TOKENS_IN),
    "MaskUnitAttention.qkv": ("models.hiera", OUT | {"dim": WIDTH, "heads": HEADS}, TOKENS_IN),
    "MultiScaleAttention.qkv": ("models.hieradet_sam2", SIZES | OUT, GRID),
    "LocallyGroupedAttn.qkv": ("models.twins", {**SIZES, "ws": 2}, TOKENS_IN),
    "RelPosAttention.qkv": ("models.vision_transformer_relpos", SIZES, TOKENS_IN),
    "XCA.qkv": ("models.xcit", SIZES, TOKENS_IN),
    "WindowAttentionGlobal.qkv": ("models.gcvit", WINDOW | {"use_global": False}, TOKENS_IN),
    "Attention2d.qkv": ("models.maxxvit", {"dim": WIDTH, "dim_head": 8}, MAP),
    "AttentionCl.qkv": ("models.maxxvit", {"dim": WIDTH, "dim_head": 8}, GRID),
    "tiny_vit.Attention.qkv": ("models.tiny_vit", BY_KEY, TOKENS_IN),
    "levit.Attention.qkv": ("models.levit", BY_KEY, TOKENS_IN),
    "efficientformer.Attention.qkv": ("models.efficientformer", BY_KEY, TOKENS_IN),
    "AttentionDownsample.kv": ("models.levit", DOWN, TOKENS_IN),
    "SHSA.qkv": ("models.shvit", {"dim": WIDTH, "qk_dim": 8, "pdim": 12}, MAP),
    "BottleneckAttn.qkv": ("layers.bottleneck_attn", BOTTLENECK, MAP),
    "AttentionPoolLatent.kv": ("layers.attention_pool", POOL, TOKENS_IN),
    "pvt_v2.Attention.kv": ("models.pvt_v2", SIZES, TOKENS_IN),
    "GlobalSubSampleAttn.kv": ("models.twins", {**SIZES, "sr_ratio": 1}, TOKENS_IN),
    "volo.ClassAttention.kv": ("models.volo", SIZES, TOKENS_IN),
    "ParallelScalingBlock.in_proj": ("models.vision_transformer", SIZES, TOKENS_IN),
    "DiffParallelScalingBlock.in_proj": ("models.vision_transformer", SIZES, TOKENS_IN),
    "mobilevit.LinearSelfAttention.qkv_proj": ("models.mobilevit", {"embed_dim": WIDTH}, MAP),
    "GluMlp.fc1": ("layers.mlp", GLU, TOKENS_IN),
    "FactorAttnConvRelPosEnc.qkv": ("models.coat", SIZES | {"shared_crpe": no_position}, TOKENS_IN),
}
"""File, options and shape of the input; `vision_transformer.Attention` is of an older timm."""
KEYWORDS = {"size": (SIDE, SIDE), "feat_size": [SIDE, SIDE]}
"""Arguments of some `forward` beside their input."""
FACTORS = {
    "ChannelAttention.qkv": (0,),
    "FactorAttnConvRelPosEnc.qkv": (0, 2),
    "mobilevit.LinearSelfAttention.qkv_proj": (1, 2),
    "GluMlp.fc1": (0, 1),
}
"""Maps without which nothing is left, of attentions without a softmax of queries and keys."""
BESIDE = ("SHSA.qkv", "ParallelScalingBlock.in_proj", "DiffParallelScalingBlock.in_proj")
"""Something comes out beside what the values make."""


class Cut:
    """A module of timm, its fused weight, and what comes out when some of its maps are scaled."""

    def __init__(self, key):
        file, options, shape = MADE[key]
        kind, name = key.split(".")[-2:]
        torch.manual_seed(0)
        self.module = getattr(importlib.import_module(f"timm.{file}"), kind)(**options)
        self.module.train(False)
        held = getattr(self.module, name)
        (self.weight,) = (p for p in held.parameters() if p.ndim > 1)
        rows, columns = self.weight.shape[:2]
        word, _ = fused.known(self.module, name, rows, columns)
        self.spec = f"{word} c" + " c" * (self.weight.ndim - 2)
        self.tokens = torch.randn(shape)
        wanted = self.module.forward.__code__.co_varnames
        self.more = {k: v for k, v in KEYWORDS.items() if k in wanted}
        with torch.no_grad():
            for label, p in self.module.named_parameters():
                if "bias" in label or "_rel" in label:
                    p.zero_()
                elif p.ndim == 1 and not p.any():  # a norm that lets nothing through at first
                    p.fill_(1.0)
                elif p.ndim > 1:
                    p.copy_(torch.randn_like(p) * p[0].numel() ** -0.5)
        self.start = self.weight.detach().clone()

    def parts(self):
        regions = [(b, b.region(self.weight)) for b in axes.parse(self.spec, self.weight.shape)]
        return [p for b, r in regions for p in (r.unbind(0) if b.batch else [r])]

    @torch.no_grad()
    def out(self, scales=()):
        self.weight.copy_(self.start)
        for index, scale in dict(scales).items():
            self.parts()[index].mul_(scale)
        return self.module(self.tokens.clone(), **self.more)


def check(key):
    """Raise unless the maps of the table are those of `forward`."""
    cut = Cut(key)
    base, count = cut.out(), len(cut.parts())
    least = 1e-3 * base.abs().max()

    def apart(scales):
        return (cut.out(scales) - base).abs().max()

    if key in FACTORS:
        for i in range(count):
            assert bool(cut.out({i: 0.0}).any()) == (i not in FACTORS[key]), i
        assert all(apart({i: 0.0}) > least for i in range(count))
        return
    keys, values = count - 2, count - 1
    assert apart({keys: 0.0}) > least, "keys"
    if count > 2:
        queries = {keys - 1: 2.0, keys: 0.5}
        torch.testing.assert_close(cut.out(queries), base, rtol=0, atol=float(least))
    left = apart({values: 0.0}) if key in BESIDE else least - cut.out({values: 0.0}).abs().max()
    assert left > 0, "values"
    if count == 4:
        assert apart({0: 0.0}) > least, "the perceptron"


if __name__ == "__main__":
    failed = 0
    assert {*fused.KNOWN["timm"]} - {*MADE} == {"vision_transformer.Attention.qkv"}
    for key in MADE:
        try:
            check(key)
            print(f"ok   {key}")
        except Exception as error:
            failed += 1
            print(f"FAIL {key}: {type(error).__name__} {str(error)[:150]!r}")
    sys.exit(failed)
