"""Ranks that die or hang are an error on the others in time."""

import pytest
from pool import Pool

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
