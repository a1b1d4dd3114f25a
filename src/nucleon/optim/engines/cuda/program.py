"""The launches of a stack: their arguments, and their inputs that are kept between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor

from nucleon.linalg.half import spread_of
from nucleon.optim.engines.cuda import addresses
from nucleon.optim.engines.cuda.addresses import Layout, layout_of
from nucleon.optim.engines.cuda.replay import Input, Replay
from nucleon.optim.engines.work import Draws, Hyperparameters, Matrices, Settings, facts_of
from nucleon.optim.matrices.stacks import gram_key
from nucleon.optim.polar_methods import chosen_method

LARGEST = 2**35
"""bm³ of captured stacks, b directions of short side m: 0.1 ms per product on an H200."""


@dataclass(frozen=True)
class Program:
    """The arguments of a stack's launches, without the inputs: table of addresses, mask and rates.

    Steps with equal programs have the same launches.
    """

    m: int
    """Length of the short side."""
    n: int
    layout: Layout
    kernel: str
    """The recursion of the direction, one of `KERNELS`."""
    small: bool
    """True if `kernels.small` computes the direction."""
    gradient: torch.dtype
    total: torch.dtype
    weight: torch.dtype
    has_gram: bool
    masked: bool
    """True if a mask marks the matrices with a gradient."""
    decays: bool
    """True if the weights decay."""
    iterations: int
    hyper: Hyperparameters
    alignments: tuple[int, int, int] = (16, 16, 16)
    """Alignments of gradients, totals and weights, see `addresses.alignment`."""

    @cached_property
    def draws(self) -> Draws | None:
        """The noise that the kernels draw."""
        return self.hyper.draws if self.kernel == "perturbed" else None

    @cached_property
    def spread(self) -> float:
        """The norm of the operands of the float16 recursion."""
        return spread_of(self.n if self.draws is None else self.draws.width)

    @cached_property
    def states(self) -> Sequence[str]:
        """The states in a table of addresses, after the gradients and before the weights."""
        gram = "gram" if self.has_gram else "skipped"  # not read
        noise = () if self.draws is None else ("stream", "step")
        return ("total", "skipped", "quiet", gram, *noise)

    @cached_property
    def kinds(self) -> int:
        """The number of lists of addresses before that of the weights."""
        return 1 + len(self.states)

    @cached_property
    def captured(self) -> bool:
        """True if the launches are captured, since they take long beside the kernels."""
        directions = self.layout.count * (1 if self.draws is None else self.draws.samples)
        return directions * self.m**3 <= LARGEST


class Recording:
    """The inputs of a repeated step on the device, and its graph."""

    def __init__(self, work: Matrices, entries: int) -> None:
        device = work.params[0].device
        self.table = Input(torch.empty(entries, dtype=torch.int64, device=device))
        """The addresses."""
        self.rates = Input(torch.empty(2, dtype=torch.float32, device=device))
        """Rate of the direction, and of the decay."""
        self.mask = Input(torch.ones(work.stack.count, dtype=torch.bool, device=device))
        """The matrices that have a gradient."""
        self.replay = Replay()


Bound = tuple[Program, list[int], Sequence[Tensor | None]]
"""A program, its addresses, and the gradients, whose copies must live until the launches."""


class Launches:
    """The launches of a stack under the options of its group, kept between steps."""

    def __init__(self, work: Matrices, settings: Settings) -> None:
        stack, param, kernel = work.stack, work.params[0], facts_of(work.optimizer).kernel
        # Directions for other ranks, and noise, have the order of the axes.
        sent, moved = layout_of(stack), layout_of(stack, in_order=kernel == "perturbed")
        assert sent is not None and moved is not None and kernel  # else another engine steps it
        method = chosen_method(settings.group, *stack.shape, param.device, param.dtype)
        self._layouts = sent, moved
        self._program = Program(
            *sorted(stack.shape),
            layout=moved,
            kernel=kernel,
            small=method != "half",
            gradient=param.dtype,
            total=param.dtype,
            weight=param.dtype,
            has_gram=work.optimizer.has_gram,
            masked=False,
            decays=False,
            iterations=settings.group["iterations"],
            hyper=settings[stack.kind],
        )
        """The program of the last step, apart from alignments."""
        self.masked = False
        """True after a gradient was missing; the kernels then read the mask."""
        self.recording: Recording | None = None
        self._options: object = None
        keys = {"gram": [gram_key(piece.block) for piece in stack.pieces]}
        self._entries = [
            (state, key)
            for kind in self._program.states
            for state, key in zip(work.states, keys.get(kind, repeat(kind)), strict=False)
        ]
        """The entries of states in the table, each as a state and a key."""
        self._followed = addresses.Followed[list[int]]()

    def bound(
        self,
        work: Matrices,
        settings: Settings,
        gradients: Sequence[Tensor | None],
        *,
        masked: bool,
        moves: bool,
    ) -> Bound | None:
        """Return the launches for these gradients; None if a tensor is irregular.

        With `moves` they update the weights; otherwise they end with the direction.
        """
        total, program = work.states[0]["total"].dtype, self._program
        readable = (torch.float32,) if program.small else addresses.DTYPES
        strides = program.layout.strides
        gradients, dtype = addresses.regular(gradients, work.params, strides, readable)
        options = {
            "layout": self._layouts[moves],
            "gradient": dtype,
            "total": total,
            "masked": masked,
            "decays": bool(settings.group["weight_decay"]),
            "hyper": settings[work.stack.kind],
        }
        if self._options != options:  # they seldom change
            self._options = options
            self._program = program = replace(program, **options)
        layout, weights = program.layout, work.params if moves else ()
        places = addresses.of_regular(layout, gradients)
        others = self._followed.get(
            ([state[key] for state, key in self._entries], weights),
            lambda: addresses.of_stack(
                work.stack, layout, work.states, program.states, weights, readable
            ),
        )
        if places is None or others is None:
            return None
        places += others
        runs, last = layout.runs, program.kinds * layout.runs
        alignments = (
            addresses.alignment(places[:runs], program.gradient.itemsize),
            addresses.alignment(places[runs : 2 * runs], program.total.itemsize),
            addresses.alignment(places[last:], program.weight.itemsize),
        )
        if alignments != program.alignments:  # they seldom differ, and a copy costs time
            program = replace(program, alignments=alignments)
        return program, places, gradients
