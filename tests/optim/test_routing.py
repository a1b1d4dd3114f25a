"""Every module type and every error of `for_model`; the same matrices given one by one agree."""

import ast
import json
import re

import pytest
import torch
from torch import nn
from transformers import Conv1D

import nucleon
from nucleon.optim import registry
from nucleon.optim.routing import roles
from nucleon.optim.routing.places import Place, Role


def routes(model, **options):
    return {row.name: row for row in nucleon.Leon.for_model(model, **options).explain()}


class Named(nn.Module):
    """A module whose class, file and attributes a test chooses, as other libraries have them."""

    def __new__(cls, kind, file="mine", **attributes):
        return super().__new__(type(kind, (Named,), {"__module__": file}))

    def __init__(self, kind, file="mine", **attributes):
        super().__init__()
        for key, value in attributes.items():
            setattr(self, key, value)


HF = "transformers.models.some.modeling_some"
TITAN = "torchtitan.models.some.moe"


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


# --------------------------------------------------------------- every route, and its matrices

# A model, the name of a parameter, its axes, and how to take its matrices out by hand.
CASES = {
    "linear": (lambda: nn.Linear(6, 4), "weight", "r c", lambda w: [w]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), "weight", "b r c", lambda w: [w[0], w[1]]),
    "conv1d": (lambda: nn.Conv1d(3, 4, 5), "weight", "r c c", lambda w: [w.reshape(4, 15)]),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2), "weight", "r c c c", lambda w: [w.reshape(4, 12)]),
    "grouped conv": (
        lambda: nn.Conv2d(6, 4, 2, groups=2),
        "weight",
        "(b=2 r) c c c",
        lambda w: [w[:2].reshape(2, 12), w[2:].reshape(2, 12)],
    ),
    "transposed conv": (
        lambda: nn.ConvTranspose2d(3, 4, 2),
        "weight",
        "c r c c",
        lambda w: [w.transpose(0, 1).reshape(4, 12)],
    ),
    "grouped transposed conv": (
        lambda: nn.ConvTranspose2d(6, 4, 2, groups=2),
        "weight",
        "(b=2 c) r c c",
        lambda w: [w[i : i + 3].transpose(0, 1).reshape(2, 12) for i in (0, 3)],
    ),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2),
        "in_proj_weight",
        "(b=3 r) c",
        lambda w: list(w.split(4)),
    ),
    "attention with other keys": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        "k_proj_weight",
        "r c",
        lambda w: [w],
    ),
    "lstm": (lambda: nn.LSTM(3, 5), "weight_ih_l0", "(b=4 r) c", lambda w: list(w.split(5))),
    "gru": (lambda: nn.GRU(3, 5), "weight_hh_l0", "(b=3 r) c", lambda w: list(w.split(5))),
    "rnn": (lambda: nn.RNN(3, 5), "weight_ih_l0", "r c", lambda w: [w]),
    "projected lstm": (
        lambda: nn.LSTM(3, 5, proj_size=2),
        "weight_hr_l0",
        "r c",
        lambda w: [w],
    ),
    "stored transposed": (lambda: Conv1D(4, 6), "weight", "c r", lambda w: [w.T]),
    "fused, stored transposed": (
        lambda: Named("GPT2Attention", HF, c_attn=Conv1D(12, 4)),
        "c_attn.weight",
        "c (b=3 r)",
        lambda w: list(w.T.split(4)),
    ),
    "falcon in groups": (
        lambda: Named(
            "FalconAttention",
            HF,
            query_key_value=nn.Linear(4, 16),
            head_dim=2,
            num_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
        "query_key_value.weight",
        "(r r{4,2,2}) c",
        lambda w: [x.reshape(-1, 4) for x in w.view(2, 8, 4).split([4, 2, 2], dim=1)],
    ),
    "experts, transposed and alternating": (
        lambda: Named("GptOssExperts", HF, gate_up_proj=parameter(3, 5, 8)),
        "gate_up_proj",
        "b c (r b=2)",
        lambda w: [expert[:, i::2].T for expert in w for i in range(2)],
    ),
    "experts of torchtitan": (
        lambda: Named("GroupedExperts", TITAN, w1_EFD=parameter(3, 8, 5)),
        "w1_EFD",
        "b r c",
        list,
    ),
    "experts of torchtitan, alternating": (
        lambda: Named("GptOssGroupedExperts", TITAN, mlp1_weight_EGD=parameter(3, 8, 5)),
        "mlp1_weight_EGD",
        "b (r b=2) c",
        lambda w: [expert[i::2] for expert in w for i in range(2)],
    ),
    "router": (
        lambda: Named("MixtralTopKRouter", HF, weight=parameter(3, 5)),
        "weight",
        "r c",
        lambda w: [w],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_routed_parameter_equals_its_matrices_given_one_by_one(case):
    build, name, axes, take = CASES[case]
    torch.manual_seed(0)
    model = build().double()
    options = {"method": "eigh", "momentum": 0.9, "lr": 0.1, "weight_decay": 0.1}
    whole = nucleon.Leon.for_model(model, head=None, **options)
    assert whole.explain()[name].axes == axes
    weight = dict(model.named_parameters())[name]
    matrices = [m.detach().clone().requires_grad_() for m in take(weight)]
    assert sum(m.numel() for m in matrices) == weight.numel()
    apart = nucleon.Leon(matrices, **options)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for matrix, gradient in zip(matrices, take(weight.grad), strict=True):
            matrix.grad = gradient.clone()
        whole.step()
        apart.step()
    for matrix, expected in zip(take(weight), matrices, strict=True):
        # Two orders of float64 products of numbers near 1, three times, through an inverse root.
        torch.testing.assert_close(matrix, expected, rtol=1e-10, atol=1e-10)


OTHERS = {
    "embedding": (lambda: nn.Embedding(5, 4), "weight", "embedding"),
    "bag": (lambda: nn.EmbeddingBag(5, 4), "weight", "embedding"),
    "layer norm": (lambda: nn.LayerNorm(4), "weight", "norm"),
    "layer norm of matrices": (lambda: nn.LayerNorm((4, 5)), "weight", "norm"),
    "rms norm": (lambda: nn.RMSNorm(4), "weight", "norm"),
    "group norm": (lambda: nn.GroupNorm(2, 4), "bias", "norm"),
    "batch norm": (lambda: nn.BatchNorm2d(4), "weight", "norm"),
    "a norm of one's own": (lambda: Named("MyRMSNorm", weight=parameter(4)), "weight", "norm"),
    "bias": (lambda: nn.Linear(3, 4), "bias", "bias"),
    "scalar": (lambda: Named("Scaled", logit_scale=parameter()), "logit_scale", "scalar"),
    "vector": (lambda: Named("Scaled", gains=parameter(4)), "gains", "vector"),
    "prelu": (lambda: nn.PReLU(4), "weight", "vector"),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), "weight", "depthwise"),
    "depthwise transposed": (lambda: nn.ConvTranspose1d(4, 4, 3, groups=4), "weight", "depthwise"),
    "added keys": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "bias_k", "bias"),
    "class token": (lambda: Named("ViT", cls_token=parameter(1, 1, 4)), "cls_token", "first axis"),
    "positions": (lambda: Named("ViT", pos_embed=parameter(9, 4)), "pos_embed", "by its name"),
    "gains of channels": (
        lambda: Named("Block", layer_scale=parameter(4, 1, 1)),
        "layer_scale",
        "vector",
    ),
    "state space": (lambda: Named("Mixer", A_log=parameter(9, 4)), "A_log", "by its name"),
    "position bias": (
        lambda: Named("Swin", relative_position_bias_table=parameter(9, 4)),
        "relative_position_bias_table",
        "by its name",
    ),
    "embeddings of one's own": (
        lambda: Named("PatchEmbeddings", table=parameter(9, 4)),
        "table",
        "embedding",
    ),
    "bias of experts": (
        lambda: Named("GptOssExperts", gate_up_proj_bias=parameter(3, 8)),
        "gate_up_proj_bias",
        "bias",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_matrix_goes_to_adamw(case):
    build, name, reason = OTHERS[case]
    row = routes(build())[name]
    assert (row.route, row.optimizer, row.axes) == ("adamw", "adamw", None)
    assert reason in row.reason


# ------------------------------------------------------------------------------- overrides


def test_an_override_is_a_route_axes_or_options():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 6), nn.Embedding(5, 4))
    optimizer = nucleon.Leon.for_model(
        model,
        lr=0.1,
        head=None,
        overrides={
            "0.weight": "adamw",
            "1.weight": {"axes": "(b=2 r) c"},
            "2.*": {"lr": 0.2, "weight_decay": 0.5},
            "2.[wb]*": {"lr": 0.3},
            "3.weight": "matrix",
            "1.bias": "frozen",
        },
    )
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["0.weight"].route == "adamw" and rows["0.weight"].reason == "override"
    assert rows["1.weight"].axes == "(b=2 r) c"
    assert rows["3.weight"].route == "matrix" and rows["3.weight"].axes == "r c"
    assert rows["1.bias"].route == "frozen"
    groups = {name: g for g in optimizer.param_groups for name in names(optimizer, g)}
    assert "1.bias" not in groups
    assert (groups["2.weight"]["lr"], groups["2.weight"]["weight_decay"]) == (0.3, 0.5)
    assert (groups["2.bias"]["lr"], groups["2.bias"]["route"]) == (0.3, "adamw")  # the later wins
    assert groups["1.weight"]["lr"] == 0.1 and groups["0.weight"]["lr"] == 1e-3
    assert groups["0.weight"] is groups["0.bias"]


def names(optimizer, group):
    return [optimizer.infos[p].name for p in group["params"]]


def test_rates_that_are_tensors_of_their_own_keep_groups_apart():
    """A schedule may change each by itself, though they are equal at first."""
    rates = {"0.weight": torch.tensor(0.5), "1.weight": torch.tensor(0.5)}
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = nucleon.Leon.for_model(
        model, head=None, overrides=lambda name, *_: {"lr": rates[name]}
    )
    assert {names(optimizer, g)[0]: id(g["lr"]) for g in optimizer.param_groups} == {
        name: id(rate) for name, rate in rates.items()
    }


def test_overrides_may_be_a_function_of_name_module_and_parameter():
    model = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))})
    model["norm"], model["head"] = nn.LayerNorm(4), nn.Linear(4, 2)
    model["layers"][2].weight = model["layers"][0].weight
    rate = torch.tensor(0.5)
    seen = []

    def overrides(name, module, parameter):
        seen.append(name)
        assert model.get_submodule(name.rpartition(".")[0]) is module
        assert module.get_parameter(name.rpartition(".")[2]) is parameter
        if name == "layers.1.weight":
            return {"axes": "(b=2 r) c", "lr": rate}
        if isinstance(module, nn.LayerNorm):
            return "frozen"
        return {"lr": 0.1 if "layers" in name else 0.3} if parameter.ndim == 1 else None

    both = {"layers.1.weight": {"momentum": 0.5, "lr": 0.7}}, overrides  # the later wins, by key
    optimizer = nucleon.Leon.for_model(model, overrides=both)
    assert sorted(seen) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["layers.1.weight"].axes == "(b=2 r) c" and rows["layers.0.weight"].axes == "r c"
    assert rows["norm.weight"].route == rows["norm.bias"].route == "frozen"
    (group,) = (g for g in optimizer.param_groups if g["lr"] is rate)
    assert group["momentum"] == 0.5
    grouped = {frozenset(names(optimizer, g)): g["lr"] for g in optimizer.param_groups}
    assert grouped.pop(frozenset({"layers.1.weight"})) is rate
    assert grouped == {
        frozenset({"layers.0.weight"}): 0.02,
        frozenset({"head.weight"}): 1e-3,
        frozenset({f"layers.{i}.bias" for i in range(3)}): 0.1,
        frozenset({"head.bias"}): 0.3,
    }


def test_frozen_parameters_are_routed_and_have_no_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    # AdamW has no momentum, and a frozen bias does not raise.
    optimizer = nucleon.Leon.for_model(
        model, overrides={"*": {"lr": 0.1}, "0.*": {"momentum": 0.5}}
    )
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["0.weight"].route == "matrix" and rows["0.weight"].state_bytes == 0
    assert "frozen" in rows["0.weight"].reason and "frozen" not in rows["1.weight"].reason


# ---------------------------------------------------------------------------------- errors


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = parameter(3, 4)
        self.weight = parameter(2, 3, 4)
        self.other = parameter(2, 3, 4, 5)
        self.linear = nn.Linear(3, 3)


def written(error):
    """Return the overrides that a message names."""
    return [ast.literal_eval(x) for x in re.findall(r"overrides=({.*})  #", str(error))]


def test_unknown_modules_are_one_short_list_with_overrides_that_fit_every_shape():
    model = nn.ModuleDict({"layers": nn.Sequential(*(Unknown() for _ in range(3)))})
    model["head"] = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="not known here") as caught:
        nucleon.Leon.for_model(model)
    first, *_, last = str(caught.value).splitlines()
    assert "layers.0.kernel (3×4, Unknown), layers.0.weight (2×3×4, Unknown)" in first
    assert "and 5 more" in first and first.count(", Unknown)") == 4
    assert "r are outputs, c inputs" in last and "register_module" in last
    expected = [["r c", "b r c", "r c c c"], ["c r", "b c r", "c r c c"], [None] * 3]
    for overrides, axes in zip(written(caught.value), expected, strict=True):
        rows = routes(model, overrides=overrides)
        for layer in range(3):
            names = [f"layers.{layer}.{name}" for name in ("kernel", "weight", "other")]
            assert [rows[name].axes for name in names] == axes
            assert {rows[name].reason for name in names} == {"override"}
            assert rows[f"layers.{layer}.linear.weight"].reason == "Linear"


OWN = {
    "experts": Named("MyExperts", gate_up_proj=parameter(4, 64, 64)),
    "of the name of known ones": Named("MixtralExperts", gate_up_proj=parameter(4, 8, 5)),
    "of a known class, stored in another order": Named(
        "MixtralExperts", HF, gate_up_proj=parameter(3, 5, 8), down_proj=parameter(3, 4, 5)
    ),
    "a router": Named("MyRouter", weight=parameter(4, 64)),
    "a Linear stored transposed": Named("Conv1D", weight=parameter(4, 64)),
}


@pytest.mark.parametrize("case", OWN)
def test_a_class_of_ones_own_is_not_taken_for_one_of_a_library_by_its_name(case):
    with pytest.raises(ValueError, match="not known here") as caught:
        nucleon.Leon.for_model(OWN[case])
    linear, crosswise, none = written(caught.value)
    batch = "b " if "gate_up_proj" in str(linear) else ""
    for overrides, axes in ((linear, f"{batch}r c"), (crosswise, f"{batch}c r"), (none, None)):
        assert {
            row.axes for row in nucleon.Leon.for_model(OWN[case], overrides=overrides).explain()
        } == {axes}


def test_an_unknown_module_can_be_taught(monkeypatch):
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))

    def role_of(place: Place):
        return Role("matrix", "mine", "c r") if place.key == "kernel" else None

    roles.register_module(Unknown, role_of)
    rows = routes(Unknown(), overrides={"other": "adamw", "weight": "adamw"}, head=None)
    assert (rows["kernel"].axes, rows["kernel"].reason) == ("c r", "mine")


@pytest.mark.parametrize("other", [nn.Embedding(4, 4), nn.Linear(4, 4)])
def test_a_parameter_of_two_roles_names_both(other):
    model = nn.Module()
    model.embed, model.linear, model.head = other, Conv1D(4, 4), nn.Linear(4, 4)
    model.linear.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"several roles.*embed\.weight.*linear\.weight") as error:
        nucleon.Leon.for_model(model)
    assert "overrides={'embed.weight': 'adamw'}" in str(error.value)
    assert routes(model, overrides={"embed.weight": "adamw"})["embed.weight"].route == "adamw"
    overrides = {"embed.weight": {"axes": "c r"}}
    assert routes(model, overrides=overrides)["embed.weight"].axes == "c r"


def on(name, value):
    return {"overrides": {name: value}}


BAD = {
    "matches no parameter": on("nothing*", "adamw"),
    "must be one of": on("weight", "sgd"),
    "weight: .*multiply out": on("weight", {"axes": "(b=5 r) c"}),
    "weight: .*3 axes": on("weight", {"axes": "r c c"}),
    "axes and route='adamw'; leave one out": on("weight", {"axes": "r c", "route": "adamw"}),
    "weight has no option 'betas'": on("weight", {"betas": (0.9, 0.9)}),
    "bias has no option 'momentum'": on("bias", {"momentum": 0.9}),
    "bias: .* has shape": on("bias", "matrix"),
    "overrides must be a function or a dict": {"overrides": ["weight"]},
    "overrides must be .* a dict with names as keys": on(3, "adamw"),
    "the route of .* return for 'weight' must be one of": {"overrides": lambda *_: "sgd"},
    "what overrides return for 'weight' must be one of": {"overrides": lambda *_: 3},
    "the override 'weight' must be one of": on("weight", None),
    "aux has no option 'momentum'": {"aux": {"momentum": 0.9}},
    "aux has no option 'lr'.*its lr is aux_lr": {"aux": {"lr": 0.9}},
    "aux must be a dict": {"aux": 3},
    "betas": {"aux": {"betas": (0.9, 2.0)}},
    "no option 'betas'": {"betas": (0.9, 0.99)},
    "lr must be .* got -1": {"lr": -1.0},
    "lr must be .* got -2": {"aux_lr": -2.0},
    "no parameter to optimize": on("*", "frozen"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_options_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        nucleon.Leon.for_model(nn.Linear(4, 6), **BAD[message])


BAD_MODELS = {
    "run a batch": nn.LazyLinear(4),
    "no parameter to optimize": nn.ReLU(),
    "sparse gradients": nn.Embedding(4, 4, sparse=True),
    r"torch\.nn\.Module": list(nn.Linear(4, 4).parameters()),
}


@pytest.mark.parametrize("message", BAD_MODELS)
def test_bad_models_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        nucleon.Leon.for_model(BAD_MODELS[message])


# ---------------------------------------------------------------------- one torch optimizer


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_the_inner_adamw_is_torchs_and_the_matrices_are_leons():
    model, twin = small(), small()
    optimizer = nucleon.Leon.for_model(
        model, lr=0.1, aux_lr=0.01, aux={"betas": (0.8, 0.9), "weight_decay": 0.1}, head="3"
    )
    named = dict(twin.named_parameters())
    others = [named[n] for n in named if n != "1.weight"]
    matrix = nucleon.Leon([named["1.weight"]], lr=0.1)
    oracle = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for round_ in range(5):
        gradients(model, round_)
        gradients(twin, round_)
        optimizer.step()
        matrix.step()
        oracle.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_reasons_and_names_survive_a_checkpoint(tmp_path):
    model = small()
    optimizer = nucleon.Leon.for_model(model, head="3")
    gradients(model, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    again = nucleon.Leon.for_model(model, head="3")
    again.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    assert again.explain().to_dict() == optimizer.explain().to_dict()


def test_the_explanation_prints_exports_and_counts():
    optimizer = nucleon.Leon.for_model(small(), head="3")
    explanation = optimizer.explain()
    assert len(explanation) == len(list(explanation)) == 7
    with pytest.raises(KeyError, match=r"'1\.weights' is no parameter of leon"):
        explanation["1.weights"]
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 120
    for part in ("1.weight", "6×4", "r c", "leon/polar-express", "output head, by head="):
        assert part in text
    exported = explanation.to_dict()
    assert json.loads(json.dumps(exported)) == exported
    (row,) = [r for r in exported["parameters"] if r["name"] == "1.weight"]
    assert row["shape"] == [6, 4]
    weight = next(p for p, info in optimizer.infos.items() if info.name == "1.weight")
    tensors = optimizer.state[weight].values()
    assert row["state_bytes"] == sum(t.numel() * t.element_size() for t in tensors)
    assert exported["totals"]["matrix"]["parameters"] == 1
    assert "<table>" in explanation._repr_html_() and "6×4" in explanation._repr_html_()
    rows = nucleon.Muon([parameter(4, 6)]).explain()  # built by hand
    assert [(r.name, r.axes, r.reason) for r in rows] == [("0", "r c", "as given")]


# --------------------------------------------------------------------------------- by name


def test_create_is_for_model_by_name():
    for name in registry.OPTIMIZERS:
        optimizer = registry.create(name.upper(), small(), lr=0.3, head=None)
        assert optimizer.name == name and optimizer.param_groups[0]["lr"] == 0.3


def test_the_registry_takes_others_and_names_what_it_lacks(monkeypatch):
    make = lambda model, **o: torch.optim.SGD(model.parameters(), **o)  # noqa: E731
    monkeypatch.setitem(registry.OPTIMIZERS, "sgd", make)
    assert isinstance(registry.create("SGD", small(), lr=0.1), torch.optim.SGD)
    with pytest.raises(ValueError, match="did you mean leon"):
        registry.create("LEONN", small())
    with pytest.raises(ValueError, match="no optimizer 'nope'; the optimizers are leon, muon"):
        registry.create("nope", small())
