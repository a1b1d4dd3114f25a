"""Several maps in one weight, such as q, k and v: how they lie in it, by the module that holds it.

A weight is cut only where the class of its parent is in `KNOWN`: the same name stands for q, then
k, then v in one library and for head after head in another. What is not known is one matrix.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from nucleon.optim.matrices import axes

Layout = Callable[[Any, int, int], str]
"""(parent, rows, columns) → the word of the output axis, see `nucleon.optim.matrices.axes`."""

_THREE = re.compile(r"qkv|query_key_value|queries_keys_values|w_pack|c_attn", re.IGNORECASE)
_TWO = re.compile(
    r"^(to_|linear_|w)?(kv|qk)(_b)?(_proj|_linear|_points)?$|keys_values|gate_up|^w1[23]$",
    re.IGNORECASE,
)
_TAKEN_BY = {
    "in_proj": "out_proj",
    "fc1": "fc2",
    "linear1": "linear2",
    "Wi": "Wo",
    "wi": "wo",
    "x_proj": "dt_proj",
}
"""Of two maps in a row, the name of the second."""
_HALVED_FOR = {
    "c_fc": "c_proj",
    "linear_1": "linear_2",
    "pointwise_conv1": "pointwise_conv2",
    "up": "down",
    "up_proj": "down_proj",
}
"""The same, where the second may take half, as a gate is multiplied with the other half."""
GLU = re.compile(r"glu$", re.IGNORECASE)
"""How activations are called that multiply one half of their input by a gate, the other half."""


def parts(name: str) -> int:
    """How many maps a module holds by its name."""
    return 3 if _THREE.search(name) else 2 if _TWO.search(name) else 1


def seems_fused(parent: nn.Module | None, name: str, rows: int, *, given: bool = False) -> bool:
    """Whether `parent.name` holds several maps by its name, or gives more than its second takes.

    What is `given` by the parent as it is goes to no second, whatever the size of another map.
    """
    if parts(name) > 1:
        return rows != getattr(parent, "head_dim", None)  # one head that is keys and values at once
    return rows > _taken(parent, name, rows) or (not given and _is_halved(parent, name, rows))


def in_turn(parent: nn.Module | None, name: str, rows: int) -> str:
    """The word of the output axis if the maps of `parent.name` lie one after the other."""
    taken = _taken(parent, name, rows)
    size, odd = divmod(rows - taken, 2)
    if name == "x_proj" and size and not odd:  # of Mamba: dt, then B and C of one size
        return _cut(rows - 2 * size, size, size)
    by_size = rows // taken if taken and rows % taken == 0 else 2
    return f"(b={max(2, parts(name), by_size)} r)"


def in_sections(sizes: Sequence[int], rows: int) -> str:
    """The same for maps of these sizes, in all or, where they are fewer than rows, per head."""
    heads, equal = rows // sum(sizes), len({*sizes}) == 1
    if heads == 1:
        return f"(b={len(sizes)} r)" if equal else _cut(*sizes)
    return f"(r={heads} b={len(sizes)} r)" if equal else f"(r={heads} {_cut(*sizes)})"


def _taken(parent: nn.Module | None, name: str, rows: int) -> int:
    """How much of what `parent.name` gives the map behind it takes; all where there is none."""
    taken = getattr(getattr(parent, _TAKEN_BY.get(name, ""), None), "in_features", rows)
    return taken if isinstance(taken, int) else rows


def _is_halved(parent: nn.Module | None, name: str, rows: int) -> bool:
    """Whether the next map in the parent takes exactly half of what `parent.name` gives.

    By the names above, in a Sequential, and where these are the only two and do not take the same:
    others may stand side by side, as queries and keys do.
    """
    if parent is None or isinstance(parent, nn.ModuleList):
        return False
    maps = {n: m for n, m in parent.named_children() if is_map(m)}
    if name not in maps:
        return False
    behind = [*parent.children()][[*parent._modules].index(name) + 1 :]
    if isinstance(parent, nn.Sequential) and behind and GLU.search(type(behind[0]).__name__):
        return rows % 2 == 0 and not is_map(behind[0])
    if len(maps) == 1:  # its gate and what it gates, as in GEGLU of diffusers
        return GLU.search(type(parent).__name__) is not None and rows % 2 == 0
    second = maps.get(_HALVED_FOR.get(name, ""))
    if second is not None:
        return rows == 2 * _columns(second)
    taken = _columns([*maps.values(), None][[*maps].index(name) + 1])
    alone = len(maps) == 2 and taken != _columns(maps[name])
    return rows == 2 * taken and (alone or isinstance(parent, nn.Sequential))


def is_map(module: nn.Module) -> bool:
    """Whether there are matrices within; a convolution of each channel by itself has none."""
    depthwise = getattr(module, "groups", 1) == getattr(module, "in_channels", None) != 1
    return not depthwise and any(p.ndim > 1 for p in module.parameters())


def _columns(module: nn.Module | None) -> int:
    """How many numbers a map takes; 0 where nothing tells."""
    sizes = (getattr(module, name, None) for name in ("in_features", "in_channels", "nx"))
    return next((size for size in sizes if isinstance(size, int)), 0)


def known(parent: nn.Module | None, name: str, rows: int, columns: int) -> tuple[str, str] | None:
    """The word of the output axis of `parent.name`, and its maps; None where nobody knows."""
    for base in type(parent).__mro__:
        package, _, module = base.__module__.partition(".")
        table, kind = KNOWN.get(package, {}), f"{base.__name__}.{name}"
        found = table.get(f"{module.rpartition('.')[2]}.{kind}") or table.get(kind)
        if found is None:
            continue
        layout, maps = found
        try:
            word = layout(parent, rows, columns)
            axes.parse(f"{word} c", (rows, columns))
        except (AttributeError, TypeError, ValueError):
            return None  # the class is not as it was known
        return word, maps
    return None


# ------------------------------------------------------------------------------------- layouts


@cache
def _equal(parts: int) -> Layout:
    """One after the other, the same size each."""
    return lambda parent, rows, columns: f"(b={parts} r)"


def _as_wide(parent: Any, rows: int, columns: int) -> str:
    """One after the other, each a square: three, or two in cross-attention."""
    return f"(b={rows // columns} r)"


def _always(word: str) -> Layout:
    """The same whatever the sizes."""
    return lambda parent, rows, columns: word


@cache
def _per_head(parts: int) -> Layout:
    """Head after head, in each the maps one after the other."""
    return lambda parent, rows, columns: f"(r={_heads(parent)} b={parts} r)"


def _sections(*names: str) -> Layout:
    """One after the other, of the sizes that these attributes of the parent have."""
    return lambda parent, rows, columns: _cut(*(getattr(parent, name) for name in names))


def _grouped(parent: Any, rows: int, columns: int) -> str:
    """q, k, v one after the other, with fewer heads in k and v."""
    size = _number(parent, *_KV_HEADS) * parent.head_dim
    return _cut(rows - 2 * size, size, size)


def _of_torchtitan(parent: Any, rows: int, columns: int) -> str:
    size = parent.head_dim
    return _repeated(parent.heads_per_kv * size, size, size)


def _of_latents(parent: Any, rows: int, columns: int) -> str:
    """Head after head, in each a key without its rotary part, and a value."""
    return _repeated(parent.qk_nope_head_dim, parent.v_head_dim)


def _of_flux(parent: Any, rows: int, columns: int) -> str:
    return _cut(*3 * [columns], rows - 3 * columns)


def _of_falcon(parent: Any, rows: int, columns: int) -> str:
    """Later: (kv heads, queries per kv head + 2, head dim), q, k, v each a matrix, as if apart."""
    if not parent.new_decoder_architecture:
        return _of_big_code(parent, rows, columns)
    queries = _heads(parent) // _number(parent, *_KV_HEADS)
    return _repeated(queries * parent.head_dim, parent.head_dim, parent.head_dim)


def _of_big_code(parent: Any, rows: int, columns: int) -> str:
    if getattr(parent, "is_cross_attention", False):
        return "(b=2 r)"
    if not parent.multi_query:
        return _per_head(3)(parent, rows, columns)
    return _cut(rows - 2 * parent.head_dim, parent.head_dim, parent.head_dim)


def _of_mamba2(parent: Any, rows: int, columns: int) -> str:
    inner, state = parent.intermediate_size, parent.n_groups * parent.ssm_state_size
    return _cut(inner, inner, state, state, parent.num_heads)


def _of_qwen3_next(parent: Any, rows: int, columns: int) -> str:
    """(k heads, 2 + 2·v heads per k head, head dim): q, k, values, gates."""
    key = parent.head_k_dim
    value = parent.num_v_heads // parent.num_k_heads * parent.head_v_dim
    return _repeated(key, key, value, value)


def _of_qwen3_next_gates(parent: Any, rows: int, columns: int) -> str:
    return f"(r={parent.num_k_heads} b=2 r)"


def _of_maxvit(parent: Any, rows: int, columns: int) -> str:
    return (_per_head(3) if parent.head_first else _equal(3))(parent, rows, columns)


def _sections_per_head(*names: str) -> Layout:
    """Head after head, in each the maps one after the other, of these sizes."""

    def layout(parent: Any, rows: int, columns: int) -> str:
        sizes = [getattr(parent, name) for name in names]
        if len({*sizes}) == 1:
            return _per_head(len(sizes))(parent, rows, columns)
        return f"(r={_heads(parent)} {_cut(*sizes)})"

    return layout


def _of_mobilevit(parent: Any, rows: int, columns: int) -> str:
    """One row of scores, then k and v."""
    return _cut(1, parent.embed_dim, parent.embed_dim)


def _of_focalnet(parent: Any, rows: int, columns: int) -> str:
    """Queries and a context as wide as the tokens, then a row of gates for each focal level."""
    return _cut(columns, columns, rows - 2 * columns)


def _of_parallel_blocks(parent: Any, rows: int, columns: int) -> str:
    return _cut(*parent.in_split)


_HEADS = ("num_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def _heads(parent: Any) -> int:
    return _number(parent, *_HEADS)


def _number(parent: Any, *names: str) -> int:
    """The first of these attributes that the parent, or its config, has."""
    for holder in (parent, getattr(parent, "config", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int):
                return value
    raise AttributeError(f"{type(parent).__name__} has none of {names}")


def _cut(*sizes: int) -> str:
    return f"r{{{','.join(map(str, sizes))}}}"


def _repeated(*sizes: int) -> str:
    """Maps of these sizes one after the other, again and again."""
    if len({*sizes}) == 1:
        return f"(r b={len(sizes)} r={sizes[0]})"
    return f"(r {_cut(*sizes)})"


# ------------------------------------------------------------------------- who has which layout

_Table = dict[str, tuple[Layout, str]]


def _table(*entries: tuple[Layout, str, str, str]) -> _Table:
    """{class.name: (layout, maps)} of entries (layout, maps, name, classes)."""
    return {
        f"{kind}.{name}": (layout, maps)
        for layout, maps, name, classes in entries
        for kind in classes.split()
    }


_QKV, _KV, _GATED = "q, k, v", "k, v", "gate, up"
_LATENT_KV = "k, v in each head"
_LATENT = (
    "AXK1Attention AXK2Attention BailingHybridAttention DeepseekV2Attention DeepseekV3Attention "
    "DeepseekV32Attention Dots3NoteTextAttention Glm4MoeLiteAttention GlmMoeDsaAttention "
    "HYV4Attention KimiLinearAttention LongcatFlashMLA MiniCPM3Attention Mistral4Attention "
    "MistralLarge4TextAttention YoutuAttention"
)
"""Attentions whose keys and values come from one latent vector of a token."""

KNOWN: Mapping[str, _Table] = {
    "transformers": _table(
        (_as_wide, _QKV, "c_attn", "GPT2Attention DecisionTransformerGPT2Attention"),
        (_as_wide, _QKV, "c_attn", "ImageGPTAttention modeling_openai.Attention"),
        (_of_big_code, _QKV, "c_attn", "GPTBigCodeAttention"),
        (_equal(3), _QKV, "att_proj", "BarkSelfAttention"),
        (_equal(3), _QKV, "qkv_linear", "LayoutLMv2SelfAttention"),
        (_equal(3), _QKV, "Wqkv", "ModernBertAttention MptAttention"),
        (_grouped, _QKV, "Wqkv", "DbrxAttention"),
        (_grouped, _QKV, "qkv_proj", "Phi3Attention Phi4MultimodalAttention"),
        (_grouped, _QKV, "qkv", "Exaone4_5_VisionAttention"),
        (_per_head(3), _QKV, "qkv_proj", "MiniMaxLightningAttention"),
        (_always("(r=4 b=3 r)"), "q, v, k, in four parts", "qkv_proj", "CodeGenAttention"),
        (_per_head(3), _QKV, "query_key_value", "BloomAttention PersimmonAttention"),
        (_per_head(3), _QKV, "query_key_value", "GPTNeoXAttention GPTNeoXJapaneseAttention"),
        (_of_falcon, _QKV, "query_key_value", "FalconAttention"),
        (_per_head(3), _QKV, "in_proj", "modeling_deberta.DisentangledSelfAttention"),
        (_sections("key_dim", "key_dim", "value_dim"), _QKV, "in_proj_qkv",
         "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet"),
        (_per_head(2), "q, gates", "q_proj",
         "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention Qwen4ExpTextAttention"),
        (_of_qwen3_next, "q, k, values, gates", "in_proj_qkvz", "Qwen3NextGatedDeltaNet"),
        (_of_qwen3_next_gates, "b, a", "in_proj_ba", "Qwen3NextGatedDeltaNet"),
        (_equal(3), _QKV, "qkv",
         "BlipAttention Blip2Attention InstructBlipAttention InstructBlipVideoAttention "
         "CohereCompassVisionAttention DeepseekOcr2SamVisionAttention Dots3NoteVisionAttention "
         "Ernie4_5_VLMoeVisionAttention Florence2VisionChannelAttention "
         "Florence2VisionWindowAttention Glm4vVisionAttention Glm4vMoeVisionAttention "
         "Glm5NextVisionAttention GlmImageVisionAttention GlmOcrVisionAttention "
         "GotOcr2VisionAttention HieraMaskUnitAttention MgpstrAttention "
         "PPFormulaNetVisionAttention PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention "
         "PPOCRV6SmallRecAttention modeling_qwen2_vl.VisionAttention Qwen2_5_VLVisionAttention "
         "Qwen3VLVisionAttention Qwen3VLMoeVisionAttention Qwen3OmniMoeVisionAttention "
         "Qwen3_5VisionAttention Qwen3_5MoeVisionAttention Qwen4ExpVisionAttention "
         "SamVisionAttention Sam2MultiScaleAttention SamHQVisionAttention SegGptAttention "
         "SLANeXtVisionAttention TimesformerSelfAttention UnlimitedOcrSamVisionAttention "
         "VitDetAttention"),
        (_equal(2), _KV, "to_kv",
         "EvollaSequenceCompressorAttention GraniteSpeechConformerAttention "
         "GraniteSpeechPlusConformerAttention"),
        (_equal(2), _KV, "kv_proj", "JetMoeAttention"),
        (_of_latents, _LATENT_KV, "kv_b_proj", f"{_LATENT} Glm5NextTextAttention"),
        (_sections("kv_lora_rank", "qk_rope_head_dim"), "latents, k", "kv_a_proj_with_mqa",
         _LATENT),
        (_equal(2), _GATED, "gate_up_proj",
         "DiaMLP Dots3NoteAudioMLP EsmFold2SwiGLU GlmMLP Glm4MLP Glm4vTextMLP GlmImageTextMLP "
         "GlmOcrTextMLP MiniMaxM3VLDenseMLP Phi3MLP Phi4MultimodalMLP Phi4MultimodalAudioMLP "
         "Zamba2MLP"),
        (_equal(2), _GATED, "Wi", "ModernBertMLP ModernBertDecoderMLP"),
        (_equal(2), _GATED, "fc1",
         "KyutaiSpeechToTextGatingMLP MoshiGatingMLP MoonshineDecoderMLP "
         "MoonshineStreamingDecoderMLP"),
        (_equal(2), _GATED, "input_linear",
         "GraniteMoeSWAMLP GraniteMoeHybridMLP GraniteMoeSharedMLP"),
        (_equal(2), "up, gate", "proj", "ClvpGatedLinearUnit"),
        (_equal(2), "x, gates", "pointwise_conv1",
         "FastSpeech2ConformerConvolutionModule LasrEncoderConvolutionModule "
         "NemotronAsrStreamingEncoderConvolutionModule ParakeetEncoderConvolutionModule "
         "SeamlessM4TConformerConvolutionModule SeamlessM4Tv2ConformerConvolutionModule "
         "Wav2Vec2BertConvolutionModule Wav2Vec2ConformerConvolutionModule"),
        (_equal(2), "x, gates", "up_conv",
         "GraniteSpeechConformerConvModule GraniteSpeechPlusConformerConvModule"),
        (_equal(2), "gates of two inputs", "gate", "DFineGate Deimv2Gate"),
        (_equal(2), "q, k", "dense", "PPDocLayoutV2GlobalPointer PPDocLayoutV3GlobalPointer"),
        (_per_head(3), _QKV, "proj", "EsmFoldSelfAttention"),
        (_equal(2), "x, z", "in_proj", "MambaMixer FalconMambaMixer JambaMambaMixer"),
        (_always("(r b=2)"), "x, z, row by row", "in_proj", "ZambaMambaMixer"),
        (_sections("time_step_rank", "ssm_state_size", "ssm_state_size"), "dt, B, C", "x_proj",
         "MambaMixer FalconMambaMixer JambaMambaMixer"),
        (_of_mamba2, "z, x, B, C, dt", "in_proj",
         "Mamba2Mixer BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer NemotronHMamba2Mixer "
         "Zamba2MambaMixer"),
        (_equal(3), "B, C, x", "in_proj",
         "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv Lfm3VlVisionShortConv"),
        (_of_focalnet, "q, context, gates", "projection_in", "FocalNetModulation"),
        (_of_mobilevit, "scores, k, v", "qkv_proj", "MobileViTV2LinearSelfAttention"),
    ),
    "timm": _table(
        (_equal(3), _QKV, "qkv",
         "attention.Attention vision_transformer.Attention beit.Attention fastvit.Attention "
         "metaformer.Attention nest.Attention visformer.Attention volo.Attention "
         "vision_transformer_sam.Attention AttentionRope DiffAttention RotAttentionPool2d "
         "AttentionPool2d TalkingHeadAttn FactorAttnConvRelPosEnc MHSA ChannelAttention "
         "ChannelAttentionV2 WindowAttention WindowMultiHeadAttention CrossCovarianceAttn "
         "EvaAttention MaskUnitAttention MultiScaleAttention LocallyGroupedAttn RelPosAttention "
         "XCA"),
        (_as_wide, _QKV, "qkv", "WindowAttentionGlobal"),
        (_of_maxvit, _QKV, "qkv", "Attention2d AttentionCl"),
        (_sections_per_head("key_dim", "key_dim", "val_dim"), _QKV, "qkv",
         "tiny_vit.Attention levit.Attention efficientformer.Attention"),
        (_sections_per_head("key_dim", "val_dim"), _KV, "kv", "AttentionDownsample"),
        (_sections("qk_dim", "qk_dim", "pdim"), _QKV, "qkv", "SHSA"),
        (_of_mobilevit, "scores, k, v", "qkv_proj", "mobilevit.LinearSelfAttention"),
        (_sections("dim_out_qk", "dim_out_qk", "dim_out_v"), _QKV, "qkv", "BottleneckAttn"),
        (_equal(2), _KV, "kv",
         "AttentionPoolLatent pvt_v2.Attention GlobalSubSampleAttn volo.ClassAttention"),
        (_of_parallel_blocks, "mlp, q, k, v", "in_proj",
         "ParallelScalingBlock DiffParallelScalingBlock"),
        (_equal(2), _GATED, "fc1", "GluMlp"),
    ),
    "torchvision": _table(
        (_equal(3), _QKV, "qkv",
         "ShiftedWindowAttention ShiftedWindowAttentionV2 MultiscaleAttention"),
    ),
    "torchtitan": _table(
        (_of_torchtitan, _QKV, "wqkv", "FusedQKVLinear"),
        (_equal(3), _QKV, "qkv", "layers.SelfAttention"),
        (_of_flux, "q, k, v, mlp", "linear1", "SingleStreamBlock"),
        (_of_latents, _LATENT_KV, "wkv_b", "model.Attention"),
        (_sections("kv_lora_rank", "qk_rope_head_dim"), "latents, k", "wkv_a", "model.Attention"),
    ),
}  # fmt: skip
"""What is known, by package; a class name that is not alone in its package has its file before."""
