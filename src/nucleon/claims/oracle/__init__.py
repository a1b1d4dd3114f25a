"""The paper a second time in NumPy float64, from its formulas alone, to compare each claim with.

Imports nothing of the library, so that an error cannot be shared. A history of gradients is an
array (T, …, m, n); the dimensions between are games side by side.
"""
