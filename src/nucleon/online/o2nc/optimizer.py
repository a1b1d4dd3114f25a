"""The online-to-nonconvex conversion: any learner as an optimizer (Section 5.1, Appendix G).

    G_t = ∇ℓ(W_t; ζ_t),  X_{t+1} = learner(G_1 … G_t),  W_{t+1} = W_t + s_{t+1}X_{t+1},  s ~ Exp(1)

The learner plays the discounted game over ‖X‖_op ≤ D = (1−γ)ρ/(2γ). The theorems are about the
average W̄_τ of the iterates at a random time τ ≤ T,

    W̄_t = (1−γ)/(1−γ^t)·Σ_{s≤t} γ^{t-s}W_s,   Pr(τ = t) = (1−γ^t)/T for t < T, else the rest.

Every learner begins with X_1 = 0, so W_1 is the initial weight. Several matrices at once are one
block-diagonal matrix: they share the lengths s and τ, their nuclear norms add.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon import _checks, noise
from nucleon.online.learners import Learner
from nucleon.online.learners.base import undone_on_error
from nucleon.online.saving import packed, unpacked
from nucleon.online.theory import o2nc_radius
from nucleon.optim.engines.work import EXPONENTIAL_STREAM
from nucleon.optim.state import SLICES


class O2NC(Optimizer):
    """Runs a learner on the gradients of a loss for T rounds: the process of Theorems 5.2 and 5.3.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, float32 or float64.
        learner: a class of `online.learners` or a function that returns a learner: called once for
            each parameter with its shape, the keywords `radius`, `discount`, `dtype`, `device` and
            `options`, and `seed` and `stream` where it accepts them; `functools.partial` may set
            these. A class of the plain game gets no discount and observes γ^{-t}G_t.
        rho: ρ of the (ρ, ε)-stationary point.
        discount: γ.
        rounds: T.
        seed: of the lengths s and of τ, and of the learners' noise (default 0).
        independent: False (default): one process. True: each parameter is (b, m, n) and its slices
            are b processes, each with its own lengths and τ.
        options: of the learners, for example `gradient_bound`.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        learner: Callable[..., Learner],
        *,
        rho: float,
        discount: float,
        rounds: int,
        seed: int = 0,
        independent: bool = False,
        **options: Any,
    ) -> None:
        self.radius = o2nc_radius(rho=rho, discount=discount)
        self.discount, self.rounds = float(discount), _checks.count("rounds", rounds)
        self.round = 0
        """Gradients taken so far, t."""
        facts = {"rho": float(rho), "discount": self.discount, "rounds": rounds}
        facts |= {"seed": seed, "independent": independent}
        super().__init__([params] if isinstance(params, Tensor) else params, facts)
        self.params: list[Tensor] = self.param_groups[0]["params"]
        first = self._check_params(independent)
        self.learners = self._make_learners(learner, options)
        runs = torch.arange(len(first) if independent else 1, device=first.device)
        # −1, −2, …: the first process has the lengths of the optimizers' step_length="exponential".
        self._streams = EXPONENTIAL_STREAM - (runs[:, None, None] if independent else runs[0])
        tau = self._draw_tau()
        self.tau = tau.reshape(tau.shape[:1])
        """τ, an int64 tensor: () or, for independent processes, (b,)."""
        self.average = [param.detach().to(torch.float64, copy=True) for param in self.params]
        """W̄_t of each parameter, float64; before the first round the initial weights."""
        self.output = list(self.average)
        """W̄_τ of each parameter, float64, once round τ is over; before, the initial weights."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the first group; raise on others, since all matrices share one process."""
        if self.param_groups:
            raise ValueError("O2NC runs one process; pass all parameters when it is made")
        super().add_param_group(param_group)

    # ------------------------------------------------------------------ the process

    @property
    def actions(self) -> list[Tensor]:
        """X_t of each parameter, which led to the present weights and awaits its gradient."""
        return [learner.play() for learner in self.learners]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average W_t, pass G_t to the learners and update the weights; on an error, do nothing."""
        loss = None
        if self.round >= self.rounds:
            raise RuntimeError(f"the {self.rounds} rounds are over; pass a larger rounds=")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, param in enumerate(self.params):
            if param.grad is None:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(param.shape)} has no gradient; the process "
                    f"needs all of them in every round: call backward(), or set zeros"
                )
        with undone_on_error(*self.learners):
            for param, learner in zip(self.params, self.learners, strict=True):
                learner.play()
                learner.observe(self._loss_of(cast(Tensor, param.grad), learner))
            actions = self.actions
        self.round += 1
        self._average()
        length = noise.exponential(
            tuple(self._streams.shape),
            seed=self.param_groups[0]["seed"],
            stream=self._streams,
            step=self.round,
            dtype=self.params[0].dtype,
            device=self.params[0].device,
        )
        for param, action in zip(self.params, actions, strict=True):
            param.add_(action * length)
        return loss

    def _loss_of(self, gradient: Tensor, learner: Learner) -> Tensor:
        """Return G_t, or γ^{-t}G_t for a learner of the plain game, the paper's reduction."""
        if learner.plays_discounted:
            return gradient
        weighted = gradient * self.discount ** -(self.round + 1)
        if gradient.isfinite().all() and not weighted.square().sum().isfinite():
            raise OverflowError(
                f"{learner.name} plays the plain game on γ^(-t)G_t, which {gradient.dtype} cannot "
                f"hold in round {self.round + 1}; use float64, fewer rounds, or a learner such as "
                f"FAML, which plays the discounted game itself"
            )
        return weighted

    def _average(self) -> None:
        """Update W̄_t = W̄_{t-1} + (1−γ)/(1−γ^t)·(W_t − W̄_{t-1}), and set W̄_τ at t = τ."""
        share = (1 - self.discount) / (1 - self.discount**self.round)
        at_tau = (self.tau == self.round).reshape(self._streams.shape)
        pairs = [*zip(self.average, self.params, strict=True)]
        self.average = [average + share * (param - average) for average, param in pairs]
        pairs = zip(self.average, self.output, strict=True)
        self.output = [torch.where(at_tau, average, output) for average, output in pairs]

    def _draw_tau(self) -> Tensor:
        """Draw τ: T with probability γ^t, else t, for t uniform on 1 … T."""
        u = noise.uniform(
            (*self._streams.shape, 2),
            seed=self.param_groups[0]["seed"],
            stream=self._streams,
            dtype=torch.float64,
            device=self._streams.device,
        )
        t = (u[..., 0] * self.rounds).ceil()
        last = u[..., 1] <= self.discount**t
        return torch.where(last, self.rounds, t.long())

    # ------------------------------------------------------------------ the state

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes; torch omits those of subclasses from copies and pickles."""
        return vars(self).copy()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the process without the weights, as copies."""
        learners = [learner.state_dict() for learner in self.learners]
        return {**packed(self._averages(), self._facts()), "learners": learners}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same process; raise on any other, before any change."""
        tensors = unpacked(state_dict, self._averages(), self._facts())
        with undone_on_error(*self.learners):
            for learner, state in zip(self.learners, state_dict["learners"], strict=True):
                learner.load_state_dict(state)
        self.round = self.learners[0].rounds
        for name in ("average", "output"):
            setattr(self, name, [tensors[f"{name}.{i}"] for i in range(len(self.params))])

    def _averages(self) -> dict[str, Tensor]:
        named = {"average": self.average, "output": self.output}
        return {f"{name}.{i}": x for name, tensors in named.items() for i, x in enumerate(tensors)}

    def _facts(self) -> dict[str, Any]:
        group = self.param_groups[0]
        return {name: x for name, x in group.items() if name not in ("params", "param_names")}

    # ------------------------------------------------------------------ construction

    def _check_params(self, independent: bool) -> Tensor:
        """Check dtypes, devices and shapes of the parameters; return the first."""
        dimensions = (3,) if independent else (2, 3)
        for param in self.params:
            if param.dtype not in _checks.FULL_DTYPES:
                raise TypeError(f"params must be float32 or float64 tensors, got {param.dtype}")
            if param.ndim not in dimensions or not param.numel():
                shape = "(b, m, n), one slice a process" if independent else "(m, n) or (b, m, n)"
                raise ValueError(f"params must be {shape}, got shape {tuple(param.shape)}")
        kinds = {(p.dtype, p.device, len(p) if independent else 0) for p in self.params}
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of one process share dtype and device, and independent ones their "
                f"number of slices; got {sorted(map(str, kinds))}"
            )
        return self.params[0]

    def _make_learners(
        self, learner: Callable[..., Learner], options: dict[str, Any]
    ) -> list[Learner]:
        """Return a learner for each parameter."""
        if not callable(learner):
            raise TypeError(
                f"learner must be a class such as online.FAML, or a function that returns a "
                f"learner, got {learner!r}; pass the class, O2NC calls it"
            )
        constructor = getattr(learner, "func", learner)  # of a functools.partial
        accepted = inspect.signature(constructor).parameters
        kinds = {parameter.kind for parameter in accepted.values()}
        # The options of a class are a closed list, also where it passes them on to its base.
        anything = inspect.Parameter.VAR_KEYWORD in kinds and not isinstance(constructor, type)
        learners: list[Learner] = []
        for index, param in enumerate(self.params):
            # The optimizers use this seed and stream for their noise, so that Pion's is FTPL's.
            noisy = {"seed": self.param_groups[0]["seed"], "stream": index * SLICES}
            game = {name: x for name, x in noisy.items() if anything or name in accepted}
            if getattr(constructor, "plays_discounted", True):
                game["discount"] = self.discount
            game |= getattr(learner, "keywords", {})
            game |= {"radius": self.radius, "dtype": param.dtype, "device": param.device}
            one = learner(tuple(param.shape), **{**game, **options})
            discount = self.discount if one.plays_discounted else 1.0
            if (one.radius, one.discount) != (self.radius, discount):
                raise ValueError(
                    f"learner has radius={one.radius:g} and discount={one.discount:g}, the process "
                    f"needs {self.radius:g} and {discount:g}; pass its keywords on"
                )
            # Vector learners name their ball; ‖x‖₂ is the operator norm of a row or a column.
            ball = getattr(one, "ball", "l2")
            if ball != "l2" and param.shape[-2:].numel() > 1:
                raise ValueError(
                    f"learner has ball={ball!r}, the process needs the operator-norm ball, which "
                    f"for vectors is ℓ2; pass ball='l2'"
                )
            learners.append(one)
        return learners
