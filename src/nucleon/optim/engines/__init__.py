"""The engines that step the work of an optimizer: `reference`, `cuda`, `ranks` and `adamw`.

They import `optim.matrices` and `optim.options`; only `optim.worklist` chooses among them.
"""
