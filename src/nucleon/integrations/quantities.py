"""What the callbacks log of an optimizer: diagnostics, and certificates where they are kept."""

import math

from nucleon.optim.base import MatrixOptimizer


def quantities(optimizer: MatrixOptimizer) -> dict[str, float]:
    """`diagnostics()` as it is; for each certificate `regret`, a finite `bound`, and `holds`.

    Keys are "{optimizer}/{parameter}/{quantity}", with "{parameter}.{matrix}" where a parameter has
    several. Where states are spread over ranks, every rank must call it.
    """
    found = optimizer.diagnostics()
    for name, certificate in optimizer.certificates().items():
        pairs = zip(
            certificate.regret.flatten().tolist(), certificate.bound.flatten().tolist(), strict=True
        )
        several = certificate.regret.numel() > 1
        for index, (regret, bound) in enumerate(pairs):
            key = f"{optimizer.name}/{name}{f'.{index}' if several else ''}"
            found[f"{key}/regret"] = regret
            if math.isfinite(bound):
                found[f"{key}/bound"] = bound
            found[f"{key}/holds"] = float(certificate.holds)
    return found
