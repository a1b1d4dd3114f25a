"""What the ranks do with a state that version 2 wrote on as many, see tests/optim/older_states."""

from unittest import mock

import torch
import torch.distributed as dist
from older_states import AFTER, BEFORE, FOLDER, go, model, of_a_list, optimizer

from nucleon.linalg import augmented


def older_state(case, largest=None):
    """The weights that the rank goes on to, those that version 2 went on to, and why not certified.

    `largest`: of the gradients that rank 0 saw of a matrix that it owns.
    """
    found = torch.load(FOLDER / f"{case}_of_rank_{dist.get_rank()}.pt", weights_only=True)
    if largest is not None and dist.get_rank() == 0:
        states = found["optimizer"]["state"].values()
        next(state for state in states if "largest" in state)["largest"].fill_(largest)
    net = model(case)
    net.load_state_dict(found["start"])
    if case == "muon":
        method = of_a_list(case, net, placement="owner")
    else:  # version 2 shared out what is not frozen, and nothing else
        left_out = {"frozen.weight": "frozen"}
        method = optimizer(case, net, placement="owner", overrides=left_out)
    method.load_state_dict(found["optimizer"])
    with mock.patch.object(augmented, "GRAM_FLOOR", 0.0):  # version 2 had none
        end = go(net, method, BEFORE, BEFORE + AFTER)
    refusals = {name: c.refusal for name, c in method.certificates().items()}
    return end, found["end"], refusals
