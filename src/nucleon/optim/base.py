"""The optimizer behind Muon, Pion and Leon: moments of the gradient, one hook, a weight update.

For each matrix W (m×n, transposed when tall) and its gradient G, a step is

    Ĝ ← β₁Ĝ + G          M̂ ← β₂M̂ + GGᵀ          (sums, not averages)
    S = Ĝ, or β₁Ĝ + G with `nesterov`
    P = direction(S, Λ),   Λ = c(G_max² β₁⁻² I + M̂),   c = `smoothing_scale`
    W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W

and the three methods differ only in `direction`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon import _checks, moments, noise
from nucleon.linalg._precision import exact_products
from nucleon.optim import certify, diagnostics, options, stacks
from nucleon.optim.stacks import Stack
from nucleon.potentials import Admissibility
from nucleon.regret import Certificate

SCHEMA = 1
EXPONENTIAL_STREAM, _ROUNDING_SEED = -1, 0x5EED  # parameters have the streams 0, 1, 2, …
SLICES = 1 << 20  # streams are parameter·2²⁰ + slice


States = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Situation:
    """What a direction may depend on besides the moments."""

    group: Mapping[str, Any]
    """The options of the parameter group."""
    stream: Tensor
    """(b,) int64: the identity of each matrix, for noise."""
    step: Tensor
    """0-d int64: the number of this step."""


class MatrixOptimizer(Optimizer, ABC):
    """Options, state and weight update shared by the three methods; see the module's equations."""

    name: ClassVar[str]
    has_gram: ClassVar[bool]
    theorem: ClassVar[str]
    uncertified: ClassVar[str | None]
    """Why no run of the method can be certified; None where it can."""

    def __init__(self, params: Any, given: Mapping[str, Any], **own: Any) -> None:
        unknown = sorted(set(given) - set(options.DEFAULTS))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} has no option {', '.join(map(repr, unknown))}; its options "
                f"are {', '.join(sorted([*own, *options.DEFAULTS]))}"
            )
        tag = f"{self.name}/{SCHEMA}"
        super().__init__(params, {**options.DEFAULTS, **given, **own, "nucleon": tag})

    @abstractmethod
    def _direction(self, total: Tensor, smoothing: Tensor, situation: Situation) -> Tensor:
        """P (b, m, n) from S (b, m, n) and Λ (b, m, m), m ≤ n: the hook, free of host syncs.

        A method without a Gram is given an empty smoothing.
        """

    @abstractmethod
    def admissibility(self, group: Mapping[str, Any], m: int, n: int) -> Admissibility | None:
        """(α, β) of the method's potential for m×n matrices; None where it has none."""

    def smoothing_scale(self, group: Mapping[str, Any], m: int, n: int) -> float:
        """The factor c = 1/η² in Λ = c(G²β₁⁻²I + M̂) for m×n matrices."""
        return group["smoothing_scale"]

    @abstractmethod
    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise on a bad option of the method itself; the shared ones are checked before."""

    # ------------------------------------------------------------------ parameters and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options and parameters of a group, then add it with its state, created now."""
        group = {**self.defaults, **param_group}
        self._check_group(group)
        params = group["params"]
        if isinstance(params, Set):
            raise TypeError("params must be ordered, got a set; pass a list")
        params = [params] if isinstance(params, Tensor) else list(params)
        _check_params(params, group["lr"])
        param_group["params"] = params
        super().add_param_group(param_group)
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        for index, param in enumerate(self.param_groups[-1]["params"], start=first):
            self.state[param] = self._new_state(param, index, self.param_groups[-1])

    def _check_group(self, group: dict[str, Any]) -> None:
        foreign = sorted((options.OF_SOME_METHOD - set(self.defaults)) & set(group))
        if foreign:
            raise TypeError(f"{self.name} has no option {', '.join(map(repr, foreign))}")
        options.check(group)
        self._check_options(group)

    def _new_state(self, param: Tensor, index: int, group: Mapping[str, Any]) -> dict[str, Tensor]:
        count, short = stacks.matrix_count(param), min(param.shape[-2:])
        wide = _checks.work_dtype(param.dtype)
        slices = torch.arange(count, device=param.device)
        # A late group counts from the same step as the others: Exp(1) lengths are shared by all.
        steps = (s["step"].to(param.device, copy=True) for s in self.state.values() if "step" in s)
        state: dict[str, Tensor] = {
            "step": next(steps, torch.zeros((), dtype=torch.int64, device=param.device)),
            "skipped": torch.zeros_like(slices),
            "stream": slices + index * SLICES,
            "total": torch.zeros_like(param, dtype=group["momentum_dtype"] or wide).detach(),
        }
        if self.has_gram:
            state["gram"] = torch.zeros((count, short, short), device=param.device, dtype=wide)
        return state | (certify.new_state(param, wide) if group["certify"] else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same method, shapes and schema; refuse any other, changing nothing.

        State keeps the dtype it was saved in: torch's cast to the parameter's dtype would round
        the float32 moments of a bf16 parameter.
        """
        # The outermost hooks see what the user's own hooks make of the state, and of its loading.
        final: list[dict[str, Any]] = []

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            self._check_state_dict(given)
            final.append(given)

        def restore(_: Optimizer) -> None:
            for saved, group in zip(final[0]["param_groups"], self.param_groups, strict=True):
                for key, param in zip(saved["params"], group["params"], strict=True):
                    for name, value in final[0]["state"][key].items():
                        self.state[param][name] = value.to(device=param.device, copy=True)

        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        missing = {"param_groups", "state"} - set(state_dict)
        if missing:
            raise ValueError(f"state_dict lacks {sorted(missing)}; pass what state_dict() returned")
        groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in groups]
        if sizes != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"state_dict has groups of {sizes} parameters, this optimizer of "
                f"{[len(g['params']) for g in self.param_groups]}; the models differ"
            )
        tag = f"{self.name}/{SCHEMA}"
        for saved, group in zip(groups, self.param_groups, strict=True):
            if saved.get("nucleon") != tag:
                raise ValueError(
                    f"state_dict is of {saved.get('nucleon', 'another optimizer')!r}, this is "
                    f"{tag!r}; load it into the optimizer that wrote it, or convert it"
                )
            absent = sorted(set(self.defaults) - set(saved))
            if absent:
                raise ValueError(f"state_dict lacks the options {absent}; it is damaged")
            if saved["certify"] != group["certify"]:
                raise ValueError(
                    f"state_dict was saved with certify={saved['certify']}, this optimizer has "
                    f"certify={group['certify']}; construct it alike"
                )
            self._check_group(saved)
            for key, param in zip(saved["params"], group["params"], strict=True):
                _check_saved(key, state_dict["state"].get(key, {}), self.state[param])

    # ------------------------------------------------------------------ looking at it

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """What the optimizer is doing to each matrix, as a flat dict; synchronizes once.

        Keys are "{optimizer}/{parameter}/{quantity}", with the parameter's name where it was given
        one, else its index; for a 3-D parameter "{parameter}.{slice}". The direction P is that of
        the present state, S = Ĝ. Quantities: `update_norm` ‖P‖_op, `smoothing_share`
        Tr Λ/Tr(ĜĜᵀ + Λ), `cosine_to_muon` of P and polar(Ĝ), `update_ratio` lr·scale·‖P‖_F/‖W‖_F,
        `skipped` steps.
        """
        return diagnostics.collect(self)

    @torch.no_grad()
    def certificates(self) -> dict[str, Certificate]:
        """The discounted regret of each parameter beside its bound, radius 1; synchronizes.

        Only groups with certify=True keep what is needed. A 3-D parameter has one entry a matrix.
        """
        return certify.certificates(self)

    def stacks_of(
        self, group: Mapping[str, Any], params: Iterable[Tensor]
    ) -> list[tuple[Stack, States]]:
        """Stacks of some parameters of a group, each with the state of its pieces, in order."""
        built = stacks.build(params, group["largest_stack"])
        return [(stack, [self.state[piece.param] for piece in stack.pieces]) for stack in built]

    def directions(
        self, stack: Stack, states: States, group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(S, Λ, P) of the present state, S = Ĝ, each (b, …); Λ is empty without a Gram."""
        dtype = _checks.work_dtype(stack.pieces[0].param.dtype)
        with exact_products(states[0]["total"].device):
            total = stack.gather((s["total"] for s in states), dtype)
            gram = self._gather_gram(stack, states)
            smoothing = self._smoothing(stack, gram, group)
            situation = _situation(stack, states, group)
            return total, smoothing, self._direction(total, smoothing, situation)

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss, if given one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            if not group["params"]:
                continue
            torch._foreach_add_([self.state[p]["step"] for p in group["params"]], 1)
            with exact_products(group["params"][0].device):
                active = [p for p in group["params"] if p.grad is not None]
                for stack, states in self.stacks_of(group, active):
                    self._update(stack, states, group)
        return loss

    def _update(self, stack: Stack, states: States, group: dict[str, Any]) -> None:
        params = [piece.param for piece in stack.pieces]
        dtype = _checks.work_dtype(params[0].dtype)
        momentum: float = group["momentum"]
        gradient = stack.gather([cast(Tensor, p.grad) for p in params], dtype)
        if group["maximize"]:
            gradient = -gradient
        old = stack.gather([s["total"] for s in states], dtype)
        old_gram = self._gather_gram(stack, states)
        total = moments.accumulate_total(old, gradient, momentum)
        gram = self._advance(old_gram, gradient, group)

        # Skipping is arithmetic, not a branch: the host never learns which matrices it concerns. A
        # gradient that is not finite shows in the total, one whose square is not in the Gram.
        finite = torch.linalg.vector_norm(total, ord=torch.inf, dim=(-2, -1)).isfinite()  # (b,)
        if self.has_gram:
            finite = finite & gram.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
            gram = torch.where(finite[:, None, None], gram, old_gram)
        total = torch.where(finite[:, None, None], total, old)

        situation = _situation(stack, states, group)
        ahead = total
        if group["nesterov"] or group["certify"]:
            gradient = torch.where(finite[:, None, None], gradient, 0.0)
            ahead = momentum * total + gradient if group["nesterov"] else total
        direction = self._direction(ahead, self._smoothing(stack, gram, group), situation)

        if group["certify"]:
            certify.record(stack, states, gradient, direction, finite, group)
        totals, oks = stack.split(total), stack.split(finite)
        for piece, state, new, ok in zip(stack.pieces, states, totals, oks, strict=True):
            piece.view(state["total"]).copy_(new)
            piece.own(state["skipped"]).add_(~ok)
        if self.has_gram:
            for piece, state, new in zip(stack.pieces, states, stack.split(gram), strict=True):
                piece.own(state["gram"]).copy_(new)
        self._write(stack, direction, finite, situation)

    def _gather_gram(self, stack: Stack, states: States) -> Tensor:
        if not self.has_gram:
            return torch.empty(0, device=states[0]["total"].device)
        return stack.gather_own([s["gram"] for s in states])

    def _advance(self, gram: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not self.has_gram:
            return gram
        discount = group["momentum"] if group["beta2"] is None else math.sqrt(group["beta2"])
        return moments.accumulate_gram(gram, gradient, discount)

    def _smoothing(self, stack: Stack, gram: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not self.has_gram:
            return gram
        scale = self.smoothing_scale(group, *sorted(stack.pieces[0].param.shape[-2:]))
        return moments.smoothing(
            gram,
            gradient_bound=group["gradient_bound"],
            eta=scale**-0.5 if scale else math.inf,
            discount=group["momentum"] or 1.0,  # without momentum there is no bound to divide
        )

    def _write(self, stack: Stack, direction: Tensor, finite: Tensor, at: Situation) -> None:
        """W ← W − lr·s·scale·P − lr·wd·W, where the step was not skipped."""
        group, lr = at.group, at.group["lr"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        length = self._random_length(at, direction) if group["steps"] == "exponential" else 1.0
        scales = [options.scale_factor(group["scale"], *p.param.shape[-2:]) for p in stack.pieces]
        change = direction * (lr * length * scales[0])
        for scale, part in zip(scales, stack.split(change), strict=True):
            if scale != scales[0]:  # tall and wide matrices share a stack
                part.mul_(scale / scales[0])
        rounds = group["stochastic_rounding"] and stack.pieces[0].param.dtype == torch.bfloat16
        weights = direction  # gathered only where the update reads them
        if group["weight_decay"] or rounds:
            weights = stack.gather([p.param for p in stack.pieces], direction.dtype)
        if group["weight_decay"]:
            decay = lr * group["weight_decay"] * weights
            change = change + (decay * (weights * direction > 0) if group["cautious"] else decay)
        change = torch.where(finite[:, None, None], change, 0.0)
        if rounds:
            new = self._round_stochastically(weights - change, at)
            for piece, part in zip(stack.pieces, stack.split(new), strict=True):
                piece.view(piece.param).copy_(part)
            return
        for piece, part in zip(stack.pieces, stack.split(change), strict=True):
            piece.view(piece.param).sub_(part)

    def _random_length(self, at: Situation, like: Tensor) -> Tensor:
        """Draw s ~ Exp(1), one for all matrices of a step: the lemma scales the whole update."""
        return noise.exponential(
            (),
            seed=at.group["seed"],
            stream=EXPONENTIAL_STREAM,
            step=at.step,
            dtype=like.dtype,
            device=like.device,
        )

    def _round_stochastically(self, weights: Tensor, at: Situation) -> Tensor:
        """float32 → bf16, up or down with probabilities that make the mean exact."""
        dither = noise.uniform(
            tuple(weights.shape),
            seed=at.group["seed"] ^ _ROUNDING_SEED,
            stream=at.stream,
            step=at.step,
            device=weights.device,
            dtype=torch.float32,
        )
        # 0 … 65535, each as likely: the bits that bf16 lacks carry with their own probability.
        low = (dither * 65536.0).to(torch.int32).clamp_max(65535)
        return ((weights.view(torch.int32) + low) & -65536).view(torch.float32)

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if group["certify"] and "played" not in self.state[param]:
                    raise ValueError(
                        "certify was switched on during the run; pass certify=True when the group "
                        "is added, so that its regret is kept from the start"
                    )
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{self.name} takes dense gradients, a parameter of shape "
                        f"{tuple(param.shape)} has layout {param.grad.layout}; "
                        f"use sparse=False or another optimizer for it"
                    )
        strict = [g for g in self.param_groups if g["nonfinite"] == "raise"]
        for param in chain.from_iterable(g["params"] for g in strict):
            if param.grad is not None and not torch.isfinite(param.grad).all():
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} is not finite; "
                    f"nonfinite='skip' would leave it out of this step"
                )


def _situation(stack: Stack, states: States, group: Mapping[str, Any]) -> Situation:
    return Situation(group, stack.gather_own([s["stream"] for s in states]), states[0]["step"])


def _check_saved(key: object, found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Raise unless a saved state has the entries, shapes and kinds of numbers of `expected`."""
    for name in sorted(set(found) ^ set(expected)):
        raise ValueError(
            f"state_dict {'lacks' if name in expected else 'has an unknown'} {name!r} for "
            f"parameter {key}; it is damaged or of another version"
        )
    for name, own in expected.items():
        value = found[name]
        if not isinstance(value, Tensor) or value.is_floating_point() != own.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"state_dict holds {name!r} of type {kind} for parameter {key}, expected "
                f"{own.dtype}; it is damaged"
            )
        if value.shape != own.shape:
            raise ValueError(
                f"state_dict holds {name!r} of shape {tuple(value.shape)} for parameter {key}, "
                f"expected {tuple(own.shape)}; the models differ"
            )


def _check_params(params: Iterable[object], lr: float | Tensor) -> None:
    devices: set[torch.device] = set()
    seen: set[int] = set()
    for item in params:
        name, param = (
            cast(tuple[str, object], item) if isinstance(item, tuple) else ("params", item)
        )
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} must hold tensors, got {type(param).__name__}")
        if param.dtype not in _checks.REAL_DTYPES:
            raise TypeError(
                f"{name} has dtype {param.dtype}; float16, bfloat16, float32 and float64 are "
                f"supported"
            )
        if param.ndim not in (2, 3):
            raise ValueError(
                f"{name} has shape {tuple(param.shape)}; only 2-D matrices and 3-D stacks of "
                f"matrices are supported, give the others to AdamW"
            )
        if id(param) in seen:
            raise ValueError(f"{name} is given twice in one group; pass each parameter once")
        seen.add(id(param))
        devices.add(param.device)
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of one group are on several devices ({sorted(map(str, devices))}); "
            f"make one group per device"
        )
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and devices - {lr.device}:
        raise ValueError(
            f"lr is on {lr.device}, the parameters are on {sorted(map(str, devices))}; move lr "
            f"there or to the CPU"
        )
