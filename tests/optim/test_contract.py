"""The contract of torch's optimizers, and our promises beyond it."""

import copy
import dataclasses
import io
import pickle
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch.testing._internal import common_optimizers
from torch.utils._python_dispatch import TorchDispatchMode

import nucleon
from nucleon import noise
from nucleon.optim.engines import rest

METHODS = {
    "muon": nucleon.Muon,
    "leon": nucleon.Leon,
    "pion": nucleon.Pion,
    "pion-samples": partial(nucleon.Pion, samples=2),
    "leon-exponential": partial(nucleon.Leon, step_length="exponential"),
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


@contextmanager
def nothing_changes(optimizer):
    """Check that weights, state and groups are the same after the block."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    before = [v.clone() for v in (*all_state(optimizer), *params)]
    yield
    assert optimizer.param_groups is groups
    assert_same(before, [*all_state(optimizer), *params])


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


# ---------------------------------------------------------------- options, groups, schedules


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
    values = optimizer.diagnostics()
    for index, param in enumerate(params):
        matrices = param.detach() if param.ndim == 3 else param.detach()[None]
        state = optimizer.state[param]
        totals = state["total"].reshape(matrices.shape)
        for i, (w, s, gram) in enumerate(zip(matrices, totals, state["gram"], strict=True)):
            s = s.mT if s.shape[0] > s.shape[1] else s
            u, _, v = torch.linalg.svd(s, full_matrices=False)
            a = s @ s.mT + gram
            d, e = torch.linalg.eigh(a)
            p = (e / d.sqrt()) @ e.mT @ s
            expected = {
                "update_norm": torch.linalg.matrix_norm(p, 2),
                "smoothing_share": gram.trace() / a.trace(),
                "cosine_to_muon": (p * (u @ v)).sum() / (p.norm() * (u @ v).norm()),
                "update_ratio": 0.25 * 0.2 * max(w.shape) ** 0.5 * p.norm() / w.norm(),
                "skipped": 0,
            }
            # 1e-3: the norm is an upper bound within m^(1/4N), Muon's direction eight quintics.
            loose = {"update_norm": 1e-3, "cosine_to_muon": 1e-3}
            for name, value in expected.items():
                found = values[f"leon/{index}" + f".{i}" * (param.ndim == 3) + f"/{name}"]
                assert found == pytest.approx(float(value), rel=loose.get(name, 1e-10)), name


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


def of_version(state, version):
    state["param_groups"][0]["nucleon"] = version
    return state


FOREIGN = {
    "another method": (nucleon.Muon, "is of muon/.*optimizer and version of nucleon that wrote it"),
    "another shape": (
        lambda p: nucleon.Leon(parameters(shapes=[(4, 7), (3, 3)])),
        "models differ",
    ),
    "torch's": (torch.optim.Muon, "another optimizer.*converted"),
    # which is not said to be another model's
    "torch's in other groups": (
        lambda p: torch.optim.AdamW([{"params": [x]} for x in p]),
        "another optimizer.*converted",
    ),
    "of version 3": ("leon/3", "is of leon/3, this optimizer is leon/4"),
    "of a version to come": (("leon/9", ()), "is of leon/9, this optimizer is leon/4"),
}


@pytest.mark.parametrize(("source", "said"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused_and_nothing_changes(source, said):
    params = parameters(shapes=[(4, 6), (3, 3)])
    optimizer = nucleon.Leon(params, lr=0.1)
    train(optimizer, params, 1)
    make, version = (source, None) if callable(source) else (nucleon.Leon, source)
    state = make(params).state_dict()
    state = state if version is None else of_version(state, version)
    with nothing_changes(optimizer), pytest.raises(ValueError, match=said) as refusal:
        optimizer.load_state_dict(state)
    assert "\n" not in str(refusal.value)


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


DAMAGE = {
    "empty": lambda s: s.clear(),
    "no axes": lambda s: s["state"][0].pop("axes"),
    "missing": lambda s: s["state"][0].pop("gram"),
    "nan": lambda s: s["state"][0]["gram"][0, 0, 0].fill_(torch.nan),
    "inf": lambda s: s["state"][0]["total"][1, 2].fill_(torch.inf),
    "of a wider dtype": lambda s: s["state"][0].update(
        total=torch.full((4, 6), 1e39, dtype=torch.float64)
    ),
    "certify": lambda s: s["param_groups"][0].update(certify=True),
    "lr": lambda s: s["param_groups"][0].update(lr=-2.0),
    "groups": lambda s: s["param_groups"].append(s["param_groups"][0]),
}


def matrix_and_vector():
    params = parameters(shapes=[(4, 6), (5,)])
    return params, [{"params": params[:1]}, {"params": params[1:], "route": "adamw"}]


SAID = {
    "nan": "'gram' of parameter 0.*not finite",
    "inf": "'total' of parameter 0.*not finite",
    "of a wider dtype": "parameter 0, saved in torch.float64, is not finite in torch.float32",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused_and_nothing_changes(damage):
    params, groups = matrix_and_vector()
    optimizer = nucleon.Leon(groups, lr=0.1)
    train(optimizer, params, 1)
    state = copy.deepcopy(optimizer.state_dict())
    DAMAGE[damage](state)
    said = SAID.get(damage, "state_dict|lr must")
    with nothing_changes(optimizer), pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(state)
    train(optimizer, params, 1)


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


def test_a_skipped_step_leaves_even_infinite_weights():
    param = torch.nn.Parameter(torch.full((2, 3), torch.inf))
    optimizer = nucleon.Leon([param], lr=0.1, weight_decay=0.1)
    param.grad = torch.full((2, 3), torch.nan)
    optimizer.step()
    assert (param == torch.inf).all()


@every_method
def test_nonfinite_raise_and_a_sparse_gradient_change_nothing(make):
    params = parameters()
    optimizer = make(params, lr=0.1, nonfinite="raise")
    train(optimizer, params, 1)
    give_gradients(params, 1)
    for error, match, spoilt in (
        (ValueError, "not finite", torch.full_like(params[-1], torch.nan)),
        (RuntimeError, "dense", params[-1].grad.to_sparse()),
    ):
        params[-1].grad = spoilt
        with nothing_changes(optimizer), pytest.raises(error, match=match):
            optimizer.step()


# ---------------------------------------------------------------- the host never waits


class NoHostRead(TorchDispatchMode):
    """Raises where a value would travel from the device to the host, as on a GPU it would wait."""

    forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.forbidden:
            raise AssertionError(f"{name} synchronizes with the host")
        return func(*args, **(kwargs or {}))


def as_on_a_device():
    """Steps on a CPU that ask no mask whether it holds for all, as those on a device."""
    return mock.patch.object(rest, "everywhere", lambda mask: False)


def test_the_guard_sees_a_host_read():
    with pytest.raises(AssertionError, match="synchronizes"), NoHostRead():
        bool(torch.ones(3).sum() > 2)


@every_method
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True, "weight_decay": 0.1},
        {"lr": torch.tensor(0.1)},
        {"certify": True},
    ],
    ids=["plain", "decay", "tensor lr", "certify"],
)
@pytest.mark.filterwarnings("ignore:certify=True measures")
def test_step_never_reads_back(make, options):
    params = parameters()
    optimizer = make(params, **options)
    give_gradients(params, 0)
    with as_on_a_device(), NoHostRead():  # raises on the first host read
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
            figures = two.diagnostics()
        assert figures == two.diagnostics() == one.diagnostics()
    assert_same(plain, cast)


def test_a_compiled_step_is_the_plain_step():
    """Nothing of it is traced, by itself or in a compiled loop."""
    plain, compiled, graphs = parameters(), parameters(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    adamw = {"route": "adamw", "weight_decay": 0.1}
    one, two = (
        nucleon.Leon([{"params": p[:-1]}, {"params": p[-1:], **adamw}], lr=0.1)
        for p in (plain, compiled)
    )

    def loop():
        two.step()
        return compiled[0] + 1

    torch._dynamo.reset()
    for call in (two.step, loop):
        run = torch.compile(call, backend=backend)
        for i in range(2):
            give_gradients(plain, i)
            give_gradients(compiled, i)
            one.step()
            run()
            assert_same(plain, compiled)
    assert len(graphs) <= 1, "a step was traced"  # the sum of the loop


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


# ---------------------------------------------------------------- bad input

NO_NUMBER = ("fast", None, 1j, float("nan"), -0.1)
BAD = {  # by the group that has the option: values that are refused at any time, by its name
    "matrix": {
        "lr": NO_NUMBER,
        "weight_decay": NO_NUMBER,
        "momentum": (1.0, 1.5, -0.1),
        "beta2": (1.0, -0.1),
        "smoothing_scale": (-1.0, 1e-310),
        "nesterov": (1,),
        "gradient_bound": (-1.0, 1e30),
        "scale": ("big", 0.0, ("spectral", -1.0), ("big", 1.0), None),
        "step_length": ("two",),
        "method": ("magic", None),
        "iterations": (0, 2.5),
        "nonfinite": ("ignore",),
        "momentum_dtype": (torch.int8,),
        "largest_stack": (0,),
        "placement": ("gram",),
        "wire_dtype": (torch.float16,),
    },
    "adamw": {
        "lr": NO_NUMBER,
        "weight_decay": NO_NUMBER,
        "nonfinite": (None,),
        "betas": ((1.0, 0.999), (0.9, float("nan")), 0.9),
        "eps": (float("nan"),),
    },
}


@pytest.mark.parametrize(
    ("route", "option", "value"),
    [(r, option, x) for r, rows in BAD.items() for option, values in rows.items() for x in values],
)
def test_a_bad_option_names_itself_and_nothing_changes(route, option, value):
    """In a constructor, in a group that is added, and at the step after it was set."""
    params, groups = matrix_and_vector()
    optimizer = nucleon.Leon(groups)
    refused = pytest.raises((ValueError, TypeError), match=rf"^{option}\b")
    with refused:
        nucleon.Leon([{**groups[0], "route": route, option: value}])
    with refused:
        late = parameters(shapes=[(2, 2)])
        optimizer.add_param_group({"params": late, "route": route, option: value})
    assert len(optimizer.param_groups) == 2
    train(optimizer, params, 2)
    group = optimizer.param_groups[route == "adamw"]
    old = group[option]
    group[option] = value
    give_gradients(params, 2)
    with nothing_changes(optimizer), refused:
        optimizer.step()
    group[option] = old
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (nucleon.Leon, {"lr": torch.tensor([0.1, 0.2])}, "lr"),
        (nucleon.Leon, {"lr": torch.tensor(-0.1)}, "lr"),
        (nucleon.Leon, {"lr": torch.tensor(1)}, "lr"),
        (nucleon.Leon, {"lr": torch.tensor(0.1, device="meta")}, "lr"),
        (nucleon.Leon, {"seed": 1.5}, "seed"),
        (nucleon.Leon, {"samples": 3}, "samples"),
        (nucleon.Leon, {"coefficients": [(1.5, -0.5, 0.0)]}, "coefficients"),
        (nucleon.Leon, {"gradient_bound": 1.0, "momentum": 0.0}, "gradient_bound"),
        (nucleon.Leon, {"method": "half", "iterations": 4}, "takes 5 iterations"),
        (nucleon.Leon, {"no_such_option": 1}, "no_such_option"),
        (nucleon.Pion, {"samples": 0}, "samples"),
        (nucleon.Pion, {"smoothing_scale": "practice"}, "smoothing_scale"),
    ],
)
def test_options_that_do_not_fit_are_named(make, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make(parameters(shapes=[(3, 4)]), **options)


@pytest.mark.parametrize(
    ("param", "error"),
    [
        *((torch.zeros(shape), ValueError) for shape in ((4,), (), (2, 3, 4, 5))),
        *(
            (torch.zeros(3, 4).to(dtype), TypeError)
            for dtype in (torch.complex64, torch.int64, torch.float8_e4m3fn)
        ),
    ],
)
def test_bad_parameters_are_named(param, error):
    with pytest.raises(error, match=r"head\.weight"):
        nucleon.Leon([("head.weight", param)])
    optimizer = nucleon.Leon(parameters())
    with pytest.raises(error):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


def test_parameters_of_one_group_are_in_order_and_on_one_device():
    params = parameters(shapes=[(2, 3), (3, 4)])
    with pytest.raises(TypeError, match="ordered"):
        nucleon.Pion([{"params": set(params)}])
    elsewhere = torch.nn.Parameter(torch.zeros(2, 3, device="meta"))
    with pytest.raises(ValueError, match="devices"):
        nucleon.Leon([params[0], elsewhere])
