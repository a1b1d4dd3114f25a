"""Set-up of the whole suite: a safe instruction set, repeatable examples, fixed seeds."""

import os

# Some virtual machines advertise AMX and then fault on it: bfloat16 products would die with an
# illegal instruction. oneDNN reads this once, so it must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import Phase, settings

# The README's test command must give the same verdict twice; `--hypothesis-profile=explore` looks
# for new counterexamples instead, and "verdict" does not stop to make the one it found smaller.
settings.register_profile("nucleon", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile(
    "verdict", settings.get_profile("nucleon"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("nucleon")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
