"""Adapters of the optimizers, one file per framework, which imports the framework.

They import `nucleon.optim`; nothing imports them.
"""
