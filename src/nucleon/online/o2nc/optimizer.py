"""The online-to-nonconvex conversion: any learner as an optimizer (Section 5.1, Appendix G).

    G_t = ∇ℓ(W_t; ζ_t),  X_{t+1} = learner(G_1 … G_t),  W_{t+1} = W_t + s_{t+1}X_{t+1},  s ~ Exp(1)

The learner plays the discounted game over ‖X‖_op ≤ D = (1−γ)ρ/(2γ). What the theorems speak of is
the average W̄_τ of the iterates at a random time τ ≤ T,

    W̄_t = (1−γ)/(1−γ^t)·Σ_{s≤t} γ^{t-s}W_s,   Pr(τ = t) = (1−γ^t)/T for t < T, else the rest.

Every learner begins with X_1 = 0, so W_1 is the initial weight. Several matrices at once are one
block-diagonal matrix: they share the lengths s and τ, their nuclear norms add.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon import _checks, noise
from nucleon.online.learners import Learner
from nucleon.online.learners.base import undone_on_error
from nucleon.online.saving import packed, unpacked
from nucleon.online.theory import o2nc_radius
from nucleon.optim.average import swapped
from nucleon.optim.engines.work import EXPONENTIAL_STREAM
from nucleon.optim.state import SLICES

TAG = "o2nc/1"


class O2NC(Optimizer):
    """Runs a learner on the gradients of a loss for T rounds: the process of Theorems 5.2 and 5.3.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, float32 or float64.
        learner: a class of `online.learners` or a function that returns a learner: called once for
            each parameter with its shape, the keywords `radius`, `discount`, `dtype`, `device` and
            `options`, and `seed` and `stream` where it accepts them; `functools.partial` may set
            these. A class of the plain game gets no discount and observes γ^{-t}G_t. Or, for one
            parameter, a new learner of that shape, radius and discount. Its ball is ‖X‖_op ≤ D and
            its first action 0.
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
        learner: Callable[..., Learner] | Learner,
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
        self.swapped = False
        """True while the parameters are an average."""
        facts = {"rho": float(rho), "discount": self.discount, "rounds": rounds}
        matrices = [params] if isinstance(params, Tensor) else list(params)
        _check_params(matrices, independent)
        super().__init__(
            matrices, {**facts, "seed": seed, "independent": independent, "nucleon": TAG}
        )
        self.params: list[Tensor] = self.param_groups[0]["params"]
        self.learners = self._make_learners(learner, options)
        first = self.params[0]
        runs = torch.arange(len(first) if independent else 1, device=first.device)
        # −1, −2, …: the first process has the lengths of the optimizers' step_length="exponential".
        self._streams = EXPONENTIAL_STREAM - (runs if independent else runs.squeeze())
        self.tau = self._draw_tau()
        """τ, an int64 tensor: () or, for independent processes, (b,)."""
        for param in self.params:
            start = param.detach().to(torch.float64, copy=True)
            self.state[param] = {"average": start, "output": start.clone()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the first group; raise on others, since all matrices share one process."""
        if self.param_groups:
            raise ValueError("O2NC runs one process; pass all parameters when it is made")
        super().add_param_group(param_group)

    # ------------------------------------------------------------------ the process

    @property
    def actions(self) -> list[Tensor]:
        """X_t of each parameter, which led to the weights of now: the next gradient answers it."""
        return [learner.play() for learner in self.learners]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average W_t, pass G_t to the learners and update the weights; on an error, do nothing."""
        loss = None
        self._check_not_swapped("step")
        if self.round >= self.rounds:
            raise RuntimeError(f"the {self.rounds} rounds are over; pass a larger rounds=")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        length = noise.exponential(
            tuple(self._streams.shape),
            seed=self.param_groups[0]["seed"],
            stream=self._streams,
            step=self.round + 1,
            dtype=self.params[0].dtype,
            device=self.params[0].device,
        )
        length = length[:, None, None] if length.ndim else length
        actions = self._answer()  # all that can fail comes before the first change
        self.round += 1
        self._average()
        for param, action in zip(self.params, actions, strict=True):
            param.add_(action * length)
        return loss

    def _answer(self) -> list[Tensor]:
        """Return X_{t+1} of each parameter after G_t; restore the learners if one of them fails."""
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
            for param, action in zip(self.params, actions, strict=True):
                if action.shape != param.shape:
                    raise ValueError(
                        f"the learner played an action of shape {tuple(action.shape)} for a "
                        f"parameter of shape {tuple(param.shape)}; mend its action()"
                    )
        return actions

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
        at_tau = self.tau == self.round
        at_tau = at_tau[:, None, None] if at_tau.ndim else at_tau
        for param in self.params:
            state = self.state[param]
            state["average"] += share * (param - state["average"])
            state["output"] = torch.where(at_tau, state["average"], state["output"])

    # ------------------------------------------------------------------ the averages

    @property
    def average(self) -> list[Tensor]:
        """W̄_t of each parameter, float64; before the first round the initial weights."""
        return [self.state[param]["average"].clone() for param in self.params]

    @property
    def output(self) -> list[Tensor]:
        """W̄_τ of each parameter, float64, once round τ is over; before, the initial weights."""
        return [self.state[param]["output"].clone() for param in self.params]

    @contextmanager
    def averaged(self, *, at_tau: bool = False) -> Iterator[None]:
        """Set the parameters to W̄_t, or W̄_τ, inside a block, and restore W exactly."""
        if at_tau and bool((self.tau > self.round).any()):
            raise RuntimeError(
                f"τ = {int(self.tau.max())} has not come, this is round {self.round}; run on, or "
                f"use averaged()"
            )
        self._check_not_swapped("average")
        averages = self.output if at_tau else self.average
        self.swapped = True
        try:
            with swapped(zip(self.params, averages, strict=True)):
                yield
        finally:
            self.swapped = False

    def _check_not_swapped(self, verb: str) -> None:
        if self.swapped:
            raise RuntimeError(f"the parameters hold an average now; {verb} after leaving the swap")

    # ------------------------------------------------------------------ the state

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's entries, which omit attributes of subclasses, and those of O2NC."""
        self._check_not_swapped("copy")  # the open block has the weights, a copy would not
        names = ("radius", "discount", "rounds", "round", "swapped", "params", "learners", "tau")
        values = {name: getattr(self, name) for name in (*names, "_streams")}
        return {**super().__getstate__(), **values}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the process without the weights, as copies."""
        learners = [learner.state_dict() for learner in self.learners]
        return {**packed(self._tensors(), self._facts()), "learners": learners}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same process; raise on any other, before any change."""
        self._check_not_swapped("load")
        process = dict(state_dict)
        states = process.pop("learners", ())
        tensors = unpacked(process, self._tensors(), self._facts())
        with undone_on_error(*self.learners):
            for learner, state in zip(self.learners, states, strict=True):
                learner.load_state_dict(state)
        self.round = self.learners[0].rounds
        for index, param in enumerate(self.params):
            self.state[param] = {n: tensors[f"{n}.{index}"] for n in ("average", "output")}

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{index}": value
            for index, param in enumerate(self.params)
            for name, value in self.state[param].items()
        }

    def _facts(self) -> dict[str, Any]:
        group = self.param_groups[0]
        return {name: x for name, x in group.items() if name not in ("params", "param_names")}

    # ------------------------------------------------------------------ construction

    def _make_learners(
        self, learner: Callable[..., Learner] | Learner, options: dict[str, Any]
    ) -> list[Learner]:
        if isinstance(learner, Learner):
            if options or len(self.params) != 1:
                raise TypeError(
                    "a learner that is made already takes no options and serves one parameter; "
                    "pass its class instead"
                )
            learners = [learner]
        else:
            accepted, seed = _accepted(learner), self.param_groups[0]["seed"]
            learners: list[Learner] = []
            for index, param in enumerate(self.params):
                # The optimizers use this seed and stream for their noise, so that Pion's is FTPL's.
                game = {"discount": self.discount, "seed": seed, "stream": index * SLICES}
                game = {name: value for name, value in game.items() if name in accepted}
                game |= {"radius": self.radius, "dtype": param.dtype, "device": param.device}
                learners.append(learner(tuple(param.shape), **{**game, **options}))
        for param, one in zip(self.params, learners, strict=True):
            self._check_learner(one, param)
        if len({id(one) for one in learners}) < len(learners):
            raise ValueError("learner made one learner for two parameters; make a new one each")
        return learners

    def _check_learner(self, learner: object, param: Tensor) -> None:
        if not isinstance(learner, Learner):
            raise TypeError(
                f"learner must make a nucleon.online.Learner, it made {learner!r}; pass a class "
                f"such as FAML, or a function that returns one of its learners"
            )
        expected = {
            "shape": tuple(param.shape),
            "radius": self.radius,
            "discount": self.discount if learner.plays_discounted else 1.0,
            "dtype": param.dtype,
            "device": param.device,
            "rounds": 0,
        }
        for name, value in expected.items():
            if getattr(learner, name) != value:
                raise ValueError(
                    f"learner has {name}={getattr(learner, name)!r}, the process needs {value!r}; "
                    f"pass the class {type(learner).__name__} and let O2NC make it"
                )
        # Vector learners name their ball; ‖x‖₂ is the operator norm of a row or a column.
        ball = getattr(learner, "ball", "l2")
        if ball != "l2" and param.shape[-2:].numel() > 1:
            raise ValueError(
                f"learner has ball={ball!r}, the process needs the operator-norm ball, which for "
                f"vectors is ℓ2; pass ball='l2'"
            )
        if learner.play().any():
            raise ValueError(
                f"the first action of {type(learner).__name__} is not 0, but the process begins at "
                f"the given weights; pass a learner that plays X_1 = 0"
            )

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


def _accepted(learner: Callable[..., Learner]) -> set[str]:
    """Return those of discount, seed and stream that a class or function accepts.

    Names that a `functools.partial` sets are left out.
    """
    if not callable(learner):
        raise TypeError(
            f"learner must be a class of nucleon.online, a function that returns a learner, or a "
            f"learner, got {learner!r}"
        )
    names, parameters = {"discount", "seed", "stream"}, inspect.signature(learner).parameters
    while isinstance(learner, functools.partial):
        names -= learner.keywords.keys()
        learner = cast(Callable[..., Learner], learner.func)
    if isinstance(learner, type):  # a closed list, even where it passes **options on to its base
        plain = not getattr(learner, "plays_discounted", True)
        return names & ({*parameters} | (set() if plain else {"discount"}))
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return names if anything else names & {*parameters}


def _check_params(params: Sequence[object], independent: bool) -> None:
    if not params:
        raise ValueError("params is empty; pass at least one matrix")
    kinds: set[object] = set()
    for index, param in enumerate(params):
        if not isinstance(param, Tensor) or param.dtype not in _checks.FULL_DTYPES:
            kind = getattr(param, "dtype", type(param).__name__)
            raise TypeError(f"params[{index}] must be a float32 or float64 tensor, got {kind}")
        if param.ndim not in ((3,) if independent else (2, 3)) or not param.numel():
            shape = "(b, m, n), one slice a process" if independent else "(m, n) or (b, m, n)"
            raise ValueError(f"params[{index}] must be {shape}, got shape {tuple(param.shape)}")
        kinds.add((param.dtype, param.device, len(param) if independent else 0))
    if len({id(param) for param in params}) < len(params):
        raise ValueError("params names a parameter twice; name each once")
    if len(kinds) > 1:
        raise ValueError(
            f"the parameters of one process share dtype and device, and independent ones their "
            f"number of slices; got {sorted(map(str, kinds))}"
        )
