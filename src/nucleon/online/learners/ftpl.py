"""Follow the perturbed leader: GBPA with Gaussian smoothing, sampled (Theorem 4.1)."""

from typing import ClassVar, Unpack, final

from torch import Tensor

from nucleon import _checks
from nucleon.linalg.polar import Method as PolarMethod
from nucleon.online import theory
from nucleon.online.learners.gbpa import GBPA, GameOptions
from nucleon.online.potentials import Gaussian
from nucleon.online.regret import Shape


@final
class FTPL(GBPA):
    """Follow the perturbed leader: X_{t+1} = −D·mean of polar([S_t 0] + LZ)'s leading block.

    The theorem is on the mean over Z against gradients fixed before Z is drawn. Against one that
    answers the sampled action the regret is linear in T, and so is what `certificate` adds to the
    bound for a given δ; without one it refuses. With `redraw=False` it always does.

    Args:
        shape: (m, n), or (b, m, n) for b games at once, each with its own noise.
        samples: draws of Z per round (default 16).
        seed: of the noise, a function of (seed, stream, round, sample) alone (default 0).
        stream: identity of the (first) game in the noise (default 0).
        redraw: a new Z every round; False keeps one for the whole game (default True).
        antithetic: draw Z in pairs Z, −Z; needs an even number of samples (default False).
        width: n′ of the perturbed matrix; None is max(n, 2m, m+2), see `potentials.Gaussian`.
        method: of the polar factors (default "svd").
        options: see `GameOptions`.
    """

    name: ClassVar[str] = "ftpl"
    theorem: ClassVar[str] = "Theorem 3.2 with the constants of Theorem 4.1"
    option_names: ClassVar[tuple[str, ...]] = ("stream", "redraw")
    potential: Gaussian

    def __init__(
        self,
        shape: Shape,
        *,
        samples: int = 16,
        seed: int = 0,
        stream: int = 0,
        redraw: bool = True,
        antithetic: bool = False,
        width: int | None = None,
        method: PolarMethod = "svd",
        **options: Unpack[GameOptions],
    ) -> None:
        super().__init__(shape, Gaussian(samples, seed, antithetic, width, method), **options)
        self.stream = _checks.count("stream", stream, minimum=0)
        if not isinstance(redraw, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"redraw must be True or False, got {redraw!r}")
        self.redraw = redraw

    def _direction(self, total: Tensor, smoothing: Tensor) -> Tensor:
        step = self.rounds if self.redraw else 0
        return self.potential.gradient(total, smoothing, step=step, stream=self.stream)

    @property
    def samples_drawn(self) -> int:
        """Independent samples that an action is the mean of: antithetic pairs count once."""
        return self.potential.samples // (2 if self.potential.antithetic else 1)

    def refusal(self, *, oblivious: bool, delta: float | None = None) -> str | None:
        """Return why no theorem bounds the regret of a game; None where one does."""
        if self.constants is None:
            return "the perturbed matrix needs at least m+2 columns; pass a larger width"
        if not self.redraw and not oblivious:
            return "one draw of noise serves all rounds, and the gradients may depend on it"
        return super().refusal(oblivious=oblivious, delta=delta)

    def _deviation(self, oblivious: bool, delta: float) -> Tensor | float:
        if self.redraw or self.rounds < 2:
            return super()._deviation(oblivious, delta)
        return theory.ftpl_oblivious_deviation(
            self.nuclear_sum.unsqueeze(-1),
            radius=self.radius,
            samples=self.samples_drawn,
            delta=delta / self.excess.numel(),
            redraw=False,
        )
