"""Programs of the ranks in the tests of agreement between them."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from cases import mesh_of, spread
from torch.distributed.tensor import DTensor, Shard

import nucleon
from nucleon.optim.matrices import shards


def stepped(param, optimizer):
    param.grad = torch.ones_like(param)
    optimizer.step()


def in_order(steps=3, kind="plain", **options):
    """All ranks alike; returns the weights."""
    param = spread(torch.ones(4, 5), kind).requires_grad_()
    optimizer = nucleon.Leon([("w", param)], **options)
    for _ in range(steps):
        stepped(param, optimizer)
    return param.detach()


def ones(shape, kind):
    """Ones, plain or cut along their rows; nothing is sent, so ranks may have other shapes."""
    if kind == "plain":
        return torch.ones(shape)
    parts = dist.get_world_size()
    here = torch.ones(shape[0] // parts, shape[1])
    return DTensor.from_local(here, mesh_of(parts), [Shard(0)], run_check=False)


def at_odds(what, odd, kind="plain", **options):
    """Rank `odd` has something else than the others; the error, and whether anything changed."""
    differs = dist.get_rank() == odd
    shape = (4, 7) if what == "shape" and differs else (4, 5)
    name = "v" if what == "name" and differs else "w"
    axes = {"axes": "c r"} if what == "axes" and differs else {}
    lr = 0.2 if what == "lr" and differs else 0.1
    if what == "placement" and differs:
        options["placement"] = "local"
    param = ones(shape, kind).requires_grad_()
    optimizer = nucleon.Leon([{"params": [(name, param)], **axes}], lr=lr, **options)
    if what == "group" and differs:
        optimizer.add_param_group({"params": [("more", torch.ones(2, 3, requires_grad=True))]})
    messages = set()
    for _ in range(2):  # a second step is refused as the first
        try:
            stepped(param, optimizer)
        except RuntimeError as error:
            messages.add(str(error))
    (message,) = messages
    state = optimizer.state[param]
    touched = any(state[n].any() for n in ("step", "total") if n in state)
    return message, touched or bool((shards.local(param) != 1).any())


def one_pair_at_odds():
    """Ranks 0 and 1 hold one matrix, 2 and 3 another, of which rank 3 has another rate."""
    mesh = mesh_of(2, 2)["inner"]
    width = 5 if dist.get_rank() < 2 else 7
    param = DTensor.from_local(torch.ones(2, width), mesh, [Shard(0)]).requires_grad_()
    own = torch.ones(3, width, requires_grad=True)  # plain and "local": of no concern to others
    groups = [{"params": [param]}, {"params": [own]}]
    optimizer = nucleon.Leon(groups, lr=0.2 if dist.get_rank() == 3 else 0.1)
    stepped(param, optimizer)


def many_options(odd):
    """Rank `odd` has another rate in each of eight groups."""
    lr = 0.2 if dist.get_rank() == odd else 0.1
    params = [torch.ones(2, 3, requires_grad=True) for _ in range(8)]
    optimizer = nucleon.Leon([{"params": [p]} for p in params], lr=lr, placement="owner")
    stepped(params[0], optimizer)


def waiting(what, patience):
    """Rank 0 exchanges something, the other ranks do not; the error and the seconds that it took.

    From the start, or after three steps of all ranks, when it adds a group that does.
    """
    param, more = (torch.ones(4, 5, requires_grad=True) for _ in range(2))
    talking = dist.get_rank() == 0
    placement = "owner" if talking and what == "placement" else "local"
    optimizer = nucleon.Leon([("a", param)], placement=placement)
    if what != "placement":
        for _ in range(3):
            stepped(param, optimizer)
    if talking and what == "group":
        optimizer.add_param_group({"params": [("b", more)], "placement": "owner"})
    # From here on: that the ranks find each other may take longer on a busy machine.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=patience))
    start = time.monotonic()
    try:
        stepped(param, optimizer)
        if talking and what == "check":
            nucleon.optim.check_ranks(optimizer)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    if not talking:
        time.sleep(1000)  # as if it went on by itself
    return "no error", 0.0


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


def carried(kind):
    """Entries of gradients and directions that the tasks of an owner hold between steps."""
    param = spread(torch.ones(8, 8), kind).requires_grad_()
    optimizer = nucleon.Leon([("w", param)], placement="owner")
    stepped(param, optimizer)
    (work,) = optimizer._worklist.works
    tasks = [task for tasks in work.rounds for task in tasks]
    held = [x.numel() for task in tasks for x in (*task.inbox.values(), task.outcome)]
    return len(tasks), sum(held)
