"""What every learner is: a player of the online game, with a state, a bound and a certificate."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from nucleon import _checks
from nucleon._inheritance import overridden
from nucleon.certificate import Certificate
from nucleon.online.regret import (
    Ledger,
    Shape,
    game_shape,
    of_the_same,
    saved,
    saved_count,
)

SCHEMA = 3
_COUNTS = ("rounds", "unplayed", "unchecked", "fixed", "adaptive")
_OF_BOUNDS = ("excess", "nuclear_sum", "nuclear_square")
"""Parts of the state that schema 1 lacks: no action depends on them."""


class LearnerOptions(TypedDict, total=False):
    """Keyword options of every learner."""

    radius: float
    """D of the ball (default 1.0)."""
    dtype: torch.dtype | None
    """Of gradients and actions, float32 or float64 (default: torch's)."""
    device: torch.device | str | None
    """Of gradients and actions (default: torch's)."""
    validate: bool
    """False trusts that gradients have the right shape, dtype and device, are finite, have squares
    that float64 can hold and are within a stated bound; the certificate says so (default True)."""


class _Mark(NamedTuple):
    """A tensor of the state as the learner left it: learners replace tensors, and write to none."""

    tensor: Tensor
    writes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Mark":
        # A tensor made in inference mode does not count what is written to it.
        return cls(tensor, 0 if tensor.is_inference() else tensor._version)  # pyright: ignore

    def is_of(self, tensor: Tensor) -> bool:
        return tensor is self.tensor and _Mark.of(tensor).writes == self.writes


class Learner(ABC):
    """Plays X_1, X_2, … in the ball ‖X‖_op ≤ D: `play` gives X_t, `observe` takes its answer G_t.

    A final class says how to absorb a gradient (`_absorb`), how to act on what was absorbed
    (`_act`), which tensors hold it (`state_names`), what decides what is played (`option_names`)
    and what its theorem promises (`bound`).
    """

    name: ClassVar[str]
    theorem: ClassVar[str] = "none"
    """That bounds the regret of what is played."""
    covered: ClassVar[tuple[str, ...]] = (
        *("play", "observe", "ledger", "bound", "_act", "_absorb"),
        *("_deviation", "_refusal", "_conditions"),
    )
    """The methods that the theorem speaks of: a class that overrides one has no theorem but one
    that it names itself."""
    state_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the state, all tensors."""
    option_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the options, all plain values; `options` may add others."""
    plays_discounted: ClassVar[bool] = True
    """Whether its sums forget with the discount; a learner of the plain game refuses one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A theorem on one way to play is not inherited by another."""
        super().__init_subclass__(**kwargs)
        if overridden(cls, "theorem", cls.covered):
            cls.theorem = Learner.theorem

    def __init__(
        self,
        shape: Shape,
        *,
        radius: float = 1.0,
        discount: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate: bool = True,
    ) -> None:
        if type(self).options is Learner.options and not hasattr(self, "option_names"):
            raise TypeError(
                f"{type(self).__name__} does not say which options it has; give the class "
                f"option_names, the attributes that decide what is played, or () for none"
            )
        self.shape = game_shape(shape)
        self.radius = _checks.positive("radius", radius)
        self.discount = _checks.fraction("discount", discount, closed="1")
        if self.discount < 1 and not self.plays_discounted:
            raise ValueError(
                f"{self.name} plays the plain game only, got discount={discount!r}; pass 1.0, or a "
                f"learner such as FAML"
            )
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in _checks.FULL_DTYPES:
            raise TypeError(
                f"dtype must be torch.float32 or torch.float64, got {self.dtype}; the sums of a "
                f"long game do not fit half precision"
            )
        limits = torch.finfo(self.dtype)
        if not limits.tiny <= self.radius <= limits.max / 2:
            raise ValueError(
                f"radius must lie between {limits.tiny:.3g} and {limits.max / 2:.3g}, where "
                f"{self.dtype} holds the actions, got {radius!r}; rescale the game or choose a "
                f"wider dtype"
            )
        device = torch.get_default_device() if device is None else device
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.validate = validate
        self.rounds = 0
        """Gradients observed so far."""
        self.unplayed = 0
        """Those among them that answered no action, or came before a state without a ledger."""
        self.unchecked = 0
        """Those taken with validate=False."""
        self.fixed = 0
        """Those said to be fixed before the game."""
        self.adaptive = 0
        """Those said to depend on earlier actions."""
        self.changed: tuple[str, ...] = ()
        """The options and the parts of the state that were changed from outside during the game."""
        self._action: Tensor | None = None
        self._terms: dict[str, Any] | None = None
        self._marks: dict[str, _Mark] = {}
        self._own: Ledger | None = None

    # ------------------------------------------------------------------ what a final class says

    def options(self) -> dict[str, Any]:
        """The options that decide what is played, as plain values."""
        return {name: getattr(self, name) for name in self.option_names}

    @abstractmethod
    def bound(self) -> Tensor:
        """The theorem's bound on the regret so far, float64, () or (b,); infinite without one."""

    @abstractmethod
    def _act(self) -> Tensor:
        """X_t from the state."""

    @abstractmethod
    def _absorb(self, gradient: Tensor) -> None:
        """Enter G_t into the state, all of it or, on an error, nothing."""

    def _conditions(self) -> tuple[str, ...]:
        """What the bound is conditional on."""
        unchecked = "every gradient was finite and within the bound, which validate=False left open"
        return (unchecked,) * bool(self.unchecked)

    def _refusal(self, oblivious: bool, delta: float | None) -> str | None:
        """Why no theorem applies, if none does."""
        return None

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        """What its own noise adds to `bound`, but with probability δ; 0 where it draws none."""
        return 0.0

    def _described(self, oblivious: bool, delta: float | None) -> tuple[str, tuple[str, ...]]:
        """The theorem in words, and what the certificate is conditional on."""
        return self.theorem, self._conditions()

    def _damage(self, rounds: int, tensors: Mapping[str, Tensor]) -> str | None:
        """Why saved tensors cannot be those of a game of so many rounds, if they cannot."""
        return None

    # ------------------------------------------------------------------ the game

    @torch.no_grad()
    def play(self) -> Tensor:
        """X_t, the same until the next gradient; X_1 = 0."""
        if self._action is None:
            self._note()
            self._action = self._act()
            self._mark()
        return self._action.clone()

    @torch.no_grad()
    def observe(
        self, gradient: Tensor, *, unplayed: bool = False, oblivious: bool | None = None
    ) -> None:
        """Take G_t, the answer to X_t; on an error nothing changes.

        Args:
            gradient: of the learner's shape, dtype and device.
            unplayed: True says that this gradient answers no action, so that `play` need not come
                first (default False). Where an action waits for its answer, this is it all the
                same. A game with such a gradient has no certificate.
            oblivious: True says that it was fixed before the game, False that it may depend on
                the actions so far; None leaves that to `certificate` (default).
        """
        if self._action is None and not unplayed:
            raise RuntimeError(
                "observe() needs the action that its gradient answers; call play() first, or pass "
                "unplayed=True for a gradient that answers none"
            )
        if self.validate:
            self._check(gradient)
        elif gradient.shape != self.shape:  # cheap, and a broadcast would go unnoticed
            raise self._wrong_shape(gradient)
        self._note()
        own = copy.copy(self._kept())  # a ledger replaces its tensors, as learners do
        if self._action is not None:
            own.record(gradient, self._action)
        self._absorb(gradient)
        self._mark()
        self.rounds += 1
        self.unplayed += self._action is None
        self.unchecked += not self.validate
        self.fixed += oblivious is True
        self.adaptive += oblivious is False
        self._action, self._own = None, own

    def norm(self, action: Tensor) -> Tensor:
        """‖X‖ in the norm of the ball that is played in, float64, () or (b,)."""
        return self._kept().norm(action)

    def ledger(self) -> Ledger:
        """An empty ledger of this learner's game."""
        return Ledger(self.shape, radius=self.radius, discount=self.discount, device=self.device)

    def certificate(
        self,
        ledger: Ledger | None = None,
        *,
        oblivious: bool | None = None,
        delta: float | None = None,
    ) -> Certificate:
        """The regret beside `bound`, with what that is conditional on, or why it does not apply.

        It is refused where a gradient answered no action, an option or the state was changed from
        outside during the game, an action lay outside the ball, the class names no theorem or none
        has a finite bound. The regret is that of the learner's own ledger.

        Args:
            ledger: a record of this learner's game, which must agree with the learner's own (None).
            oblivious: whether all gradients were fixed before the game, but for those that
                `observe` was told are not; None is what `observe` was told (default). Gradients
                recorded in an earlier game are fixed before this one only if its seed is new:
                against the noise that they answered they are adaptive.
            delta: δ in (0, 1). The bound of a learner that draws noise is one on the mean over it;
                with δ it is one on these actions that fails with probability at most δ, for all
                games of a batch together (default None, the mean).
        """
        own = self._kept()
        if ledger is not None:
            self._same_game(ledger, own)
        if self._terms is not None:
            self._note()
        fixed = not self.adaptive and (
            self.fixed == self.rounds if oblivious is None else oblivious
        )
        if delta is not None:
            self._check_delta(delta)
        bound, refusal = self.bound(), self._refusal(fixed, delta) or self._broken(own)
        if delta is not None and refusal is None:
            bound = bound + self._deviation(fixed, delta)
        if refusal is None and not bool(bound.isfinite().all()):
            refusal = "no theorem has a finite bound on this game"
        words = self._described(fixed, delta)
        return Certificate(own.regret(), bound, *words, refusal, own.lower())

    def _broken(self, own: Ledger) -> str | None:
        """What about the game itself no theorem covers, if anything."""
        if self.theorem == Learner.theorem:
            return f"{type(self).__name__} names no theorem on the way it plays"
        if self.unplayed:
            return (
                f"{self.unplayed} gradients answered no action or were saved by an older version, "
                f"and the ledger lacks them"
            )
        if self.changed:
            return f"{', '.join(self.changed)} changed during the game"
        if bool((own.outside > 0).any()):
            return (
                f"an action had norm {own.outside.max().item():.6g}, outside the ball of radius "
                f"{self.radius:.6g}"
            )
        return None

    def _same_game(self, ledger: Ledger, own: Ledger) -> None:
        """Raise unless the ledger is of this game."""
        mine = (self.shape, self.radius, self.discount, self.rounds - self.unplayed)
        other = (ledger.shape, ledger.radius, ledger.discount, ledger.rounds)
        if mine != other:
            raise ValueError(
                f"the ledger is of another game: its shape, radius, discount and rounds are "
                f"{other}, the learner's {mine}"
            )
        if not own.agrees(ledger, self.dtype):
            raise ValueError(
                "the ledger is of another game: its sums of gradients and losses are not those of "
                "the rounds that this learner played; use the ledger of its game, or none"
            )

    def _kept(self) -> Ledger:
        """The learner's own ledger, an empty one before the game."""
        return self.ledger() if self._own is None else self._own

    def _note(self) -> None:
        """Compare options and state with what the game left them; a change is not forgotten."""
        terms = self._game()
        if self._terms is None:
            self._terms, self._own = terms, self.ledger()
            self._mark()
            return
        other = [name for name, value in terms.items() if self._terms.get(name) != value]
        other += [name for name, mark in self._marks.items() if not mark.is_of(getattr(self, name))]
        self.changed = tuple(dict.fromkeys([*self.changed, *other]))

    def _mark(self) -> None:
        """Remember the tensors that the state is made of."""
        self._marks = {name: _Mark.of(getattr(self, name)) for name in self.state_names}

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        if self._terms is not None:
            self._note()
        return {**vars(self), "_marks": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._terms is not None:
            self._mark()

    def _game(self) -> dict[str, Any]:
        """What the theorem takes for constant during a game, as plain values."""
        own = {"shape": self.shape, "radius": self.radius, "discount": self.discount}
        return {**own, **self.options()}

    def _check_delta(self, delta: float) -> None:
        """Raise unless δ, and the share of it that each game has, lie in (0, 1)."""
        games = math.prod(self.shape[:-2])
        if _checks.fraction("delta", delta) / games == 0:
            raise ValueError(
                f"delta={delta!r} shared by {games} games is 0 in float64; pass a larger one"
            )

    def _check(self, gradient: object) -> None:
        if isinstance(gradient, Tensor) and gradient.device != self.device:
            raise ValueError(
                f"gradient is on {gradient.device} but the learner is on {self.device}; move one: "
                f"gradient.to({str(self.device)!r})"
            )
        tensor = _checks.matrix("gradient", gradient, dtypes=(self.dtype,))
        if tuple(tensor.shape) != self.shape:
            raise self._wrong_shape(tensor)

    def _wrong_shape(self, gradient: Tensor) -> ValueError:
        return ValueError(
            f"gradient must have the learner's shape {self.shape}, got {tuple(gradient.shape)}"
        )

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the game depends on, as copies: tensors and plain values."""
        if self._terms is not None:
            self._note()
        action = None if self._action is None else self._action.clone()
        own = self._kept().state_dict()
        return {
            **self._identity(),
            **{name: getattr(self, name) for name in _COUNTS},
            "changed": list(self.changed),
            "action": action,
            **{f"ledger_{name}": value for name, value in own.items()},
            **{name: getattr(self, name).clone() for name in self.state_names},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same learner, shape and options; refuse any other.

        One of schema 1 has no ledger: the game goes on, without a certificate, and `bound()` knows
        nothing of what exceeded a bound before.
        """
        known = isinstance(state, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        if known and state.get("schema") == 1:
            state = self._upgraded(state)
        of_the_same(state, self._identity())
        counts = {name: saved_count(state, name) for name in _COUNTS}
        action = None
        if state.get("action") is not None:
            like = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            action = saved(state, "action", like)
        own, prefix = self.ledger(), "ledger_"
        own.load_state_dict(
            {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
        )
        tensors = {name: saved(state, name, getattr(self, name)) for name in self.state_names}
        damage = self._damage(counts["rounds"], tensors)
        for name, count in counts.items():
            if count > counts["rounds"]:
                damage = f"{name}={count} exceeds rounds={counts['rounds']}"
        if own.rounds != counts["rounds"] - counts["unplayed"]:
            damage = f"the ledger has {own.rounds} rounds of {counts}"
        if damage is not None:
            raise ValueError(f"the state is damaged: {damage}; load one that state_dict() returned")
        for name, value in (counts | tensors).items():
            setattr(self, name, value)
        self.changed, self._terms = tuple(map(str, state.get("changed", ()))), self._game()
        self._action, self._own = action, own
        self._mark()

    def _upgraded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of schema 1 in the terms of this one: an empty ledger, and unplayed rounds."""
        added = [name for name in _OF_BOUNDS if name in self.state_names]
        return {
            **dict.fromkeys(("unchecked", "fixed", "adaptive"), 0),
            **{f"ledger_{name}": value for name, value in self.ledger().state_dict().items()},
            **{name: torch.zeros_like(getattr(self, name)) for name in added},
            **state,
            "schema": SCHEMA,
            "unplayed": state.get("rounds"),
        }

    def _identity(self) -> dict[str, Any]:
        """What must agree for a state to be this learner's."""
        own = {"shape": list(self.shape), "radius": self.radius, "discount": self.discount}
        return {
            "learner": self.name,
            "schema": SCHEMA,
            "dtype": str(self.dtype),
            **own,
            "options": self.options(),
        }


@contextmanager
def undone_on_error(*learners: Learner) -> Iterator[None]:
    """Whatever stops the block, the learners are as before.

    Learners replace their tensors and never write into them: references undo a round.
    """
    before = [dict(vars(learner)) for learner in learners]
    try:
        yield
    except BaseException:
        for learner, old in zip(learners, before, strict=True):
            vars(learner).clear()
            vars(learner).update(old)
        raise
