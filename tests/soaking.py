"""The share of the slowest cases that `make test` runs; `make soak` runs all of them."""

import os

SOAK = os.environ.get("NUCLEON_SOAK") == "1"


def some(cases):
    """Return every third case, or with `make soak` every one."""
    return [*cases][:: 1 if SOAK else 3]
