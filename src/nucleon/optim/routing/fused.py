"""Known classes of libraries: the layout of their fused weights and stacks of experts, as data.

A weight is cut only where the class of its parent is in `KNOWN`: the same name stands for q, then
k, then v in one library and for head after head in another. All other weights are one matrix.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from nucleon.optim.matrices import axes

Layout = Callable[[Any, int, int], str]
"""(parent, rows, columns) → the word of the output axis, see `nucleon.optim.matrices.axes`."""


def known(parent: nn.Module | None, name: str, rows: int, columns: int) -> tuple[str, str] | None:
    """Return the word of the output axis of `parent.name`, and its maps; None if not in `KNOWN`."""
    for package, file, base in bases(parent):
        table, kind = KNOWN.get(package, {}), f"{base}.{name}"
        entry = table.get(f"{file}.{kind}") or table.get(kind)
        if entry is None:
            continue
        layout, maps = entry
        try:
            word = layout(parent, rows, columns)
            axes.parse(f"{word} c", (rows, columns))
        except (AttributeError, TypeError, ValueError):
            return None  # another version of the class
        return word, maps
    return None


def experts(module: nn.Module, name: str) -> tuple[str, str] | None:
    """Return the axes of a stack of experts, and its maps; None if no library defines the class."""
    for package, _, base in bases(module):
        if package not in EXPERTS or not base.endswith("Experts"):
            continue
        spec, word = EXPERTS[package].get(base, ("b {} c", "(b=2 r)"))
        order = "(in, out)" if spec == "b c {}" else "(out, in)"
        gated = name in _GATED_STACKS and getattr(module, "has_gate", True)
        if not _is_stored(module, transposed=spec == "b c {}"):
            return None  # another version of the class
        maps = "experts: gate, up" if gated else "experts"
        return spec.format(word if gated else "r"), f"{maps}, each {order}"
    return None


def _is_stored(module: nn.Module, *, transposed: bool) -> bool:
    """Return False if the shapes of gate_up_proj and down_proj tell that the order is another."""
    both, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(both, Tensor) and isinstance(down, Tensor) and both.ndim == down.ndim == 3):
        return True
    outer, inner = (2, 1) if transposed else (1, 2)
    return both.shape[outer] == 2 * down.shape[inner]


def bases(module: nn.Module | None) -> Iterator[tuple[str, str, str]]:
    """Yield package, file and name of the class of a module, and of those it derives from."""
    for base in type(module).__mro__:
        package, _, path = base.__module__.partition(".")
        yield package, path.rpartition(".")[2], base.__name__


def is_known(module: nn.Module) -> bool:
    """Return True if the class of a module, or one it derives from, is of a library in `KNOWN`."""
    return any(package in KNOWN for package, _, _ in bases(module))


# ------------------------------------------------------------------------------------- layouts


def sections(*sizes: int) -> str:
    """Return the word of maps of these sizes one after the other."""
    return f"r{{{','.join(map(str, sizes))}}}"


def repeated(*sizes: int) -> str:
    """Return the word of maps of these sizes one after the other, again and again."""
    if len({*sizes}) == 1:
        return f"(r b={len(sizes)} r={sizes[0]})"
    return f"(r {sections(*sizes)})"


def attribute(parent: Any, *names: str) -> int | None:
    """Return the first of these numbers that the parent, or its config, has."""
    for holder in (parent, getattr(parent, "config", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int):
                return value
    return None


def _number(parent: Any, *names: str) -> int:
    value = attribute(parent, *names)
    if value is None:
        raise AttributeError(f"{type(parent).__name__} has none of {names}")
    return value


def _heads(parent: Any) -> int:
    return _number(parent, "num_heads", "num_attention_heads", "n_head")


def _kv_heads(parent: Any) -> int:
    return _number(parent, "num_key_value_heads", "num_kv_heads")


def _always(word: str) -> Layout:
    """The same whatever the sizes."""
    return lambda parent, rows, columns: word


@cache
def _equal(parts: int) -> Layout:
    """One after the other, the same size each."""
    return _always(f"(b={parts} r)")


@cache
def _per_head(parts: int) -> Layout:
    """Head after head, in each the maps one after the other."""
    return lambda parent, rows, columns: f"(r={_heads(parent)} b={parts} r)"


def _sections(*names: str) -> Layout:
    """One after the other, of the sizes that these attributes of the parent have."""
    return lambda parent, rows, columns: sections(*(getattr(parent, name) for name in names))


def _sections_per_head(*names: str) -> Layout:
    """Head after head, in each the maps one after the other, of these sizes."""

    def layout(parent: Any, rows: int, columns: int) -> str:
        sizes = [getattr(parent, name) for name in names]
        if len({*sizes}) == 1:
            return _per_head(len(sizes))(parent, rows, columns)
        return f"(r={_heads(parent)} {sections(*sizes)})"

    return layout


def _as_wide(parent: Any, rows: int, columns: int) -> str:
    """One after the other, each a square: three, or two in cross-attention."""
    return f"(b={rows // columns} r)"


def _grouped(parent: Any, rows: int, columns: int) -> str:
    """q, k, v one after the other, with fewer heads in k and v."""
    size = _kv_heads(parent) * parent.head_dim
    return sections(rows - 2 * size, size, size)


def _of_torchtitan(parent: Any, rows: int, columns: int) -> str:
    size = parent.head_dim
    return repeated(parent.heads_per_kv * size, size, size)


def _of_latents(parent: Any, rows: int, columns: int) -> str:
    """Head after head, in each a key without its rotary part, and a value."""
    return repeated(parent.qk_nope_head_dim, parent.v_head_dim)


def _of_flux(parent: Any, rows: int, columns: int) -> str:
    return sections(*3 * [columns], rows - 3 * columns)


def _of_falcon(parent: Any, rows: int, columns: int) -> str:
    """Later: (kv heads, queries per kv head + 2, head dim), q, k, v each a matrix, as if apart."""
    if not parent.new_decoder_architecture:
        return _of_big_code(parent, rows, columns)
    queries = _heads(parent) // _kv_heads(parent)
    return repeated(queries * parent.head_dim, parent.head_dim, parent.head_dim)


def _of_big_code(parent: Any, rows: int, columns: int) -> str:
    if getattr(parent, "is_cross_attention", False):
        return "(b=2 r)"
    if not parent.multi_query:
        return _per_head(3)(parent, rows, columns)
    return sections(rows - 2 * parent.head_dim, parent.head_dim, parent.head_dim)


def _of_mamba2(parent: Any, rows: int, columns: int) -> str:
    inner, state = parent.intermediate_size, parent.n_groups * parent.ssm_state_size
    return sections(inner, inner, state, state, parent.num_heads)


def _of_qwen3_next(parent: Any, rows: int, columns: int) -> str:
    """(k heads, 2 + 2·v heads per k head, head dim): q, k, values, gates."""
    key = parent.head_k_dim
    value = parent.num_v_heads // parent.num_k_heads * parent.head_v_dim
    return repeated(key, key, value, value)


def _of_qwen3_next_gates(parent: Any, rows: int, columns: int) -> str:
    return f"(r={parent.num_k_heads} b=2 r)"


def _of_maxvit(parent: Any, rows: int, columns: int) -> str:
    return (_per_head(3) if parent.head_first else _equal(3))(parent, rows, columns)


def _of_mobilevit(parent: Any, rows: int, columns: int) -> str:
    """One row of scores, then k and v."""
    return sections(1, parent.embed_dim, parent.embed_dim)


def _of_focalnet(parent: Any, rows: int, columns: int) -> str:
    """Queries and a context as wide as the tokens, then a row of gates for each focal level."""
    return sections(columns, columns, rows - 2 * columns)


def _of_parallel_blocks(parent: Any, rows: int, columns: int) -> str:
    return sections(*parent.in_split)


# ------------------------------------------------------------------------- who has which layout

_Table = dict[str, tuple[Layout, str]]


def _table(*entries: tuple[Layout, str, str, str]) -> _Table:
    """Return {class.name: (layout, maps)} of entries (layout, maps, name, classes)."""
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
"""Layouts by package; a class name that is not alone in its package has its file before."""

EXPERTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "transformers": {
        "AriaExperts": ("b c {}", "(b=2 r)"),
        "GptOssExperts": ("b c {}", "(r b=2)"),
        "Llama4TextExperts": ("b c {}", "(b=2 r)"),
        "OpenAIPrivacyFilterExperts": ("b c {}", "(b=2 r)"),
    },
    "torchtitan": {"GptOssGroupedExperts": ("b {} c", "(r b=2)")},
}
"""Axes of stacks of experts by package, and the word of one that holds gate and up.

Other classes of these packages whose name ends with Experts have ("b {} c", "(b=2 r)").
"""
_GATED_STACKS = ("gate_up_proj", "mlp1_weight_EGD")
