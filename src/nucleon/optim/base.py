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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon import _checks, moments
from nucleon.linalg._precision import exact_products
from nucleon.optim import (
    adamw,
    bulletin,
    certify,
    checkpoints,
    diagnostics,
    fused,
    grams,
    lists,
    options,
    placement,
    rest,
    schema,
    shards,
    stacks,
    wire,
)
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack
from nucleon.potentials import Admissibility
from nucleon.regret import Certificate

if TYPE_CHECKING:
    from nucleon.optim import routing

States = list[dict[str, Tensor]]


class MatrixOptimizer(Optimizer, ABC):
    """Options, state and weight update shared by the three methods; see the module's equations."""

    name: ClassVar[str]
    has_gram: ClassVar[bool]
    has_gram_form: ClassVar[bool] = True
    """Whether P = Q(ĜĜᵀ + Λ)·Ĝ, which placement="gram" needs."""
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
        bulletin.announce(self)

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
        named = [x if isinstance(x, tuple) else (f"parameter {i}", x) for i, x in enumerate(params)]
        given = {"params": [p for _, p in named], "param_names": [name for name, _ in named]}
        placement.check({**group, **given, "axes": axes}, gram_form=self.has_gram_form)
        super().add_param_group(param_group)
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        added = self.param_groups[-1]
        owners = zip(added["params"], axes, placement.owners(added), strict=True)
        for index, (param, spec, owner) in enumerate(owners, start=first):
            owned = owner is None or owner == dist.get_rank()
            self.state[param] = self._new_state(param, spec, index, added, owned=owned)

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
        self,
        param: Tensor,
        spec: str | None,
        index: int,
        group: Mapping[str, Any],
        *,
        owned: bool,
    ) -> dict[str, Tensor]:
        if group["rule"] == "adamw":
            return adamw.new_state(param, group)
        # A late group counts from the same step as the others: Exp(1) lengths are shared by all.
        step = next((s["step"] for s in self.state.values() if "stream" in s), None)
        return schema.new_state(
            param, spec, index, step, group, has_gram=self.has_gram, owned=owned
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps, see `nucleon.optim.checkpoints`; `consolidate` returns all of it.

        With placement="gram" every rank must call it: the Gram matrices are summed.
        """
        # Before the user's own hooks: they are to see what will be saved.
        hook = self.register_state_dict_post_hook(checkpoints.pack, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same method, shapes and schema; refuse any other, changing nothing.

        State keeps the dtype it was saved in: torch's cast to the parameter's dtype would round
        the float32 moments of a bf16 parameter.
        """
        # The outermost hooks see what the user's own hooks make of the state, and of its loading.
        final: list[dict[str, Any]] = []

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            checkpoints.unpack(given)
            self._check_state_dict(given)
            final.append(given)

        before_loading = self.param_groups, dict(self.state)

        def restore(_: Optimizer) -> None:
            old_groups, old_state = before_loading
            for saved, old, group in zip(
                final[0]["param_groups"], old_groups, self.param_groups, strict=True
            ):
                group.update({name: old[name] for name in placement.OPTIONS})
                for key, param in zip(saved["params"], group["params"], strict=True):
                    found = final[0]["state"].get(key, {})
                    self.state[param] = schema.loaded(param, found, old_state[param], group)

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
        P is that of the present state, S = Ĝ. Where parameters or states are spread over ranks,
        every rank must call it, and has the whole answer.

        Quantities: `update_norm` ‖P‖_op, `smoothing_share` Tr Λ/Tr(ĜĜᵀ + Λ), `cosine_to_muon` of P
        and polar(Ĝ), `update_ratio` lr·scale·‖P‖_F/‖W‖_F, `skipped` steps.
        """
        return diagnostics.collect(self)

    @torch.no_grad()
    def certificates(self) -> dict[str, Certificate]:
        """The discounted regret of each parameter beside its bound, radius 1; synchronizes.

        Only groups with certify=True keep what is needed. A parameter of several matrices has one
        entry a matrix. With placement="owner" every rank must call it, and has all of the answer.
        """
        return certify.certificates(self)

    def stacks_of(
        self, group: Mapping[str, Any], *, with_gradient: bool = False
    ) -> list[tuple[Stack, States]]:
        """Stacks of the matrices of a group, each with the state of its pieces, in order.

        A DTensor is always among them: other ranks may have a gradient, and must be answered.
        """
        params = zip(group["params"], group["axes"], strict=True)
        chosen = [
            (param, spec)
            for param, spec in params
            if "total" in self.state[param]
            and (not with_gradient or param.grad is not None or shards.sharded(param))
        ]
        built = self._built(chosen, group, stepping=with_gradient)
        return [(stack, [self.state[param] for param in stack.params]) for stack in built]

    def _built(
        self,
        params: Sequence[tuple[Tensor, str | None]],
        group: Mapping[str, Any],
        *,
        stepping: bool,
    ) -> Sequence[Stack]:
        """`stacks.build`, once for the same parameters: a step must not pay for it again."""
        if torch.compiler.is_compiling():  # no step that is compiled is fused
            return stacks.build(params, options.room(group))
        room = options.room(group, partial(fused.expected, self, group) if stepping else None)
        how = [group[option] for option in options.STACKING]
        key = (stepping, *how, *[(id(p), spec, p.shape, p.dtype, p.device) for p, spec in params])
        cache: dict[object, list[Stack]] = self.__dict__.setdefault("_stacks", {})
        found = cache.get(key)
        if found is None:
            # Sets of parameters that have a gradient, few of each group in practice.
            if len(cache) >= 16 * len(self.param_groups):
                cache.clear()
                self.__dict__.pop("_recordings", None)  # they are of these stacks
            found = cache[key] = stacks.build(params, room)
        return found

    def directions(
        self, stack: Stack, states: States, group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(S, Λ, P) of the present state, S = Ĝ, each (b, …); Λ is empty without a Gram."""
        dtype = _checks.work_dtype(stack.params[0].dtype)
        with exact_products(states[0]["total"].device):
            total = stack.gather((shards.full(s["total"]) for s in states), dtype)
            gram = self._gather_gram(stack, states)
            if self.has_gram and shards.sharded(states[0]["total"]):
                gram = grams.whole_gram(stack.params[0], gram)
            smoothing = self._smoothing(stack, gram, group)
            direction = self._direction(total, smoothing, Situation(group, stack, states))
            quiet = stack.gather_own(s["quiet"] for s in states)
            return total, smoothing, rest.kept(~rest.resting(quiet, group), direction)

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
        bulletin.check(self)
        wire.settle(chain.from_iterable(g["params"] for g in self.param_groups))
        self._check_gradients()
        if any(group["consistency_every"] for group in self.param_groups):
            self._compared = self.__dict__.get("_compared", -1) + 1
        for group in self.param_groups:
            params = group["params"]
            if not params:
                continue
            if group["rule"] == "adamw":
                active = [p for p in params if p.grad is not None or shards.sharded(p)]
                adamw.update(active, [self.state[p] for p in active], group)
                continue
            if group["certify"]:
                certify.note(group)
            lists.each("add_", [self.state[p]["step"] for p in params], [1] * len(params))
            with exact_products(params[0].device):
                placement.update(self, group)
        return loss

    def compute(
        self,
        stack: Stack,
        states: States,
        gradients: Sequence[Tensor],
        at: Situation,
        present: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Enter gradients, one per piece, into the state; (P, which matrices are to be moved).

        Those that are not `present`, (b,), are left alone; None is all of them.
        """
        group, momentum = cast(dict[str, Any], at.group), at.group["momentum"]
        done = fused.direction(self, stack, states, gradients, group, present)
        if done is not None:
            return done
        dtype = _checks.work_dtype(stack.params[0].dtype)
        gradient = stack.gather(gradients, dtype)
        if group["maximize"]:
            gradient = -gradient
        old = stack.gather([s["total"] for s in states], dtype)
        old_gram = self._gather_gram(stack, states)
        total = moments.accumulate_total(old, gradient, momentum)
        gram = self._advance(old_gram, gradient, group)
        total, gram = rest.faded(total, gram)
        ahead = momentum * total + gradient if group["nesterov"] else total
        smoothing = self._smoothing(stack, gram, group)

        # Skipping is arithmetic, not a branch: the host never learns which matrices it concerns.
        rounded = total.to(states[0]["total"].dtype)
        finite = rest.all_finite(gradient, rounded, ahead, gram, smoothing)  # (b,)
        quiet = rest.quiet_steps(stack.gather_own(s["quiet"] for s in states), gradient)
        moving = finite & ~rest.resting(quiet, group)
        moving = moving if present is None else moving & present
        ahead, smoothing = (rest.kept(moving, x) for x in (ahead, smoothing))
        direction = self._direction(ahead, smoothing, at)
        finite = finite & rest.all_finite(direction)
        direction = rest.kept(moving & finite, direction)
        skipped = ~finite if present is None else ~finite & present
        taken = finite if present is None else finite & present

        if group["certify"]:
            certify.record(stack, states, rest.kept(taken, gradient), direction, taken, group)
        each = taken[:, None, None]
        total = lists.settled(torch.where(each, total, old))
        stack.scatter(total, [s["total"] for s in states])
        if self.has_gram:
            gram = lists.settled(torch.where(each, gram, old_gram))
            lists.each("copy_", stack.grams(states), stack.split(gram))
        stack.scatter_own(
            torch.where(taken, quiet, stack.gather_own(s["quiet"] for s in states)),
            [s["quiet"] for s in states],
        )
        counts = stack.own(s["skipped"] for s in states)
        lists.each("add_", counts, stack.split(skipped.long()))
        return direction, taken

    def _gather_gram(self, stack: Stack, states: States) -> Tensor:
        if not self.has_gram:
            return torch.empty(0, device=states[0]["total"].device)
        return torch.cat(stack.grams(states))

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

    def agree(self, stack: Stack, shared: Tensor, group: Mapping[str, Any]) -> None:
        """Every `consistency_every` steps, raise on all ranks unless they have updated alike.

        Compared are what they share of the direction, the learning rate, and the new weights where
        every rank has them whole.
        """
        every, params = group["consistency_every"], stack.params
        if not every or placement.world(params) == (0,) or self._compared % every:
            return
        tensors = [shared] if shards.sharded(params[0]) else [shared, *params]
        found = [float(group["lr"]), *map(wire.fingerprint, tensors)]
        wire.check_same(found, "updates", placement.process_groups(params))

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"] if group["certify"]]
            if any("total" in state and "played" not in state for state in states):
                raise ValueError(
                    "certify was switched on during the run; pass certify=True when the group is "
                    "added, so that its regret is kept from the start"
                )
            for param in group["params"]:
                gradient = param.grad
                if gradient is not None and gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{self.name} takes dense gradients, a parameter of shape "
                        f"{tuple(param.shape)} has layout {gradient.layout}; "
                        f"use sparse=False or another optimizer for it"
                    )
        strict = [g for g in self.param_groups if g["nonfinite"] == "raise"]
        for param in chain.from_iterable(g["params"] for g in strict):
            if param.grad is not None and not torch.isfinite(param.grad).all():
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} is not finite; "
                    f"nonfinite='skip' would leave it out of this step"
                )
