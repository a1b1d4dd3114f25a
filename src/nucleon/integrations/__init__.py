"""Adapters of the optimizers to other frameworks; a module imports the library in its name.

They import `nucleon.optim`, and nothing imports them.
"""
