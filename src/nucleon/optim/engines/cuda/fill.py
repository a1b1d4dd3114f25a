"""Addresses of the host as a tensor of the device, by a kernel that has them as its arguments."""
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false

import torch
import triton
import triton.language as tl
from torch import Tensor

POINTERS = 16


@triton.jit(do_not_specialize=[f"p{i}" for i in range(POINTERS)])
def fill(
    table, p0: tl.int64, p1: tl.int64, p2: tl.int64, p3: tl.int64, p4: tl.int64, p5: tl.int64,
    p6: tl.int64, p7: tl.int64, p8: tl.int64, p9: tl.int64, p10: tl.int64, p11: tl.int64,
    p12: tl.int64, p13: tl.int64, p14: tl.int64, p15: tl.int64,
):  # fmt: skip
    """Addresses as arguments: no copy from the host, and right in a captured graph."""
    tl.store(table + 0, p0)
    tl.store(table + 1, p1)
    tl.store(table + 2, p2)
    tl.store(table + 3, p3)
    tl.store(table + 4, p4)
    tl.store(table + 5, p5)
    tl.store(table + 6, p6)
    tl.store(table + 7, p7)
    tl.store(table + 8, p8)
    tl.store(table + 9, p9)
    tl.store(table + 10, p10)
    tl.store(table + 11, p11)
    tl.store(table + 12, p12)
    tl.store(table + 13, p13)
    tl.store(table + 14, p14)
    tl.store(table + 15, p15)


def filled(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses as a tensor, by kernels: no copy from the host, and right in a captured graph."""
    some = POINTERS
    padded = [*pointers, *pointers[-1:] * (-len(pointers) % some)]
    found = torch.empty(len(padded), dtype=torch.int64, device=device)
    for i in range(0, len(padded), some):
        fill[(1,)](found[i:], *padded[i : i + some])
    return found[: len(pointers)]
