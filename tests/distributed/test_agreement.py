"""Ranks that exchange something compare what they train, and each says what differs."""

import pytest
import torch
from agreement import in_order
from pool import Pool, free_port

PATIENCE = 2  # seconds, the timeout of the process group where it is waited for
SLACK = 8  # for a busy machine

W = "w (4, {}) torch.float32, axes {}"
DIFFERENCES = {  # of which parameter or option; the usual, and what a rank has instead
    "shape": ("parameter 0 of group 0", W.format(5, "r c"), W.format(7, "r c")),
    "name": (
        "parameter 0 of group 0",
        W.format(5, "r c"),
        W.format(5, "r c").replace("w", "v"),
    ),
    "axes": ("parameter 0 of group 0", W.format(5, "r c"), W.format(5, "c r")),
    "lr": ("lr of group 0", "0.1", "0.2"),
    "group": ("parameter 0 of group 1", "none", "more (2, 3) torch.float32, axes r c"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize(("kind", "placement"), [("plain", "owner"), ("rows", "local")])
@pytest.mark.parametrize("odd", [0, 1])
def test_every_rank_says_what_differs_and_changes_nothing(ranks2, what, kind, placement, odd):
    where, *values = DIFFERENCES[what]
    first, second = values if odd else values[::-1]
    for message, changed in ranks2("at_odds", what=what, odd=odd, kind=kind, placement=placement):
        assert message.startswith("the ranks differ in parameters or options")
        assert f"{where}: rank 0 has {first}, rank 1 {second}" in message.splitlines()[1:]
        assert not changed


@pytest.mark.parametrize("odd", [0, 3])
def test_four_ranks_are_named_and_long_lists_are_cut(ranks4, odd):
    others, (first, other) = ([1, 2, 3], (0.2, 0.1)) if odd == 0 else ([3], (0.1, 0.2))
    said = [f"lr of group 0: rank 0 has {first}, rank {rank} {other}" for rank in others]
    for message, _ in ranks4("at_odds", what="lr", odd=odd, placement="owner"):
        assert message.splitlines()[1:] == said
    for ok, message in ranks4.try_all("many_options", odd=3):
        assert not ok
        assert "lr of group 4: rank 0 has 0.1, rank 3 0.2\n… and 3 more" in message
        assert "lr of group 5" not in message


def test_pairs_of_ranks_are_compared_each_for_itself(ranks4):
    results = ranks4.try_all("one_pair_at_odds")
    assert [ok for ok, _ in results] == [True, True, False, False]
    for _, message in results[2:]:
        assert "lr of group 0: rank 2 has 0.1, rank 3 0.2" in message


def test_placements_are_compared_where_every_rank_exchanges_something(ranks2):
    options = {"kind": "rows", "placement": "owner"}
    for message, changed in ranks2("at_odds", what="placement", odd=1, **options):
        assert "placement of group 0: rank 0 has 'owner', rank 1 'local'" in message
        assert not changed


@pytest.mark.parametrize(
    ("what", "exchanged"),
    [(what, "parameters and options") for what in ("placement", "group")] + [("check", "updates")],
)
def test_a_rank_that_exchanges_alone_ends_by_the_timeout(what, exchanged):
    """Nothing tells the others that it waits for them."""
    pool = Pool(2)
    try:
        pool.send("waiting", what=what, patience=PATIENCE)
        ok, answer = pool.answer(0)
    finally:
        pool.close()
    assert ok, answer
    message, took = answer
    assert f"rank 0 could not exchange the {exchanged}: another rank" in message
    assert "did not answer within the process group's timeout" in message
    assert PATIENCE - 1 <= took < PATIENCE + SLACK


def test_an_optimizer_from_before_the_process_group():
    pool = Pool(2)
    try:
        for weights in pool("built_before", port=free_port()):
            assert torch.equal(weights, in_order())
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["plain", "rows"])
def test_between_steps_an_owner_holds_no_gradients_and_directions(ranks2, kind):
    for tasks, entries in ranks2("carried", kind=kind):
        assert tasks == 1
        assert entries == 0
