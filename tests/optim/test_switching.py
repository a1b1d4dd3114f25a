"""Switching optimizers in the middle of a run: moments by their definitions, and the loss."""

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim.migrate import convert, convert_checkpoint

BETA = 0.95


def stream(shape, rounds, noise=0.0, seed=0):
    """Gradients with a mean and independent noise, float64."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    draws = torch.randn((rounds, *shape), generator=generator, dtype=torch.float64)
    return mean + noise * draws


def run(optimizer, params, gradients):
    for each in gradients:
        for p in params:
            p.grad = each.reshape(p.shape).clone()
        optimizer.step()


def matrix(rows=4, columns=6):
    return nn.Parameter(torch.zeros(rows, columns, dtype=torch.float64))


def discounted(terms, rate):
    """Σ rate^(T−t) terms_t, summed by the definition."""
    powers = rate ** torch.arange(len(terms) - 1, -1, -1, dtype=torch.float64)
    return torch.einsum("t,t...->...", powers, terms)


# ------------------------------------------------------------------------- the right scale


class JordanMuon(torch.optim.Optimizer):
    """The state of Jordan's Muon of today: an average, and groups without Newton–Schulz options."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "momentum": BETA, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(p.grad, 1 - BETA)


class OldMuon(torch.optim.Optimizer):
    """That of 2024: a sum, and for what is no matrix an Adam with names of its own."""

    def __init__(self, params):
        adam = {"adamw_lr_ratio": 0.1, "adamw_betas": (0.9, 0.99), "adamw_eps": 1e-8, "adamw_wd": 0}
        shared = {"lr": 0.02, "momentum": BETA, "nesterov": True, "ns_steps": 5}
        super().__init__(params, {**shared, **adam})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["use_muon"] = p.ndim == 2
            if state["use_muon"]:
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(BETA).add_(p.grad)
                continue
            state["step"] = state.get("step", 0) + 1
            state.setdefault("moment1", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            state.setdefault("moment2", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)


OLD = {
    "torch.optim.Muon": lambda p: torch.optim.Muon(p, momentum=BETA),
    "Jordan's": JordanMuon,
    "Jordan's of 2024": OldMuon,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=BETA),
    "Adam": lambda p: torch.optim.Adam(p, betas=(BETA, 0.999)),
    "AdamW": lambda p: torch.optim.AdamW(p, betas=(BETA, 0.999)),
    "nucleon.Muon": lambda p: nucleon.Muon(p, momentum=BETA),
}


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("new", [nucleon.Leon, nucleon.Muon, nucleon.Pion])
def test_the_total_is_the_sum_of_the_gradients(old, new):
    weight = matrix()
    gradients = stream((4, 6), 30, noise=1.0)
    old_optimizer = OLD[old]([weight])
    run(old_optimizer, [weight], gradients)
    fresh = new([weight], momentum=BETA)
    convert(old_optimizer, fresh)
    total = fresh.state[weight]["total"]
    torch.testing.assert_close(total, discounted(gradients, BETA), rtol=1e-9, atol=1e-9)


class MuonOf2025(JordanMuon):
    """From February to May 2025: an average, under options that versions with a sum have too."""

    def __init__(self, params, **more):
        shared = {"lr": 0.02, "momentum": BETA, "nesterov": True, "ns_steps": 5}
        torch.optim.Optimizer.__init__(self, params, {**shared, **more})


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.01}])
def test_a_momentum_that_the_options_do_not_tell_is_asked_for(more):
    weight, gradients = matrix(), stream((4, 6), 30, noise=1.0)
    old = MuonOf2025([weight], **more)
    run(old, [weight], gradients)
    new = nucleon.Leon([weight], momentum=BETA)
    with pytest.raises(ValueError, match="momentum='average' if"):
        convert(old, new)
    with pytest.raises(ValueError, match="momentum must be one of"):
        convert(old, new, momentum="mean")
    assert new.state[weight]["total"].eq(0).all()
    convert(old, new, momentum="average")
    total = discounted(gradients, BETA)
    torch.testing.assert_close(new.state[weight]["total"], total, rtol=1e-9, atol=1e-9)
    convert(old, new, momentum="sum")
    torch.testing.assert_close(new.state[weight]["total"], 0.05 * total, rtol=1e-9, atol=1e-9)


def test_the_adam_inside_of_muon_of_2024_goes_on():
    model = nn.Linear(6, 4).double()
    old = OldMuon(list(model.parameters()))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        old.step()
    new = nucleon.Leon.for_model(model)
    assert convert(old, new)["bias"] == "kept: moments and step count"
    state = new.state[model.bias]
    assert torch.equal(state["exp_avg_sq"], old.state[model.bias]["moment2"])
    assert state["step"].item() == 3


def test_an_adam_whose_every_step_was_skipped_has_no_state():
    weight, other = matrix(), matrix()
    old = torch.optim.AdamW([weight, other])
    run(old, [weight, other], stream((4, 6), 2))
    old.state[weight]["step"].zero_()
    new = nucleon.Leon([("weight", weight), ("other", other)])
    assert convert(old, new)["weight"] == "begins at zero: no old state"
    assert new.state[weight]["gram"].eq(0).all()


def test_another_momentum_keeps_the_mean_gradient():
    """A constant gradient g has the total g/(1−β₁) at any β₁."""
    weight, constant = matrix(), stream((4, 6), 400)
    old = torch.optim.AdamW([weight], betas=(0.9, 0.999))
    run(old, [weight], constant)
    new = nucleon.Leon([weight], momentum=0.99)
    convert(old, new)
    torch.testing.assert_close(new.state[weight]["total"], constant[0] / 0.01, rtol=1e-9, atol=1e-9)


# --------------------------------------------------------------------------- the Gram matrix


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("beta2", [None, 0.98])
def test_the_gram_of_a_constant_gradient_is_exact_from_adamw(shape, beta2):
    weight, constant = matrix(*shape), stream(shape, 600)
    old = torch.optim.AdamW([weight], betas=(0.9, 0.99))
    run(old, [weight], constant)
    new = nucleon.Leon([weight], momentum=0.9, beta2=beta2)
    convert(old, new)
    g = constant[0] if shape[0] <= shape[1] else constant[0].T
    expected = g @ g.T / (1 - (0.81 if beta2 is None else beta2))
    torch.testing.assert_close(new.state[weight]["gram"][0], expected, rtol=1e-6, atol=1e-6)


def test_the_gram_has_the_diagonal_of_the_mean_square_from_adamw():
    """Row sums of v are the diagonal of the average GGᵀ, whatever the noise."""
    weight, gradients = matrix(), stream((4, 6), 50, noise=3.0)
    old = torch.optim.AdamW([weight], betas=(0.9, 0.99))
    run(old, [weight], gradients)
    new = nucleon.Leon([weight], momentum=0.9)
    convert(old, new)
    weights = discounted(torch.ones(50, dtype=torch.float64), 0.99)
    squares = discounted(gradients.square(), 0.99) / weights
    average = 0.1 * discounted(gradients, 0.9)
    expected = torch.maximum(squares, average.square()).sum(1) / (1 - 0.81)
    diagonal = new.state[weight]["gram"][0].diagonal()
    torch.testing.assert_close(diagonal, expected, rtol=1e-9, atol=1e-9)


def test_the_gram_from_muon_is_right_in_the_mean_over_noise():
    """E ĜĜᵀ = E M̂ for independent gradients of mean zero; 400 runs of 60 steps."""
    rounds, runs = 60, 400
    generator = torch.Generator().manual_seed(0)
    shape = torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64)
    guesses = []
    for _ in range(runs):
        weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        draws = shape * torch.randn((rounds, 3, 5), generator=generator, dtype=torch.float64)
        old = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
        old.state[weight]["momentum_buffer"] = discounted(draws, 0.9)
        new = nucleon.Leon([weight], momentum=0.9)
        convert(old, new)
        guesses.append(new.state[weight]["gram"][0].diagonal())
    found = torch.stack(guesses)
    expected = 5 * shape.squeeze().square() / (1 - 0.81)
    error = found.std(0) / runs**0.5
    assert ((found.mean(0) - expected).abs() <= 4 * error).all()  # 4σ: 1 in 5000 a row


@pytest.mark.parametrize("axes", [None, "r{1,3} c"])
def test_the_gram_of_leon_is_kept_by_pion(axes):
    """It is M̂ itself, Σβ₂^(T−t)GGᵀ, scaled to the other β₂ as averages are alike."""
    weight, gradients = matrix(), stream((4, 6), 40, noise=1.0)
    old = nucleon.Leon([weight], momentum=0.9, axes=axes)
    run(old, [weight], gradients)
    for beta2, factor in ((None, 1.0), (0.98, (1 - 0.81) / (1 - 0.98))):
        new = nucleon.Pion([weight], momentum=0.9, beta2=beta2, axes=axes)
        assert convert(old, new) == {"0": "momentum and Gram of leon"}
        rows = [slice(0, 4)] if axes is None else [slice(0, 1), slice(1, 4)]
        for i, mine in enumerate(rows):
            part = gradients[:, mine]
            expected = factor * discounted(part @ part.mT, 0.81)
            found = new.state[weight]["gram" if axes is None else f"gram.{i}"][0]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_each_block_of_a_fused_weight_has_its_own_gram():
    model = nn.MultiheadAttention(4, 2).double()
    old = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    old.step()
    new = nucleon.Leon.for_model(model, momentum=0.9)
    convert(old, new)
    g = model.in_proj_weight.grad
    gram = new.state[model.in_proj_weight]["gram"]
    for i in range(3):
        block = 0.1 * g[4 * i : 4 * i + 4]
        noise = (g[4 * i : 4 * i + 4].square() - block.square()).sum(1)
        expected = (block @ block.T + torch.diag(noise)) / (1 - 0.81)
        torch.testing.assert_close(gram[i], expected, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------ mid-run switch


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)).double()


def problem():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator, dtype=torch.float64)
    teacher = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x @ teacher)


def train(model, optimizer, steps, seed=0):
    x, y = problem()
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(256, (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(x), y).item())
    return torch.tensor(losses)


def old_pair(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3),
    ]


class Both:
    """Several optimizers stepped as one."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for o in self.optimizers:
            o.zero_grad()

    def step(self):
        for o in self.optimizers:
            o.step()


@pytest.mark.parametrize("old_is", ["muon", "adamw"])
def test_switching_in_the_middle_of_a_run_has_no_jump(old_is):
    """The loss after the switch stays below what it was, and below a start from scratch."""
    model = network()
    if old_is == "muon":
        olds = old_pair(model)
    else:
        olds = [torch.optim.AdamW(model.parameters(), lr=3e-3)]
    before = train(model, Both(olds), 100)
    new = nucleon.Leon.for_model(model, lr=0.01, aux_lr=3e-3, head=None)
    report = convert(olds, new)
    assert all("anew" not in said for said in report.values())
    after = train(model, new, 100, seed=1)
    wiggle = before[-20:].max() - before[-20:].min()
    assert after[:20].max() <= before[-20:].max() + wiggle  # no more than the old run moved by
    assert after[-1] < before[-1]
    scratch = network()
    alone = train(scratch, nucleon.Leon.for_model(scratch, lr=0.01, aux_lr=3e-3, head=None), 100)
    assert after[-1] < alone[-1]


def test_adamw_parameters_go_on_as_if_nothing_happened():
    """Where the new optimizer has AdamW too, the switch cannot be seen."""
    model, twin = network(), network()
    old = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.0)
    train(model, old, 5)
    train(twin, oracle, 5)
    new = nucleon.Leon.for_model(model, aux_lr=1e-3, overrides={"*": "adamw"})
    convert(old, new)
    train(model, new, 5, seed=2)
    train(twin, oracle, 5, seed=2)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)  # float64, ten steps


# ------------------------------------------------------------------------------- checkpoints


def state_of(optimizer):
    return [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_converts_like_the_optimizer(named, tmp_path):
    model = network()
    params = model.named_parameters() if named else model.parameters()
    old = torch.optim.AdamW(params)
    train(model, old, 3)
    torch.save(old.state_dict(), tmp_path / "old.pt")
    live, loaded = nucleon.Leon.for_model(model), nucleon.Leon.for_model(model)
    convert(old, live)
    convert_checkpoint(torch.load(tmp_path / "old.pt", weights_only=True), model, loaded)
    for a, b in zip(state_of(live), state_of(loaded), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_checkpoints_whose_order_cannot_be_told_are_refused():
    model = network()
    olds = old_pair(model)
    train(model, Both(olds), 2)
    new = nucleon.Leon.for_model(model)
    with pytest.raises(ValueError, match="which is which"):
        convert_checkpoint([o.state_dict() for o in olds], model, new)
    other = torch.optim.AdamW(reversed(list(model.parameters())))
    train(model, other, 1)
    with pytest.raises(ValueError, match="has shape"):
        convert_checkpoint(other.state_dict(), model, new)
    with pytest.raises(ValueError, match="lacks 'state'"):
        convert_checkpoint({"param_groups": []}, model, new)
    named = torch.optim.AdamW([("nowhere", p) for p in [next(model.parameters())]])
    train(model, named, 1)
    with pytest.raises(ValueError, match="'nowhere' is not in the model"):
        convert_checkpoint(named.state_dict(), model, new)


def test_bad_sources_are_named_and_change_nothing():
    weight = matrix()
    new = nucleon.Leon([weight])
    with pytest.raises(ValueError, match="no state"):
        convert(torch.optim.AdamW([weight]), new)
    with pytest.raises(ValueError, match="none of the optimizers"):
        old = torch.optim.Adagrad([weight])
        run(old, [weight], stream((4, 6), 1))
        convert(old, new)
    broken = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    broken.state[weight]["momentum_buffer"] = torch.full_like(weight, torch.nan)
    with pytest.raises(ValueError, match="must be finite"):
        convert(broken, new)
    with pytest.raises(ValueError, match="certify"):
        sound = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        run(sound, [weight], stream((4, 6), 1))
        convert(sound, nucleon.Leon([weight], gradient_bound=1.0, certify=True))
    assert new.state[weight]["total"].eq(0).all()


def test_what_cannot_be_kept_is_reported():
    model = network()
    old = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, old, 2)
    new = nucleon.Leon.for_model(model, head=None)
    report = convert(old, new)
    assert report["0.weight"] == "momentum of SGD; Gram from the momentum"
    assert "keeps no squares" in report["0.bias"]
