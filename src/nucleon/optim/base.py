"""The optimizer behind Muon, Pion and Leon: moments of the gradient, one hook, a weight update.

For each matrix W (m×n, transposed when tall) and its gradient G, a step is

    Ĝ ← β₁Ĝ + G          M̂ ← β₂M̂ + GGᵀ          (sums, not averages)
    S = Ĝ, or β₁Ĝ + G with `nesterov`
    P = direction(S, Λ),   Λ = c(G_max² β₁⁻² I + M̂),   c = `smoothing_scale`
    W ← W − lr·s·scale(m, n)·P − lr·`weight_decay`·W

and the three methods differ only in `direction`. Groups with rule="adamw" take AdamW's step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon import _checks, moments, noise
from nucleon.linalg._precision import exact_products
from nucleon.optim import adamw, certify, diagnostics, options, schema, stacks
from nucleon.optim.stacks import Stack
from nucleon.potentials import Admissibility
from nucleon.regret import Certificate

if TYPE_CHECKING:
    from nucleon.optim import routing

EXPONENTIAL_STREAM, _ROUNDING_SEED = -1, 0x5EED  # matrices have streams ≥ 0

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
        tag = f"{self.name}/{schema.VERSION}"
        super().__init__(params, {**options.DEFAULTS, **given, **own, "nucleon": tag})

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float | Tensor = 0.02,
        *,
        aux_lr: float | Tensor = 3e-4,
        overrides: "Mapping[str, routing.Override] | None" = None,
        **given: Any,
    ) -> Self:
        """One optimizer for a whole model: its matrices by this method, the rest by AdamW.

        Args:
            model: its parameters are routed by the module that holds them, see `explain`.
            lr: learning rate of the matrices (0.02).
            aux_lr: learning rate of the parameters that go to AdamW (3e-4).
            overrides: {glob over parameter names: a route, or options of its own} (None).
            given: options of the method, and those of `nucleon.optim.routing.for_model`.
        """
        from nucleon.optim import routing

        return routing.for_model(cls, model, lr=lr, aux_lr=aux_lr, overrides=overrides, **given)

    def explain(self) -> "routing.Explanation":
        """Which parameter goes where, and why: a table that prints, and exports to a dict."""
        from nucleon.optim import routing

        return routing.explain(self)

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
        own = adamw.DEFAULTS if param_group.get("rule") == "adamw" else {}
        group = {**self.defaults, **own, **param_group}
        self._check_group(group)
        params = schema.parameters(group)
        axes = schema.specs(group["axes"], len(params))
        if group["rule"] == "matrix":
            schema.check_matrices(params, axes)
        param_group.update({**own, **param_group, "params": params, "axes": axes})
        super().add_param_group(param_group)
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        added = self.param_groups[-1]
        for index, (param, spec) in enumerate(zip(added["params"], axes, strict=True), start=first):
            self.state[param] = self._new_state(param, spec, index, added)

    def _check_group(self, group: dict[str, Any]) -> None:
        foreign = sorted((options.OF_SOME_METHOD - set(self.defaults)) & set(group))
        if foreign:
            raise TypeError(f"{self.name} has no option {', '.join(map(repr, foreign))}")
        options.check(group)
        if group["rule"] == "adamw":
            adamw.check(group)
        else:
            self._check_options(group)

    def _new_state(
        self, param: Tensor, spec: str | None, index: int, group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if group["rule"] == "adamw":
            return adamw.new_state(param, group)
        # A late group counts from the same step as the others: Exp(1) lengths are shared by all.
        step = next((s["step"] for s in self.state.values() if "total" in s), None)
        return schema.new_state(param, spec, index, step, group, has_gram=self.has_gram)

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
        schema.check_state_dict(state_dict, self.param_groups, self.state, self.defaults)
        for saved in state_dict["param_groups"]:
            self._check_group(saved)

    # ------------------------------------------------------------------ looking at it

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """What the optimizer is doing to each matrix, as a flat dict; synchronizes once.

        Keys are "{optimizer}/{parameter}/{quantity}", with the parameter's name where it was given
        one, else its index; where it holds several matrices "{parameter}.{matrix}". The direction
        P is that of the present state, S = Ĝ. Quantities: `update_norm` ‖P‖_op, `smoothing_share`
        Tr Λ/Tr(ĜĜᵀ + Λ), `cosine_to_muon` of P and polar(Ĝ), `update_ratio` lr·scale·‖P‖_F/‖W‖_F,
        `skipped` steps.
        """
        return diagnostics.collect(self)

    @torch.no_grad()
    def certificates(self) -> dict[str, Certificate]:
        """The discounted regret of each parameter beside its bound, radius 1; synchronizes.

        Only groups with certify=True keep what is needed. A parameter of several matrices has one
        entry a matrix.
        """
        return certify.certificates(self)

    def stacks_of(
        self, group: Mapping[str, Any], *, with_gradient: bool = False
    ) -> list[tuple[Stack, States]]:
        """Stacks of the matrices of a group, each with the state of its pieces, in order."""
        params = zip(group["params"], group["axes"], strict=True)
        chosen = (pair for pair in params if not with_gradient or pair[0].grad is not None)
        built = stacks.build(chosen, group["largest_stack"])
        return [(stack, [self.state[param] for param in stack.params]) for stack in built]

    def directions(
        self, stack: Stack, states: States, group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(S, Λ, P) of the present state, S = Ĝ, each (b, …); Λ is empty without a Gram."""
        dtype = _checks.work_dtype(stack.params[0].dtype)
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
            if group["rule"] == "adamw":
                active = [p for p in group["params"] if p.grad is not None]
                adamw.update(active, [self.state[p] for p in active], group)
                continue
            torch._foreach_add_([self.state[p]["step"] for p in group["params"]], 1)
            with exact_products(group["params"][0].device):
                for stack, states in self.stacks_of(group, with_gradient=True):
                    self._update(stack, states, group)
        return loss

    def _update(self, stack: Stack, states: States, group: dict[str, Any]) -> None:
        dtype = _checks.work_dtype(stack.params[0].dtype)
        gradient = stack.gather([cast(Tensor, p.grad) for p in stack.params], dtype)
        situation = _situation(stack, states, group)
        direction, finite = self._compute(stack, states, gradient, situation)
        self._apply(stack, direction, finite, situation)

    def _compute(
        self, stack: Stack, states: States, gradient: Tensor, at: Situation
    ) -> tuple[Tensor, Tensor]:
        """Enter the gradients into the state; (P, which matrices are not to be skipped)."""
        group, momentum = cast(dict[str, Any], at.group), at.group["momentum"]
        if group["maximize"]:
            gradient = -gradient
        old = stack.gather([s["total"] for s in states], gradient.dtype)
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

        ahead = total
        if group["nesterov"] or group["certify"]:
            gradient = torch.where(finite[:, None, None], gradient, 0.0)
            ahead = momentum * total + gradient if group["nesterov"] else total
        direction = self._direction(ahead, self._smoothing(stack, gram, group), at)

        if group["certify"]:
            certify.record(stack, states, gradient, direction, finite, group)
        stack.scatter(total, [s["total"] for s in states])
        torch._foreach_add_(
            [p.own(s["skipped"]) for p, s in zip(stack.pieces, states, strict=True)],
            stack.split((~finite).long()),
        )
        if self.has_gram:
            grams = [p.gram(s) for p, s in zip(stack.pieces, states, strict=True)]
            torch._foreach_copy_(grams, stack.split(gram))
        return direction, finite

    def _gather_gram(self, stack: Stack, states: States) -> Tensor:
        if not self.has_gram:
            return torch.empty(0, device=states[0]["total"].device)
        return torch.cat([p.gram(s) for p, s in zip(stack.pieces, states, strict=True)])

    def _advance(self, gram: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not self.has_gram:
            return gram
        discount = group["momentum"] if group["beta2"] is None else math.sqrt(group["beta2"])
        return moments.accumulate_gram(gram, gradient, discount)

    def _smoothing(self, stack: Stack, gram: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not self.has_gram:
            return gram
        scale = self.smoothing_scale(group, *sorted(stack.shape))
        return moments.smoothing(
            gram,
            gradient_bound=group["gradient_bound"],
            eta=scale**-0.5 if scale else math.inf,
            discount=group["momentum"] or 1.0,  # without momentum there is no bound to divide
        )

    def _apply(self, stack: Stack, direction: Tensor, finite: Tensor, at: Situation) -> None:
        """W ← W − lr·s·scale·P − lr·wd·W, where the step was not skipped."""
        group, lr = at.group, at.group["lr"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        length = self._random_length(at, direction) if group["steps"] == "exponential" else 1.0
        taken = finite.to(direction.dtype)[:, None, None]
        scale = options.scale_factor(group["scale"], *stack.shape)
        change = direction * (taken * (lr * length * scale))
        rounds = group["stochastic_rounding"] and stack.params[0].dtype == torch.bfloat16
        weights = direction  # gathered only where the update reads them
        if group["weight_decay"] or rounds:
            weights = stack.gather(stack.params, direction.dtype)
        if group["weight_decay"]:
            decay = torch.where(finite[:, None, None], lr * group["weight_decay"] * weights, 0.0)
            change = change + (decay * (weights * direction > 0) if group["cautious"] else decay)
        if rounds:
            stack.scatter(self._round_stochastically(weights - change, at), stack.params)
        else:
            torch._foreach_sub_(*stack.regions(stack.params, change))

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
                if (
                    group["certify"]
                    and group["rule"] == "matrix"
                    and "played" not in self.state[param]
                ):
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
