"""Weights that are not plain parameters: parametrized, in adapters, complex, behind wrappers."""

import re
import warnings

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import nucleon
from nucleon.optim.matrices.parameters import globs
from optim.modules import rows_of


def old(norm, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has newer ones
        return norm(module)


# ---------------------------------------------------------------------- made of other weights

CONV, ORIGINAL = "(b=2 r) c c", "parametrizations.weight.original"
SCALED = {f"{ORIGINAL}0": None, f"{ORIGINAL}1": CONV}
MADE = {
    "weight_norm": (lambda: weight_norm(nn.Conv1d(4, 6, 3, groups=2)), SCALED),
    "of the last axis, as in wav2vec2": (
        lambda: weight_norm(nn.Conv1d(4, 6, 3, groups=2), dim=2), SCALED),
    "of a Linear": (lambda: weight_norm(nn.Linear(4, 6)), SCALED | {f"{ORIGINAL}1": "r c"}),
    "spectral_norm": (lambda: spectral_norm(nn.ConvTranspose1d(4, 6, 3)), {ORIGINAL: "c r c"}),
    "orthogonal": (lambda: orthogonal(nn.Linear(4, 4)), {ORIGINAL: None}),
    "two of them": (lambda: orthogonal(spectral_norm(nn.Linear(4, 4))), {ORIGINAL: None}),
    "older weight_norm": (lambda: old(old_weight_norm, nn.Conv1d(4, 6, 3, groups=2)),
                          {"weight_g": None, "weight_v": CONV}),
    "older spectral_norm": (lambda: old(old_spectral_norm, nn.Linear(4, 6)),
                            {"weight_orig": "r c"}),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 6), "weight", 0.5),
               {"weight_orig": "r c"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("path", ["", "inner."], ids=["alone", "within"])
def test_what_a_weight_is_made_of_has_its_role_if_it_is_the_weight_up_to_a_scale(case, path):
    build, expected = MADE[case]
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": build()}) if path else build()
    rows = rows_of(model, head=None)
    assert {f"{path}bias", *(path + name for name in expected)} == set(rows)
    for name, axes in expected.items():
        row = rows[path + name]
        assert (row.axes, row.route) == (axes, "matrix" if axes else "adamw"), row
        assert re.search("norm|pruning|parametrized by", row.reason), row


# --------------------------------------------------------------------------------- adapters


ADAPTERS = {
    "loha": (LoHaConfig, {}),
    "lokr": (LoKrConfig, {"decompose_both": True, "decompose_factor": 2}),
    "lora": (LoraConfig, {}),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_the_factors_of_adapters_are_matrices_but_those_of_an_embedding(case):
    make, options = ADAPTERS[case]
    model = nn.Sequential(nn.Linear(8, 12), nn.Conv2d(4, 4, 3), nn.Embedding(9, 8))
    targets = ["0", "1", "2"] if make is LoraConfig else ["0", "1"]
    model = get_peft_model(model, make(r=2, target_modules=targets, **options))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    rows = {n: r for n, r in rows_of(model, head=None).items() if n in trained}
    assert rows and all(re.search("hada_w|lokr_w|lora_", name) for name in rows)
    assert all((r.route == "matrix") != ("lora_embedding_" in n) for n, r in rows.items())


# ---------------------------------------------------------------------------------- complex


class Filter(nn.Module):
    def __init__(self, dtype=torch.complex64):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.gain = nn.Parameter(torch.randn(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_take_torchs_adamw(dtype):
    torch.manual_seed(0)
    model, twin = Filter(dtype), Filter(dtype)
    twin.load_state_dict(model.state_dict())
    aux = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer = nucleon.Leon.for_model(model, aux_lr=0.01, aux=aux)
    oracle = torch.optim.AdamW(twin.parameters(), lr=0.01, **aux)
    assert {row.route for row in optimizer.explain()} == {"adamw"}
    assert "real" in optimizer.explain()["kernel"].reason
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p).conj()
            q.grad = p.grad.resolve_conj().clone()
        optimizer.step()
        oracle.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    again = nucleon.Leon.for_model(model, aux_lr=0.01, aux=aux)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        again.state[model.kernel]["exp_avg"], optimizer.state[model.kernel]["exp_avg"]
    )


def test_a_complex_gradient_that_is_not_finite_is_skipped():
    model = Filter()
    optimizer = nucleon.Leon.for_model(model)
    before = model.kernel.detach().clone()
    model.kernel.grad = torch.full_like(before, complex(1.0, float("nan")))
    optimizer.step()
    assert torch.equal(model.kernel, before) and optimizer.state[model.kernel]["skipped"] == 1


# ------------------------------------------------------------------------- routers and gates


def test_routers_and_gates_of_one_row_say_what_is_done_with_them():
    moe = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.ModuleList()})
    gates = {"shared_expert_gate": nn.Linear(8, 1), "gate": nn.Linear(8, 8)}
    rows = rows_of(nn.ModuleDict({"moe": moe, **gates}), head=None)
    assert "router" in rows["moe.gate.weight"].reason and "adamw" in rows["moe.gate.weight"].reason
    assert "one row" in rows["shared_expert_gate.weight"].reason
    assert rows["gate.weight"].reason == "Linear"


# ---------------------------------------------------------------------------------- wrappers


def wrapped(model, wrapper):
    if wrapper == "_checkpoint_wrapped_module.":
        model[0] = checkpoint_wrapper(model[0])
        model[1] = checkpoint_wrapper(model[1])
        return model
    outer = nn.Module()
    setattr(outer, wrapper.removesuffix("."), model)
    return outer


WRAPPERS = ["_orig_mod.", "module.", "_checkpoint_wrapped_module."]


def two():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_seen_through_and_may_come_or_go_between_save_and_load(wrapper):
    plain, other = two(), wrapped(two(), wrapper)
    assert any(wrapper in name for name, _ in other.named_parameters())
    rows = rows_of(other, head="1", overrides={"0.weight": "adamw"})
    assert rows["0.weight"].reason == "override"
    assert rows["1.weight"].reason == "output head, by head="
    saved = nucleon.Leon.for_model(plain, head="1")
    for p in plain.parameters():
        p.grad = torch.randn_like(p)
    saved.step()
    for target in (other, plain):
        loaded = nucleon.Leon.for_model(target, head="1")
        loaded.load_state_dict(saved.state_dict())
        assert loaded.explain().to_dict() == saved.explain().to_dict()
        saved = loaded


# -------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (["a.0.qkv.weight", "a.1.qkv.weight"], ["a.0.o.weight"], ["*qkv.weight"]),
        (["a.0.w", "b.0.w"], ["c.0.w"], ["*a.*.w", "*b.*.w"]),
        (["list.0", "list.1"], ["head.weight"], ["*list.*"]),
        (["w"], ["a.w"], ["w"]),
        (["a.0.qkv.0.w", "a.1.qkv.0.w"], ["a.0.qkv.1.w", "a.1.o.0.w"], ["*qkv.0.w"]),
    ],
)
def test_globs_match_what_they_should_and_nothing_else(names, others, expected):
    assert globs(names, others) == expected


def own_module():
    """A model with a child that is called as DDP calls the model."""
    torch.manual_seed(0)
    inner = nn.ModuleDict({"up": nn.Linear(4, 4, bias=False)})
    return nn.ModuleDict({"up": nn.Linear(4, 4, bias=False), "module": inner})


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: wrapped(m, "module.")])
def test_a_module_of_the_models_own_keeps_its_name(wrap):
    names = ["up.weight", "module.up.weight"]
    for options, other in (
        ({"head": None, "overrides": {"up.weight": "adamw"}}, "up.weight"),
        ({"head": None, "overrides": {"module.up.weight": "adamw"}}, "module.up.weight"),
        ({"head": "module.up"}, "module.up.weight"),
    ):
        rows = rows_of(wrap(own_module()), **options)
        assert {*rows} == {*names}
        assert [name for name, row in rows.items() if row.route == "adamw"] == [other]
    optimizer = nucleon.Leon(wrap(own_module()).named_parameters())
    assert [row.name for row in optimizer.explain()] == names
