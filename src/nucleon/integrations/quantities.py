"""Diagnostics and certificates of an optimizer as plain numbers, for loggers."""

import math

from nucleon.optim.base import MatrixOptimizer


def quantities(optimizer: MatrixOptimizer) -> dict[str, float]:
    """Return `diagnostics()`, and for each certificate `regret`, a finite `bound`, and `holds`.

    Keys are "{optimizer}/{parameter}/{quantity}"; a parameter of several matrices has a key
    "{parameter}.{matrix}" for each. If states are spread over ranks, every rank must call it.
    """
    numbers = optimizer.diagnostics()
    for name, certificate in optimizer.certificates().items():
        pairs = zip(
            certificate.regret.flatten().tolist(), certificate.bound.flatten().tolist(), strict=True
        )
        several = certificate.regret.numel() > 1
        for index, (regret, bound) in enumerate(pairs):
            key = f"{optimizer.name}/{name}{f'.{index}' if several else ''}"
            numbers[f"{key}/regret"] = regret
            if math.isfinite(bound):
                numbers[f"{key}/bound"] = bound
            numbers[f"{key}/holds"] = float(certificate.holds)
    return numbers
