"""What torch promises of an optimizer, and what we promise beyond it."""

import copy
import dataclasses
import io
import pickle
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.testing._internal import common_optimizers
from torch.utils._python_dispatch import TorchDispatchMode

import nucleon
from nucleon import noise
from nucleon.optim.engines import rest

METHODS = {
    "muon": lambda p, **k: nucleon.Muon(p, **k),
    "leon": lambda p, **k: nucleon.Leon(p, **k),
    "pion": lambda p, **k: nucleon.Pion(p, **k),
    "pion-samples": lambda p, **k: nucleon.Pion(p, samples=2, **k),
    "leon-exponential": lambda p, **k: nucleon.Leon(p, step_length="exponential", **k),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
SHAPES = [(4, 6), (6, 4), (4, 6), (5, 5), (3, 4, 6), (1, 1)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype))
        for s in shapes
    ]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


def snapshot(params):
    return [p.detach().clone() for p in params]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def all_state(optimizer):
    groups = optimizer.param_groups
    return [v for g in groups for p in g["params"] for v in optimizer.state[p].values()]


# ---------------------------------------------------------------- torch's own error inputs


@every_method
@pytest.mark.parametrize(
    "case",
    common_optimizers.get_error_inputs_for_all_optims("cpu", torch.float32),
    ids=lambda c: c.optimizer_error_input.desc,
)
def test_torchs_error_inputs(make, case):
    given = case.optimizer_error_input
    params = parameters(shapes=[(2, 3)]) if given.params is None else given.params
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=given.desc.rpartition(" ")[2]):
            make(params, **given.kwargs)
        return
    with pytest.raises((case.error_type, ValueError, TypeError)) as caught:
        make(params, **given.kwargs)
    assert "NoneType" not in str(caught.value)


@every_method
@pytest.mark.parametrize(
    "case", common_optimizers.optim_inputs_func_muon("cpu"), ids=lambda c: c.desc
)
def test_torchs_inputs_for_muon(make, case):
    """Every configuration torch tests its Muon with, but for the options that only it has."""
    options = {k: v for k, v in case.kwargs.items() if not k.startswith("ns_")}
    params = parameters()
    before = snapshot(params)
    train(make(params, **options), params, 3)
    assert all(
        not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, params, strict=True)
    )


# ---------------------------------------------------------------- options, groups, schedules


@every_method
def test_options_of_a_group_override_the_defaults(make):
    together, apart = parameters(), parameters()
    groups = [{"params": together[:3], "lr": 0.5, "momentum": 0.3}, {"params": together[3:]}]
    train(make(groups, lr=0.1, scale="none"), together, 4)
    # Pion's noise depends on the index of the parameter in the optimizer: keep it.
    first = make([{"params": apart[:3]}, {"params": apart[3:]}], lr=0.5, momentum=0.3, scale="none")
    train(first, apart, 4)
    assert_same(together[:3], apart[:3])
    assert not torch.equal(together[3], apart[3])


@every_method
def test_a_group_added_later_equals_one_given_at_once(make):
    at_once, later = parameters(), parameters()
    train(make([{"params": at_once[:4]}, {"params": at_once[4:]}], lr=0.1), at_once, 3)
    optimizer = make(later[:4], lr=0.1)
    optimizer.add_param_group({"params": later[4:]})
    train(optimizer, later, 3)
    assert_same(at_once, later)


@every_method
def test_tensor_lr_equals_number(make):
    number, tensor, one_element = parameters(), parameters(), parameters()
    train(make(number, lr=0.125), number, 3)
    train(make(tensor, lr=torch.tensor(0.125)), tensor, 3)
    train(make(one_element, lr=torch.tensor([0.125])), one_element, 3)
    assert_same(number, tensor)
    assert_same(number, one_element)


@every_method
def test_schedulers_move_lr_and_momentum(make):
    scheduled, by_hand = parameters(), parameters()
    optimizer, other = make(scheduled, lr=0.1), make(by_hand, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, total_steps=6, cycle_momentum=True
    )
    momenta = set()
    for step in range(5):
        momenta.add(optimizer.param_groups[0]["momentum"])
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        other.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"]
        train(optimizer, scheduled, 1, step)
        train(other, by_hand, 1, step)
        scheduler.step()
    assert len(momenta) > 2
    assert_same(scheduled, by_hand)


def test_beta2_follows_a_momentum_schedule():
    """beta2=None is momentum² at every step, not the square of the first momentum."""
    (param,) = params = parameters(torch.float64, [(3, 5)])
    optimizer = nucleon.Leon(params, lr=0.1, momentum=0.9)
    gram = torch.zeros(3, 3, dtype=torch.float64)
    for step, momentum in enumerate([0.9, 0.5, 0.7]):
        optimizer.param_groups[0]["momentum"] = momentum
        train(optimizer, params, 1, step)
        gram = momentum**2 * gram + param.grad @ param.grad.mT
    torch.testing.assert_close(optimizer.state[param]["gram"][0], gram, rtol=1e-13, atol=1e-13)


@every_method
def test_named_parameters_and_diagnostics(make):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 6), "b": torch.nn.Linear(6, 4)})
    named = [(n, p) for n, p in model.named_parameters() if p.ndim == 2]
    optimizer = make(named, lr=0.1)
    train(optimizer, [p for _, p in named], 2)
    values = optimizer.diagnostics()
    assert all(isinstance(v, float) for v in values.values())
    name = optimizer.name
    for key in ("update_norm", "smoothing_share", "cosine_to_muon", "update_ratio", "skipped"):
        assert f"{name}/a.weight/{key}" in values
    assert 0 < values[f"{name}/a.weight/update_norm"] <= 1.001


@pytest.mark.parametrize("size", [1e-25, 6e18])
def test_the_smoothing_share_does_not_see_the_scale(size):
    """Squares of these gradients leave float32; M̂ = GGᵀ and Ĝ = G share alike."""
    param = torch.zeros(5, 3, requires_grad=True)
    optimizer = nucleon.Leon([param])
    param.grad = size * torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    share = optimizer.diagnostics()["leon/0/smoothing_share"]
    assert share == pytest.approx(0.5 if size > 1 else 0.0, abs=1e-6)


def test_diagnostics_against_their_definitions():
    params = parameters(torch.float64, [(4, 7), (7, 4), (2, 3, 5)])
    optimizer = nucleon.Leon(params, lr=0.25, method="eigh", scale="match-adamw")
    train(optimizer, params, 3)
    optimizer.param_groups[0]["lr"] = 0.0  # as a scheduler does: figures are of the last step
    values = optimizer.diagnostics()
    for index, param in enumerate(params):
        matrices = param.detach() if param.ndim == 3 else param.detach()[None]
        totals = optimizer.state[param]["total"].reshape(matrices.shape)
        for i, (w, s, gram) in enumerate(
            zip(matrices, totals, optimizer.state[param]["gram"], strict=True)
        ):
            key = f"leon/{index}.{i}/" if param.ndim == 3 else f"leon/{index}/"
            s = s.mT if s.shape[0] > s.shape[1] else s
            u, _, v = torch.linalg.svd(s, full_matrices=False)
            a = s @ s.mT + gram
            d, e = torch.linalg.eigh(a)
            p = (e / d.sqrt()) @ e.mT @ s
            share = gram.trace() / a.trace()
            cosine = (p * (u @ v)).sum() / (p.norm() * (u @ v).norm())
            ratio = 0.25 * 0.2 * max(w.shape) ** 0.5 * p.norm() / w.norm()
            top = torch.linalg.matrix_norm(p, 2)
            # 1e-3: the norm is an upper bound within m^(1/4N), Muon's direction eight quintics.
            assert values[key + "update_norm"] == pytest.approx(top.item(), rel=1e-3)
            assert values[key + "smoothing_share"] == pytest.approx(share.item(), rel=1e-10)
            assert values[key + "cosine_to_muon"] == pytest.approx(cosine.item(), abs=1e-3)
            assert values[key + "update_ratio"] == pytest.approx(ratio.item(), rel=1e-10)
            assert values[key + "skipped"] == 0


@every_method
def test_closure_hooks_and_zero_grad(make):
    params = parameters()
    optimizer = make(params, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        calls.append("loss")
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0 and calls == ["before", "loss", "after"]
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@every_method
def test_maximize_is_descent_on_the_negative(make):
    up, down = parameters(), parameters()
    climb, descend = make(up, lr=0.1, maximize=True), make(down, lr=0.1)
    for step in range(3):
        give_gradients(up, step)
        give_gradients(down, step)
        for p in down:
            p.grad.neg_()
        climb.step()
        descend.step()
    assert_same(up, down)


# ---------------------------------------------------------------- state, saving, resuming


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_repeats_bit_for_bit(make, dtype):
    straight, resumed = parameters(dtype), parameters(dtype)
    train(make(straight, lr=0.1), straight, 6)
    first = make(resumed, lr=0.1)
    train(first, resumed, 3)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make(resumed, lr=0.7)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.param_groups[0]["lr"] == 0.1
    for a, b in zip(all_state(first), all_state(second), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    train(second, resumed, 3, start=3)
    assert_same(straight, resumed)


@every_method
def test_deepcopy_and_pickle(make):
    params = parameters()
    optimizer = make(params, lr=0.1)
    train(optimizer, params, 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    train(optimizer, params, 2, start=2)
    for other in copies:
        own = other.param_groups[0]["params"]
        assert own[0] is not params[0]
        train(other, own, 2, start=2)
        assert_same(params, own)


def test_state_is_created_eagerly_and_has_the_promised_size():
    """Leon: mn + m² numbers a matrix, m the short side; Muon: mn."""
    params = parameters(shapes=[(4, 6), (9, 2), (3, 5, 7)])
    muon, leon = nucleon.Muon(params), nucleon.Leon(params)
    for param, entries, short in zip(params, (24, 18, 105), (4, 2, 5), strict=True):
        count = 3 if param.ndim == 3 else 1

        def floats(optimizer, param=param):
            return sum(v.numel() for v in optimizer.state[param].values() if v.is_floating_point())

        assert floats(muon) == entries
        assert floats(leon) == entries + count * short**2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16, torch.float32])
def test_half_precision_weights_keep_wide_moments(dtype, momentum_dtype):
    params = parameters(dtype)
    optimizer = nucleon.Leon(params, lr=0.1, momentum_dtype=momentum_dtype)
    train(optimizer, params, 2)
    again = nucleon.Leon(params, lr=0.1, momentum_dtype=momentum_dtype)
    again.load_state_dict(optimizer.state_dict())
    for param in params:
        assert param.dtype == dtype
        assert again.state[param]["total"].dtype == (momentum_dtype or torch.float32)
        assert again.state[param]["gram"].dtype == torch.float32


def of_version(state, version):
    state["param_groups"][0]["nucleon"] = version
    return state


FOREIGN = {
    "another method": (
        lambda p: nucleon.Muon(p).state_dict(),
        "is of 'muon/.*optimizer that wrote it",
    ),
    "another shape": (
        lambda p: nucleon.Leon(parameters(shapes=[(4, 7), (3, 3)])).state_dict(),
        "models differ",
    ),
    "torch's": (lambda p: torch.optim.Muon(p).state_dict(), "another optimizer.*converted"),
    "torch's in other groups": (  # which is not said to be another model's
        lambda p: torch.optim.AdamW([{"params": [x]} for x in p]).state_dict(),
        "another optimizer.*converted",
    ),
    "of version 3": (
        lambda p: of_version(nucleon.Leon(p).state_dict(), "leon/3"),
        "'leon/3', this version reads 'leon/4'",
    ),
    "of a version to come": (
        lambda p: of_version(nucleon.Leon(p).state_dict(), ("leon/9", ())),
        "'leon/9', this version reads 'leon/4'",
    ),
}


@pytest.mark.parametrize(("state", "said"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused_and_nothing_changes(state, said):
    params = parameters(shapes=[(4, 6), (3, 3)])
    optimizer = nucleon.Leon(params, lr=0.1)
    train(optimizer, params, 1)
    before = [v.clone() for v in all_state(optimizer)]
    with pytest.raises(ValueError, match=said) as refusal:
        optimizer.load_state_dict(state(params))
    assert "\n" not in str(refusal.value)
    assert_same(before, all_state(optimizer))


def test_load_hooks_are_heard():
    params = parameters(shapes=[(4, 6)])
    optimizer = nucleon.Leon(params)
    train(optimizer, params, 1)
    state = optimizer.state_dict()

    def doubled(_, given):
        given["state"][0] = {**given["state"][0], "total": 2 * given["state"][0]["total"]}
        return given

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[params[0]]["skipped"].fill_(7))
    expected = 2 * optimizer.state[params[0]]["total"]
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[params[0]]["total"], expected)
    assert optimizer.state[params[0]]["skipped"].item() == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.clear(),
        lambda s: s["state"].update({0: 3}),
        lambda s: s["state"].update({1: torch.ones(2)}),
        lambda s: s["state"][0].pop("axes"),
        lambda s: s["state"][0].update(extra=1),
        lambda s: s["state"][0].update(total=3),
        lambda s: s["state"][0].update(total=s["state"][0]["total"].long()),
        lambda s: s["state"][0].pop("gram"),
        lambda s: s["state"][0]["gram"].neg_(),
        lambda s: s["state"][0]["gram"][0, 1, 2].mul_(1.1),
        lambda s: s["state"][0]["gram"][0].sub_(2 * s["state"][0]["gram"][0].trace()),
        lambda s: s["state"][0]["quiet"].fill_(-1),
        lambda s: s["state"][0]["skipped"].fill_(-1),
        lambda s: s["state"][0]["step"].fill_(-1),
        lambda s: s["state"][1]["step"].fill_(-1),
        lambda s: s["state"][1]["exp_avg_sq"][0].neg_(),
        lambda s: s["param_groups"][0].pop("certify"),
        lambda s: s["param_groups"][0].update(certify=True),
        lambda s: s["param_groups"][0].update(lr=-2.0),
        lambda s: s["param_groups"].append(s["param_groups"][0]),
    ],
    ids=[
        *("empty", "number for a state", "tensor for a state", "no axes"),
        *("extra", "number", "integers", "missing", "negative gram", "asymmetric gram"),
        *("gram beyond its diagonal", "quiet", "skipped", "step", "AdamW's step", "AdamW's v"),
        *("option", "certify", "lr", "groups"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_changes(damage):
    params = parameters(shapes=[(4, 6), (5,)])
    groups = [{"params": params[:1]}, {"params": params[1:], "route": "adamw"}]
    optimizer = nucleon.Leon(groups, lr=0.1)
    train(optimizer, params, 1)
    before = [v.clone() for v in all_state(optimizer)]
    state = copy.deepcopy(optimizer.state_dict())
    damage(state)
    with pytest.raises(ValueError, match=r"state_dict|lr must"):
        optimizer.load_state_dict(state)
    assert_same(before, all_state(optimizer))
    train(optimizer, params, 1)


@every_method
@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1.0, 1e18])
def test_a_gram_matrix_of_any_gradients_is_no_damage(make, scale):
    """Nor are its terms that left the range of the dtype: rows far apart in size."""
    params = parameters(shapes=[(6, 400), (3, 7, 5)])
    optimizer = make(params, lr=0.1)
    for round_ in range(3):
        give_gradients(params, round_)
        for p in params:
            p.grad *= scale * torch.logspace(0, -30, p.shape[-2])[:, None]
        optimizer.step()
    other = make(parameters(shapes=[(6, 400), (3, 7, 5)]))
    other.load_state_dict(optimizer.state_dict())
    assert_same(all_state(optimizer), all_state(other))


@pytest.mark.parametrize(
    ("group", "options", "word"),
    [
        (0, {"momentum": 1.5}, "momentum"),
        (0, {"beta2": -0.1}, "beta2"),
        (0, {"smoothing_scale": 1e-310}, "smoothing_scale"),
        (0, {"gradient_bound": 1e30}, "gradient_bound"),
        (0, {"scale": "twice"}, "scale"),
        (0, {"iterations": 0}, "iterations"),
        (0, {"iterations": 2.5}, "iterations"),
        (0, {"nonfinite": "ignore"}, "nonfinite"),
        (0, {"nesterov": 1}, "nesterov"),
        (0, {"method": "fastest"}, "method"),
        (0, {"method": None}, "method"),
        (0, {"lr": float("nan")}, "lr"),
        *((group, {"lr": value}, "lr") for group in (0, 1) for value in ("fast", None, 1j)),
        *((g, {"weight_decay": x}, "weight_decay") for g in (0, 1) for x in ("fast", None, 1j)),
        (1, {"nonfinite": None}, "nonfinite"),
        (1, {"betas": (1.0, 0.999)}, "betas"),
        (1, {"betas": (0.9, float("nan"))}, "betas"),
        (1, {"eps": float("nan")}, "eps"),
        (1, {"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_an_option_set_to_nonsense_is_named_and_nothing_changes(group, options, word):
    params = parameters(shapes=[(4, 6), (5,)])
    optimizer = nucleon.Leon([{"params": params[:1]}, {"params": params[1:], "route": "adamw"}])
    train(optimizer, params, 2)
    before = [v.clone() for v in (*all_state(optimizer), *params)]
    old = {name: optimizer.param_groups[group][name] for name in options}
    optimizer.param_groups[group].update(options)
    give_gradients(params, 2)
    with pytest.raises((ValueError, TypeError), match=rf"^{word}\b"):
        optimizer.step()
    assert_same(before, [*all_state(optimizer), *params])
    optimizer.param_groups[group].update(old)
    optimizer.step()


class Twice(nucleon.Pion):
    """Draws of its own, which every engine asks for."""

    def draws(self, group, m, n):
        return dataclasses.replace(super().draws(group, m, n), samples=2)


def test_the_draws_of_a_subclass_are_those_of_its_steps():
    weights = []
    for make, options in ((Twice, {}), (nucleon.Pion, {"samples": 2}), (nucleon.Pion, {})):
        params = parameters(shapes=[(4, 6)])
        train(make(params, lr=0.1, **options), params, 2)
        weights.append(params[0].detach())
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])


# ---------------------------------------------------------------- gradients of every kind


@every_method
def test_a_missing_gradient_leaves_weight_and_moments(make):
    params = parameters()
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    train(optimizer, params, 1)
    before = snapshot(params)
    give_gradients(params, 1)
    params[0].grad = None
    total = optimizer.state[params[0]]["total"].clone()
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert torch.equal(optimizer.state[params[0]]["total"], total)
    assert not torch.equal(params[2], before[2])


@every_method
def test_matrices_do_not_depend_on_their_company(make):
    """Stacked, in chunks, or with other parameters missing a gradient: the same bits."""
    reference, chunked = parameters(), parameters()
    train(make(reference, lr=0.1), reference, 3)
    train(make(chunked, lr=0.1, largest_stack=24), chunked, 3)
    for a, b in zip(reference, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # batched products may round apart


@every_method
def test_layouts_of_parameters_and_gradients(make):
    plain, odd = parameters(shapes=[(4, 6), (6, 4)]), parameters(shapes=[(4, 6), (6, 4)])
    odd = [torch.nn.Parameter(p.detach().mT.contiguous().mT) for p in odd]
    assert not odd[0].is_contiguous()
    one, two = make(plain, lr=0.1), make(odd, lr=0.1)
    for step in range(3):
        give_gradients(plain, step)
        give_gradients(odd, step)
        for p in odd:
            p.grad = torch.stack([p.grad, p.grad], dim=-1)[..., 0]
        one.step()
        two.step()
    for a, b in zip(plain, odd, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@every_method
def test_zero_size_and_zero_gradients(make):
    params = parameters(shapes=[(0, 4), (4, 0), (0, 3, 4), (3, 4)])
    optimizer = make(params, lr=0.1)
    before = params[3].detach().clone()
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(params[3], before)
    train(optimizer, params, 2)
    assert params[3].isfinite().all() and not torch.equal(params[3], before)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.diagnostics()


@every_method
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_gradient_is_skipped_and_counted(make, bad):
    params, clean = parameters(), parameters()
    optimizer, reference = (
        make(params, lr=0.1, weight_decay=0.1),
        make(clean, lr=0.1, weight_decay=0.1),
    )
    train(optimizer, params, 1)
    train(reference, clean, 1)
    weight = params[1].detach().clone()
    moments = {k: v.clone() for k, v in optimizer.state[params[1]].items()}
    give_gradients(params, 1)
    give_gradients(clean, 1)
    params[1].grad[2, 3] = bad
    clean[1].grad = None
    optimizer.step()
    reference.step()
    assert torch.equal(params[1], weight)
    for name, value in optimizer.state[params[1]].items():
        if name not in ("step", "skipped"):
            assert torch.equal(value, moments[name]), name
    assert optimizer.diagnostics()[f"{optimizer.name}/1/skipped"] == 1
    for i in (0, 2, 3, 4, 5):
        torch.testing.assert_close(params[i], clean[i], rtol=1e-6, atol=1e-6)
    train(optimizer, params, 1, start=2)
    assert not torch.equal(params[1], weight) and params[1].isfinite().all()


@every_method
def test_a_gradient_that_overflows_the_moments_is_skipped(make):
    params = parameters(shapes=[(4, 6), (5, 5)])
    optimizer = make(params, lr=0.1)
    train(optimizer, params, 1)
    before = snapshot(params)
    give_gradients(params, 1)
    params[0].grad.fill_(3e38)
    train_once = optimizer.state[params[0]]["total"].clone()
    optimizer.step()
    give_gradients(params, 2)
    params[0].grad.fill_(3e38)
    optimizer.step()
    train(optimizer, params, 1, start=3)
    assert all(p.isfinite().all() for p in params)
    assert not torch.equal(params[1], before[1])
    if optimizer.has_gram:
        assert optimizer.state[params[0]]["skipped"].item() == 2
    assert optimizer.state[params[0]]["total"].isfinite().all() and train_once.isfinite().all()


def test_a_skipped_step_leaves_even_infinite_weights():
    param = torch.nn.Parameter(torch.full((2, 3), torch.inf))
    optimizer = nucleon.Leon([param], lr=0.1, weight_decay=0.1)
    param.grad = torch.full((2, 3), torch.nan)
    optimizer.step()
    assert (param == torch.inf).all()


def test_one_bad_slice_of_a_stack_leaves_the_others():
    params = parameters(shapes=[(3, 4, 6)])
    optimizer = nucleon.Leon(params, lr=0.1)
    before = params[0].detach().clone()
    give_gradients(params, 0)
    params[0].grad[1, 0, 0] = float("nan")
    optimizer.step()
    assert torch.equal(params[0][1], before[1])
    assert not torch.equal(params[0][0], before[0])
    assert optimizer.state[params[0]]["skipped"].tolist() == [0, 1, 0]


@every_method
def test_nonfinite_raise_changes_nothing(make):
    params = parameters()
    optimizer = make(params, lr=0.1, nonfinite="raise")
    train(optimizer, params, 1)
    weights, state = snapshot(params), [v.clone() for v in all_state(optimizer)]
    give_gradients(params, 1)
    params[-1].grad.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step()
    assert_same(weights, params)
    assert_same(state, all_state(optimizer))


def test_a_sparse_gradient_is_refused():
    params = parameters(shapes=[(4, 6), (5, 5)])
    optimizer = nucleon.Leon(params, lr=0.1)
    give_gradients(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    before = snapshot(params)
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()
    assert_same(before, params)


# ---------------------------------------------------------------- the host never waits


class NoHostRead(TorchDispatchMode):
    """Raises where a value would travel from the device to the host, as on a GPU it would wait."""

    forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.forbidden:
            raise AssertionError(f"{name} synchronizes with the host")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.elsewhere = as_on_a_device()
        self.elsewhere.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.elsewhere.__exit__(*error)


def as_on_a_device():
    """Steps on a CPU that ask no mask whether it holds for all, as those on a device."""
    return mock.patch.object(rest, "everywhere", lambda mask: False)


def test_the_guard_sees_a_host_read():
    with pytest.raises(AssertionError, match="synchronizes"), NoHostRead():
        bool(torch.ones(3).sum() > 2)


@every_method
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True, "weight_decay": 0.1}, {"lr": torch.tensor(0.1)}],
    ids=["plain", "decay", "tensor lr"],
)
def test_step_never_reads_back(make, options):
    params = parameters()
    optimizer = make(params, **options)
    give_gradients(params, 0)
    with NoHostRead():  # raises on the first host read
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@every_method
@pytest.mark.parametrize("spoilt", [None, "nan", "zero", "missing"])
def test_a_step_without_masks_has_the_bits_of_one_with_them(make, spoilt):
    """On a CPU masks that hold for all are left out; those that concern one matrix are not."""
    plain, masked = parameters(), parameters()
    one, two = (make(params, momentum=0.5, weight_decay=0.1) for params in (plain, masked))
    for seed in range(5):
        for params, optimizer, where in ((plain, one, nullcontext), (masked, two, as_on_a_device)):
            give_gradients(params, seed)
            if seed and spoilt == "missing":
                params[0].grad = None
            elif seed and spoilt is not None:
                params[0].grad[..., :1, :1] = float("nan")
                if spoilt == "zero":
                    params[0].grad.zero_()
            with where():
                optimizer.step()
    assert_same(snapshot(plain), masked)
    assert_same(all_state(one), all_state(two))


# ---------------------------------------------------------------- compile, precision, rounding


def test_a_compiled_loop_reaches_the_plain_step():
    """Nothing of a step is traced: its weights are bit for bit those of the plain one."""
    plain, compiled, graphs = parameters(), parameters(), list[object]()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    adamw = {"route": "adamw", "weight_decay": 0.1}
    one, two = (
        nucleon.Leon([{"params": p[:-1]}, {"params": p[-1:], **adamw}], lr=0.1)
        for p in (plain, compiled)
    )

    def loop():
        loss = sum((p * p).sum() for p in compiled)
        loss.backward()
        two.step()
        two.zero_grad()

    torch._dynamo.reset()
    run, step = torch.compile(loop, backend=backend), torch.compile(two.step, backend=backend)
    for _ in range(3):
        sum((p * p).sum() for p in plain).backward()
        one.step()
        one.zero_grad()
        run()
    for p, q in zip(plain, compiled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # the loss is the compiler's
        p.data.copy_(q.data)
    two_state, traced = two.state_dict(), len(graphs)
    one.load_state_dict(two_state)
    for i in range(2):
        give_gradients(plain, i)
        give_gradients(compiled, i)
        one.step()
        step()
    assert_same(plain, compiled)
    assert len(graphs) == traced, "a step was traced"


@every_method
def test_autocast_around_the_step_changes_nothing(make):
    plain, cast = parameters(), parameters()
    one, two = make(plain, lr=0.1), make(cast, lr=0.1)
    for i in range(2):
        give_gradients(plain, i)
        give_gradients(cast, i)
        one.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            two.step()
    assert_same(plain, cast)


@every_method
def test_diagnostics_do_not_depend_on_autocast(make):
    params = parameters()
    optimizer = make(params, lr=torch.tensor([[0.1]]))
    train(optimizer, params, 2)
    plain = optimizer.diagnostics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert optimizer.diagnostics() == plain


@every_method
def test_the_default_dtype_is_not_relied_on(make):
    plain, other = parameters(), parameters()
    train(make(plain, lr=0.1), plain, 2)
    torch.set_default_dtype(torch.float64)
    try:
        train(make(other, lr=0.1), other, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(plain, other)


@every_method
def test_grad_scaler_skips_an_overflow_and_goes_on(make):
    params = parameters()
    optimizer = make(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        loss = sum((p.square() * factor).sum() for p in params)
        scaler.scale(loss).backward()
        before = snapshot(params)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
        assert same == (step == 1)
    assert scaler.get_scale() < 2.0**10


@pytest.mark.parametrize("low", [0, 1, 2, 5, 1000, 32768, 65535])
def test_stochastic_rounding_is_exact_in_the_mean(low):
    """A weight `low` of 65536 parts above a bf16 number is rounded up in so many parts of draws."""
    draws, rounds = 2**17, 4
    exact = torch.tensor([0x3F800000 + low], dtype=torch.int32).view(torch.float32).item()
    up = 0
    for seed in range(rounds):
        param = torch.nn.Parameter(torch.ones(1, draws, dtype=torch.bfloat16))
        optimizer = nucleon.Leon(
            [param], lr=1.0, scale="none", stochastic_rounding=True, momentum=0.0, seed=seed
        )
        # ‖g‖ = 1 and M̂ = ‖g‖², so P = g/√2; choose lr so that W moves by exact − 1.
        param.grad = torch.full_like(param, -(draws**-0.5))
        step = -optimizer_direction(param)
        optimizer.param_groups[0]["lr"] = (exact - 1) / step
        optimizer.step()
        up += int((param > 1).sum())
    total, share = rounds * draws, low / 65536
    deviation = (total * share * (1 - share)) ** 0.5
    assert abs(up - total * share) <= 5 * deviation + total * 2e-5 * (low > 0)


def test_stochastic_rounding_keeps_exact_weights_at_the_largest_draw(monkeypatch):
    monkeypatch.setattr(noise, "uniform", lambda shape, **_: torch.ones(shape))  # on (0, 1]
    param = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
    train(nucleon.Leon([param], lr=0.0, stochastic_rounding=True), [param], 1)
    assert (param == 1).all()


def optimizer_direction(param):
    """An entry of Leon's first direction, from the same code, so that its 1 % cancels."""
    probe = torch.nn.Parameter(torch.zeros(param.shape))
    probe.grad = param.grad.float()
    nucleon.Leon([probe], lr=1.0, scale="none", momentum=0.0).step()
    return -probe[0, 0].item()


def test_without_stochastic_rounding_small_steps_vanish():
    param = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
    optimizer = nucleon.Leon([param], lr=1e-5, scale="none")
    train(optimizer, [param], 20)
    assert (param == 1).all()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options,match",
    [
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr"),
        ({"lr": torch.tensor(-0.1)}, "lr"),
        ({"lr": torch.tensor(float("nan"))}, "lr"),
        ({"lr": torch.tensor(1)}, "lr"),
        ({"lr": torch.tensor(0.1, device="meta")}, "lr"),
        ({"seed": 1.5}, "seed"),
        ({"samples": 3}, "samples"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"beta2": 1.0}, "beta2"),
        ({"smoothing_scale": -1.0}, "smoothing_scale"),
        ({"gradient_bound": -1.0}, "gradient_bound"),
        ({"gradient_bound": 1.0, "momentum": 0.0}, "gradient_bound"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"scale": "big"}, "scale"),
        ({"scale": 0.0}, "scale"),
        ({"scale": ("spectral", -1.0)}, "scale"),
        ({"scale": ("big", 1.0)}, "scale"),
        ({"scale": None}, "scale"),
        ({"coefficients": [(1.5, -0.5, 0.0)]}, "coefficients"),
        ({"step_length": "two"}, "step_length"),
        ({"method": "magic"}, "method"),
        ({"iterations": 0}, "iterations"),
        ({"iterations": 2.5}, "iterations"),
        ({"method": "half", "iterations": 4}, "takes 5 iterations"),
        ({"method": "half", "iterations": 6}, "takes 5 iterations"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype"),
        ({"nesterov": 1}, "nesterov"),
        ({"largest_stack": 0}, "largest_stack"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_options_name_themselves(options, match):
    params = parameters(shapes=[(3, 4)])
    with pytest.raises((ValueError, TypeError), match=match):
        nucleon.Leon(params, **options)
    if match == "no_such_option":
        return  # torch lets a group carry keys of the user's own
    optimizer = nucleon.Leon(params)
    with pytest.raises((ValueError, TypeError), match=match):
        optimizer.add_param_group({"params": parameters(shapes=[(2, 2)]), **options})
    assert len(optimizer.param_groups) == 1


def test_bad_samples():
    with pytest.raises(ValueError, match="samples"):
        nucleon.Pion(parameters(), samples=0)


@pytest.mark.parametrize(
    "param,error",
    [
        (torch.zeros(4), ValueError),
        (torch.zeros(()), ValueError),
        (torch.zeros(2, 3, 4, 5), ValueError),
        (torch.zeros(3, 4, dtype=torch.complex64), TypeError),
        (torch.zeros(3, 4, dtype=torch.int64), TypeError),
        (torch.zeros(3, 4).to(torch.float8_e4m3fn), TypeError),
    ],
    ids=lambda v: str(getattr(v, "shape", v)),
)
def test_bad_parameters_are_named(param, error):
    with pytest.raises(error, match=r"head\.weight"):
        nucleon.Leon([("head.weight", param)])
    optimizer = nucleon.Leon(parameters())
    with pytest.raises(error):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


def test_a_set_of_parameters_is_refused():
    with pytest.raises(TypeError, match="ordered"):
        nucleon.Pion([{"params": set(parameters(shapes=[(2, 3), (3, 4)]))}])


def test_mixed_devices_in_a_group_are_refused():
    params = [
        torch.nn.Parameter(torch.zeros(2, 3)),
        torch.nn.Parameter(torch.zeros(2, 3, device="meta")),
    ]
    with pytest.raises(ValueError, match="devices"):
        nucleon.Leon(params)


def test_a_stage_of_a_model_draws_the_noise_that_it_draws_in_the_whole():
    """As stages of a pipeline have optimizers of their own; no two of their matrices share it."""
    whole = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(4, 4) for i in range(4)})
    stages = [torch.nn.ModuleDict({f"layer{i}": whole[f"layer{i}"]}) for i in range(4)]

    def streams(model):
        made = nucleon.Pion.for_model(model, head=None)
        infos = made.infos
        return {infos[p].name: s["stream"].tolist() for p, s in made.state.items() if "stream" in s}

    apart = {name: stream for stage in stages for name, stream in streams(stage).items()}
    assert apart == streams(whole) and len(apart) == 4
    assert len({tuple(stream) for stream in apart.values()}) == 4
