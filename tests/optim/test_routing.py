"""Every module type and every error of `for_model`; the same matrices given one by one agree."""

import json

import pytest
import torch
from torch import nn
from transformers import Conv1D

import nucleon
from nucleon.optim import registry
from nucleon.optim.routing import roles
from nucleon.optim.routing.places import Place, Role
from optim.modules import named, parameter, rows_of, written

HF = "transformers.models.some.modeling_some"
TITAN = "torchtitan.models.some.moe"


# --------------------------------------------------------------- every route, and its matrices


def falcon():
    sizes = {"head_dim": 2, "num_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}
    return named("FalconAttention", HF, query_key_value=nn.Linear(4, 16), **sizes)


CASES = {  # a model, the name of a parameter, its axes, and how to take its matrices out by hand
    "linear": (lambda: nn.Linear(6, 4), "weight", "r c", lambda w: [w]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), "weight", "b r c", list),
    "conv1d": (lambda: nn.Conv1d(3, 4, 5), "weight", "r c c", lambda w: [w.reshape(4, 15)]),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2), "weight", "r c c c", lambda w: [w.reshape(4, 12)]),
    "grouped conv": (lambda: nn.Conv2d(6, 4, 2, groups=2), "weight", "(b=2 r) c c c",
                     lambda w: [w[:2].reshape(2, 12), w[2:].reshape(2, 12)]),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 2), "weight", "c r c c",
                        lambda w: [w.transpose(0, 1).reshape(4, 12)]),
    "grouped transposed conv": (
        lambda: nn.ConvTranspose2d(6, 4, 2, groups=2), "weight", "(b=2 c) r c c",
        lambda w: [w[i : i + 3].transpose(0, 1).reshape(2, 12) for i in (0, 3)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", "(b=3 r) c",
                  lambda w: list(w.split(4))),
    "attention with other keys": (lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
                                  "k_proj_weight", "r c", lambda w: [w]),
    "lstm": (lambda: nn.LSTM(3, 5), "weight_ih_l0", "(b=4 r) c", lambda w: list(w.split(5))),
    "gru": (lambda: nn.GRU(3, 5), "weight_hh_l0", "(b=3 r) c", lambda w: list(w.split(5))),
    "rnn": (lambda: nn.RNN(3, 5), "weight_ih_l0", "r c", lambda w: [w]),
    "projected lstm": (lambda: nn.LSTM(3, 5, proj_size=2), "weight_hr_l0", "r c", lambda w: [w]),
    "stored transposed": (lambda: Conv1D(4, 6), "weight", "c r", lambda w: [w.T]),
    "fused, stored transposed": (lambda: named("GPT2Attention", HF, c_attn=Conv1D(12, 4)),
                                 "c_attn.weight", "c (b=3 r)", lambda w: list(w.T.split(4))),
    "falcon in groups": (
        falcon, "query_key_value.weight", "(r r{4,2,2}) c",
        lambda w: [x.reshape(-1, 4) for x in w.view(2, 8, 4).split([4, 2, 2], dim=1)]),
    "experts, transposed and alternating": (
        lambda: named("GptOssExperts", HF, gate_up_proj=parameter(3, 5, 8)),
        "gate_up_proj", "b c (r b=2)", lambda w: [x[:, i::2].T for x in w for i in (0, 1)]),
    "experts of torchtitan": (lambda: named("GroupedExperts", TITAN, w1_EFD=parameter(3, 8, 5)),
                              "w1_EFD", "b r c", list),
    "experts of torchtitan, alternating": (
        lambda: named("GptOssGroupedExperts", TITAN, mlp1_weight_EGD=parameter(3, 8, 5)),
        "mlp1_weight_EGD", "b (r b=2) c", lambda w: [expert[i::2] for expert in w for i in (0, 1)]),
    "router": (lambda: named("MixtralTopKRouter", HF, weight=parameter(3, 5)), "weight", "r c",
               lambda w: [w]),
}  # fmt: skip


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


OTHERS = [  # a model, the name of a parameter, and a part of the reason
    (nn.Embedding(5, 4), "weight", "embedding"),
    (nn.EmbeddingBag(5, 4), "weight", "embedding"),
    (nn.LayerNorm(4), "weight", "norm"),
    (nn.LayerNorm((4, 5)), "weight", "norm"),
    (nn.RMSNorm(4), "weight", "norm"),
    (nn.GroupNorm(2, 4), "bias", "norm"),
    (nn.BatchNorm2d(4), "weight", "norm"),
    (named("MyRMSNorm", weight=parameter(4)), "weight", "norm"),
    (nn.Linear(3, 4), "bias", "bias"),
    (nn.PReLU(4), "weight", "vector"),
    (nn.Conv2d(4, 4, 3, groups=4), "weight", "depthwise"),
    (nn.ConvTranspose1d(4, 4, 3, groups=4), "weight", "depthwise"),
    (nn.MultiheadAttention(4, 2, add_bias_kv=True), "bias_k", "bias"),
    (named("Scaled", logit_scale=parameter()), "logit_scale", "scalar"),
    (named("Scaled", gains=parameter(4)), "gains", "vector"),
    (named("ViT", cls_token=parameter(1, 1, 4)), "cls_token", "first axis"),
    (named("ViT", pos_embed=parameter(9, 4)), "pos_embed", "by its name"),
    (named("Block", layer_scale=parameter(4, 1, 1)), "layer_scale", "vector"),
    (named("Mixer", A_log=parameter(9, 4)), "A_log", "by its name"),
    (named("Swin", relative_position_bias_table=parameter(9, 4)), "relative_position_bias_table",
     "by its name"),
    (named("PatchEmbeddings", table=parameter(9, 4)), "table", "embedding"),
    (named("GptOssExperts", gate_up_proj_bias=parameter(3, 8)), "gate_up_proj_bias", "bias"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name", "reason"), OTHERS)
def test_what_is_no_matrix_goes_to_adamw(model, name, reason):
    row = rows_of(model)[name]
    assert (row.route, row.optimizer, row.axes) == ("adamw", "adamw", None)
    assert reason in row.reason


# ------------------------------------------------------------------------------- overrides


def group_of(optimizer):
    """Return the group of each parameter by name."""
    groups = optimizer.param_groups
    return {optimizer.infos[p].name: group for group in groups for p in group["params"]}


def test_an_override_is_a_route_axes_or_options():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 6), nn.Embedding(5, 4))
    overrides = {
        "0.weight": "adamw",
        "1.weight": {"axes": "(b=2 r) c"},
        "2.*": {"lr": 0.2, "weight_decay": 0.5},
        "2.[wb]*": {"lr": 0.3},
        "3.weight": "matrix",
        "1.bias": "frozen",
    }
    optimizer = nucleon.Leon.for_model(model, lr=0.1, head=None, overrides=overrides)
    rows, groups = {row.name: row for row in optimizer.explain()}, group_of(optimizer)
    assert rows["0.weight"].route == "adamw" and rows["0.weight"].reason == "override"
    assert rows["1.weight"].axes == "(b=2 r) c"
    assert rows["3.weight"].route == "matrix" and rows["3.weight"].axes == "r c"
    assert rows["1.bias"].route == "frozen" and "1.bias" not in groups
    assert (groups["2.weight"]["lr"], groups["2.weight"]["weight_decay"]) == (0.3, 0.5)
    assert (groups["2.bias"]["lr"], groups["2.bias"]["route"]) == (0.3, "adamw")  # the later wins
    assert groups["1.weight"]["lr"] == 0.1 and groups["0.weight"]["lr"] == 1e-3
    assert groups["0.weight"] is groups["0.bias"]


def test_overrides_may_be_a_function_of_name_module_and_parameter():
    """Rates that are tensors keep groups apart: a schedule may change each by itself."""
    model = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))})
    model["norm"], model["head"] = nn.LayerNorm(4), nn.Linear(4, 2)
    model["layers"][2].weight = model["layers"][0].weight
    rates = {f"layers.{i}.weight": torch.tensor(0.5) for i in (0, 1)}
    seen = []

    def overrides(name, module, parameter):
        seen.append(name)
        assert model.get_submodule(name.rpartition(".")[0]) is module
        assert module.get_parameter(name.rpartition(".")[2]) is parameter
        if name in rates:
            return {"axes": "(b=2 r) c", "lr": rates[name]}
        if isinstance(module, nn.LayerNorm):
            return "frozen"
        return {"lr": 0.1 if "layers" in name else 0.3} if parameter.ndim == 1 else None

    both = {"layers.1.weight": {"momentum": 0.5, "lr": 0.7}}, overrides  # the later wins, by key
    optimizer = nucleon.Leon.for_model(model, overrides=both)
    assert sorted(seen) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
    rows = {row.name: row for row in optimizer.explain()}
    assert {rows[name].axes for name in rates} == {"(b=2 r) c"}
    assert rows["norm.weight"].route == rows["norm.bias"].route == "frozen"
    groups = group_of(optimizer)
    assert groups["layers.1.weight"]["momentum"] == 0.5 != groups["layers.0.weight"]["momentum"]
    assert all(groups.pop(name)["lr"] is rate for name, rate in rates.items())
    biases = {f"layers.{i}.bias": 0.1 for i in range(3)}
    expected = {"head.weight": 1e-3, "head.bias": 0.3, **biases}
    assert {name: group["lr"] for name, group in groups.items()} == expected


def test_frozen_parameters_are_routed_and_have_no_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    # AdamW has no momentum, and a frozen bias does not raise.
    rows = rows_of(model, overrides={"*": {"lr": 0.1}, "0.*": {"momentum": 0.5}})
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
        rows = rows_of(model, overrides=overrides)
        for layer in range(3):
            names = [f"layers.{layer}.{name}" for name in ("kernel", "weight", "other")]
            assert [rows[name].axes for name in names] == axes
            assert {rows[name].reason for name in names} == {"override"}
            assert rows[f"layers.{layer}.linear.weight"].reason == "Linear"


OWN = [
    named("MyExperts", gate_up_proj=parameter(4, 64, 64)),
    named("MixtralExperts", gate_up_proj=parameter(4, 8, 5)),
    # stored in another order than the library's
    named("MixtralExperts", HF, gate_up_proj=parameter(3, 5, 8), down_proj=parameter(3, 4, 5)),
    named("MyRouter", weight=parameter(4, 64)),
    named("Conv1D", weight=parameter(4, 64)),
]


@pytest.mark.parametrize("model", OWN, ids=lambda model: type(model).__name__)
def test_a_class_of_ones_own_is_not_taken_for_one_of_a_library_by_its_name(model):
    with pytest.raises(ValueError, match="not known here") as caught:
        nucleon.Leon.for_model(model)
    batch = "b " if hasattr(model, "gate_up_proj") else ""
    for overrides, axes in zip(written(caught.value), ("r c", "c r", None), strict=True):
        found = {row.axes for row in rows_of(model, overrides=overrides).values()}
        assert found == {axes and batch + axes}


def test_an_unknown_module_can_be_taught(monkeypatch):
    monkeypatch.setattr(roles, "_TABLE", list(roles._TABLE))

    def role_of(place: Place):
        return Role("matrix", "mine", "c r") if place.key == "kernel" else None

    roles.register_module(Unknown, role_of)
    rows = rows_of(Unknown(), overrides={"other": "adamw", "weight": "adamw"}, head=None)
    assert (rows["kernel"].axes, rows["kernel"].reason) == ("c r", "mine")


@pytest.mark.parametrize("other", [nn.Embedding(4, 4), nn.Linear(4, 4)])
def test_a_parameter_of_two_roles_names_both(other):
    model = nn.Module()
    model.embed, model.linear, model.head = other, Conv1D(4, 4), nn.Linear(4, 4)
    model.linear.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"several roles.*embed\.weight.*linear\.weight") as error:
        nucleon.Leon.for_model(model)
    assert "overrides={'embed.weight': 'adamw'}" in str(error.value)
    for override, (route, axes) in (
        ("adamw", ("adamw", None)),
        ({"axes": "c r"}, ("matrix", "c r")),
    ):
        row = rows_of(model, overrides={"embed.weight": override})["embed.weight"]
        assert (row.route, row.axes) == (route, axes)


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
    "the route of .* return for 'weight' must be one of": {"overrides": lambda *_: "sgd"},
    "what overrides return for 'weight' must be one of": {"overrides": lambda *_: 3},
    "the override 'weight' must be one of": on("weight", None),
    "aux has no option 'momentum'": {"aux": {"momentum": 0.9}},
    "aux has no option 'lr'.*its lr is aux_lr": {"aux": {"lr": 0.9}},
    "betas": {"aux": {"betas": (0.9, 2.0)}},
    "no option 'betas'": {"betas": (0.9, 0.99)},
    "lr must be .* got -1": {"lr": -1.0},
    "lr must be .* got -2": {"aux_lr": -2.0},
    "no parameter to optimize": on("*", "frozen"),
}


BAD_MODELS = {
    "run a batch": nn.LazyLinear(4),
    "no parameter to optimize": nn.ReLU(),
    "sparse gradients": nn.Embedding(4, 4, sparse=True),
    r"torch\.nn\.Module": list(nn.Linear(4, 4).parameters()),
}


@pytest.mark.parametrize(
    ("message", "model", "options"),
    [(message, nn.Linear(4, 6), options) for message, options in BAD.items()]
    + [(message, model, {}) for message, model in BAD_MODELS.items()],
)
def test_bad_options_and_models_are_named(message, model, options):
    with pytest.raises((TypeError, ValueError), match=message):
        nucleon.Leon.for_model(model, **options)


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
    aux = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer = nucleon.Leon.for_model(model, lr=0.1, aux_lr=0.01, aux=aux, head="3")
    named = dict(twin.named_parameters())
    matrix = nucleon.Leon([named.pop("1.weight")], lr=0.1)
    oracle = torch.optim.AdamW(named.values(), lr=0.01, **aux)
    for round_ in range(5):
        gradients(model, round_)
        gradients(twin, round_)
        for each in (optimizer, matrix, oracle):
            each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_the_explanation_prints_exports_counts_and_survives_a_checkpoint(tmp_path):
    model = small()
    optimizer, again = (nucleon.Leon.for_model(model, head="3") for _ in range(2))
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
    tensors = optimizer.state[model[1].weight].values()
    assert row["shape"] == [6, 4]
    assert row["state_bytes"] == sum(t.numel() * t.element_size() for t in tensors)
    assert exported["totals"]["matrix"]["parameters"] == 1
    rows = nucleon.Muon([parameter(4, 6)]).explain()  # built by hand
    assert [(r.name, r.axes, r.reason) for r in rows] == [("0", "r c", "as given")]
    gradients(model, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    again.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    assert again.explain().to_dict() == optimizer.explain().to_dict()


def test_create_is_for_model_by_name(monkeypatch):
    for name in registry.OPTIMIZERS:
        optimizer = registry.create(name.upper(), small(), lr=0.3, head=None)
        assert optimizer.name == name and optimizer.param_groups[0]["lr"] == 0.3
    make = lambda model, **o: torch.optim.SGD(model.parameters(), **o)  # noqa: E731
    monkeypatch.setitem(registry.OPTIMIZERS, "sgd", make)
    assert isinstance(registry.create("SGD", small(), lr=0.1), torch.optim.SGD)
    with pytest.raises(ValueError, match="did you mean leon"):
        registry.create("LEONN", small())
    with pytest.raises(ValueError, match="no optimizer 'nope'; the optimizers are leon, muon"):
        registry.create("nope", small())
