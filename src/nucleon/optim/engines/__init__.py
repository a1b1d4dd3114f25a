"""Engines that step the work of an optimizer: `reference`, `cuda`, `ranks` and `adamw`.

Imports `optim.matrices` and `optim.options`; only `optim.worklist` chooses among them.
"""
