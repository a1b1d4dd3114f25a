"""Settings over which the tests of this folder run."""

from soaking import SOAK
from soundness import cases

SETTINGS = [*cases.settings("cpu")] if SOAK else cases.some_settings("cpu")
