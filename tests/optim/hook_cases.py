"""Methods of one's own beside slow NumPy twins, on the device that a test names."""

import math

import numpy as np
import torch
import torch.distributed as dist

import nucleon
from nucleon.optim import MatrixOptimizer
from nucleon.optim.engines import reference
from optim.twins import Twin

LR, MOMENTUM, DECAY, STEPS = 0.05, 0.9, 0.1, 4
PLACES = {
    # Each is (shape, axes); without a hook of one's own the kernels would serve all on CUDA.
    "wide": ((64, 96), None),
    "tall": ((96, 64), None),
    "one": ((24, 64), None),
    "like it": ((24, 64), None),
    "stack": ((3, 24, 64), None),
    "cut": ((96, 192), "c (b=3 r)"),
}


class Clipped(MatrixOptimizer):
    """P: the singular values of S cut off at an option of its own."""

    name = "clipped"
    own_options = {"most": 1.0}  # noqa: RUF012

    def direction(self, total, smoothing, context):
        u, values, vt = torch.linalg.svd(total, full_matrices=False)
        return (u * values.clamp_max(context.options["most"]).unsqueeze(-2)) @ vt


class Resolvent(nucleon.Leon):
    """P = (SSᵀ + Λ + I)⁻¹S."""

    def direction(self, total, smoothing, context):
        return resolvent(total, smoothing, context)


def resolvent(total, smoothing, context):
    one = torch.eye(total.shape[-2], dtype=total.dtype, device=total.device)
    return torch.linalg.solve(total @ total.mT + smoothing + one, total)


class ClippedTwin(Twin):
    most = 0.5

    def direction(self, s):
        u, values, vt = np.linalg.svd(s, full_matrices=False)
        return (u * np.minimum(values, self.most)) @ vt


class ResolventTwin(Twin):
    def direction(self, s):
        return np.linalg.solve(s @ s.T + self.gram + np.eye(len(s)), s)


METHODS = {
    "of the base": (Clipped, {"most": 0.5}, ClippedTwin),
    "of Leon": (Resolvent, {}, ResolventTwin),
}


def matrices(name, x):
    """The matrices of a parameter, (b, rows, columns), written out for each of its axes."""
    if name == "cut":
        return x.reshape(96, 3, 64).permute(1, 2, 0)
    return x if x.ndim == 3 else x[None]


def exact(name, x):
    """Return a copy in NumPy's float64."""
    return matrices(name, x.detach().cpu()).numpy().astype(np.float64)


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return {
        name: (0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, (shape, _) in PLACES.items()
    }


class Run:
    """An optimizer of every place, and a twin for each of its matrices."""

    def __init__(self, method, device, dtype, **more):
        make, options, twin = METHODS[method] if isinstance(method, str) else method
        start = {name: 2 * x for name, x in gradients(99, dtype).items()}
        self.dtype = dtype
        self.params = {n: x.clone().to(device).requires_grad_() for n, x in start.items()}
        group = {"params": [*self.params.items()], "axes": [axes for _, axes in PLACES.values()]}
        self.optimizer = make([group], LR, momentum=MOMENTUM, weight_decay=DECAY, **options, **more)
        self.twins = {
            (name, i): twin(w.double(), LR, MOMENTUM, decay=DECAY)
            for name, x in start.items()
            for i, w in enumerate(matrices(name, x))
        }
        self.steps = 0

    def step(self, count=STEPS):
        for _ in range(count):
            given = gradients(self.steps, self.dtype)
            for name, param in self.params.items():
                param.grad = given[name].to(param.device)
            self.optimizer.step()
            for (name, i), twin in self.twins.items():
                twin.step(exact(name, given[name])[i], scale(twin))
            self.steps += 1

    def tolerance(self):
        """Return the error of a weight: rounding per step, and P by cond(SSᵀ + M̂ + I)."""
        sizes = [
            1 + np.linalg.norm(t.total, 2) ** 2 + np.linalg.norm(t.gram, 2)
            for t in self.twins.values()
        ]
        return self.steps * math.sqrt(192) * torch.finfo(self.dtype).eps * (1 + LR * max(sizes))

    def check(self):
        """Every weight is that of its twin."""
        for (name, i), twin in self.twins.items():
            found = exact(name, self.params[name])[i]
            assert np.abs(found - twin.w).max() <= self.tolerance(), name

    def engines(self):
        return {work.engine for work in self.optimizer._worklist.works}


def scale(twin):
    return math.sqrt(max(1, twin.w.shape[0] / twin.w.shape[1]))


# ------------------------------------------------------------------ what is to be true


def check_steps(device, method, dtype, **options):
    run = Run(method, device, dtype, **options)
    run.step()
    run.check()
    assert run.engines() == {reference}
    assert any(len(work.params) > 1 for work in run.optimizer._worklist.works)


def check_one_rank(device, method, dtype):
    """A direction that placement="owner" does not divide: matrices step as without ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_steps(device, method, dtype, placement="owner")
    finally:
        dist.destroy_process_group()


class Normalized(MatrixOptimizer):
    """P = S/‖S‖_F: 0/0 where S is zero."""

    name = "normalized"

    def direction(self, total, smoothing, context):
        return total / torch.linalg.matrix_norm(total, keepdim=True)


def check_resting(device):
    """A matrix without gradients comes to rest, whatever the hook makes of S = 0."""
    param = torch.ones(3, 4, 6, dtype=torch.float64, device=device, requires_grad=True)
    optimizer = Normalized([param], lr=0.1, momentum=0.5, weight_decay=0.5)
    for step in range(6):
        before, total = param.detach().clone(), optimizer.state[param]["total"].clone()
        param.grad = torch.ones_like(param)
        param.grad[1] = step == 0
        optimizer.step()
    state = optimizer.state[param]
    assert state["quiet"].tolist() == [0, 5, 0] and state["skipped"].tolist() == [0, 0, 0]
    assert torch.equal(state["total"][1], total[1] / 2)
    torch.testing.assert_close(param[1], before[1] * 0.95)  # the decay alone
    assert not torch.equal(param[0], before[0] * 0.95)
