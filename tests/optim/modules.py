"""Modules of the classes, files and attributes that other libraries have."""

import ast
import re
import warnings
from contextlib import contextmanager

import torch
from torch import nn

import nucleon


def named(kind, file="mine", base=nn.Module, **attributes):
    """Return a module of the class `kind`, defined in `file`, with these attributes."""
    module = type(kind, (base,), {"__module__": file})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def linear(rows, columns=8):
    return nn.Linear(columns, rows)


@contextmanager
def silent():
    """Make an error of every warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rows_of(model, **options):
    """Return the rows of the explanation by name."""
    return {row.name: row for row in nucleon.Leon.for_model(model, **options).explain()}


def written(text):
    """Return the overrides that a message names."""
    return [ast.literal_eval(x) for x in re.findall(r"overrides=({.*})  #", str(text))]
