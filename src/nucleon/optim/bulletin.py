"""Whether all ranks have the same parameters and options, asked before the first step.

Ranks that exchange something ask each other in a collective. An optimizer that exchanges nothing
may live on one rank, so it takes part in none; where it stands by mistake in the place of one that
the other ranks wait for, they would wait in vain. Every optimizer therefore leaves a note in the
process group's store: of which parameters it is, whether it talks to all ranks or is silent, with
which options, and when it begins to step. Notes are read without waiting for their authors. Silent
ones of the same parameters must have the same options too, as under DDP, unless
consistency_every=None says that the ranks have nothing to do with each other.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim import placement, shards, stacks, wire

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from nucleon.optim.base import MatrixOptimizer

P = ParamSpec("P")
T = TypeVar("T")
Groups = Sequence[Mapping[str, Any]]

GRACE = 5.0
"""Seconds that a silent optimizer gives one that talks, built on another rank, for its first step.

After a backward pass of all ranks it is there at once. Another program, where a rank tries
something out by itself before the run of all, loses them once."""

SILENT, TALKING = 0, 1


def check(optimizer: "MatrixOptimizer") -> None:
    """Raise unless all ranks have the same parameters and options, asked once for each of them.

    Where this rank exchanges nothing that is never settled: others may still wait for it.
    """
    groups = optimizer.param_groups
    if placement.world(()) == (0,) or optimizer.__dict__.get("_agreed") == _asked(groups):
        return
    if torch.compiler.is_compiling():  # a step that exchanges nothing may be one graph
        if _widest(groups):
            _ask(optimizer)
    elif not _resting(optimizer):
        _ask(optimizer)


def _resting(optimizer: "MatrixOptimizer") -> bool:
    """Whether there is nothing to look at: that is done at steps 1, 2, 4, 8 and so on."""
    notice: Notice | None = optimizer.__dict__.get("_notice")
    if notice is None or not notice.alone or notice.asked != _asked(optimizer.param_groups):
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
            complaint = board.attempt(board.look, notice)
        if complaint:
            board.turn_page(notice)
            raise RuntimeError(complaint)
    if widest:
        names = stacks.parameter_names(groups)
        same = [
            (names[p], tuple(p.shape), p.dtype, _comparable(g)) for g in groups for p in g["params"]
        ]
        wire.check_same(same, "parameters and options", placement.process_groups(widest))
        optimizer.__dict__["_agreed"] = _asked(groups)  # copies shall ask anew


def _comparable(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, free of what is of one rank: a rate on the device names that."""
    return {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def announce(optimizer: "MatrixOptimizer") -> None:
    """Note that an optimizer was built; without a process group it is noted at its first step."""
    if placement.world(()) != (0,):
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
    """All options of each silent one that is compared, every choice once."""

    def misses(self, other: "Record", talking: Sequence[int]) -> bool:
        """Whether one of the `talking` ones here waits for a rank that steps a silent one instead.

        A rank may have more optimizers than another, but not less that talk and more silent ones.
        """
        return talking[TALKING] > other.built[TALKING] and other.begun[SILENT] > self.built[SILENT]

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
    choice: str
    """Its options, where they are compared; otherwise empty."""
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
        if found is None or found.board() is not self or found.asked != _asked(groups):
            digest = _digest(groups)
            page = self.pages[digest]
            choice = "" if widest else _choice(groups)
            found = Notice(ref(self), _asked(groups), digest, page, kind, not widest, choice)
            record = self.mine[found.key]
            record.built[kind] += 1
            record.options[kind] = _options(groups)
            new = [choice] if choice and choice not in record.choices else []
            record.choices += new
            self._post(found)
            for text in new:  # how many ranks have chosen the same, and how many have chosen
                self.store.add(self._of_choice(found, text), 1)
                self.store.add(self._of_choice(found), len(record.choices) == 1)
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

    def look(self, notice: Notice) -> str:
        """Why this rank must not go on by itself: others wait for it."""
        self._begin(notice)
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
        same, all_ = (self._of_choice(notice, text) for text in (notice.choice, ""))
        if not notice.choice or self.store.add(same, 0) >= self.store.add(all_, 0):
            return ""
        mine = self.mine[notice.key]
        others = {r: x for r, x in self._others(notice) if mine.parts_from(x)}
        if not others:
            return ""
        there = json.loads(next(iter(others.values())).choices[-1])
        here = json.loads(notice.choice)
        differing = [
            f"{name}={other.get(name)} there, {own.get(name)} here"
            for own, other in zip(here, there, strict=False)
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
        return (
            f"options of rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} differ "
            f"from those of rank {dist.get_rank()}, for the same parameters: "
            f"{'; '.join(differing) or 'other groups'}; every rank must have the same ones, or "
            f"their weights would part. Where each trains a model of its own pass "
            f"consistency_every=None"
        )

    def turn_page(self, notice: Notice) -> None:
        """What was refused shall not stand against what is built after it."""
        notice.steps = 0
        self.pages[notice.digest] = max(self.pages[notice.digest], notice.page + 1)

    def _begin(self, notice: Notice) -> None:
        if not notice.begun:
            notice.begun = True
            self.mine[notice.key].begun[notice.kind] += 1
            self._post(notice)

    def _post(self, notice: Notice) -> None:
        # The note before its count: whoever sees the count finds the note.
        self.store.set(
            f"{self.life}/{notice.key}/rank {dist.get_rank()}",
            json.dumps(asdict(self.mine[notice.key])),
        )
        self.store.add(f"{self.life}/{notice.key}/kind {notice.kind}", 1)

    def _of_choice(self, notice: Notice, text: str = "") -> str:
        """Where it is counted how many ranks have chosen these options, or any."""
        named = hashlib.sha256(text.encode()).hexdigest() if text else "any"
        return f"{self.life}/{notice.key}/choice {named}"

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


def _digest(groups: Groups) -> str:
    """Of the names, where given, shapes and dtypes of all parameters, in whatever groups."""
    listed = sorted(
        f"{name} {tuple(param.shape)} {param.dtype}"
        for g in groups
        for name, param in zip_longest(g.get("param_names") or (), g["params"])
    )
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


def _asked(groups: Groups) -> list[tuple[str, int | None]]:
    """What of the options decides whether an optimizer exchanges anything."""
    return [(g["placement"], g["consistency_every"]) for g in groups]


def _choice(groups: Groups) -> str:
    """All options of an optimizer, group by group, or nothing where it is not to be compared."""
    if any(g["consistency_every"] is None for g in groups):
        return ""
    left_out = ("param_names", "initial_lr")  # the first is in the digest, the second a schedule's
    listed = [
        {name: repr(x) for name, x in _comparable(g).items() if name not in left_out}
        for g in groups
    ]
    return json.dumps(listed, sort_keys=True)


def _options(groups: Groups) -> str:
    found = {
        f"placement={g['placement']!r}, consistency_every={g['consistency_every']}"
        for g in groups
        if g["rule"] == "matrix"
    }
    return " and ".join(sorted(found)) or "no matrices"
