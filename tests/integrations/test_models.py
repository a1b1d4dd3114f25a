"""Real architectures, tiny and untrained: all are routed; experts are cut where they are."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import nucleon
from nucleon.optim.matrices import axes

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 32, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}


def build(name, sizes):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 if p.ndim >= 2 else torch.zeros_like(p))
        for module in model.modules():
            if "Norm" in type(module).__name__ and hasattr(module, "weight"):
                module.weight.fill_(1.0)
    return model


EXPERTS = {
    "MixtralForCausalLM": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2},
    "Llama4ForCausalLM": {
        **SIZES,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "head_dim": 8,
        "intermediate_size_mlp": 16,
    },
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("half", [0, 1])
def test_experts_are_cut_into_gate_and_up(name, half):
    """silu(gate)·up is zero where either is: with one of them at zero, nothing comes out."""
    model = build(name, EXPERTS[name])
    (module,) = (m for n, m in model.named_modules() if n.endswith("experts"))
    rows = nucleon.Leon.for_model(model).explain()
    (row,) = (r for r in rows if r.name.endswith("experts.gate_up_proj"))
    seen = []
    module.register_forward_hook(lambda _, inputs, output: seen.append(output.abs().max().item()))
    (block,) = axes.parse(row.axes, row.shape)
    with torch.no_grad():
        model(torch.arange(1, 9)[None])
        block.region(module.gate_up_proj)[:, half].zero_()
        model(torch.arange(1, 9)[None])
    assert seen[0] > 1e-3 and seen[1] == 0.0


ROUTED = {
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": SIZES,
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "Phi3ForCausalLM": {**SIZES, "num_key_value_heads": 2},
    "PersimmonForCausalLM": {**SIZES, "qk_layernorm": False},
    "FalconForCausalLM": {**SIZES, "multi_query": True, "new_decoder_architecture": False},
    "GPTBigCodeForCausalLM": {**GPT2, "n_inner": 64, "multi_query": False},
    "CodeGenForCausalLM": {**GPT2, "rotary_dim": 4, "n_ctx": 32},
    "MptForCausalLM": {
        "vocab_size": 32,
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 4,
        "max_seq_len": 32,
    },
    "LlamaForCausalLM": {**SIZES, "num_key_value_heads": 2},
    "Qwen3ForCausalLM": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "MixtralForCausalLM": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2},
    "GptOssForCausalLM": {
        **SIZES,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "head_dim": 8,
        "layer_types": ["full_attention"],
    },
    "Llama4ForCausalLM": EXPERTS["Llama4ForCausalLM"],
    "BertForMaskedLM": SIZES,
    "BertForSequenceClassification": SIZES,
    "T5ForConditionalGeneration": {
        "vocab_size": 32,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
    },
    "ViTForImageClassification": {**SIZES, "image_size": 8, "patch_size": 4},
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "MambaForCausalLM": {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("name", ROUTED)
def test_known_architectures_are_routed_whole(name):
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**ROUTED[name]))
    optimizer = nucleon.Leon.for_model(model)
    rows = {row.name: row for row in optimizer.explain()}
    assert set(rows) == {n for n, _ in model.named_parameters()}
    output = model.get_output_embeddings()
    for path, module in model.named_modules():
        row = rows.get(f"{path}.weight")
        if row is None:
            continue
        if isinstance(module, nn.Embedding) or module is output:
            assert row.route == "adamw", row
        elif isinstance(module, nn.Linear):
            head = "head" in row.reason or "classifier" in path
            assert row.route == ("adamw" if head else "matrix"), row
        elif module.weight.ndim == 1:
            assert row.route == "adamw", row
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])]


def test_lora_pairs_equal_their_matrices_given_one_by_one():
    model = build("LlamaForCausalLM", SIZES)
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets)).double()
    whole = nucleon.Leon.for_model(model, lr=0.1, method="eigh")
    rows = {row.name: row for row in whole.explain() if row.state_bytes}  # the rest is frozen
    pairs = {n: p for n, p in model.named_parameters() if ".lora_A." in n or ".lora_B." in n}
    assert len(pairs) == 6  # of q_proj, down_proj and lm_head
    assert {n for n, row in rows.items() if row.route == "matrix"} == set(pairs)
    assert all("lora_embedding_" in n for n in set(rows) - set(pairs))
    alone = [p.detach().clone().requires_grad_() for p in pairs.values()]
    apart = [nucleon.Leon([p], lr=0.1, method="eigh") for p in alone]
    for _ in range(3):
        for p, q in zip(pairs.values(), alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in (whole, *apart):
            optimizer.step()
    for p, q in zip(pairs.values(), alone, strict=True):
        # Stacked or alone, float64 products of numbers near 1 in two orders, three times.
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
