"""What the ranks do in the tests of ranks that are of different minds."""

import copy
import os
import pickle
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.optim.lr_scheduler import LambdaLR

import nucleon
from nucleon.optim import bulletin


def stepped(param, optimizer):
    param.grad = torch.ones_like(param)
    optimizer.step()


def at_odds(silent, what="placement", late="nobody", width=5):
    """Some ranks are silent, the others wait for them.

    `late`: "nobody", and all ranks have built theirs before any steps; or the kind of ranks that
    build theirs after the others have begun. Returns the error, the steps before it, the seconds
    that it took, and whether weights and state were untouched.
    """
    rank = dist.get_rank()
    kind = "silent" if rank in silent else "talking"
    asked = {"placement": {"placement": "owner"}, "every": {"consistency_every": 3}}[what]
    param = torch.ones(4, width, requires_grad=True)
    dist.barrier()
    if kind == late:
        time.sleep(0.5)
    start, steps = time.monotonic(), 0
    optimizer = nucleon.Leon([("w", param)], **({} if kind == "silent" else asked))
    if late == "nobody":
        dist.barrier()
    try:
        while time.monotonic() < start + 15:
            stepped(param, optimizer)
            steps += 1
            time.sleep(0.01)
    except RuntimeError as error:
        untouched = torch.equal(param, torch.ones_like(param))
        states = [s for s in optimizer.state[param].values() if s.is_floating_point()]
        untouched &= not any(s.any() for s in states) and not optimizer.state[param]["step"].any()
        took = time.monotonic() - start
        try:
            optimizer.step()
        except RuntimeError as again:
            assert "differ from those" in str(again)  # by then more ranks may have come
            return str(error), steps, took, untouched
    return "no error", steps, time.monotonic() - start, False


def in_order(width=5, steps=3, **options):
    """All ranks alike; returns the weights."""
    param = torch.ones(4, width, requires_grad=True)
    optimizer = nucleon.Leon([("w", param)], **options)
    for _ in range(steps):
        stepped(param, optimizer)
    return param.detach()


def alone(rank, steps=3):
    """One rank has a local optimizer, the others have none; the seconds it takes."""
    start = time.monotonic()
    if dist.get_rank() == rank:
        in_order(steps=steps)
    return time.monotonic() - start


def trial(grace):
    """Rank 0 tries something out on a copy, while the others have built what talks already."""
    bulletin.GRACE, kept = grace, bulletin.GRACE
    start = time.monotonic()
    param = torch.ones(4, 9, requires_grad=True)
    if dist.get_rank() > 0:
        optimizer = nucleon.Leon([("w", param)], placement="owner")
    dist.barrier()
    if dist.get_rank() == 0:
        for _ in range(3):
            in_order(width=9)
        optimizer = nucleon.Leon([("w", param)], placement="owner")
    tried = time.monotonic() - start
    dist.all_reduce(torch.zeros(1))  # as that of the gradients
    time.sleep(0.2 * (dist.get_rank() == 0))
    for _ in range(3):
        stepped(param, optimizer)
    bulletin.GRACE = kept
    return param.detach(), tried


def population():
    """Every rank trains a model of its own, with options of its own, some in the same shapes."""
    rank = dist.get_rank()
    shape = (4, 16 + rank // 2)
    param = torch.ones(shape, requires_grad=True)
    own = {"lr": 0.1 * (1 + rank), "momentum": 0.9 - 0.1 * rank}
    optimizer = nucleon.Leon([("w", param)], **own, consistency_every=None)
    for _ in range(5):
        stepped(param, optimizer)
    return param.detach(), optimizer.state[param]["step"].item()


def parting(odd, how="built", width=21):
    """Under "local", as with DDP, rank `odd` has another rate; the error, and whether it moved.

    From the start, or set before the first step, by a schedule, or the rates of two parameters are
    exchanged.
    """
    param, other = (torch.ones(4, width, requires_grad=True) for _ in range(2))
    rates = [0.2, 0.1] if dist.get_rank() == odd else [0.1, 0.2]
    start = rates[0] if how in ("built", "exchanged") else 0.1
    groups = [{"params": [("w", param)]}]
    if how == "exchanged":
        groups.append({"params": [("v", other)], "lr": rates[1]})
    optimizer = nucleon.Leon(groups, lr=start, weight_decay=0.1)
    if how == "set":
        optimizer.param_groups[0]["lr"] = rates[0]
    if how == "scheduled":
        LambdaLR(optimizer, lambda _: rates[0] / start)
    dist.all_reduce(torch.zeros(1))  # as that of the gradients
    try:
        stepped(param, optimizer)
    except RuntimeError as error:
        return str(error), torch.equal(param, torch.ones_like(param))
    return "no error", False


def another_model(first):
    """Rank 0 has one more optimizer, of another model, built and stepped before or after the run's.

    Nothing else lets the ranks wait for each other.
    """
    shared, own = torch.ones(4, 7, requires_grad=True), torch.ones(3, 8, requires_grad=True)
    extra = nucleon.Leon([("w", own)]) if first and dist.get_rank() == 0 else None
    if extra:
        stepped(own, extra)
    optimizer = nucleon.Leon([("w", shared)], placement="owner")
    for _ in range(3):
        stepped(shared, optimizer)
        if dist.get_rank() == 0:
            extra = extra or nucleon.Leon([("w", own)])
            stepped(own, extra)
    return shared.detach()


def strangers(seconds):
    """Other parameters and another placement on each rank: nothing shows that they belong together.

    Returns the error and when it came.
    """
    rank, start = dist.get_rank(), time.monotonic()
    param = torch.ones(4, 5 + rank, requires_grad=True)
    optimizer = nucleon.Leon([param], placement=["owner", "local"][rank])
    try:
        while time.monotonic() < start + seconds:
            stepped(param, optimizer)
            time.sleep(0.01)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", seconds


def host_gone():
    """Rank 0, which hosts the store, is done; the other goes on by itself."""
    param = torch.ones(4, 5, requires_grad=True)
    optimizer = nucleon.Leon([param])
    stepped(param, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(0)
    time.sleep(0.5)
    for _ in range(8):
        stepped(param, optimizer)
    return in_order()


def later_group(placement):
    """A group that is added after some steps, by all ranks; one optimizer may become a talking one.

    Rank 0 comes late, and what it has noted before must not be held against it.
    """
    params = [torch.ones(4, 5, requires_grad=True), torch.ones(6, 2, requires_grad=True)]
    optimizer = nucleon.Leon([("a", params[0])])
    for _ in range(3):
        stepped(params[0], optimizer)
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.3 * (dist.get_rank() == 0))
    optimizer.add_param_group({"params": [("b", params[1])], "placement": placement})
    for _ in range(3):
        params[1].grad = torch.ones_like(params[1])
        stepped(params[0], optimizer)
    return [p.detach() for p in params]


def copies(placement):
    """Copies step on as what they are copies of: the weights of all three."""
    param = torch.ones(4, 5, requires_grad=True)
    optimizer = nucleon.Leon([("w", param)], placement=placement)
    stepped(param, optimizer)
    found = [optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    fresh = nucleon.Leon([("w", param.detach().clone().requires_grad_())], placement=placement)
    fresh.load_state_dict(optimizer.state_dict())
    for each in (*found, fresh):
        stepped(each.param_groups[0]["params"][0], each)
    return [each.param_groups[0]["params"][0].detach() for each in (*found, fresh)]


def compiled(placement, fullgraph):
    param = torch.ones(4, 5, requires_grad=True)
    optimizer = nucleon.Leon([("w", param)], placement=placement)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=fullgraph)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        step()
    return param.detach()


def pretend():
    """A process that stands for four, with either kind of store."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for store in (FakeStore(), dist.HashStore()):
        dist.init_process_group("fake", rank=0, world_size=4, store=store)
        for options in ({}, {"placement": "owner"}, {"consistency_every": 1}):
            in_order(**options)
        dist.destroy_process_group()


def lives(port):
    """One store for several process groups, one after the other; the weights by life, from 0.

    All ranks exchange in the first and in the third, in the second one rank is by itself; in the
    last two none exchanges anything, and the rates differ between them. Only the notes share the
    store: gloo would meet addresses that the group before has left in it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    found = {}
    for life, placement in enumerate(("owner", "local", "owner", "local", "local")):
        dist.destroy_process_group()
        own = dist.PrefixStore(str(life), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        bulletin._boards[_get_default_group()] = bulletin.Board(dist.PrefixStore("notes", store))
        param = torch.ones(4, 5, requires_grad=True)
        if placement == "owner" or rank == 1 or life > 2:
            time.sleep(0.2 * rank * (life > 3))  # what is there is of the life before
            optimizer = nucleon.Leon([("w", param)], placement=placement, lr=0.1 * (1 + life))
            dist.all_reduce(torch.zeros(1))  # as that of the gradients
            for _ in range(3):
                stepped(param, optimizer)
            found[life] = param.detach()
        else:
            dist.all_reduce(torch.zeros(1))
        dist.barrier()
    return found


def switched(placement, what, seconds):
    """After three steps of all ranks rank 0 alone asks for more; the error and when it came."""
    params = [torch.ones(4, 5, requires_grad=True), torch.ones(6, 2, requires_grad=True)]
    optimizer = nucleon.Leon([("a", params[0])], placement=placement)
    for _ in range(3):
        stepped(params[0], optimizer)
    if dist.get_rank() == 0 and what == "every":
        optimizer.param_groups[0]["consistency_every"] = 1
    elif dist.get_rank() == 0:
        optimizer.add_param_group({"params": [("b", params[1])], "placement": "owner"})
    start = time.monotonic()
    try:
        while time.monotonic() < start + seconds:
            stepped(params[0], optimizer)
            time.sleep(0.01)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return f"no error, {params[0].detach()[0]}", seconds


def ordinary(program):
    """Programs in which nothing is wrong, and ranks are not in step; returns the weights."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def pause():
        time.sleep(0.05 * torch.rand(()).item() if dist.is_initialized() else 0.0)

    def one(placement, steps=3, lr=0.02, width=13):
        pause()
        param = torch.ones(4, width, requires_grad=True)
        optimizer = nucleon.Leon([("w", param)], placement=placement, lr=lr)
        for _ in range(steps):
            pause()
            stepped(param, optimizer)
        return param.detach()

    if program == "sweep":  # each trial with an optimizer of its own
        return [one(placement) for placement in ("local", "owner", "owner", "local", "owner")]
    if program == "two models":  # of the same names and shapes, stepped in turn
        params = [torch.ones(4, 13, requires_grad=True) for _ in range(2)]
        built = []
        for param, placement in zip(params, ("local", "owner"), strict=True):
            pause()
            built.append(nucleon.Leon([("w", param)], placement=placement))
            stepped(param, built[-1])
        for _ in range(3):
            for param, optimizer in zip(params, built, strict=True):
                pause()
                stepped(param, optimizer)
        return [p.detach() for p in params]
    if program == "evaluation":  # rank 0 tunes a copy between the steps of the run
        param = torch.ones(4, 13, requires_grad=True)
        optimizer = nucleon.Leon([("w", param)], placement="owner")
        for _ in range(3):
            stepped(param, optimizer)
            if rank == 0:
                one("local")
        return [param.detach()]
    if program == "groups in another order":
        params = [torch.ones(4, 15, requires_grad=True) for _ in range(2)]
        named = zip("ab", params, (0.1, 0.2), strict=True)
        groups = [{"params": [(name, param)], "lr": rate} for name, param, rate in named]
        optimizer = nucleon.Leon(groups[:: -1 if rank % 2 else 1])
        for _ in range(3):
            pause()
            for param in params:
                stepped(param, optimizer)
        return [param.detach() for param in params]
    if program == "entries of the user's own":
        param = torch.ones(4, 16, requires_grad=True)
        rate = np.float64(0.1) if rank % 2 else 0.1
        own = {"decide": lambda: rank, "table": torch.zeros(3), "at": torch.device("cuda", rank)}
        optimizer = nucleon.Leon([{"params": [("w", param)], **own}], lr=rate)
        for _ in range(3):
            pause()
            stepped(param, optimizer)
        return [param.detach()]
    if program == "rates of their own":  # as tensors on each rank's device are, printed
        kinds = (torch.float32, torch.float64)
        return [one("owner", lr=torch.tensor(0.5, dtype=kinds[rank % 2]), width=14)]
    raise ValueError(program)


def built_before(port):
    """An optimizer from before the process group was there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    param = torch.ones(4, 5, requires_grad=True)
    optimizer = nucleon.Leon([("w", param)], placement="owner")
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size)
    for _ in range(3):
        stepped(param, optimizer)
    dist.barrier()
    return param.detach()
