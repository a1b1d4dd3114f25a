"""Run by `test_kernels.py` in a process with TRITON_INTERPRET=1: the kernels on the CPU.

No bfloat16: the interpreter multiplies its bit patterns.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers, also as a script

import interpreting  # noqa: F401  (patches the language once)
from helpers_half import PRODUCTS, check_grams_in_place, check_product
from nucleon.linalg import triton_symmetric
from soaking import some

assert triton_symmetric.INTERPRETED
for m, n in ((64, 64), (136, 40), (201, 75)):
    check_grams_in_place(m, n, triton_symmetric.IN_PLACE, "cpu")
# With and without the copy engine for the operands, and for what is added and stored.
SHAPES = ((2, 5, 7), (1, 70, 33), (2, 130, 128), (2, 136, 64), (1, 64, 64), (2, 200, 40), (2, 7, 7))
CONFIGS = (*triton_symmetric.CONFIGS, triton_symmetric.IN_PLACE)
CASES = (
    (shape, number, config)
    for shape in SHAPES
    for number in range(len(PRODUCTS))
    for config in (CONFIGS if shape[1] in (64, 130, 136) else (None,))
)
for shape, number, config in some(CASES):
    check_product(shape, PRODUCTS[number], config, "cpu")
generator = torch.Generator().manual_seed(0)
x = torch.randn(3, 7, 300, generator=generator)
factor = torch.tensor([1.0, 2.0, 3.0])
torch.testing.assert_close(triton_symmetric.squares(x), x.double().square().sum(dim=(1, 2)))
assert torch.equal(triton_symmetric.scaled_half(x, factor), (x * factor[:, None, None]).half())
print("all agree")
