"""Ranks that die, hang or are killed: an error on the others in time, and a run that goes on."""

import pytest
from pool import Pool

from helpers_forks import Forked

PATIENCE = 4  # seconds, the timeout of the process group
SLACK = 8  # for a busy machine


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("kind", ["plain", "rows"])
def test_a_rank_that_dies_or_hangs_is_an_error_on_the_others_in_time(fault, kind):
    pool = Pool(2, timeout=PATIENCE)
    try:
        arguments = {"fault": fault, "kind": kind, "rank": 1}
        pool.send("fail", **arguments)
        ok, message = pool.answer(0)
        assert not ok
        assert "another rank failed or did not answer" in message
        assert float(message.split("after ")[1].split(" s")[0]) < PATIENCE + SLACK
    finally:
        pool.close()


def test_a_killed_run_goes_on_as_if_nothing_had_been():
    """The same with more kills: python tests/distributed/kill_ranks.py --kills 20."""
    process = Forked("import kill_ranks\nkill_ranks.main()", "--kills", 3)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "the same bit for bit" in out
