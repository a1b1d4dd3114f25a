"""Run by `test_adamw.py` in a process with TRITON_INTERPRET=1: AdamW's kernels on the CPU.

No bfloat16: the interpreter knows its bit patterns only.
"""

import sys
from pathlib import Path

import torch

sys.path.extend(map(str, Path(__file__).parents[:2]))  # the cases and the helpers

import adamw_cases

import interpreting  # noqa: F401  (patches the language once)
from nucleon.linalg import triton_symmetric
from nucleon.optim.engines.cuda import adamw_kernels, addresses, average_kernel, engine
from soaking import some

assert triton_symmetric.INTERPRETED

engine.runs_on = lambda device: True
addresses.send = lambda places, table: table.copy_(torch.tensor(places))
torch.cuda.is_current_stream_capturing = lambda: False
adamw_kernels.PART = 4096  # the interpreter's time is that of the programs, not of the entries

for name, (case, options) in some(adamw_cases.CASES.items()):
    print(name, flush=True)
    case(torch.device("cpu"), **options)

# The kernel of the average: whole chunks and their ends, at any offset.
for dtype in (torch.float32, torch.float16):
    flat = torch.randn(20_000).to(dtype)
    weights = [flat[1:4098], flat[4100:4107], flat[5000:13_192].view(64, 128), flat[:0]]
    averages = [torch.randn(w.shape) for w in weights]
    part = torch.tensor(0.3)
    expected = [a.lerp(w.float(), part) for a, w in zip(averages, weights, strict=True)]
    average_kernel.run(average_kernel.chunks(weights, averages), part, dtype)
    for average, mean in zip(averages, expected, strict=True):
        torch.testing.assert_close(average, mean)
print("all agree")
