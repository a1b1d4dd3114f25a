"""An optimizer whose every step is compared, matrix by matrix, with the float64 oracle."""

import math

import torch
from torch import Tensor

from soundness import oracle

KEPT = ("total", "gram", "quiet")


def matrices(x: Tensor) -> list[Tensor]:
    """The matrices of a 2-D or 3-D tensor, in float64 on the host, short side first."""
    wide = x.detach().double().cpu().reshape(-1, *x.shape[-2:])
    return list(wide.mT if x.shape[-2] > x.shape[-1] else wide)


def snapshot(optimizer, params) -> list[dict[str, Tensor]]:
    """Weights and state of each parameter, copied."""
    found = []
    for p in params:
        state = {name: value.detach().clone() for name, value in optimizer.state[p].items()}
        found.append({"weight": p.detach().clone(), **state})
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have equal bits, with the signs of zeros and NaNs."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


class Watched:
    """Steps of an optimizer over 2-D and 3-D parameters, each judged.

    Weights are set to zero before a step, so that they are −P after it, as exact as their dtype.
    """

    def __init__(self, make, shapes, dtype=torch.float32, device="cpu", **options):
        self.params = [
            torch.nn.Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in shapes
        ]
        self.optimizer = make(self.params, lr=1.0, scale="none", **options)
        self.dtype, self.steps, self.judged = dtype, 0, 0
        self.lengths: list[list[float]] = []
        """‖P‖_op of each matrix at each step."""

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    @property
    def states(self):
        return [self.optimizer.state[p] for p in self.params]

    def method(self, shape) -> str:
        """The one that "auto" stands for on this device."""
        chosen = self.group["method"]
        if chosen != "auto":
            return chosen
        fused = self.params[0].is_cuda and self.dtype != torch.float64 and min(shape[-2:]) >= 64
        return "half" if fused else "polar-express"

    def step(self, *gradients: Tensor | None) -> None:
        """One step with these gradients, one per parameter; None is a missing one."""
        with torch.no_grad():
            for p, g in zip(self.params, gradients, strict=True):
                p.zero_()
                p.grad = None if g is None else g.to(p).reshape(p.shape).clone()
        before = snapshot(self.optimizer, self.params)
        self.optimizer.step()
        self.steps += 1
        after, lengths = snapshot(self.optimizer, self.params), []
        for p, old, new in zip(self.params, before, after, strict=True):
            assert int(new["step"]) == int(old["step"]) + 1
            if p.grad is None:
                for name in ("weight", "skipped", *(k for k in KEPT if k in old)):
                    assert same_bits(old[name], new[name]), name
                lengths += [0.0] * old["quiet"].numel()
                continue
            lengths += self._judge(p, old, new)
        self.lengths.append(lengths)

    def quiet(self, steps: int) -> None:
        """So many steps without gradients."""
        for _ in range(steps):
            self.step(*(torch.zeros_like(p) for p in self.params))

    def quiet_unjudged(self, steps: int) -> None:
        """Check less: weights are finite and in the ball, and moments finite."""
        for _ in range(max(steps, 0)):
            with torch.no_grad():
                for p in self.params:
                    p.zero_()
                    p.grad = torch.zeros_like(p)
            self.optimizer.step()
            self.steps += 1
            lengths = []
            for p, state in zip(self.params, self.states, strict=True):
                assert all(state[name].isfinite().all() for name in KEPT if name in state)
                assert p.isfinite().all(), "weights that are not finite"
                wide = p.detach().double().cpu()
                norms = torch.linalg.matrix_norm(wide, 2) if wide.any() else wide.sum((-2, -1))
                most = 1 + oracle.contract(self.method(p.shape), self.dtype)
                rounding = torch.finfo(self.dtype).eps / 2 * torch.linalg.matrix_norm(wide)
                assert (norms <= most + rounding).all(), f"‖P‖_op = {norms.max():.6g}"
                lengths += norms.flatten().tolist()
            self.lengths.append(lengths)

    def _judge(self, param, old, new) -> list[float]:
        parts = {name: matrices(old[name]) for name in ("weight", "total", "gram") if name in old}
        after = {name: matrices(new[name]) for name in parts}
        counts = [
            (old[k].flatten().tolist(), new[k].flatten().tolist()) for k in ("quiet", "skipped")
        ]
        lengths = []
        for i, gradient in enumerate(matrices(param.grad)):
            mine = {name: (parts[name][i], after[name][i]) for name in parts}
            quiet, skipped = ((was[i], now[i]) for was, now in counts)
            found = oracle.expected(
                mine["total"][0],
                mine["gram"][0] if "gram" in mine else None,
                quiet[0],
                gradient,
                self.dtype,
                self.group,
            )
            lengths.append(self._judge_matrix(found, mine, quiet, skipped, param))
        return lengths

    def _judge_matrix(self, found, mine, quiet, skipped, param) -> float:
        self.judged += 1
        _, weight = mine["weight"]
        assert weight.isfinite().all(), "weights that are not finite"
        if skipped[1] > skipped[0]:
            assert found.skipped is not False, "skipped without need"
            assert skipped[1] == skipped[0] + 1
            assert quiet[1] == quiet[0]
            assert all(same_bits(was, now) for was, now in mine.values()), "a skip changed bits"
            return 0.0
        assert found.skipped is not True, "a step with what is not finite"
        assert quiet[1] == found.quiet, (quiet, found.quiet)
        self._judge_moments(found, mine)
        return self._judge_direction(found, -weight, self.method(param.shape))

    def _judge_moments(self, found, mine) -> None:
        limits = torch.finfo(oracle.work(self.dtype))
        held = torch.finfo(self.group["momentum_dtype"] or oracle.work(self.dtype))
        (_, total), (_, gram) = mine["total"], mine.get("gram", (None, None))
        assert total.isfinite().all()
        if found.faded:
            assert not total.any() and (gram is None or not gram.any()), "did not fade"
            return
        if found.faded is None and not total.any():
            return
        size = found.total.abs() + (found.total - self.group["momentum"] * mine["total"][0]).abs()
        near = (total - found.total).abs() <= 2 * held.eps * size + 2 * held.tiny
        assert near.all(), "Ĝ"
        if gram is None:
            return
        m, n = total.shape
        assert gram.isfinite().all()
        # On CUDA the gradients of M̂ are rounded to float16, on a CPU products to the work dtype.
        coarse = 2**-10 if self.method((m, n)) == "half" else (n + 8) * limits.eps
        size = max(found.gram.trace().item(), limits.tiny)
        gram, exact = gram / size, found.gram / size  # squares of the entries may overflow
        assert (gram - exact).norm() <= coarse + m * limits.tiny / size, "M̂"
        assert (gram - gram.mT).abs().max() <= coarse + m * limits.tiny / size, "M̂ is not symmetric"
        lowest = torch.linalg.eigvalsh((gram + gram.mT) / 2)[0].item()
        rounding = m * (coarse + self.steps * limits.eps + limits.tiny / size)
        assert lowest >= -rounding, f"λ_min(M̂)/Tr M̂ = {lowest:.3g}"

    def _judge_direction(self, found, p, method) -> float:
        if found.rests or found.faded:
            assert not p.any(), "moved while at rest"
            return 0.0
        norm = torch.linalg.matrix_norm(p, 2).item()
        # Rounding to the dtype of the weights moves each entry by eps/2 of itself.
        limits = torch.finfo(self.dtype)
        rounding = limits.eps / 2 * p.norm().item() + limits.smallest_normal * math.sqrt(p.numel())
        assert norm <= 1 + oracle.contract(method, self.dtype) + rounding, f"‖P‖_op = {norm:.6g}"
        if found.skipped is False and found.faded is False and self._is_exact():
            error = torch.linalg.matrix_norm(p - found.direction, 2).item()
            beta2 = self.group.get("beta2")
            decay = self.group["momentum"] ** 2 if beta2 is None else beta2
            most = oracle.direction_error(method, self.dtype, p.shape[-1], found.condition, decay)
            assert error <= most + rounding, f"‖P − exact‖_op = {error:.3g} > {most:.3g}"
        return norm

    def _is_exact(self) -> bool:
        """Return True if P is a function of Ĝ and M̂ alone; Pion's depends on noise."""
        return "samples" not in self.group or self.group["smoothing_scale"] == 0
