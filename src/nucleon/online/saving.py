"""Saved states: tensors by name, and facts of the object that they belong to."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nucleon import _checks

State = dict[str, Any]


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> State:
    """Return a state: copies of tensors by name, and the plain values that must agree."""
    return {"facts": dict(facts), **{name: tensor.clone() for name, tensor in tensors.items()}}


def unpacked(state: object, like: Mapping[str, Tensor], facts: Mapping[str, Any]) -> State:
    """Return copies of the tensors of a state, on the devices of `like`.

    Raises an error unless the state has these facts, and finite tensors with the names, shapes and
    dtypes of `like`.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("facts"), Mapping):  # pyright: ignore
        raise ValueError(f"the state must be what state_dict() returned, got {type(state)!r}")
    for name, value in facts.items():
        if state["facts"].get(name) != value:
            raise ValueError(
                f"the state has {name}={state['facts'].get(name)!r}, this object {value!r}; load "
                f"it into an object with {name}={state['facts'].get(name)!r}"
            )
    for name, template in like.items():
        saved, kind = state.get(name), (template.shape, template.dtype)
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != kind:
            raise ValueError(
                f"the state's {name} must be {kind}, got {getattr(saved, 'shape', saved)!r} of "
                f"{getattr(saved, 'dtype', type(saved))}; it is of another game or damaged"
            )
        _checks.finite(f"the state's {name}", saved)
    return {name: state[name].to(template.device, copy=True) for name, template in like.items()}
