"""The average of the iterates: its formula, its state, and the model that it becomes."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import nucleon
from helpers_states import differences
from nucleon.optim.average import get_multi_avg_fn, share

KINDS = [0.1, 0.5, 1 / 3, 1, 7.5]
SEED_STEPS = 9


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def build(model, method="Muon", **options):
    options = {"average": 0.1, **options}
    return getattr(nucleon, method).for_model(model, lr=0.05, head=None, **options)


def take(model, optimizer, *steps):
    """Step with gradients that are a function of the number of the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def iterates(model, optimizer, steps=SEED_STEPS):
    """Take steps, and return the iterates of each parameter."""
    seen = []
    for step in range(steps):
        take(model, optimizer, step)
        seen.append(values(model))
    return [*zip(*seen, strict=True)]


def averages(model, optimizer):
    return [optimizer.state[p]["average"] for p in model.parameters()]


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def weights_of(average, count):
    """Σ weights of the iterates 1…count in W̄, in float64 from the definition, not the recursion."""
    t = torch.arange(1, count + 1, dtype=torch.float64)
    if average < 1:
        p = 1 / average - 2
        raw = torch.exp(torch.lgamma(t + p) - torch.lgamma(t))
    else:
        raw = (average / (average + 1)) ** (count - t)
    return raw / raw.sum()


def twin(average, iterates):
    """W̄ of iterates in float64 from its definition."""
    return torch.einsum(
        "t,t...->...", weights_of(average, len(iterates)), torch.stack(iterates).double()
    )


@pytest.mark.parametrize("average", KINDS)
def test_shares_make_the_weights_and_the_mean_age_that_are_promised(average):
    t = torch.arange(1, 4001, dtype=torch.float64)
    parts = share(average, t)
    assert parts[0] == 1
    kept = torch.cat([(1 - parts).flip(0).cumprod(0).flip(0)[1:], torch.ones(1).double()])
    weights = weights_of(average, 4000)
    torch.testing.assert_close(parts * kept, weights, rtol=1e-9, atol=1e-300)
    age = (weights * (4000 - t)).sum().item()
    assert age == pytest.approx(average * 3999 if average < 1 else average, rel=1e-9)


@pytest.mark.parametrize("average", KINDS)
@pytest.mark.parametrize("method", ["Muon", "Leon", "Pion"])
def test_average_is_its_twin_for_every_parameter(method, average):
    model = net(torch.float64)
    optimizer = build(model, method, average=average)
    seen = iterates(model, optimizer)
    ours = AveragedModel(model, multi_avg_fn=get_multi_avg_fn(average), use_buffers=True)
    before, zipped = values(model), zip(*seen, strict=True)
    for step in zipped:  # torch's own model, which is told the iterates
        with torch.no_grad():
            for p, value in zip(model.parameters(), step, strict=True):
                p.copy_(value)
        ours.update_parameters(model)
    with optimizer.averaged():
        for p, q, each in zip(model.parameters(), ours.module.parameters(), seen, strict=True):
            torch.testing.assert_close(p.detach(), twin(average, each), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(p.detach(), q.detach())
    assert same(model.parameters(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_a_float32_average(dtype):
    model = net(dtype)
    optimizer = build(model)
    for p, seen in zip(model.parameters(), iterates(model, optimizer), strict=True):
        average = optimizer.state[p]["average"]
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), twin(0.1, seen), rtol=1e-5, atol=1e-6)
    raw = values(model)
    with optimizer.averaged():
        assert same(model.parameters(), [x.to(dtype) for x in averages(model, optimizer)])
    assert same(model.parameters(), raw)
    wide = build(net(), average_dtype=torch.float64)
    assert all(s["average"].dtype == torch.float64 for s in wide.state.values())
    take(net(), wide, 0)


def test_complex_and_strided_parameters():
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    model.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    matrix = {"params": [model.weight], "axes": "r c c c"}
    rest = {"params": [model.bias, model.spectrum], "route": "adamw"}
    optimizer = nucleon.Muon([matrix, rest], average=0.5)
    for p, seen in zip(model.parameters(), iterates(model, optimizer, 3), strict=True):
        torch.testing.assert_close(optimizer.state[p]["average"], torch.stack(seen).mean(0))


def test_a_skipped_step_counts_and_enters_the_weights_that_stayed():
    model = net(torch.float64)
    optimizer = build(model, average=0.5)
    first = model[0].weight
    take(model, optimizer, 0)
    once = first.detach().clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert torch.equal(first, once)
    take(model, optimizer, 1)
    mean = (2 * once + first.detach()) / 3
    torch.testing.assert_close(optimizer.state[first]["average"], mean)


def test_frozen_and_late_parameters_share_the_weights_of_the_others():
    model = net(torch.float64)
    model.late = nn.Linear(4, 4, bias=False).double()
    frozen, added = model[2].weight.requires_grad_(False), model.late.weight
    optimizer = build(model[:3])
    seen = []
    for step in range(8):
        if step == 3:
            frozen.requires_grad_(True)
        if step == 5:
            optimizer.add_param_group({"params": [("added", added)], "route": "matrix"})
        take(model, optimizer, step)
        seen.append(values(model))
    for p, each in zip(model.parameters(), zip(*seen, strict=True), strict=True):
        average = optimizer.state[p]["average"]
        torch.testing.assert_close(average, twin(0.1, each), rtol=1e-12, atol=1e-14)


def test_tied_weights_and_two_optimizers_over_one_model():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    first = nucleon.Muon([model[1].weight], average=0.1)
    rest = {"params": [model[0].weight, model[2].bias], "route": "adamw"}
    second = nucleon.Leon([rest], average=5)
    for step in range(4):
        take(model, first, step)
        second.step()
    raw = copy.deepcopy(model.state_dict())
    with first.averaged(), second.averaged():
        whole = copy.deepcopy(model.state_dict())
        assert model[2].weight is model[0].weight
    with pytest.warns(UserWarning, match=r"2 trainable parameters, such as 0.weight, are not in"):
        mine = first.averaged_state_dict(model)
    assert torch.equal(mine["1.weight"], whole["1.weight"])
    assert torch.equal(mine["0.weight"], raw["0.weight"])
    assert same(model.state_dict().values(), raw.values())
    assert not torch.equal(whole["2.bias"], raw["2.bias"])
    assert torch.equal(whole["0.weight"], whole["2.weight"])


def test_averaged_restores_after_an_exception_and_refuses_what_would_mix_the_two():
    model = net()
    optimizer = build(model)
    take(model, optimizer, 0, 1, 2)
    raw, state = values(model), copy.deepcopy(optimizer.state_dict())
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        assert addresses == [p.data_ptr() for p in model.parameters()]
        assert not torch.equal(raw[0], model[0].weight)
        for forbidden in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.averaged().__enter__(),
            lambda: optimizer.averaged_state_dict(model),
            optimizer.restart_average,
            lambda: copy.deepcopy(optimizer),
        ):
            with pytest.raises(RuntimeError, match="inside averaged"):
                forbidden()
        raise ZeroDivisionError
    assert same(model.parameters(), raw)
    assert not differences(optimizer.state_dict(), state)
    take(model, optimizer, 3)


def test_averaged_state_dict_is_the_model_inside_averaged():
    model = net(torch.bfloat16)
    optimizer = build(model)
    before = optimizer.averaged_state_dict(model)  # no step yet: the model itself
    assert not differences(before, dict(model.state_dict()))
    take(model, optimizer, 0, 1, 2)
    saved = optimizer.averaged_state_dict(model)
    with optimizer.averaged():
        assert not differences(saved, dict(model.state_dict()))
        assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    net(torch.bfloat16).load_state_dict(saved)
    assert saved._metadata == model.state_dict()._metadata  # versions, which some modules read

    def halved(module, state, prefix, metadata):  # as torchtitan splits a fused weight
        state["0.first"], state["0.second"] = state.pop("0.weight").split([4, 5])

    model.register_state_dict_post_hook(halved)
    split = optimizer.averaged_state_dict(model)
    split["0.weight"] = torch.cat([split.pop("0.first"), split.pop("0.second")])
    assert not differences(split, saved)


@pytest.mark.parametrize("average", [0.1, 20])
@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_resume_is_bit_for_bit(average, way):
    model = net()
    optimizer = build(model, "Leon", average=average)
    take(model, optimizer, *range(4))
    if way == "state_dict":
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other = net()
        new = build(other, "Leon", average=average)
        new.load_state_dict(state)  # before the model, as some trainers do
        other.load_state_dict(weights)
    else:
        pair = (model, optimizer)
        other, new = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    take(model, optimizer, *range(4, 8))
    take(other, new, *range(4, 8))
    assert same(other.parameters(), model.parameters())
    assert same(averages(other, new), averages(model, optimizer))
    assert {int(new.state[p]["averaged"]) for p in other.parameters()} == {8}


def test_a_run_that_is_taken_back_repeats_itself():
    model = net()
    optimizer = build(model)
    take(model, optimizer, 0, 1, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        take(model, optimizer, 3, 4)
        ends.append([x.clone() for x in averages(model, optimizer)])
        assert optimizer.state[model[0].weight]["averaged"].item() == 5
    assert same(*ends)


def test_a_state_without_an_average_starts_it_and_one_too_many_is_left_out():
    model, other = net(torch.float64), net(torch.float64)
    plain, averaging = build(model, average=None), build(other, average=0.5)
    take(model, plain, 0, 1)
    take(other, averaging, *range(5))
    with pytest.warns(UserWarning, match="no average; average=0.5 starts") as caught:
        averaging.load_state_dict(plain.state_dict())
    assert [warning.filename for warning in caught] == [__file__]
    other.load_state_dict(model.state_dict())
    with averaging.averaged():
        assert torch.equal(other[0].weight, model[0].weight)  # nothing averaged yet
    seen = []
    for step in (2, 3):
        take(other, averaging, step)
        seen.append(other[0].weight.detach().clone())
    mean = torch.stack(seen).mean(0)
    torch.testing.assert_close(averaging.state[other[0].weight]["average"], mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.load_state_dict(averaging.state_dict())
    assert "average" not in plain.state[model[0].weight]
    with pytest.raises(RuntimeError, match=r"construct it with average=0\.1"):
        plain.averaged().__enter__()


def test_a_parameter_unfrozen_between_save_and_load_has_the_count_of_the_others():
    model, other = net(), net()
    model[2].weight.requires_grad_(False)
    optimizer, new = build(model), build(other)
    take(model, optimizer, 0, 1, 2)
    other.load_state_dict(model.state_dict())
    state = optimizer.state_dict()
    new.load_state_dict(state)
    assert new.state[other[2].weight]["averaged"].item() == 3
    assert torch.equal(new.state[other[2].weight]["average"], model[2].weight)


@pytest.mark.parametrize("steps", [0, 3])
def test_restart_forgets_weights_that_were_not_numbers(steps):
    """Nor does what the weights were before the first step leave a trace."""
    model = net()
    optimizer = build(model, average=0.5)
    take(model, optimizer, *range(steps))
    good = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.data.fill_(torch.nan)
    if steps:
        take(model, optimizer, steps)
        assert all(x.isnan().all() for x in averages(model, optimizer))
        optimizer.restart_average()
    else:
        optimizer = build(model, average=0.5)  # then the weights are loaded
    model.load_state_dict(good)
    take(model, optimizer, 4)
    assert same(model.parameters(), averages(model, optimizer))


@pytest.mark.parametrize("average", [0.0, 0.51, 0.99, -1, float("inf"), float("nan"), "f", True])
def test_bad_averages_say_what_to_write(average):
    with pytest.raises(ValueError, match=r"average must be None, a fraction .* average=0.1 suits"):
        build(net(), average=average)
    with pytest.raises(ValueError, match=r"average must be"):
        get_multi_avg_fn(average)


def test_it_is_an_option_of_the_optimizer_alone():
    weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(TypeError, match="a group of muon has no option 'average'"):
        nucleon.Muon([{"params": [weight], "average": 0.1}])
    with pytest.raises(TypeError, match="a group of muon has no option 'average'"):
        build(net(), overrides={"0.weight": {"average": 0.2}})
    with pytest.raises(TypeError, match="half precision would lose"):
        build(net(), average_dtype=torch.bfloat16)


@pytest.mark.parametrize("average", [0.1, 50])
def test_one_pass_updates_all_parameters_and_reads_its_share_on_the_device(average):
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    counts = []
    for depth in (2, 6):
        model, names = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), []
        optimizer = build(model, average=average)
        take(model, optimizer, 0, 1)
        with Calls():
            optimizer._averaging.update(optimizer.state, optimizer._worklist)
        counts.append(len(names))
        assert names.count("_foreach_lerp_") == 1
        assert not {"item", "_local_scalar_dense", "copy_"} & set(names), names
    assert counts[0] == counts[1] <= 8
