"""What the tests of this folder are run over."""

import os

from soundness import cases

SOAK = os.environ.get("NUCLEON_SOAK") == "1"
"""Long runs of every setting instead of short ones of some."""
SETTINGS = [*cases.settings("cpu")] if SOAK else cases.some_settings("cpu")
