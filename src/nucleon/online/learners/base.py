"""The base class of learners: players of the online game with a state and a certificate."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Certificate, forced_regret
from nucleon.online.regret import Ledger, Shape, game_shape
from nucleon.online.saving import State, packed, unpacked

_OF_THE_GAME = ("radius", "discount", "stated_bound", "tall", "validate")
"""Public attributes that are neither options nor state of a learner."""


class LearnerOptions(TypedDict, total=False):
    """Keyword options of every learner."""

    radius: float
    """D of the ball (default 1.0)."""
    dtype: torch.dtype | None
    """Dtype of gradients and actions, float32 or float64 (default: torch's)."""
    device: torch.device | str | None
    """Device of gradients and actions (default: torch's)."""
    validate: bool
    """False skips the checks of dtype and device, and allows gradients above a stated bound: the
    excess is added to the regret bound (default True)."""


class Learner(ABC):
    """Player of X_1, X_2, … in the ball ‖X‖_op ≤ D: `play` returns X_t, `observe` enters G_t.

    A final class defines the `action` of its state, its `update` by a gradient and its `bound`. Its
    public attributes are its state, if tensors, and its options, if plain values. `action` and
    `update` see float64 matrices with the short side first; tall ones are transposed for them. An
    update replaces tensors and never writes into them.

    Args:
        shape: (m, n), or (b, m, n) for b games at once.
        options: see `LearnerOptions`; learners of the discounted game have a `discount` too.
    """

    name: ClassVar[str]
    theorem: ClassVar[str] = "none"
    """Theorem that bounds the regret, or "none"."""
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
        device = torch.get_default_device() if device is None else device
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.validate = validate
        *self.batch, rows, columns = self.shape
        self.tall = rows > columns
        self.sides = (columns, rows) if self.tall else (rows, columns)
        """(m, n) of the matrices that `action` and `update` see, m ≤ n."""
        self.ledger = self._empty_ledger()
        """The game so far: its regret, and what the bound is made of."""
        self._action: Tensor | None = None

    @property
    def rounds(self) -> int:
        """Gradients observed so far."""
        return self.ledger.rounds

    def zeros(self, *sides: int) -> Tensor:
        """Return zeros of the games of the batch, (…, *sides), float64, to start a state with."""
        return torch.zeros((*self.batch, *sides), dtype=torch.float64, device=self.device)

    # ------------------------------------------------------------------ hooks of a final class

    @abstractmethod
    def action(self) -> Tensor:
        """Return X_t from the state, (…, m, n); X_1 = 0."""

    @abstractmethod
    def update(self, gradient: Tensor) -> None:
        """Update the state by G_t, (…, m, n); where it raises, the state is restored."""

    @abstractmethod
    def bound(self) -> Tensor:
        """Return the theorem's bound on the regret so far, float64, () or (b,); else infinity."""

    def options(self) -> dict[str, Any]:
        """Return the options that decide what is played, as plain values."""
        return dict(self._public(bool, int, float, str, type(None)))

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

    def _refuse_above(
        self,
        kind: str,
        norm: Tensor,
        bound: Tensor | float,
        *,
        name: str = "gradient_bound",
        remedy: str = "state a larger bound",
    ) -> None:
        """Check that no norm exceeds its bound by more than rounding to the dtype.

        Rounding moves each entry by eps/2 of itself, an operator norm by √m times as much.
        """
        entries = self.sides[0] if kind == "operator norm" else 1
        ratio = norm / bound
        if self.validate and bool(
            (ratio > 1 + 8 * entries**0.5 * torch.finfo(self.dtype).eps).any()
        ):
            game = int(ratio.argmax())
            limit = torch.as_tensor(bound).expand_as(norm).flatten()[game].item()
            raise ValueError(
                f"gradient has {kind} {norm.flatten()[game].item():.9g}, above {name}={limit:.9g}; "
                f"{remedy}"
            )

    # ------------------------------------------------------------------ the game

    @torch.no_grad()
    def play(self) -> Tensor:
        """Return X_t, the same until the next gradient; X_1 = 0."""
        if self._action is None:
            action = self.action()
            self._action = (action.mT if self.tall else action).to(self.dtype)
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
            _checks.matrix("gradient", gradient)
            _checks.same("gradient", gradient, "the action", self._action)
        ledger = copy.copy(self.ledger)
        ledger.record(gradient, self._action, oblivious=oblivious)
        with undone_on_error(self):
            self.update((gradient.mT if self.tall else gradient).double().contiguous())
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
            _checks.fraction("delta", delta)
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
            lower=forced_regret(ledger.gram, self.radius),
        )

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> State:
        """Return the state as copies, with an action that awaits its gradient."""
        action = {} if self._action is None else {"action": self._action}
        return packed({**self._tensors(), **action}, self._facts())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same learner, shape and options; raise on any other."""
        like, ledger = self._tensors(), self._empty_ledger()
        if isinstance(state, Mapping) and "action" in state:  # pyright: ignore[reportUnnecessaryIsInstance]
            like["action"] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        tensors = unpacked(state, like, self._facts())
        ledger.restore({name: tensors.pop(f"ledger.{name}") for name in ledger.tensors()})
        self.ledger, self._action = ledger, tensors.pop("action", None)
        vars(self).update(tensors)

    def _tensors(self) -> dict[str, Tensor]:
        ledger = {f"ledger.{name}": tensor for name, tensor in self.ledger.tensors().items()}
        return ledger | dict(self._public(Tensor))

    def _public(self, *types: type) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self).items():
            if isinstance(value, types) and not name.startswith("_") and name not in _OF_THE_GAME:
                yield name, value

    def _facts(self) -> dict[str, Any]:
        """Return the facts in which a state must agree with this learner."""
        identity = {"learner": self.name, "shape": list(self.shape), "radius": self.radius}
        return {**identity, "discount": self.discount, "dtype": str(self.dtype), **self.options()}


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


def dimension_of(shape: Shape) -> int:
    """Return d of a shape of vectors: (1, d) or (d, 1), with or without games in front."""
    *_, rows, columns = game_shape(shape)
    if min(rows, columns) != 1:
        raise ValueError(
            f"shape must be a row (1, d) or a column (d, 1), with b games in front (b, 1, d), "
            f"got {shape}; matrices have learners of their own"
        )
    return max(rows, columns)
