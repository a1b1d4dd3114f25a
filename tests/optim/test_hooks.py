"""A direction of one's own runs as written, with all that the base class has around it."""

import pytest
import torch

import nucleon
from nucleon.optim import of_potential
from nucleon.optim.engines.work import facts_of
from optim import hook_cases as cases

CPU = torch.device("cpu")
every = pytest.mark.parametrize("method", cases.METHODS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
checks = pytest.mark.parametrize("check", [cases.check_steps, cases.check_one_rank])


@checks
@dtypes
@every
def test_a_direction_of_ones_own(check, dtype, method):
    check(CPU, method, dtype)


def test_what_a_direction_makes_of_a_matrix_that_rests_is_not_used():
    cases.check_resting(CPU)


SHAPES = {
    "transposed": (lambda s: s.mT, r"\(3, 6, 4\)"),
    "of one matrix": (lambda s: s[0], r"\(4, 6\)"),
    "of one entry": (lambda s: s[:, :1, :1], r"\(3, 1, 1\)"),
    "turned": (lambda s: s.transpose_(1, 2), r"\(3, 6, 4\)"),
    "none": (lambda s: None, "NoneType"),
    "of NumPy": (lambda s: s.numpy(), "ndarray"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_direction_of_another_shape_is_refused(case):
    """Before Ĝ, M̂ and the weights of its stack have changed, and in diagnostics too."""
    hook, said = SHAPES[case]
    said = rf"Bad.direction returned {said} for S of the shape \(3, 4, 6\)"
    bad = type("Bad", (nucleon.Leon,), {"direction": lambda self, s, *_: hook(s)})
    param = torch.zeros(3, 4, 6, requires_grad=True)
    optimizer = bad([param])
    param.grad = torch.ones(3, 4, 6)
    for call in (optimizer.step, optimizer.diagnostics):
        with pytest.raises(ValueError, match=said):
            call()
    state = optimizer.state[param]
    assert not any(x.any() for x in (param, state["total"], state["gram"], state["quiet"]))


def test_a_direction_may_write_into_its_arguments():
    class Scribbling(nucleon.Leon):
        def direction(self, total, smoothing, context):
            found = super().direction(total, smoothing, context)
            total.fill_(torch.nan)
            smoothing.fill_(torch.nan)
            return found

    figures = []
    for make in (Scribbling, nucleon.Leon):
        params = [torch.zeros(4, 6, requires_grad=True) for _ in range(2)]
        optimizer, generator = make(params), torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(4, 6, generator=generator)
            optimizer.step()
        figures.append((optimizer.diagnostics(), [param.tolist() for param in params]))
    assert figures[0] == figures[1]


def zero(self, total, smoothing, context):
    return torch.zeros_like(total)


def test_what_a_class_must_say_is_asked_for():
    with pytest.raises(ValueError, match=r"kernel must be one of .*got 'nonsense'"):
        of_potential(kernel="nonsense")


@pytest.mark.parametrize("to", ["body", "mixin", "class", "instance"])
def test_facts_belong_to_the_function(to):
    """A subclass keeps those of the direction that it inherits; any other function has none."""
    param = torch.zeros(4, 6, requires_grad=True)
    bases = (type("Mixin", (), {"direction": zero}), nucleon.Leon)
    same = type("Same", (nucleon.Leon,), {"smoothing_scale": lambda *given: 2.0})
    assert facts_of(same([param])) == facts_of(nucleon.Leon([param]))
    assert facts_of(same([param])).theorem.endswith("of Theorem 4.2, discounted")
    other = type("Other", bases if to == "mixin" else bases[1:], {})
    if to == "body":
        other = type("Other", bases[1:], {"direction": zero})
    optimizer = other([param])
    if to == "class":
        other.direction = zero
    if to == "instance":
        optimizer.direction = zero.__get__(optimizer)
    assert facts_of(optimizer) == of_potential()
    assert facts_of(optimizer).refusal == "the optimizer names no theorem"


def test_a_direction_of_ones_own_is_explained_and_certified_as_what_it_is():
    class Claimed(nucleon.Leon):
        direction = of_potential(theorem="Theorem C")(lambda *given: cases.resolvent(*given[1:]))

    param = torch.zeros(4, 6, requires_grad=True)
    for make, how, theorem in (
        (nucleon.Leon, "leon/polar-express", "Theorem 3.2 with the constants of Theorem 4.2"),
        (Claimed, "leon", "Theorem C"),
        (cases.Clipped, "clipped", "none"),
    ):
        optimizer = make([param], certify=True)
        assert optimizer.explain().rows[0].optimizer == how
        param.grad = torch.ones(4, 6)
        optimizer.step()
        (certificate,) = optimizer.certificates().values()
        assert certificate.theorem.startswith(theorem)
