"""A job that goes on under another optimizer: hyperparameters, moments and schedule."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import nucleon
from nucleon import converted

BETA = 0.9


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 8))
    return model.double()


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def train(model, optimizers, steps=(0, 1, 2, 3)):
    for step in steps:
        give_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()


class PlainMuon(torch.optim.Optimizer):
    """The state of Jordan's script: an average for matrices, and Adam's moments for the rest."""

    def __init__(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        muon = {"lr": 0.03, "momentum": BETA, "weight_decay": 0.1, "use_muon": True}
        adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}
        groups = [{"params": matrices} | muon, {"params": others, "use_muon": False} | adam]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["use_muon"]:
                    state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(p.grad, 1 - BETA)
                    continue
                state["step"] = state.get("step", 0) + 1
                state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)


def torch_muon(model, **more):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = {"lr": 0.005, "momentum": BETA, "weight_decay": 0.1} | more
    return [
        torch.optim.Muon(matrices, **muon),
        torch.optim.AdamW(others, lr=2e-3, betas=(BETA, 0.95), eps=1e-6, weight_decay=0.05),
    ]


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(BETA, 0.99), weight_decay=0.02)]


OLD = {"AdamW": adamw, "torch's Muon": torch_muon, "the script": lambda model: [PlainMuon(model)]}


# --------------------------------------------------------------------------- hyperparameters

MATRIX = {  # lr, momentum, weight_decay, nesterov, scale
    "AdamW": (1e-3, BETA, 0.02, False, "match-adamw"),
    "torch's Muon": (0.005, BETA, 0.1, True, "spectral"),
    "the script": (0.03, BETA, 0.1, True, "spectral"),
}
REST = {  # lr, betas, eps, weight_decay
    "AdamW": (1e-3, (BETA, 0.99), 1e-8, 0.02),
    "torch's Muon": (2e-3, (BETA, 0.95), 1e-6, 0.05),
    "the script": (3e-4, (0.9, 0.95), 1e-10, 0.01),
}


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("method", [nucleon.Muon, nucleon.Leon, nucleon.Pion])
def test_hyperparameters_are_kept(old, method):
    model = network()
    olds = OLD[old](model)
    train(model, olds)
    matrix, rest = converted(olds, model, method, head=None).param_groups
    names = ("lr", "momentum", "weight_decay", "nesterov", "scale")
    assert tuple(matrix[name] for name in names) == MATRIX[old]
    assert tuple(rest[name] for name in ("lr", "betas", "eps", "weight_decay")) == REST[old]


def go_on(make, optimizer, **options):
    """Return a model, its oracle whose optimizers never stopped, and the weights in between."""
    model, twin = network(), network()
    olds, oracles = make(model), make(twin)
    train(model, olds)
    train(twin, oracles)
    new = converted(olds, model, optimizer, **options)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, [new], range(4, 8))
    train(twin, oracles, range(4, 8))
    return zip(model.parameters(), twin.parameters(), start, strict=True)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_next_steps_are_those_of_torch(adjust, nesterov):
    """Muon of torch goes on as ours: the same way to what its bf16 allows, AdamW exactly."""
    make = partial(torch_muon, adjust_lr_fn=adjust, nesterov=nesterov)
    for p, q, s in go_on(make, nucleon.Muon, head=None, method="muon"):
        if p.ndim == 2:  # bf16 has 8 bits, and each of five iterations rounds some products
            assert torch.linalg.norm(p - q) <= 0.05 * torch.linalg.norm(q - s)
        else:
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("maximize", [False, True])
def test_what_stays_with_adamw_goes_on_as_if_nothing_had_happened(maximize):
    options = {"lr": 1e-3, "weight_decay": 0.1, "maximize": maximize}
    make = lambda model: [torch.optim.AdamW(model.parameters(), **options)]  # noqa: E731
    for p, q, _ in go_on(make, nucleon.Leon, overrides={"*": "adamw"}):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)  # float64, eight steps


def test_what_is_given_wins():
    model = network()
    olds = torch_muon(model, ns_steps=6)
    train(model, olds)
    explicit = {"lr": 0.3, "aux_lr": 0.1, "aux": {"eps": 1e-9}, "weight_decay": 0.0}
    matrix, rest = converted(olds, model, nucleon.Leon, head=None, **explicit).param_groups
    names = ("lr", "weight_decay", "momentum", "iterations")
    assert [matrix[name] for name in names] == [0.3, 0.0, BETA, 6]
    assert [rest[name] for name in ("lr", "eps", "betas")] == [0.1, 1e-9, (BETA, 0.95)]


def test_a_parameter_without_an_old_optimizer_has_the_usual_options_of_its_route():
    model = network()
    old = torch.optim.AdamW(model[:2].parameters(), lr=0.3, weight_decay=0.1)
    train(model, [old])
    new = converted(old, model, nucleon.Leon, head=None)
    assert {p for g in new.param_groups for p in g["params"]} == {*model.parameters()}
    assert all((g["lr"], g["weight_decay"]) == (0.3, 0.1) for g in new.param_groups)


def test_groups_that_the_routing_mixes_are_kept_apart():
    """Layers share a glob; AdamW decays embeddings and not norms, and both go to AdamW here."""
    model = nn.Module()
    model.embed = nn.Embedding(10, 8).double()
    model.blocks = nn.ModuleList([network() for _ in range(3)])
    slow, fast = model.blocks[1][0].weight, [block[3].weight for block in model.blocks]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    others = {*model.parameters()} - {slow, *fast, *vectors}
    decays = [{"params": [*others], "weight_decay": 0.1}, {"params": [slow], "weight_decay": 0.3}]
    decays += [{"params": fast, "lr": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    old = torch.optim.AdamW(decays)
    train(model, [old])
    expected = {p: (g["lr"], g["weight_decay"]) for g in old.param_groups for p in g["params"]}
    wished = {"embed.weight": {"lr": 0.5}}
    new = converted(old, model, nucleon.Leon, head=None, overrides=wished)
    expected[model.embed.weight] = (0.5, 0.1)
    for group in new.param_groups:
        assert {expected[p] for p in group["params"]} == {(group["lr"], group["weight_decay"])}


# --------------------------------------------------------------------------------- schedules


SCHEDULES = {
    "LambdaLR": lambda *given: lr_scheduler.LambdaLR(
        given[0], lambda step: min(1.0, step / 5), *given[1:]
    ),
    "CosineAnnealingLR": lambda o, *last: lr_scheduler.CosineAnnealingLR(o, 20, 1e-5, *last),
    "OneCycleLR": lambda o, last=-1: lr_scheduler.OneCycleLR(
        o, 0.01, total_steps=20, last_epoch=last
    ),
}


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_by_its_last_epoch(schedule, at):
    """The oracle: the same schedule of the old optimizer, which never stopped."""
    model, twin = network(), network()
    (old,), (oracle,) = adamw(model), adamw(twin)
    before, going = SCHEDULES[schedule](old), SCHEDULES[schedule](oracle)
    for step in range(at):
        train(model, [old], [step])
        before.step()
        train(twin, [oracle], [step])
        going.step()
    if not at:
        train(model, [old], [0])  # a state to convert
    momenta = [old.param_groups[0]["betas"][0]]
    new = converted(old, model, nucleon.Leon, head=None)
    assert [g["lr"] for g in new.param_groups] == pytest.approx([old.param_groups[0]["lr"]] * 2)
    after = SCHEDULES[schedule](new, before.last_epoch - 1)
    for step in range(at, 15):
        expected = oracle.param_groups[0]
        assert [g["lr"] for g in new.param_groups] == pytest.approx([expected["lr"]] * 2, rel=1e-12)
        momenta.append(expected["betas"][0])
        assert new.param_groups[0]["momentum"] == pytest.approx(momenta[-1], rel=1e-12)
        train(model, [new], [step])
        after.step()
        train(twin, [oracle], [step])
        going.step()
    assert (max(momenta) > min(momenta)) is (schedule == "OneCycleLR")


def test_a_rate_that_is_given_is_the_one_that_the_schedule_starts_from():
    model = network()
    olds = torch_muon(model)
    schedules = [lr_scheduler.CosineAnnealingLR(old, 10) for old in olds]
    for step in range(4):
        train(model, olds, [step])
        for schedule in schedules:
            schedule.step()
    new = converted(olds, model, nucleon.Leon, head=None, lr=0.04)
    factor = olds[0].param_groups[0]["lr"] / 0.005
    assert factor < 0.7
    expected = pytest.approx([0.04 * factor, 2e-3 * factor], rel=1e-12)
    assert [g["lr"] for g in new.param_groups] == expected
    lr_scheduler.CosineAnnealingLR(new, 10, last_epoch=schedules[0].last_epoch - 1)
    assert [g["lr"] for g in new.param_groups] == expected


# ----------------------------------------------------------------------------------- moments


def stream(shape, rounds, noise=0.0):
    """Gradients with a mean and independent noise, float64."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    draws = torch.randn((rounds, *shape), generator=generator, dtype=torch.float64)
    return mean + noise * draws


def discounted(terms, rate):
    """Σ rate^(T−t) terms_t, summed by the definition."""
    powers = rate ** torch.arange(len(terms) - 1, -1, -1, dtype=torch.float64)
    return torch.einsum("t,t...->...", powers, terms)


def moments(gradients, make=adamw, method=nucleon.Leon, **options):
    """Return the state of a matrix with these gradients after the conversion."""
    rows, columns = gradients.shape[1:]
    model = nn.Linear(columns, rows, bias=False, dtype=torch.float64)
    (old,) = make(model)
    for gradient in gradients:
        model.weight.grad = gradient.clone()
        old.step()
    return converted(old, model, method, head=None, **options).state[model.weight]


def muon_alone(model):
    return [torch.optim.Muon(model.parameters(), momentum=BETA)]


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("method", [nucleon.Leon, nucleon.Muon, nucleon.Pion])
def test_the_total_is_the_sum_of_the_gradients(old, method):
    gradients = stream((4, 6), 30, noise=1.0)
    total = moments(gradients, muon_alone if "torch" in old else OLD[old], method)["total"]
    torch.testing.assert_close(total, discounted(gradients, BETA), rtol=1e-9, atol=1e-9)


def test_another_momentum_keeps_the_mean_gradient():
    """A constant gradient g has the total g/(1−β₁) at any β₁."""
    constant = stream((4, 6), 400)
    total = moments(constant, momentum=0.99)["total"]
    torch.testing.assert_close(total, constant[0] / 0.01, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("beta2", [None, 0.98])
def test_the_gram_of_a_constant_gradient_is_exact_from_adamw(shape, beta2):
    constant = stream(shape, 600)
    g = constant[0] if shape[0] <= shape[1] else constant[0].T
    expected = g @ g.T / (1 - (0.81 if beta2 is None else beta2))
    gram = moments(constant, beta2=beta2)["gram"][0]
    torch.testing.assert_close(gram, expected, rtol=1e-6, atol=1e-6)


def test_the_gram_has_the_diagonal_of_the_mean_square_from_adamw():
    """Row sums of v are the diagonal of the average GGᵀ, whatever the noise."""
    gradients = stream((4, 6), 50, noise=3.0)
    weights = discounted(torch.ones(50, dtype=torch.float64), 0.99)
    squares = discounted(gradients.square(), 0.99) / weights
    average = 0.1 * discounted(gradients, BETA)
    expected = torch.maximum(squares, average.square()).sum(1) / (1 - 0.81)
    diagonal = moments(gradients)["gram"][0].diagonal()
    torch.testing.assert_close(diagonal, expected, rtol=1e-9, atol=1e-9)


def test_the_gram_from_muon_is_right_in_the_mean_over_noise():
    """E ĜĜᵀ = E M̂ for independent gradients of mean zero; 400 runs of 60 steps."""
    rounds, runs = 60, 400
    generator = torch.Generator().manual_seed(0)
    shape = torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64)
    grams, model = [], nn.Linear(5, 3, bias=False, dtype=torch.float64)
    (old,) = muon_alone(model)
    for _ in range(runs):
        draws = shape * torch.randn((rounds, 3, 5), generator=generator, dtype=torch.float64)
        old.state[model.weight]["momentum_buffer"] = (1 - BETA) * discounted(draws, BETA)
        new = converted(old, model, nucleon.Leon, head=None)
        grams.append(new.state[model.weight]["gram"][0].diagonal())
    diagonals = torch.stack(grams)
    expected = 5 * shape.squeeze().square() / (1 - 0.81)
    error = diagonals.std(0) / runs**0.5
    assert ((diagonals.mean(0) - expected).abs() <= 4 * error).all()  # 4σ: 1 in 5000 a row


def test_each_block_of_a_fused_weight_has_its_own_gram():
    model = nn.MultiheadAttention(4, 2).double()
    (old,) = adamw(model)
    train(model, [old], [0])
    new = converted(old, model, nucleon.Leon, head=None)
    weight = model.in_proj_weight
    for g, gram in zip(weight.grad.split(4), new.state[weight]["gram"], strict=True):
        block = 0.1 * g
        noise = (g.square() - block.square()).sum(1)
        expected = (block @ block.T + torch.diag(noise)) / (1 - 0.81)
        torch.testing.assert_close(gram, expected, rtol=1e-6, atol=1e-9)


# --------------------------------------------------------------------------------- bad input


def with_nan(model):
    (old,) = adamw(model)
    train(model, [old], [0])
    old.state[model[0].weight]["exp_avg"][0, 0] = torch.nan
    return old


def stepped(make):
    def build(model):
        old = make(model.parameters())
        train(model, [old], [0])
        return old

    return build


BAD = {
    "no state": (lambda m: torch.optim.AdamW(m.parameters()), {}, "no state of any"),
    "SGD": (stepped(lambda p: torch.optim.SGD(p, momentum=0.9)), {}, "SGD .* cannot be converted"),
    "RMSprop": (stepped(torch.optim.RMSprop), {}, "RMSprop .* cannot be converted"),
    "NAdam": (stepped(torch.optim.NAdam), {}, "NAdam .* cannot be converted"),
    "Adam's decay": (stepped(lambda p: torch.optim.Adam(p, weight_decay=0.1)), {}, "adds it to"),
    "amsgrad": (stepped(lambda p: torch.optim.AdamW(p, amsgrad=True)), {}, "amsgrad"),
    "not finite": (with_nan, {}, r"exp_avg of 0\.weight must be finite"),
    "certify": (stepped(torch.optim.AdamW), {"certify": True}, "convert without it"),
    "option": (stepped(torch.optim.AdamW), {"speed": 3}, "no option 'speed'"),
}


@pytest.mark.parametrize(("make", "explicit", "message"), BAD.values(), ids=BAD)
def test_bad_sources_are_named(make, explicit, message):
    model = network()
    with pytest.raises((ValueError, TypeError), match=message):
        converted(make(model), model, nucleon.Leon, head=None, **explicit)


def test_what_has_no_state_begins_at_zero():
    model = network()
    model[0].requires_grad_(False)
    (old,) = adamw(model)
    give_gradients(model[3], 0)
    model[1].weight.grad = None
    old.step()
    old.state[model[3].weight]["step"].zero_()  # every step of it was skipped
    new = converted(old, model, nucleon.Leon, head=None)
    assert model[0].weight not in new.state
    assert new.state[model[1].weight]["exp_avg"].eq(0).all()
    assert new.state[model[3].weight]["gram"].eq(0).all()
    assert new.state[model[3].bias]["exp_avg"].abs().max() > 0


def test_new_layers_join_the_groups_of_the_old_ones():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    (old,) = adamw(model)
    give_gradients(model, 0)
    old.step()
    model.extend([nn.Linear(8, 8), nn.LayerNorm(8)])
    new = converted(old, model, nucleon.Muon, head=None)
    assert [len(group["params"]) for group in new.param_groups] == [2, 6]
    fresh = nucleon.Muon.for_model(model, head=None)
    fresh.load_state_dict(new.state_dict())
