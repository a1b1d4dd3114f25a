"""The share of the slowest cases that `make test` runs; `make soak` runs all of them."""

import functools
import os

SOAK = os.environ.get("NUCLEON_SOAK") == "1"


def some(cases):
    """Return every third case, or with `make soak` every one."""
    return [*cases][:: 1 if SOAK else 3]


def every_third(compare):
    """Run a comparison at its first call in a process and at every third one from there."""
    calls = 0

    @functools.wraps(compare)
    def run(*arguments, **options):
        nonlocal calls
        calls += 1
        if SOAK or calls % 3 == 1:
            compare(*arguments, **options)

    return run
