"""Parameters as matrices, and matrices of one shape as one stack, short side first.

Imports torch and `nucleon._checks`; the rest of `nucleon.optim` imports it.
"""
