"""The comparison of two nested states."""

import torch


def leaves(value, path=""):
    """Every number, tensor and word of a nested state, by its place."""
    if isinstance(value, dict):
        return {k: v for key, x in value.items() for k, v in leaves(x, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, x in enumerate(value) for k, v in leaves(x, f"{path}/{i}").items()}
    return {path: value}


def differences(a, b):
    """The places at which two nested states are not the same bit for bit."""
    a, b = leaves(a), leaves(b)
    same = {
        key
        for key in a.keys() & b.keys()
        if (torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key])
    }
    return sorted((a.keys() | b.keys()) - same)
