"""Whether all ranks have the same parameters and options, asked before the first step.

Ranks that exchange something ask each other in a collective. An optimizer that exchanges nothing
may live on one rank, so it takes part in none; where it stands by mistake in the place of one that
the other ranks wait for, they would wait in vain. Every optimizer therefore leaves a note in the
process group's store: of which parameters it is, whether it talks to all ranks or is silent, when
it begins to step, and with which options. Notes are read without waiting for their authors,
but for a moment at the first step. Silent ones of the same parameters must have the same options
too, as under DDP, unless consistency_every=None says that the ranks have nothing to do with each
other.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim import choices, placement, shards, stacks, wire
from nucleon.optim.choices import Groups

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from nucleon.optim.base import MatrixOptimizer

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 5.0
"""Seconds that a silent optimizer gives others, built on another rank, for their first step.

After a backward pass of all ranks they are there at once. Another program, where a rank tries
something out by itself before the run of all, loses these seconds once."""

SILENT, TALKING = 0, 1


def check(optimizer: "MatrixOptimizer") -> None:
    """Raise unless all ranks have the same parameters and options, asked once for each of them.

    Where this rank exchanges nothing that is never settled: others may still wait for it.
    """
    groups = optimizer.param_groups
    if not _several() or optimizer.__dict__.get("_agreed") == choices.asked(groups):
        return
    if torch.compiler.is_compiling():  # a step that exchanges nothing may be one graph
        if _widest(groups):
            _ask(optimizer)
    elif not _resting(optimizer):
        _ask(optimizer)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _resting(optimizer: "MatrixOptimizer") -> bool:
    """Whether there is nothing to look at: that is done at steps 1, 2, 4, 8 and so on."""
    notice: Notice | None = optimizer.__dict__.get("_notice")
    if notice is None or not notice.alone or notice.asked != choices.asked(optimizer.param_groups):
        return False
    notice.steps += 1
    return notice.steps & (notice.steps - 1) != 0


# Unlike torch.compiler.disable it imports the compiler when called, which torch.optim does as well.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _ask(optimizer: "MatrixOptimizer") -> None:
    groups, board = optimizer.param_groups, _board()
    widest = _widest(groups)
    notice = board.attempt(board.notice, optimizer, widest)
    if notice is not None:
        if notice.kind == TALKING:
            with wire.heard("parameters and options"):
                complaint = board.meet(notice, _timeout(widest[0].device, board.store))
        else:
            choice = "" if notice.begun or not notice.alone else choices.choice(groups)
            complaint = board.attempt(board.look, notice, choice)
        if complaint:
            board.turn_page(notice)
            raise RuntimeError(complaint)
    if widest:
        names = stacks.parameter_names(groups)
        same = [
            (names[p], tuple(p.shape), p.dtype, choices.comparable(g))
            for g in groups
            for p in g["params"]
        ]
        wire.check_same(same, "parameters and options", placement.process_groups(widest))
        optimizer.__dict__["_agreed"] = choices.asked(groups)  # copies shall ask anew


def announce(optimizer: "MatrixOptimizer") -> None:
    """Note that an optimizer was built; without a process group it is noted at its first step."""
    if _several():
        board = _board()
        board.attempt(board.notice, optimizer, _widest(optimizer.param_groups))


def _widest(groups: Groups) -> Sequence[Tensor]:
    """The parameters, of those that are exchanged, which the most ranks hold.

    Among equals DTensors, which are exchanged under any options: all ranks must choose alike.
    """
    talking = [
        g["params"]
        for g in groups
        if any(map(shards.sharded, g["params"]))
        or (g["rule"] == "matrix" and (g["placement"] != "local" or g["consistency_every"]))
    ]

    def width(params: Sequence[Tensor]) -> tuple[int, bool]:
        return len(placement.world(params)), any(map(shards.sharded, params))

    return max(talking, key=width, default=())


def _kind(widest: Sequence[Tensor]) -> int:
    """TALKING where all ranks of the run must step; those of a smaller mesh go on by themselves."""
    everyone = len(widest) > 0 and len(placement.world(widest)) == dist.get_world_size()
    return TALKING if everyone else SILENT


# ---------------------------------------------------------------------------- notes


@dataclass
class Record:
    """How many optimizers of one list of parameters a rank has, silent and talking ones."""

    built: list[int] = field(default_factory=lambda: [0, 0])
    begun: list[int] = field(default_factory=lambda: [0, 0])
    options: list[str] = field(default_factory=lambda: ["", ""])
    """Of the latest of each kind."""
    choices: list[str] = field(default_factory=list[str])
    """A hash of all options of each silent one that is compared and has begun, each once."""
    latest: str = ""
    """The options of the last of them."""
    board: int = 0
    """Which of the rank's boards in this store it is on."""

    def misses(self, other: "Record", talking: Sequence[int]) -> bool:
        """Whether one of the `talking` ones here waits for a rank that steps a silent one instead.

        A rank may have more optimizers than another, but not less that talk and more silent ones.
        """
        return talking[TALKING] > other.built[TALKING] and other.begun[SILENT] > self.built[SILENT]

    @property
    def choosing(self) -> int:
        """How many silent ones have not begun."""
        return self.built[SILENT] - self.begun[SILENT]

    def parts_from(self, other: "Record") -> bool:
        """Whether each has made a choice that the other has not; one may have made more."""
        mine, theirs = set(self.choices), set(other.choices)
        return bool(mine - theirs and theirs - mine)


@dataclass
class Notice:
    """What one optimizer has noted: `page` is counted up after the parameters were refused."""

    board: "ref[Board]"
    asked: list[tuple[str, int | None]]
    digest: str
    page: int
    kind: int
    alone: bool
    """Whether it exchanges nothing, neither with all ranks nor with those of a smaller mesh."""
    choice: str = ""
    """A hash of its options at its first step, where they are compared; otherwise empty."""
    begun: bool = False
    steps: int = 0

    @property
    def key(self) -> str:
        """Where the ranks note what they have of these parameters."""
        return f"{self.digest}/{self.page}"


class Board:
    """The notes of all ranks, in the store of their process group, where it has one."""

    def __init__(self, store: "Store") -> None:
        self.store = store
        self.mine: defaultdict[str, Record] = defaultdict(Record)
        self.pages: Counter[str] = Counter()
        self.gatherings = 0
        self.usable = dist.get_backend() != "fake"  # one process that stands for all ranks
        # A store may outlive its process group: what was noted in an earlier life is not looked at.
        # All ranks read the same here, none can pass a gathering before the others are there. MPI
        # has no store that notes could be left in: the attempt fails, and nothing is noted.
        self.life = self.attempt(self.store.add, "passed", 0)
        # Silent ones gather nowhere: they are compared with those of a rank's board of this number.
        self.number = self.attempt(self.store.add, f"boards of rank {dist.get_rank()}", 1) or 0

    def attempt(self, act: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Do something with the store; None once it is gone, the rank that hosts it may be done."""
        try:
            return act(*args, **options) if self.usable else None
        except RuntimeError:
            self.usable = False
            return None

    def notice(self, optimizer: "MatrixOptimizer", widest: Sequence[Tensor]) -> Notice:
        """That of an optimizer, made now unless it is there; a late group makes it another one."""
        groups, kind = optimizer.param_groups, _kind(widest)
        found: Notice | None = optimizer.__dict__.get("_notice")
        if found is None or found.board() is not self or found.asked != choices.asked(groups):
            digest = choices.digest(groups)
            page = self.pages[digest]
            found = Notice(ref(self), choices.asked(groups), digest, page, kind, not widest)
            record = self.mine[found.key]
            record.built[kind] += 1
            record.options[kind], record.board = choices.talk(groups), self.number
            self._post(found)
            if found.alone and not choices.apart(groups):
                self.store.add(self._of_choice(found, "built"), record.built[SILENT] == 1)
            optimizer.__dict__["_notice"] = found  # copies shall have none
        return found

    def meet(self, notice: Notice, timeout: float) -> str:
        """Wait until all ranks have come to compare; why not, if one steps without."""
        self._begin(notice)
        gathering, silent = f"{self.life}/gathering {self.gatherings}", 0
        self.store.add(gathering, 1)
        for _ in _moments(timeout):
            if self.store.add(gathering, 0) >= dist.get_world_size():
                self.gatherings += 1
                self.store.add("passed", 1)
                return ""
            if (found := self._count(notice, SILENT)) > silent:
                silent = found
                mine = self.mine[notice.key]
                others = {r: x for r, x in self._others(notice) if mine.misses(x, mine.begun)}
                if others:
                    self.store.add(gathering, -1)
                    return self._complaint(notice, others)
        self.store.add(gathering, -1)
        self.store.set(f"{self.life}/gave up", str(dist.get_rank()))
        raise RuntimeError(f"not all ranks came within {timeout:.0f} s")

    def look(self, notice: Notice, choice: str) -> str:
        """Why this rank must not go on by itself: others wait for it, or have other options.

        Its `choice` is looked at the first time.
        """
        self._begin(notice, choice)
        mine = self.mine[notice.key]
        for _ in _moments(GRACE if notice.steps <= 1 else 0.0):
            others = dict(self._others(notice)) if self._count(notice, TALKING) else {}
            waiting = {r: x for r, x in others.items() if x.misses(mine, x.begun)}
            if waiting:
                return self._complaint(notice, waiting)
            if not any(x.misses(mine, x.built) for x in others.values()):
                break
        gave_up = f"{self.life}/gave up"
        if self.store.check([gave_up]):
            rank = self.store.get(gave_up).decode()
            return (
                f"rank {rank} waited in vain for all ranks to compare parameters and options, and "
                f"gave up; every rank must have the same ones, in the same order"
            )
        return self._difference(notice)

    def _difference(self, notice: Notice) -> str:
        """How the options of other silent ones of the same parameters differ, if they do."""
        if not notice.choice:
            return ""
        mine, others = self.mine[notice.key], dict[int, Record]()
        counted = [self._of_choice(notice, what) for what in (notice.choice, "any", "built")]
        for _ in _moments(GRACE if notice.steps <= 1 else 0.0):
            same, chosen, built = (self.store.add(name, 0) for name in counted)
            parting = self._others(notice) if same < chosen else ()
            others = {r: x for r, x in parting if x.board == self.number and mine.parts_from(x)}
            # What has been built and not begun may make the choice that is missing.
            if chosen >= built and all(x.choosing <= 0 for x in (mine, *others.values())):
                break
        if not others:
            return ""
        there, here = (json.loads(x.latest) for x in (next(iter(others.values())), mine))
        differing = [
            f"{name}={other.get(name)} there, {own.get(name)} here"
            for own, other in zip(here, there, strict=False)
            for name in sorted((own.keys() | other.keys()) - {"of"})
            if own.get(name) != other.get(name)
        ]
        return (
            f"options of rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ "
            f"from those of rank {dist.get_rank()}, for the same parameters: "
            f"{'; '.join(differing) or 'other groups'}; every rank must have the same ones, or "
            f"their weights would part. Where each trains a model of its own, or a part of one, "
            f"pass consistency_every=None"
        )

    def turn_page(self, notice: Notice) -> None:
        """What was refused shall not stand against what is built after it."""
        notice.steps = 0
        self.pages[notice.digest] = max(self.pages[notice.digest], notice.page + 1)

    def _begin(self, notice: Notice, choice: str = "") -> None:
        if notice.begun:
            return
        notice.begun, record = True, self.mine[notice.key]
        record.begun[notice.kind] += 1
        notice.choice = hashlib.sha256(choice.encode()).hexdigest() if choice else ""
        new = bool(choice) and notice.choice not in record.choices
        record.choices += [notice.choice] * new
        record.latest = choice or record.latest
        self._post(notice)
        if new:  # how many ranks have chosen the same, and how many have chosen
            self.store.add(self._of_choice(notice, notice.choice), 1)
            self.store.add(self._of_choice(notice, "any"), len(record.choices) == 1)

    def _post(self, notice: Notice) -> None:
        # The note before its count: whoever sees the count finds the note.
        self.store.set(
            f"{self.life}/{notice.key}/rank {dist.get_rank()}",
            json.dumps(asdict(self.mine[notice.key])),
        )
        self.store.add(f"{self.life}/{notice.key}/kind {notice.kind}", 1)

    def _of_choice(self, notice: Notice, what: str) -> str:
        """Where it is counted how many ranks have built such an optimizer, or chosen options."""
        return f"{self.life}/{self.number}/{notice.key}/choice {what}"

    def _count(self, notice: Notice, kind: int) -> int:
        """How many notes there are of a kind: mostly none, and the ranks need not be asked."""
        return self.store.add(f"{self.life}/{notice.key}/kind {kind}", 0)

    def _others(self, notice: Notice) -> Iterator[tuple[int, Record]]:
        for rank in range(dist.get_world_size()):
            key = f"{self.life}/{notice.key}/rank {rank}"
            if rank != dist.get_rank() and self.store.check([key]):
                yield rank, Record(**json.loads(self.store.get(key)))

    def _complaint(self, notice: Notice, others: Mapping[int, Record]) -> str:
        here = self.mine[notice.key].options[notice.kind]
        first = next(iter(others.values()))
        there = first.options[TALKING if notice.kind == SILENT else SILENT]
        return (
            f"options of rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ "
            f"from those of rank {dist.get_rank()}, for the same parameters: {there} there, {here} "
            f"here, and one would wait for the other; every rank must have the same placement and "
            f"consistency_every. An optimizer that is meant for one rank alone needs parameters of "
            f"other names"
        )


_boards: WeakKeyDictionary[dist.ProcessGroup, Board] = WeakKeyDictionary()


def _board() -> Board:
    """That of the default process group, which may be another one than last time."""
    # Here, since not every torch has it.
    from torch.distributed.distributed_c10d import (
        PrefixStore,
        _get_default_group,
        _get_default_store,
    )

    group = _get_default_group()
    if group not in _boards:
        _boards[group] = Board(PrefixStore("nucleon", _get_default_store()))
    return _boards[group]


def _timeout(device: torch.device, store: "Store") -> float:
    """Of the process group, in seconds; a store that the user made has another."""
    try:
        found = cast(Any, dist.group.WORLD)._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend tells
        found = cast(Any, store).timeout
    return found.total_seconds()


def _moments(seconds: float) -> Iterator[None]:
    """Now, and again until the time is over, less and less often."""
    end, pause = time.monotonic() + seconds, 1e-3
    yield
    while time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        yield
