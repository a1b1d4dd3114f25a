"""The base class of learners: players of the online game with a state and a certificate."""

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
    """Dtype of gradients and actions, float32 or float64 (default: torch's)."""
    device: torch.device | str | None
    """Device of gradients and actions (default: torch's)."""
    validate: bool
    """False skips the checks of dtype, device and finite squares in float64, and allows gradients
    above a stated bound, which then enter the regret bound (default True)."""


class Learner(ABC):
    """Player of X_1, X_2, … in the ball ‖X‖_op ≤ D: `play` returns X_t, `observe` enters G_t.

    A final class defines the update of its state by a gradient (`_absorb`), the action (`_act`),
    the names of the tensors of its state (`state_names`), the names of its options
    (`option_names`) and its bound (`bound`).
    """

    name: ClassVar[str]
    theorem: ClassVar[str] = "none"
    """Theorem that bounds the regret, or "none"."""
    state_names: ClassVar[tuple[str, ...]]
    """Attributes of the state, all tensors."""
    option_names: ClassVar[tuple[str, ...]]
    """Attributes of the options, all plain values; `options` may add others."""
    plays_discounted: ClassVar[bool] = True
    """True if it plays the discounted game; a learner of the plain game raises on a discount."""

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
                f"{type(self).__name__} has no option_names; give the class option_names, the "
                f"attributes that decide what is played, or () for none"
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

    # ------------------------------------------------------------------ hooks of a final class

    def options(self) -> dict[str, Any]:
        """Return the options that decide what is played, as plain values."""
        return {name: getattr(self, name) for name in self.option_names}

    @abstractmethod
    def bound(self) -> Tensor:
        """Return the theorem's bound on the regret so far, float64, () or (b,); else infinity."""

    @abstractmethod
    def _act(self) -> Tensor:
        """Return X_t from the state."""

    @abstractmethod
    def _absorb(self, gradient: Tensor) -> None:
        """Update the state by G_t; on an error leave it unchanged."""

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret of a game; None if one does.

        Args:
            oblivious: True if all gradients are fixed before the game.
            delta: see `certificate`.
        """
        return f"{self.name} has no theorem" if self.theorem == "none" else None

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        """Return the addition to `bound` that holds with probability 1 − δ; 0 without noise."""
        return 0.0

    def _theorem(self, oblivious: bool, delta: float | None) -> str:
        """Return the theorem in words."""
        return self.theorem

    def _bounded(self) -> tuple[Tensor | None, Tensor | None]:
        """Return G and the addition to the bound by gradients above it; None without G."""
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
        """Enter G_t, the answer to X_t; on an error nothing changes.

        Args:
            gradient: G_t, of the learner's shape, dtype and device.
            oblivious: True if G_t was fixed before the game, False if it may depend on the actions
                so far (default False). Gradients that were recorded in a game with the same seed
                are not fixed, since they depend on its noise.
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
            delta: δ in (0, 1). By default (None) the bound of a learner with noise is on the mean
                over the noise. With δ it is on the actual actions and fails with probability at
                most δ, for all games of a batch together.
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
        """Check that δ, and its share for each game, are in (0, 1)."""
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
        """Return the state as copies."""
        return packed(self._tensors(), self._facts())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same learner, shape and options; raise on any other."""
        like = self._tensors()
        if isinstance(state, Mapping) and "action" in state:  # pyright: ignore[reportUnnecessaryIsInstance]
            like["action"] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            like.pop("action", None)
        tensors = unpacked(state, like, self._facts())
        ledger = self._empty_ledger()
        ledger_tensors = {
            n.removeprefix(_LEDGER): t for n, t in tensors.items() if n.startswith(_LEDGER)
        }
        ledger.load_state_dict(packed(ledger_tensors, ledger._facts()))
        self.ledger, self._action = ledger, tensors.get("action")
        vars(self).update({name: tensors[name] for name in self.state_names})

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, with an action that awaits its gradient."""
        ledger = {_LEDGER + name: tensor for name, tensor in self.ledger._tensors().items()}
        action = {} if self._action is None else {"action": self._action}
        return {name: getattr(self, name) for name in self.state_names} | action | ledger

    def _facts(self) -> dict[str, Any]:
        """Return the facts in which a state must agree with this learner."""
        identity = {"learner": self.name, "shape": list(self.shape), "radius": self.radius}
        return {**identity, "discount": self.discount, "dtype": str(self.dtype), **self.options()}


_LEDGER = "ledger."


@contextmanager
def undone_on_error(*learners: Learner) -> Iterator[None]:
    """Restore the learners if the block raises.

    Learners replace their tensors and never write into them, so references suffice.
    """
    before = [dict(vars(learner)) for learner in learners]
    try:
        yield
    except BaseException:
        for learner, old in zip(learners, before, strict=True):
            vars(learner).clear()
            vars(learner).update(old)
        raise
