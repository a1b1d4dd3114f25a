"""What every learner is: a player of the online game, with a state, a bound and a certificate."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.norms import operator_norm
from nucleon.regret import Certificate, Ledger, Shape, game_shape, of_the_same, saved, saved_count

SCHEMA = 1


class Learner(ABC):
    """Plays X_1, X_2, … in the ball ‖X‖_op ≤ D: `play` gives X_t, `observe` takes its answer G_t.

    A final class says how to absorb a gradient (`_absorb`), how to act on what was absorbed
    (`_act`), which tensors hold it (`state_names`) and what its theorem promises (`bound`).
    """

    name: ClassVar[str]
    theorem: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the state, all tensors."""
    plays_discounted: ClassVar[bool] = True
    """Whether its sums forget with the discount; a learner of the plain game refuses one."""

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
        """Those among them that answered no action."""
        self._action: Tensor | None = None

    # ------------------------------------------------------------------ what a final class says

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options that decide what is played, as plain values."""

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
        return (unchecked,) * (not self.validate)

    def _refusal(self, oblivious: bool) -> str | None:
        """Why no theorem applies, if none does."""
        return None

    def _damage(self, rounds: int, tensors: Mapping[str, Tensor]) -> str | None:
        """Why saved tensors cannot be those of a game of so many rounds, if they cannot."""
        return None

    # ------------------------------------------------------------------ the game

    @torch.no_grad()
    def play(self) -> Tensor:
        """X_t, the same until the next gradient; X_1 = 0."""
        if self._action is None:
            self._action = self._act()
        return self._action.clone()

    @torch.no_grad()
    def observe(self, gradient: Tensor, *, unplayed: bool = False) -> None:
        """Take G_t, the answer to X_t; on an error nothing changes.

        Args:
            gradient: of the learner's shape, dtype and device.
            unplayed: True says that this gradient answers no action, so that `play` need not come
                first (default False). Where an action waits for its answer, this is it all the
                same. A game with such a gradient has no certificate.
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
        self._absorb(gradient)
        self.rounds += 1
        self.unplayed += self._action is None
        self._action = None

    def norm(self, action: Tensor) -> Tensor:
        """‖X‖ in the norm of the ball that is played in, float64, () or (b,)."""
        return operator_norm(action).double()

    def ledger(self) -> Ledger:
        """An empty ledger of this learner's game."""
        return Ledger(self.shape, radius=self.radius, discount=self.discount, device=self.device)

    def certificate(self, ledger: Ledger, *, oblivious: bool = False) -> Certificate:
        """The ledger's regret beside `bound`, with what it is conditional on.

        Args:
            ledger: the record of this learner's game.
            oblivious: whether all gradients were fixed before the game (default False).
        """
        mine = (self.shape, self.radius, self.discount, self.rounds - self.unplayed)
        if mine != (ledger.shape, ledger.radius, ledger.discount, ledger.rounds):
            raise ValueError(
                f"the ledger is of another game: its shape, radius, discount and rounds are "
                f"{(ledger.shape, ledger.radius, ledger.discount, ledger.rounds)}, the learner's "
                f"{mine}"
            )
        refusal = self._refusal(oblivious)
        if self.unplayed:
            refusal = f"{self.unplayed} gradients answered no action, and the ledger lacks them"
        return Certificate(ledger.regret(), self.bound(), self.theorem, self._conditions(), refusal)

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
        action = None if self._action is None else self._action.clone()
        return {
            **self._identity(),
            "rounds": self.rounds,
            "unplayed": self.unplayed,
            "action": action,
            **{name: getattr(self, name).clone() for name in self.state_names},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same learner, shape and options; refuse any other."""
        of_the_same(state, self._identity())
        rounds, unplayed = saved_count(state, "rounds"), saved_count(state, "unplayed")
        action = None
        if state.get("action") is not None:
            like = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            action = saved(state, "action", like)
        tensors = {name: saved(state, name, getattr(self, name)) for name in self.state_names}
        damage = self._damage(rounds, tensors)
        if unplayed > rounds:
            damage = f"unplayed={unplayed} exceeds rounds={rounds}"
        if damage is not None:
            raise ValueError(f"the state is damaged: {damage}; load one that state_dict() returned")
        self.rounds, self.unplayed, self._action = rounds, unplayed, action
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

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
