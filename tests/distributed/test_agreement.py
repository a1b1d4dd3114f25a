"""Ranks that are of different minds: a clear error on each, at once, and none where all is well."""

import pytest
import torch
from agreement import copies, in_order, later_group, ordinary, pretend
from pool import TIMEOUT, Pool, free_port, server

PATIENCE = 4  # seconds, the timeout of the process group where it is waited for
SLACK = 8  # for a busy machine
SOON = TIMEOUT / 2

ODD = {2: [(0,), (1,)], 4: [(0,), (3,), (1, 2), (0, 1, 3)]}
OPTIONS = {
    "placement": "placement='owner', consistency_every=0",
    "every": "placement='local', consistency_every=3",
}


@pytest.fixture
def pools(ranks2, ranks4):
    return {2: ranks2, 4: ranks4}


def check_errors(results, silent, what):
    """Every rank is told which others differ, and what they have."""
    talking = [r for r in range(len(results)) if r not in silent]
    local, asked = "placement='local', consistency_every=0", OPTIONS[what]
    for rank, (message, _, took, _) in enumerate(results):
        others = {str(r) for r in (talking if rank in silent else silent)}
        there, here = (asked, local) if rank in silent else (local, asked)
        assert message.startswith("options of rank")
        assert f"differ from those of rank {rank}," in message
        assert set(message.split(" differ")[0].split(" ", 3)[3].split(", ")) <= others
        assert f"{there} there, {here} here" in message
        assert "every rank must have the same placement" in message
        assert took < SOON


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize(("size", "silent"), [(n, s) for n, found in ODD.items() for s in found])
def test_a_rank_in_whose_stead_the_others_would_wait(pools, size, silent, what):
    """All ranks have built their optimizer before one steps: nothing changes on any of them."""
    results = pools[size]("at_odds", silent=silent, what=what)
    check_errors(results, silent, what)
    for _, steps, _, untouched in results:
        assert steps == 0
        assert untouched


@pytest.mark.parametrize("late", ["talking", "silent"])
@pytest.mark.parametrize(("size", "silent"), [(2, (0,)), (2, (1,)), (4, (1, 2))])
def test_ranks_that_come_one_after_the_other(pools, size, silent, late):
    results = pools[size]("at_odds", silent=silent, late=late)
    check_errors(results, silent, "placement")
    for rank, (_, steps, _, untouched) in enumerate(results):
        if rank not in silent or late == "silent":
            assert steps == 0
            assert untouched


def test_what_was_refused_does_not_stand_against_what_follows(ranks2):
    for silent in ((0,), (1,), (0,)):
        check_errors(ranks2("at_odds", silent=silent, width=3), silent, "placement")
        expected = in_order(width=3)
        for options in ({"placement": "owner"}, {}, {"consistency_every": 1}):
            for weights in ranks2("in_order", width=3, **options):
                assert torch.equal(weights, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_optimizer_may_live_on_one_rank(ranks2, rank):
    assert max(ranks2("alone", rank=rank)) < SOON
    for weights in ranks2("in_order", placement="owner"):
        assert torch.equal(weights, in_order())


def test_a_rank_may_try_something_before_the_run(ranks2):
    """It waits a little, once for each trial, for what the others have built to take part."""
    results = ranks2("trial", grace=0.2)
    for weights, _ in results:
        assert torch.equal(weights, in_order(width=9))
    assert 3 * 0.2 < results[0][1] < SOON


def test_every_rank_may_train_a_model_of_its_own(ranks4):
    for weights, steps in ranks4("population"):
        assert weights.isfinite().all()
        assert steps == 5


@pytest.mark.parametrize("how", ["built", "set", "scheduled", "exchanged"])
@pytest.mark.parametrize(("size", "odd"), [(2, 0), (2, 1), (4, 2)])
def test_local_optimizers_of_the_same_parameters_have_the_same_options(pools, size, odd, how):
    for rank, (message, untouched) in enumerate(pools[size]("parting", odd=odd, how=how)):
        there, here = (0.1, 0.2) if rank == odd else (0.2, 0.1)
        differing = [f"lr={there} there, {here} here; "]
        if how == "exchanged":
            differing.append(f"lr={here} there, {there} here; ")
        _, said = message.split(f"differ from those of rank {rank}, for the same parameters: ")
        assert all(text in said for text in differing)
        assert said.index("every rank must") == sum(map(len, differing))  # and nothing else
        assert untouched


@pytest.mark.parametrize("first", [False, True])
def test_one_more_optimizer_on_one_rank(ranks4, first):
    for weights in ranks4("another_model", first=first):
        assert torch.equal(weights, in_order(width=7))


@pytest.mark.parametrize(
    "program",
    [
        "sweep",
        "two models",
        "evaluation",
        "rates of their own",
        "groups in another order",
        "entries of the user's own",
    ],
)
def test_programs_in_which_nothing_is_wrong(ranks4, program):
    expected = ordinary(program)
    for found in ranks4("ordinary", program=program):
        assert all(map(torch.equal, found, expected))


def test_an_optimizer_from_before_the_process_group():
    pool = Pool(2)
    try:
        for weights in pool("built_before", port=free_port()):
            assert torch.equal(weights, in_order())
    finally:
        pool.close()


def test_other_parameters_and_another_placement_end_by_the_timeout_on_every_rank():
    pool = Pool(2, timeout=PATIENCE)
    try:
        talking, silent = pool("strangers", seconds=PATIENCE + 2 * SLACK)
    finally:
        pool.close()
    assert "did not answer within the process group's timeout" in talking[0]
    assert PATIENCE <= talking[1] < PATIENCE + SLACK
    assert "rank 0 waited in vain" in silent[0]
    assert silent[1] < PATIENCE + 2 * SLACK


@pytest.mark.parametrize("placement", ["local", "owner"])
@pytest.mark.parametrize("what", ["every", "group"])
def test_a_rank_that_asks_for_more_during_the_run_ends_by_the_timeout_on_every_rank(
    placement, what
):
    """It may be the first of all, so that nothing tells it from a program that is in order."""
    pool = Pool(2, timeout=PATIENCE)
    try:
        seconds = PATIENCE + 2 * SLACK
        first, second = pool("switched", placement=placement, what=what, seconds=seconds)
    finally:
        pool.close()
    for message, took in (first, second):
        assert "did not answer within the process group's timeout" in message or (
            "rank 0 waited in vain" in message
        )
        assert took < seconds


def test_a_store_that_is_gone_hinders_nobody():
    pool = Pool(2)
    try:
        pool.send("host_gone")
        ok, weights = pool.answer(1)
    finally:
        pool.close()
    assert ok, weights
    assert torch.equal(weights, in_order())


def test_a_store_in_a_file(tmp_path):
    pool = Pool(2, meeting=f"file://{tmp_path}/store")
    try:
        for weights in pool("in_order", placement="owner"):
            assert torch.equal(weights, in_order())
        check_errors(pool("at_odds", silent=(1,)), (1,), "placement")
    finally:
        pool.close()


def test_one_process_that_stands_for_all():
    process = server().Process(target=pretend)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("placement", ["local", "owner"])
def test_late_groups(ranks2, placement):
    for weights in ranks2("later_group", placement=placement):
        assert all(map(torch.equal, weights, later_group("local")))


@pytest.mark.parametrize("placement", ["local", "owner"])
def test_copies_and_loaded_states(ranks2, placement):
    expected = copies("local")[0]
    for found in ranks2("copies", placement=placement):
        assert all(torch.equal(weights, expected) for weights in found)


@pytest.mark.parametrize(("placement", "fullgraph"), [("local", True), ("owner", False)])
def test_compiled_steps(ranks2, placement, fullgraph):
    for weights in ranks2("compiled", placement=placement, fullgraph=fullgraph):
        torch.testing.assert_close(weights, in_order(), rtol=1e-5, atol=1e-6)


def test_a_store_that_outlives_its_process_group():
    pool = Pool(2)
    try:
        for found in pool("lives", port=free_port()):
            assert len(found) >= 4
            for life, weights in found.items():
                assert torch.equal(weights, in_order(lr=0.1 * (1 + life)))
    finally:
        pool.close()
