"""All base models of transformers on the meta device: what is refused, and what is warned of."""

import re
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import nucleon

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
DEPTHS += ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
NAMES = sorted({n if isinstance(n, str) else n[0] for n in MODEL_MAPPING_NAMES.values()})
REFUSED = {
    "AriaModel": "query",
    "CsmForConditionalGeneration": "codebooks_head.weight",
    "DeepseekV4Model": "fn",
    "Gemma3Model": "mm_input_projection_weight",
    "Glm5NextModel": "fn",
    "Glm5NextTextModel": "fn",
    "HYV4Model": "fn",
    "IBertModel": "query.weight",
    "Inkling2Model": "rel_logits_proj.proj",
    "Inkling2TextModel": "rel_logits_proj.proj",
    "InklingModel": "rel_logits_proj.proj",
    "InklingTextModel": "rel_logits_proj.proj",
    "Kosmos2Model": "latent_query",
    "Kosmos2_5Model": "latent_query",
    "Llama4ForConditionalGeneration": "positional_embedding_vlm",
    "RecurrentGemmaModel": "input_gate_weight",
    "ReformerModel": "weights.0",
    "T5Gemma2Model": "mm_input_projection_weight",
    "XCLIPModel": "prompts_visual_projection",
    "XLNetModel": "q",
    "ZambaModel": "x_proj_weight",
}
"""Models with parameters that nobody knows, and how the names of these end."""

FUSED = {
    "LevitModel": "queries_keys_values.linear",
    "VibeVoiceForConditionalGeneration": "diffusion_head.layers.0.linear",
}
"""Models warned of several maps in a weight of an unknown layout, and the name of one."""
NOT_BUILT = {
    "AutoformerModel", "AyaVisionModel", "ChameleonModel", "CohereCompassModel",
    "CohereCompassTextModel", "DbrxModel", "DeepseekOcr2Model", "DiffusionGemmaModel",
    "Dots1Model", "Emu3Model", "EsmModel", "FunnelModel", "Gemma3nTextModel",
    "Granite4VisionModel", "HunYuanDenseV1Model", "HunYuanMoEV1Model", "HunYuanVLModel",
    "HunYuanVLTextModel", "InformerModel", "Lfm2MoeModel", "MinistralModel",
    "MoonshineStreamingModel", "NemotronModel", "PPOCRV6MediumDetModel", "ProphetNetModel",
    "T5Gemma2Encoder", "TimeSeriesTransformerModel", "VoxtralRealtimeTextModel",
}  # fmt: skip
"""Models that their own default configuration, or two layers of it, does not make."""

KINDS = {nn.Linear: "matrix", nn.Embedding: "adamw", nn.LayerNorm: "adamw"}


def parts(config):
    """A configuration, and those within it."""
    yield config
    for inner in vars(config).values():
        if isinstance(inner, transformers.PreTrainedConfig):
            yield from parts(inner)


def build(name):
    """A model two layers deep, without memory."""
    cls = getattr(transformers, name)
    config = cls.config_class()
    for part in parts(config):
        for depth in DEPTHS:
            if isinstance(getattr(part, depth, None), int) and getattr(part, depth) > 2:
                setattr(part, depth, 2)
    with torch.device("meta"):
        return cls(config)


def built(name):
    """The model; the test is skipped where its package is absent, or it is one of `NOT_BUILT`."""
    try:
        model = build(name)
    except ImportError as error:
        absent = re.search(r"requires the (timm|natten|torchaudio|detectron2) library", str(error))
        if absent is None:
            raise
        pytest.skip(f"needs {absent[1]}")
    except Exception:
        if name not in NOT_BUILT:
            raise
        pytest.skip("not made by its default configuration")
    assert name not in NOT_BUILT
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_base_model_is_routed_or_refused_with_an_override(name):
    model = built(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            rows = nucleon.Leon.for_model(model).explain()
        except ValueError as error:
            assert name in REFUSED, error
            assert f"{REFUSED[name]}'" in str(error)
            return
    assert name not in REFUSED
    assert len(rows) == len(list(model.parameters()))
    routes = {row.name: row for row in rows}
    for path, module in model.named_modules():
        if type(module) in KINDS and f"{path}.weight" in routes:
            row = routes[f"{path}.weight"]
            assert row.route == KINDS[type(module)] or "head" in row.reason, row
    texts = [str(w.message) for w in caught]
    fused = [text for text in texts if "in a layout not known here" in text]
    assert [f"{FUSED[name]}.weight" in text for text in fused] == [True] * (name in FUSED)
    heads = any("output head" in row.reason for row in rows)
    others = [text.partition(",")[0] for text in texts if text not in fused]
    assert others == ["no output head was found"] * (not heads and len(rows) > 1)


HEADS = {
    "BarkModel": ["semantic.lm_head", "coarse_acoustics.lm_head"],
    "BltForCausalLM": ["lm_head", "model.patcher.lm_head"],
    "Data2VecVisionForSemanticSegmentation": ["decode_head.classifier"],
    "DistilBertForSequenceClassification": ["classifier"],
    "FSMTForConditionalGeneration": ["model.decoder.output_projection"],
    "GPT2DoubleHeadsModel": ["transformer.wte", "multiple_choice_head.summary"],
    "LwDetrForObjectDetection": ["class_embed", "bbox_embed.layers.2"],
    "ModernBertForSequenceClassification": ["classifier"],
    "ModernBertForTokenClassification": ["classifier"],
    "OneFormerForUniversalSegmentation": ["model.transformer_module.decoder.class_embed"],
    "RTDetrForObjectDetection": [
        "model.enc_score_head",
        "model.enc_bbox_head.layers.2",
        *(f"model.decoder.class_embed.{layer}" for layer in range(2)),
        *(f"model.decoder.bbox_embed.{layer}.layers.2" for layer in range(2)),
    ],
    "SamModel": ["mask_decoder.iou_prediction_head.proj_out"],
    "UperNetForSemanticSegmentation": ["decode_head.classifier", "auxiliary_head.classifier"],
    "YolosForObjectDetection": ["class_labels_classifier.layers.2", "bbox_predictor.layers.2"],
}
"""Models with heads within, several heads, or some that are not the last weight of their module."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_all_heads_of_models_with_several_are_found(name):
    model = built(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rows = nucleon.Leon.for_model(model).explain()
    heads = {row.name for row in rows if "output head" in row.reason}
    assert {f"{head}.weight" for head in HEADS[name]} <= heads
    hidden = [row for row in rows if row.name in heads and row.shape[0] in row.shape[1:]]
    assert not hidden  # square: a layer before the head
