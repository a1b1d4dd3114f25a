"""Routing of a model's parameters to matrices or AdamW, and its explanation.

Imports `optim.matrices` and `optim.options`; `engines.cuda` only to explain which kernels serve.
"""
