"""What every learner is: a player of the online game, with a state, a bound and a certificate."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Certificate
from nucleon.online.regret import Ledger, Shape, game_shape
from nucleon.online.saving import State, packed, unpacked


class LearnerOptions(TypedDict, total=False):
    """Keyword options of every learner."""

    radius: float
    """D of the ball (default 1.0)."""
    dtype: torch.dtype | None
    """Of gradients and actions, float32 or float64 (default: torch's)."""
    device: torch.device | str | None
    """Of gradients and actions (default: torch's)."""
    validate: bool
    """False trusts that gradients have the right dtype and device and squares that float64 can
    hold, and does not refuse one above a stated bound, which enters the regret bound (default
    True)."""


class Learner(ABC):
    """Plays X_1, X_2, … in the ball ‖X‖_op ≤ D: `play` gives X_t, `observe` takes its answer G_t.

    A final class says how to absorb a gradient (`_absorb`), how to act on what was absorbed
    (`_act`), which tensors hold it (`state_names`), what decides what is played (`option_names`)
    and what its theorem promises (`bound`).
    """

    name: ClassVar[str]
    theorem: ClassVar[str] = "none"
    """That bounds the regret of what is played."""
    state_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the state, all tensors."""
    option_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the options, all plain values; `options` may add others."""
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
        self.ledger = self._empty_ledger()
        """The game so far: its regret, and what the bound is made of."""
        self._action: Tensor | None = None

    @property
    def rounds(self) -> int:
        """Gradients observed so far."""
        return self.ledger.rounds

    # ------------------------------------------------------------------ what a final class says

    def options(self) -> dict[str, Any]:
        """The options that decide what is played, as plain values."""
        return {name: getattr(self, name) for name in self.option_names}

    @abstractmethod
    def bound(self) -> Tensor:
        """Return the theorem's bound on the regret so far, float64, () or (b,); else infinity."""

    @abstractmethod
    def _act(self) -> Tensor:
        """X_t from the state."""

    @abstractmethod
    def _absorb(self, gradient: Tensor) -> None:
        """Enter G_t into the state, all of it or, on an error, nothing."""

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret of a game; None where one does.

        Args:
            oblivious: True if all gradients are fixed before the game.
            delta: see `certificate`.
        """
        return f"{self.name} has no theorem" if self.theorem == "none" else None

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        """Return what its own noise adds to `bound`, but with probability δ; 0 without noise."""
        return 0.0

    def _theorem(self, oblivious: bool, delta: float | None) -> str:
        """Return the theorem in words."""
        return self.theorem

    def _bounded(self) -> tuple[Tensor | None, Tensor | None]:
        """Return G and what gradients above it added to the bound; None without such a G."""
        return None, None

    def _empty_ledger(self) -> Ledger:
        return Ledger(self.shape, radius=self.radius, discount=self.discount, device=self.device)

    # ------------------------------------------------------------------ the game

    @torch.no_grad()
    def play(self) -> Tensor:
        """Return X_t, the same until the next gradient; X_1 = 0."""
        if self._action is None:
            self._action = self._act()
        return self._action.clone()

    @torch.no_grad()
    def observe(self, gradient: Tensor, *, oblivious: bool = False) -> None:
        """Take G_t, the answer to X_t; on an error nothing changes.

        Args:
            gradient: of the learner's shape, dtype and device.
            oblivious: True says that it was fixed before the game, False that it may depend on the
                actions so far (default False). Gradients recorded in an earlier game are fixed only
                if the seed of this one is new: they depend on the noise that they answered.
        """
        if self._action is None:
            raise RuntimeError(
                "observe() needs the action that its gradient answers; call play() first"
            )
        if self.validate:
            self._check(gradient)
        elif gradient.shape != self.shape:  # cheap, and a broadcast would go unnoticed
            raise self._wrong_shape(gradient)
        ledger = copy.copy(self.ledger)
        ledger.record(gradient, self._action, oblivious=oblivious)
        self._absorb(gradient)
        self.ledger, self._action = ledger, None

    def certificate(self, *, delta: float | None = None) -> Certificate:
        """Return the regret beside `bound`, both from the learner's ledger.

        Args:
            delta: δ in (0, 1). The bound of a learner that draws noise is one on the mean over it;
                with δ it is one on these actions that fails with probability at most δ, for all
                games of a batch together (default None, the mean).
        """
        ledger, bound = self.ledger, self.bound()
        if delta is not None:
            self._check_delta(delta)
        refusal = self.refusal(oblivious=ledger.oblivious, delta=delta)
        if refusal is None and bool((ledger.outside > 0).any()):
            norm = ledger.outside.max().item()
            refusal = f"an action had norm {norm:.6g}, outside the ball of radius {self.radius:.6g}"
        if refusal is None and not bool(bound.isfinite().all()):
            refusal = "no theorem has a finite bound on this game"
        if refusal is None and delta is not None:
            bound = bound + self._deviation(ledger.oblivious, delta)
        gradient_bound, excess = self._bounded()
        return Certificate(
            regret=ledger.regret(),
            bound=bound,
            theorem=self._theorem(ledger.oblivious, delta),
            refusal=refusal,
            largest=ledger.largest,
            excess=excess,
            gradient_bound=gradient_bound,
            lower=ledger.lower(),
        )

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

    def state_dict(self) -> State:
        """Return everything the rest of the game depends on, as copies."""
        return packed(self._tensors(), self._facts())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same learner, shape and options; refuse any other."""
        like = self._tensors()
        if isinstance(state, Mapping) and "action" in state:  # pyright: ignore[reportUnnecessaryIsInstance]
            like["action"] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            like.pop("action", None)
        tensors = unpacked(state, like, self._facts())
        ledger = self._empty_ledger()
        kept = {n.removeprefix(_LEDGER): t for n, t in tensors.items() if n.startswith(_LEDGER)}
        ledger.load_state_dict(packed(kept, ledger._facts()))
        self.ledger, self._action = ledger, tensors.get("action")
        vars(self).update({name: tensors[name] for name in self.state_names})

    def _tensors(self) -> dict[str, Tensor]:
        """Return all that changes from round to round, by name; the action while it waits."""
        ledger = {_LEDGER + name: tensor for name, tensor in self.ledger._tensors().items()}
        action = {} if self._action is None else {"action": self._action}
        return {name: getattr(self, name) for name in self.state_names} | action | ledger

    def _facts(self) -> dict[str, Any]:
        """Return what must agree for a state to be this learner's."""
        own = {"learner": self.name, "shape": list(self.shape), "radius": self.radius}
        return {**own, "discount": self.discount, "dtype": str(self.dtype), **self.options()}


_LEDGER = "ledger."


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
